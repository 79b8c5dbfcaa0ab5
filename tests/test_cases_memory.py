"""Reported faults of reused memory, ends and draws, each as a case with its right value.

`docs/cases.md` lists the case of each test here and those that are met by other tests.
"""

import math

import checkpoints
import heads
import kit
import numpy as np
import pytest
import torch
from kit import runners, side
from test_engine import CONTEXT, PROMPT, Script, headed, plain, run, scripted, target
from test_proposers import OPTIONS, oracle_runner, rows
from test_target import loaded

from circuit.engine.conversation import Conversation
from circuit.engine.engine import Engine
from circuit.engine.sampling import Sampling
from circuit.engine.statistics import Finish
from circuit.models.target import target_side
from ir.key import GraphKey, Mode
from proposers.base import ProposeRequest
from proposers.levers import ModelLevers, TrimPolicy
from proposers.mtp_binding import bind_head
from runners.rows import Lane, index_inputs

__all__ = ["plain", "runners", "side", "target"]  # fixtures


# Captured and reused memory
# ------------------------------------------------------------------------------


def test_padded_rows_of_a_batch_touch_nothing(side):
    """B12: four lanes, then two with poison in the padded ones, whose blocks a fifth has now."""
    runner = side.modules[0].runner
    tokens, hiddens = rows(8)
    leases = [runner.pool.lease() for _ in range(4)]
    key = GraphKey(Mode.BATCH, 4)

    def step(chosen, poisoned):
        lanes = [Lane(lease, lease.append(1), lease.rows) for lease in chosen]
        ids, hidden = np.array(tokens[:4], np.int32), hiddens[:4].copy()
        inputs = index_inputs(runner, key, lanes)
        if poisoned:
            ids[2:], hidden[2:] = heads.VOCAB + 5, np.nan
            inputs["positions"][2:] = 2**30
        return runner.read(runner.run_draft(key, ids=ids, hidden=hidden, **inputs)["logits"])

    step(leases, False)
    for lease in leases[2:]:
        lease.close()
    other = runner.pool.lease(20)
    other.append(16)
    for array in runner.pool.arrays.values():
        np.asarray(array)[other.blocks] = 0.25
    before = [np.asarray(a)[1:].copy() for a in runner.pool.arrays.values()]
    logits = step(leases[:2], True)
    assert np.isfinite(logits[:2]).all()
    changed = {
        int(b) + 1
        for a, old in zip(runner.pool.arrays.values(), before)
        for b in np.flatnonzero((np.asarray(a)[1:] != old).any((1, 2, 3, 4)))
    }
    assert changed == {lease.blocks[0] for lease in leases[:2]}
    for lease in leases[:2]:
        lease.trim(1)
    again = step(leases[:2], False)
    np.testing.assert_array_equal(logits[:2], again[:2])
    for lease in (*leases[:2], other):
        lease.close()


def test_what_a_propose_returned_is_not_changed_by_the_next(side):
    """B16: the ids of A are held while B drafts, and a hidden that was read stays."""
    tokens, hiddens = rows(2)
    states = side.head.alloc_state(), side.head.alloc_state()
    requests = [ProposeRequest(t, h, 1, 3, want_logprobs=True) for t, h in zip(tokens, hiddens)]
    first = side.head.propose(requests[0], states[0])
    kept = list(first.tokens), list(first.logprobs)
    side.head.propose(requests[1], states[1])
    assert (list(first.tokens), list(first.logprobs)) == kept
    for state in states:
        side.head.free_state(state)


def test_memory_that_was_never_written_changes_nothing(side):
    """B44: thirty fresh states over a pool full of NaN give one and the same chain."""
    runner = side.modules[0].runner
    for array in runner.pool.arrays.values():
        np.asarray(array)[...] = np.nan
    tokens, hiddens = rows(1)
    made = set()
    for _ in range(30):
        state = side.head.alloc_state()
        made.add(side.head.propose(ProposeRequest(tokens[0], hiddens[0], 1, 3), state).tokens)
        side.head.free_state(state)
    assert made == {kit.exact_drafts([kit.Rows()], tokens[0], hiddens[0], 1, 3).drafts}
    for array in runner.pool.arrays.values():
        np.asarray(array)[...] = 0


def test_a_drafter_swapped_there_and_back_is_the_first_again(runners):
    """B32: two heads take turns; each drafts as it did, and the old memory is free."""
    tokens, hiddens = rows(1)
    request = ProposeRequest(tokens[0], hiddens[0], 1, 3)
    side, found = kit.Side(True), []
    for runner in (runners[0], runners[2], runners[0], runners[2]):
        side.install([runner])
        state = side.head.alloc_state()
        found.append(side.head.propose(request, state).tokens)
        side.head.free_state(state)
        assert runner.pool.owners == 0
    side.install(None)
    assert found[0] == found[2] != found[1] == found[3]
    fresh = [kit.exact_drafts([kit.Rows()], tokens[0], hiddens[0], 1, 3).drafts]
    assert found[0] == fresh[0]


