"""Every configuration key is classified, and a refusal lists all problems at once."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from circuit.models.config import Family, RopeKind, RopeSpec, config_problems
from circuit.models.errors import ConfigRefused, UnknownArchitecture
from circuit.models.gguf_keys import MODEL_RULES, OTHER_RULES
from circuit.models.hf_config import config_from_json
from circuit.models.hf_keys import ROPE_RULES, RULES
from circuit.models.keys import Allowed, Ignored, Used, classify, rule_of
from tests.checkpoints import FAMILIES, SIZES

PLAIN = {**SIZES, "model_type": "llama"}


def problems(**changes):
    """The problems of the plain configuration with `changes`; a value of `...` removes a key."""
    found = {k: v for k, v in {**PLAIN, **changes}.items() if v is not ...}
    with pytest.raises(ConfigRefused) as caught:
        config_from_json("config.json", found, generation={})
    assert str(caught.value).count("\n  - ") == len(caught.value.problems)
    return list(caught.value.problems)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_librarys_own_defaults_are_all_classified(family):
    config_class, _, extra = FAMILIES[family]
    found = json.loads(config_class(**{**SIZES, **extra}).to_json_string(use_diff=False))
    assert [key for key in found if rule_of(key, RULES) is None] == []
    assert config_from_json("config.json", found, generation={}).vocab_size == 97


def test_unknown_wrong_and_missing_keys_are_listed_together():
    assert problems(hidden_size="32", logit_scale=2.0, hidden_act="gelu", rms_norm_eps=...) == [
        "hidden_size is '32'; an integer is needed",
        "logit_scale is an unknown key (value 2.0)",
        "hidden_act is 'gelu'; allowed: 'silu', 'swish'",
        "rms_norm_eps is missing",
    ]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"quantization_config": {"quant_method": "fp8"}},
            "quantization_config is {'quant_method': 'fp8'}; allowed: None",
        ),
        ({"auto_map": {"AutoModel": "x.y"}}, "auto_map is {'AutoModel': 'x.y'}; allowed: None"),
        ({"mlp_bias": True}, "mlp_bias is True; allowed: False"),
        ({"pretraining_tp": 2}, "pretraining_tp is 2; allowed: 1, None"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; allowed: 1.0, None"),
        ({"num_attention_heads": True}, "num_attention_heads is True; an integer is needed"),
        (
            {"num_attention_heads": 5, "head_dim": 8},
            "5 query heads cannot share 2 key/value heads evenly",
        ),
        (
            {"num_attention_heads": 5, "num_key_value_heads": 5},
            "hidden_size is not a multiple of num_attention_heads and head_dim is missing",
        ),
        ({"head_dim": 7}, "head_dim is 7; rotary embedding turns pairs of dimensions"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0, which is not positive"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0, which is not positive"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0, which is not positive"),
        ({"head_dim": 0}, "head_dim is 0, which is not positive"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps is 0.0, which is not between 0 and 1"),
        ({"eos_token_id": [2, 97]}, "eos_token_id is 97, outside the vocabulary of 97"),
        ({"rope_theta": -1.0}, "the rope base is -1.0, which is not above 1"),
        (
            {"rope_scaling": {"rope_type": "linear"}},
            "rope_scaling.factor is missing, which rope type linear needs",
        ),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "beta_fast": 3.0}},
            "rope_scaling.beta_fast means nothing for rope type linear",
        ),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 0.5}},
            "the rope scaling factor is 0.5, which is not 1 or more",
        ),
        (
            {"rope_scaling": {"factor": 2.0, "short_factor": [1.0]}},
            "rope_scaling.short_factor is an unknown key (value [1.0])",
        ),
        (
            {
                "rope_scaling": {"type": "linear", "factor": 2.0},
                "rope_parameters": {"rope_theta": 1e4},
            },
            "rope_scaling and rope_parameters are both given; allowed: one of them",
        ),
    ],
)
def test_a_single_problem_is_named(changes, said):
    assert problems(**changes) == [said]


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        (
            "mistral",
            {},
            "sliding_window is 4096 by default; allowed: null, or at least "
            "max_position_embeddings (8192)",
        ),
        (
            "mistral",
            {"sliding_window": 1024},
            "sliding_window is 1024; allowed: null, or at least max_position_embeddings (8192)",
        ),
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window is True; allowed: False"),
        (
            "qwen3",
            {"head_dim": 8, "layer_types": ["full_attention", "sliding_attention"]},
            "layer_types holds full_attention, sliding_attention; allowed: full_attention",
        ),
        ("qwen3", {}, "head_dim is missing; this family's default is not hidden_size / heads"),
        (
            "qwen2",
            {"num_key_value_heads": ...},
            "num_key_value_heads is missing; this family's default is not its usual value",
        ),
        (
            "mistral",
            {"sliding_window": None, "attention_bias": True},
            "attention_bias is True; the biases of this family are fixed",
        ),
    ],
)
def test_what_one_family_refuses(family, changes, said):
    assert problems(model_type=family, max_position_embeddings=8192, **changes) == [said]


@pytest.mark.parametrize("kinds", [[{}], [["full_attention"]], [None]])
def test_layer_types_that_are_no_names(kinds):
    assert problems(layer_types=kinds) == [f"layer_types holds {kinds[0]}; allowed: full_attention"]


SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 576,
    "initializer_range": 0.041666666666666664, "intermediate_size": 1536, "is_llama_config": True,
    "max_position_embeddings": 8192, "mlp_bias": False, "model_type": "llama",
    "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3, "pad_token_id": 2,
    "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_interleaved": False, "rope_scaling": None,
    "rope_theta": 100000, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "transformers_version": "4.42.3", "use_cache": True, "vocab_size": 49152,
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
}  # fmt: skip
QWEN25 = {
    "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151645, "hidden_act": "silu", "hidden_size": 896, "initializer_range": 0.02,
    "intermediate_size": 4864, "max_position_embeddings": 32768, "max_window_layers": 21,
    "model_type": "qwen2", "num_attention_heads": 14, "num_hidden_layers": 24, "use_mrope": False,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "use_cache": True,
    "sliding_window": 32768, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "transformers_version": "4.43.1", "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
LLAMA32 = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "head_dim": 64,
    "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "model_type": "llama",
    "intermediate_size": 8192, "max_position_embeddings": 131072, "mlp_bias": False,
    "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8,
    "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "use_cache": True,
    "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                     "original_max_position_embeddings": 8192, "rope_type": "llama3"},
    "tie_word_embeddings": True, "torch_dtype": "bfloat16", "transformers_version": "4.45.0",
    "vocab_size": 128256,
}  # fmt: skip


def test_configurations_as_published_are_read():
    smollm, qwen, llama = (
        config_from_json("config.json", found, generation={})
        for found in (SMOLLM2, QWEN25, LLAMA32)
    )
    assert (smollm.head_dim, smollm.q_size, smollm.kv_size, smollm.rope.theta) == (
        64,
        576,
        192,
        1e5,
    )
    assert (qwen.head_dim, qwen.qkv_bias, qwen.o_bias, qwen.qk_norm) == (64, True, False, False)
    assert llama.rope == RopeSpec(500000.0, RopeKind.LLAMA3, 32.0, 8192, 1.0, 4.0)
    assert llama.eos_token_ids == (128001, 128008, 128009)


def test_an_unused_window_is_no_obstacle():
    for changes in (
        {"model_type": "mistral", "sliding_window": 4096, "max_position_embeddings": 4096},
        {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 64},
    ):
        found = {**PLAIN, **changes}
        assert config_from_json("c", found, generation={}).family is Family(changes["model_type"])


def test_unknown_architectures_are_named_with_the_known_ones():
    for changes in (
        {"model_type": "gpt2"},
        {"model_type": None},
        {"architectures": ["LlamaForSequenceClassification"]},
    ):
        with pytest.raises(UnknownArchitecture) as caught:
            config_from_json("c", {**PLAIN, **changes}, generation={})
        assert "is not one of" in str(caught.value)


@given(st.dictionaries(st.text(max_size=12), st.none() | st.booleans() | st.integers() | st.text()))
def test_no_key_escapes_classification(found):
    for rules in (RULES, ROPE_RULES, MODEL_RULES, OTHER_RULES):
        named = classify(found, rules)
        for key, value in found.items():
            rule = rule_of(key, rules)
            refused = any(sentence.startswith(f"{key} is ") for sentence in named)
            assert refused == (rule is None or rule.problem(key, value) is not None)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=2)
    ),
    max_leaves=4,
)


@settings(max_examples=150, deadline=None)
@given(
    changes=st.dictionaries(st.sampled_from(sorted(RULES)), json_values, min_size=1, max_size=4),
    rope=st.none() | st.dictionaries(st.sampled_from(sorted(ROPE_RULES)), json_values, max_size=3),
    generation=st.dictionaries(st.sampled_from(["eos_token_id", "bos_token_id"]), json_values),
    family=st.sampled_from([family.value for family in Family]),
)
def test_no_value_escapes_as_another_error(changes, rope, generation, family):
    """Any JSON under any known key gives a configuration without contradictions, or a refusal."""
    found = {**PLAIN, "model_type": family, "rope_scaling": rope, **changes}
    try:
        config = config_from_json("config.json", found, generation=generation)
    except (ConfigRefused, UnknownArchitecture):
        return
    assert config_problems(config) == [] and hash(config) is not None


def test_every_ignored_key_has_a_reason_and_every_rule_a_kind():
    for rules in (RULES, ROPE_RULES, MODEL_RULES, OTHER_RULES):
        for key, rule in rules.items():
            assert isinstance(rule, (Used, Ignored, Allowed)), key
            assert not isinstance(rule, Ignored) or len(rule.reason.split()) >= 3, key
