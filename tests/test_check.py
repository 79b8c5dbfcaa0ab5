"""The comparison of chains: along their own drafts, every number, whatever is nearly tied."""

import heads
import numpy as np
import pytest
import torch

from circuit.part_check import PartCheck, columns_of, planted_keys
from circuit.program_check import (
    Columns,
    Compared,
    along,
    compare,
    compare_chain,
    drafts_of,
    eager_distances,
)
from circuit.scenario import AHEAD, PREFIX, Script, follow, walk
from ir.key import DECODE, GraphKey, Mode
from proposers.mtp_binding import bind_head
from proposers.mtp_program import CACHE
from proposers.options import DraftOptions, head_keys
from runners.eager import EagerRunner

OPTIONS = DraftOptions(64, head_keys(batches=(), chunk=32, chain=3, spine=4), sequences=2)
SPINE, CHAIN = GraphKey(Mode.SPINE, 4), GraphKey(Mode.CHAIN, 3)


class Spoiled(EagerRunner):
    """Computes in f32, and spoils what the programs of one key give."""

    spoil, spoiled = staticmethod(lambda out, runner: None), SPINE

    def step(self, key, **inputs):
        out = {n: np.array(a) for n, a in super().step(key, **inputs).items()}
        if key == self.spoiled:
            self.spoil(out, self)
        return out


