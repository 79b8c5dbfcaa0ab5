"""Texts written together are the texts written alone, whatever comes and goes beside them."""

import checkpoints
import numpy as np
import pytest
from test_target import loaded

from circuit.engine.batch import BatchWriter
from circuit.engine.engine import Engine
from circuit.engine.errors import EmptyPrompt, NoBatch, PromptTooLong
from circuit.engine.sampling import Sampling
from circuit.engine.statistics import Finish
from circuit.models.target import target_binding, target_keys
from runners.eager import EagerRunner

CONTEXT = 48


@pytest.fixture(scope="module")
def runner():
    binding = target_binding(
        *loaded(checkpoints.make_model("llama", seed=3)),
        CONTEXT,
        target_keys(batches=(2, 4), chunk=8),
    )
    return EagerRunner(binding, double=True, context=CONTEXT)


def prompts(count):
    rng = np.random.default_rng(2)
    return [
        (rng.integers(3, 97, int(rng.integers(1, 20))).tolist(),
         Sampling(seed=i) if i % 2 else Sampling(1.0, top_p=0.9, seed=i))
        for i in range(count)
    ]  # fmt: skip


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_each_text_is_the_one_it_is_alone(runner, width):
    given = prompts(7)
    texts = list(BatchWriter(runner, 12, width=width, stop={7, 30}).write(given))
    assert sorted(t.number for t in texts) == list(range(7)) and runner.pool.owners == 0
    for text in texts:
        prompt, sampling = given[text.number]
        alone = Engine(runner).generate(prompt, 12, sampling=sampling, stop={7, 30})
        assert [t for step in alone for t in step.tokens] == text.tokens
        assert alone.statistics.finish is text.finish


def test_the_hiddens_of_a_text_are_those_of_its_rows(runner):
    given = prompts(4)
    for text in BatchWriter(runner, 6, keep_hidden=True).write(given):
        ids = [*text.prompt, *text.tokens[:-1]]
        assert text.hidden.shape == (len(ids), 32)
        with runner.pool.lease() as lease:
            whole = Engine(runner).target.prompt(lease, ids, keep_hidden=True)
        np.testing.assert_allclose(text.hidden, whole.hidden, atol=1e-9)


def test_the_context_ends_a_text_and_prompts_are_read_when_there_is_room(runner):
    read = []

    def source():
        for prompt, sampling in prompts(5):
            read.append(len(prompt))
            yield prompt, sampling

    writer = BatchWriter(runner, 1000, width=2)
    texts = writer.write(source())
    first = next(texts)
    assert first.finish is Finish.CONTEXT
    assert len(first.tokens) == CONTEXT - len(first.prompt) + 1 and len(read) == 2
    texts.close()
    assert runner.pool.owners == 0


def test_what_cannot_be_written(runner):
    with pytest.raises(NoBatch, match=r"5 sequences .* up to 4"):
        BatchWriter(runner, 5, width=5)
    for prompt, error in (([], EmptyPrompt), ([1] * 49, PromptTooLong)):
        with pytest.raises(error):
            list(BatchWriter(runner, 5).write([([3], Sampling()), (prompt, Sampling())]))
        assert runner.pool.owners == 0
    assert list(BatchWriter(runner, 5).write([])) == []
