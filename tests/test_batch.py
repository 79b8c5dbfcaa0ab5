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


def test_rows_of_a_common_opening_are_computed_once(runner, monkeypatch):
    """Texts and hiddens are those without it, of prompts that do not begin with it too."""
    opening = list(range(11, 32))
    given = [([*opening, *p] if i != 2 else p, s) for i, (p, s) in enumerate(prompts(5))]
    given.append((opening, Sampling()))
    rows, step = [], BatchWriter._step
    monkeypatch.setattr(
        BatchWriter, "_step", lambda self, texts: rows.append(len(texts)) or step(self, texts)
    )
    found = []
    for known in ([], opening):
        rows.clear()
        writer = BatchWriter(runner, 6, width=3, keep_hidden=True, opening=known)
        texts = sorted(writer.write(given), key=lambda t: t.number)
        found.append((texts, sum(rows)))
    assert runner.pool.owners == 0
    assert found[0][1] - found[1][1] == 4 * len(opening) + len(opening) - 1
    for mine, theirs in zip(*(texts for texts, _ in found), strict=True):
        assert mine.tokens == theirs.tokens
        np.testing.assert_allclose(mine.hidden, theirs.hidden, atol=1e-9)


@pytest.mark.parametrize(
    ("live", "expected"),
    [(1, [1]), (3, [8]), (8, [8]), (9, [8, 1]), (14, [16]), (13, [8, 8]), (40, [32, 8]),
     (55, [32, 16, 8]), (56, [64]), (130, [64, 64, 8])],
)  # fmt: skip
def test_programs_are_nearly_full_where_rows_cost(runner, monkeypatch, live, expected):
    monkeypatch.setattr(runner, "rows", lambda mode: (8, 16, 32, 64))
    writer = BatchWriter(runner, 5)
    parts = [len(part) for part in writer._parts(range(live))]
    assert sum(parts) == live
    widths = [next(w for w in (1, 8, 16, 32, 64) if w >= part) for part in parts]
    assert widths == expected


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