def test_a_slot_used_again_knows_nothing_of_the_last_text(target, plain):
    """B36: a short text after a long one; many of them leave the memory as it was."""
    engine, _, head = headed(target)
    free = target.pool.free, head.runner.pool.free
    long, short = [*PROMPT, *plain[:30]], PROMPT[:3]
    wanted = run(Engine(target), 1).tokens
    alone = list(engine.generate(short, 4, drafts=3))
    for _ in range(20):
        list(engine.generate(long, 3, drafts=3))
        again = list(engine.generate(short, 4, drafts=3))
        assert again == alone  # tokens, drafts and accepted counts of every step
    assert (target.pool.free, head.runner.pool.free) == free and wanted


# Ends and draws
# ------------------------------------------------------------------------------


@pytest.mark.parametrize("offset", [0, 1, 2, 3])
def test_an_end_at_any_place_of_a_step(target, plain, offset):
    """B15: the text stops there, later drafts are not counted, a next turn is a cold run's."""
    at = next(i for i in range(1 + offset, 50, 4) if plain[i] not in plain[:i])
    script = Script(PROMPT + plain, [[True] * 3])
    with Conversation(Engine(target, script)) as conversation:
        generation = conversation.turn(PROMPT, 60, drafts=3, stop={plain[at]})
        list(generation)
        assert generation.tokens == plain[: at + 1]
        assert generation.statistics.finish is Finish.STOP
        whole, rest = divmod(at, 4)
        assert sum(generation.statistics.accepted) == 3 * whole + min(rest, 3)
        assert conversation._kept.rows.rows == len(PROMPT) + at
        prompt = [*PROMPT, *plain[: at + 1], 4, 9]
        second = conversation.turn(prompt, 5)
        list(second)
        cold = Engine(target).generate(prompt, 5)
        list(cold)
        assert second.tokens == cold.tokens and conversation.reused == len(PROMPT) + at


@pytest.mark.parametrize("sampling", [
    Sampling(1e-6, seed=1), Sampling(1e-5, seed=1), Sampling(1.0, top_k=1),
    Sampling(1.0, top_p=0.0), Sampling(0.0, top_k=500),
])  # fmt: skip
def test_settings_that_are_nearly_greedy_are(target, plain, sampling):
    """B53: no division by nothing, no NaN, and the maximum."""
    engine, _ = scripted(target, plain, [[True, True, False]])
    assert run(engine, 12, drafts=3, sampling=sampling).tokens == plain[:12]
    logits = np.array([0.0, 3.0, -np.inf, 2.9], np.float32)
    assert sampling.pick(logits, 5) == 1
    assert Sampling(1.0, top_k=999).pick(np.array([-np.inf, 0.0], np.float32), 0) == 1


def test_steps_without_drafts_do_not_move_the_draws(target):
    """B54: what is drawn for a place depends on seed and place alone."""
    sampling = Sampling(1.0, top_p=0.95, seed=9)
    alone = run(Engine(target), 30, sampling=sampling)
    for rights in ([[]], [[True], [], [False]]):
        engine, script = scripted(target, alone.tokens, rights)
        assert run(engine, 30, drafts=3, sampling=sampling).tokens == alone.tokens
        assert script.calls
    assert len(set(alone.tokens)) > 5


def test_many_proposers_at_once_share_nothing_but_memory(side):
    """B37: drafts belong to their sequence, whatever the order and company of a batch."""
    head, texts = side.head, [rows(3 + i, seed=20 + i) for i in range(4)]
    alone = []
    for tokens, hiddens in texts:
        state = head.alloc_state()
        head.prefill_drafter([0, *tokens[:-1]], hiddens, state)
        request = ProposeRequest(tokens[-1], hiddens[-1], len(tokens), 3)
        alone.append((request, head.propose(request, state).tokens))
        head.free_state(state)
    for order in ([0, 1, 2, 3], [3, 1, 0], [2, 0], [1, 3, 2, 0]):
        states = [head.alloc_state() for _ in order]
        for i, state in zip(order, states):
            head.prefill_drafter([0, *texts[i][0][:-1]], texts[i][1], state)
        made = head.propose_batch([alone[i][0] for i in order], states)
        assert [d.tokens for d in made] == [alone[i][1] for i in order]
        for state in states:
            head.free_state(state)


def test_the_head_reads_the_rotary_settings_it_was_made_with():
    """B39: of its own base where it has one, of the target's tables where it has none."""
    own, borrowed = heads.make_head("qwen3.5"), heads.make_head("llama")
    table = bind_head(own.weights, own.side, OPTIONS).weights["rope.cos"]
    pairs = table.shape[1]
    steps = torch.arange(pairs, dtype=torch.float64) / pairs
    for position in (0, 1, 63):
        wanted = torch.cos(position * own.weights.config.rope_theta**-steps)
        np.testing.assert_allclose(table[position], wanted, atol=1e-6)
    shared = bind_head(borrowed.weights, borrowed.side, OPTIONS).weights["rope.cos"]
    assert torch.equal(shared, borrowed.side.rope["rope.cos"][: len(shared)])
    assert math.isclose(own.weights.contract.partial_rotary, 0.25)
    assert oracle_runner(own).widest(Mode.CHAIN) and ModelLevers().trim is TrimPolicy.KV_EXACT
    config, tensors = loaded(checkpoints.make_model("llama", seed=3))
    assert target_side(config, tensors, CONTEXT).rope.keys() == borrowed.side.rope.keys()
