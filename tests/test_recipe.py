"""What an artifact records of its making is read as it was written, or refused by the field."""

import copy
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from circuit.models.config import Family, RopeKind, RopeSpec, TargetConfig
from circuit.models.convert import WeightOption
from circuit.recipe import WEIGHTS, Choices, HeadRecord, Origin, Recipe
from proposers.config import Contract, HeadConfig

RECIPE = Recipe(
    origin=Origin("demo", "/models/demo.gguf", "0" * 64),
    choices=Choices(batches=(2,), trees=()),
    config=TargetConfig(
        family=Family.QWEN3, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=288,
        rms_norm_eps=1e-5, rope=RopeSpec(1e4, RopeKind.LINEAR, factor=2.0),
        max_position_embeddings=128, qk_norm=True, eos_token_ids=(2, 3), chat_template="{{ x }}",
    ),
    heads=(HeadRecord(Contract(), HeadConfig(64, 96, 4, 2, 16, 1e-5, 120, 288)),),
    notes=("a note",),
)  # fmt: skip
PLAIN = json.loads(json.dumps(RECIPE.plain()))
ODD = st.sampled_from([None, True, -1, 0, 7, 2.5, 2**70, "", "x", [], {}, [1], ["a"], [None]])


def places(value, path=()):
    """The path of every field and item, at every depth."""
    inside = dict(enumerate(value)) if type(value) is list else value
    for name, inner in inside.items() if type(inside) is dict else ():
        yield (*path, name)
        yield from places(inner, (*path, name))


def changed(path, value):
    """The plain record with one field set; `...` drops it."""
    record = copy.deepcopy(PLAIN)
    *inside, last = path
    found = record
    for name in inside:
        found = found[name]
    if value is ...:
        del found[last]
    else:
        found[last] = value
    return record


def test_a_recipe_is_read_as_it_was_written():
    assert Recipe.read(PLAIN) == RECIPE and Recipe.read(PLAIN).plain() == RECIPE.plain()


@given(st.sampled_from(list(places(PLAIN))), ODD)
def test_a_changed_recipe_is_read_as_it_stands_or_refused(path, value):
    record = changed(path, value)
    try:
        found = Recipe.read(record)
    except ValueError as error:
        assert str(error) and "\n" not in str(error)
    else:
        assert json.loads(json.dumps(found.plain())) == record


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("origin",), ..., "options lacks origin"),
        (("choices", "spin"), 1, "options.choices has an unknown field spin"),
        (("choices", "context"), "64", "options.choices.context is 64, not an int"),
        (("choices", "context"), True, "options.choices.context is True, not an int"),
        (("choices", "context"), 0, "not below 1"),
        (("choices", "batches"), 2, "options.choices.batches is 2, not a list"),
        (("choices", "weights"), "q2", "there are no weights in q2"),
        (("config", "family"), "gpt", "options.config.family is gpt, not a Family"),
        (("config", "hidden_size"), -1, "hidden_size is -1, which is not positive"),
        (("config", "rope", "theta"), [1], "options.config.rope.theta is [1], not a float"),
        (("config", "eos_token_ids"), [999], "outside the vocabulary"),
        (("heads", 0, "config", "vocab_size"), 999, "999 ids are scored"),
        (("heads", 0, "contract", "rope_offset"), 3, "rope_offset is 3"),
        (("notes",), [3], "options.notes is 3, not a str"),
    ],
)
def test_the_field_is_named(path, value, said):
    with pytest.raises(ValueError) as caught:
        Recipe.read(changed(path, value))
    assert said in str(caught.value)


def test_the_formats_of_weights_are_those_that_there_are():
    assert set(WEIGHTS) == {option.value for option in WeightOption}