@pytest.fixture(scope="module", params=[True, False], ids=["mapped", "whole"])
def head(request):
    """A head whose scored columns come in pairs of exactly tied ones, and the text of a walk."""
    tiny = heads.make_head(mapped=request.param)
    binding = bind_head(tiny.weights, tiny.side, OPTIONS)
    scores = binding.weights["lm_head.weight"]
    binding.weights["lm_head.weight"] = scores[torch.arange(len(scores)) // 2 * 2].contiguous()
    draw = np.random.default_rng(3)
    need = PREFIX + AHEAD + 1
    script = Script(
        draw.integers(3, heads.VOCAB, need),
        draw.normal(size=(need, heads.HIDDEN)).astype(np.float32), 1,
    )  # fmt: skip
    return binding, script


def checked(head, spoil=None, key=SPINE, binding=None):
    """The comparison of a program whose outputs are spoilt, and the sizes of eager's errors."""
    known, script = head
    runner = Spoiled(binding or known, context=64)
    eager, oracle = EagerRunner(known, context=64), EagerRunner(known, double=True, context=64)
    columns = columns_of(known)
    whole = [o for o in walk(runner, script, {key, DECODE}) if o.key in (key, DECODE)]
    pairs = [next(o for o in walk(r, script, {DECODE}) if o.key == DECODE) for r in (eager, oracle)]
    chain = next(o for o in whole if o.key == key)
    drafts = drafts_of(chain, columns)
    pairs = [pairs, [along(chain, follow(r, script, drafts), columns) for r in (eager, oracle)]]
    sizes = eager_distances(pairs)
    assert not compare("draft", whole[0], pairs[0][1], sizes).problems
    if spoil is not None:
        runner.spoil, runner.spoiled = spoil, key
        chain = next(o for o in walk(runner, script, {key}) if o.key == key)
        drafts = drafts_of(chain, columns)
    steps = None if drafts is None else follow(oracle, script, drafts)
    return compare_chain("draft", chain, steps, sizes, columns)


@pytest.mark.parametrize("key, ids", [(SPINE, 4 * 4), (CHAIN, 3)])
def test_every_step_of_a_chain_is_compared_and_how_much_is_told(head, key, ids):
    """Choices, their log-probabilities, the last hidden, and a row of keys and values a step."""
    found = checked(head, key=key)
    types = head[0].states[CACHE].shape  # blocks, keys and values, heads, rows, columns
    assert not found.problems and found.rows == key.rows
    assert (found.tokens, found.near_ties) == (ids, 0)
    assert found.numbers == ids + heads.HIDDEN + key.rows * types[1] * types[2] * types[4]
    assert 0 < found.worst <= 1


def swap(step, one, other):
    def spoil(out, runner):
        ids = out[f"ranks.{step}"]
        ids[0, [one, other]] = ids[0, [other, one]]

    return spoil


def put(name, place, value):
    return lambda out, runner: out[name].__setitem__(place, value)


def add(name, place, value):
    return lambda out, runner: out[name].__setitem__(place, out[name][place] + value)


def test_a_tie_is_counted_and_hides_nothing_after_it(head):
    """Ids of the third and the fourth rank are tied; whichever comes first, all is compared."""
    found = checked(head, swap(1, 2, 3))
    assert not found.problems and (found.tokens, found.near_ties) == (14, 2)
    assert found.numbers == checked(head).numbers

    def later(out, runner):
        swap(1, 2, 3)(out, runner)
        out["logprobs.3"][0, 3] += 0.01

    assert any("logprobs.3 is" in problem for problem in checked(head, later).problems)


def stored(out, runner):
    """One value of the newest key that the step stored."""
    block, row = np.argwhere(np.abs(runner.pool.arrays[CACHE]).sum((1, 2, 4)) > 0)[-1]
    runner.pool.arrays[CACHE][block, 0, 0, row, 0] += 0.01


@pytest.mark.parametrize("spoil, said", [
    (swap(0, 1, 2), "step 0: 2 of 4 ids are not the likeliest"),
    (swap(3, 0, 3), "step 3: 2 of 4 ids are not the likeliest"),
    (lambda out, runner: out["ranks.2"].__setitem__((0, 3), out["ranks.2"][0, 2]),
     "step 2: 1 of 4 ids are not the likeliest"),
    (lambda out, runner: out.update({"ranks.2": out["ranks.1"]}), "step 2"),
    (put("ranks.1", (0, 2), 10**6), "an id that the head does not score"),
    (put("ranks.0", (0, 0), -1), "an id that the head does not score"),
    (add("logprobs.0", (0, 0), 0.01), "logprobs.0 is"),
    (add("logprobs.3", (0, 2), -0.01), "logprobs.3 is"),
    (put("logprobs.2", (0, 1), np.nan), "logprobs.2 is inf"),
    (add("hidden", (0, 5), 0.01), "hidden is"), (stored, f"stored {CACHE} is"),
])  # fmt: skip
def test_a_fault_in_a_spine_is_seen(head, spoil, said):
    found = checked(head, spoil)
    assert any(said in problem for problem in found.problems), found.problems


@pytest.mark.parametrize("key", [SPINE, CHAIN])
def test_a_chain_that_drafts_other_ids_throughout_is_seen(head, key):
    """Its first draft differs already: nothing of it is of the oracle's own text."""
    binding, _ = head
    weights = dict(binding.weights)
    weights["lm_head.weight"] = weights["lm_head.weight"].roll(2, 0)
    runner = EagerRunner(type(binding)(**{**vars(binding), "weights": weights}), context=64)
    columns, script = columns_of(binding), head[1]
    chain = next(o for o in walk(runner, script, {key}) if o.key == key)
    oracle = EagerRunner(binding, double=True, context=64)
    steps = follow(oracle, script, drafts_of(chain, columns))
    sizes = eager_distances([(along(chain, steps, columns),) * 2])
    found = compare_chain("draft", chain, steps, sizes, columns)
    assert len([p for p in found.problems if "not the likeliest" in p]) == key.rows
    assert any("logprobs" in problem for problem in found.problems)


def test_columns_of_ids():
    columns = Columns(np.array([7, 3, 9]))
    assert columns.of(np.array([9, 7])).tolist() == [2, 0]
    assert columns.of(np.array([9, 8])) is None and columns.of(np.array([10])) is None


def test_faults_are_planted_in_the_longest_chains_too():
    keys = {DECODE, GraphKey(Mode.SPINE, 2), SPINE, GraphKey(Mode.CHAIN, 1), CHAIN}
    assert planted_keys(keys) == [DECODE, CHAIN, SPINE]
    assert planted_keys({GraphKey(Mode.VERIFY, 2)}) == []


@pytest.mark.parametrize(("tokens", "near", "complete", "thin"), [
    (6, 5, True, False), (5, 6, True, False), (4, 7, True, True), (0, 0, True, True),
    (8, 30, True, False), (7, 30, True, True), (7, 0, False, True),
])  # fmt: skip
def test_how_many_tokens_make_a_check_that_counts(tokens, near, complete, thin):
    """Eight, or half of all where a whole part has fewer; rows that are nearly tied do not help."""
    compared = Compared("target", DECODE, rows=tokens + near, tokens=tokens, near_ties=near)
    problems = PartCheck([compared], faults={"sign": True}).problems(complete)
    assert any("too thin" in problem for problem in problems) is thin
