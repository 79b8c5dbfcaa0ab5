"""How many drafts a step has, and what is kept up and counted meanwhile; the text stays."""

import logging
from dataclasses import replace
from itertools import cycle

import numpy as np
import pytest
import torch
from test_engine import PROMPT, engine_prompt_hiddens, headed, plain, run, scripted, target

from circuit.engine import drafting
from circuit.engine import generation as stepping
from circuit.engine.engine import Engine
from circuit.engine.pace import Pace
from proposers.errors import LeverRefused
from proposers.levers import Depth, ModelLevers, TrimPolicy
from proposers.mtp_program import CACHE
from proposers.rules.cost import Goal
from proposers.rules.gate import WINDOW, GateMode, Way
from proposers.rules.ladder import Ladder

__all__ = ["plain", "target"]  # fixtures


class Clock:
    """Time that passes only when programs run."""

    def __init__(self, monkeypatch, engine, verify, propose):
        self.now = 0.0
        monkeypatch.setattr(stepping.time, "perf_counter", lambda: self.now)
        rows, propose_of = engine.target.rows, engine.proposer.propose

        def timed_rows(lease, ids):
            self.now += verify[len(ids) - 1]
            return rows(lease, ids)

        def timed_propose(request, state):
            self.now += propose * request.num_drafts
            return propose_of(request, state)

        monkeypatch.setattr(engine.target, "rows", timed_rows)
        engine.proposer.propose = timed_propose


def paced(target, plain, rights, **levers):
    engine, script = scripted(target, plain, rights)
    script.levers = ModelLevers(**levers)
    engine.pace = Pace(script.levers, 3)
    return engine, script


def test_the_ladder_of_one_sequence_bounds_the_drafts(target, plain):
    levers = ModelLevers.parse({"ladder": "1:2,8:1"})
    engine, script = paced(target, plain, [[True] * 3], ladder=levers.ladder)
    assert run(engine, 20, drafts=3).tokens == plain[:20]
    assert {count for _, count, *_ in script.calls} == {2}


def test_the_gate_leaves_drafts_out_where_they_cost_more_than_they_bring(
    target, plain, monkeypatch
):
    """All drafts are wrong: a drafted step takes three times a plain one for the same token."""
    engine, script = paced(target, plain, [[False] * 3], gate=GateMode.AUTO, gate_refresh=32)
    Clock(monkeypatch, engine, [1.0, 2.0, 2.5, 2.7], 0.1)
    for _ in range(3):
        assert run(engine, 50, drafts=3).tokens == plain[:50]
    gate = engine.pace.gate
    assert gate.present is Way.SERIAL
    assert gate.estimates[Way.SERIAL].rate == pytest.approx(1.0)
    assert gate.estimates[Way.DRAFTED].rate == pytest.approx(1 / 3.0)
    found = engine.pace.plain()["gate"]
    assert found["present"] == "serial" and found["tokens_per_second"]["serial"] == 1.0
    assert len(script.calls) <= 32 + 2 * WINDOW


def test_the_gate_keeps_drafts_that_pay(target, plain, monkeypatch):
    engine, _ = paced(target, plain, [[True] * 3], gate=GateMode.AUTO, gate_refresh=32)
    Clock(monkeypatch, engine, [1.0, 1.1, 1.2, 1.3], 0.1)
    for _ in range(6):
        assert run(engine, 50, drafts=3).tokens == plain[:50]
    gate = engine.pace.gate
    assert gate.present is Way.DRAFTED and gate.estimates[Way.SERIAL].rate == pytest.approx(1.0)


@pytest.mark.parametrize("rights, verify, best", [
    ([[True, False, False]], [1.0, 1.2, 1.4, 1.6], 1),
    ([[True] * 3], [1.0, 1.2, 1.4, 1.6], 3),
    ([[False] * 3], [1.0, 1.2, 1.4, 1.6], 0),
])  # fmt: skip
def test_measured_costs_choose_the_depth(target, plain, monkeypatch, rights, verify, best):
    engine, _ = paced(target, plain, rights, depth=Depth.COST)
    Clock(monkeypatch, engine, verify, 0.05)
    for _ in range(2):
        assert run(engine, 55, drafts=3).tokens == plain[:55]
    found = engine.pace.plain()["costs"]
    assert found["drafts"] == best
    assert found["milliseconds"]["0"] == pytest.approx(1000.0)
    assert found["milliseconds"]["3"] == pytest.approx(1e3 * (verify[3] + 0.15))


def test_energy_is_not_measured_while_running():
    with pytest.raises(LeverRefused, match="no joules are measured"):
        Pace(ModelLevers(depth=Depth.COST, goal=Goal.ENERGY), 3)
    pace = Pace(ModelLevers(depth=Depth.FIXED), 3)
    assert not pace.measures and pace.plain() == {}


def test_steps_soon_after_thinking_are_drafted_and_not_recorded(target, plain, monkeypatch):
    """The gate is serial; within four tokens of the end of thinking the head drafts anyhow."""
    levers = {"gate": GateMode.AUTO, "entry_pin": 4, "gate_reprobe": 10**6}
    engine, script = paced(target, plain, [[False] * 3], **levers)
    engine.pace.gate.present = Way.SERIAL
    at = next(i for i in range(8, 30) if plain[i] not in [*PROMPT, *plain[:i]])
    recorded, record = [], engine.pace.record
    monkeypatch.setattr(engine.pace, "record", lambda *a: (recorded.append(a), record(*a)))
    generation = run(engine, 35, drafts=3, thinking_end=plain[at])
    assert generation.tokens == plain[:35]
    ends = [i for i in range(35) if plain[i] == plain[at]]
    near = {i + n for i in ends for n in range(4)} & set(range(33))  # the last has no room
    assert [call[0] - len(PROMPT) for call in script.calls] == sorted(near)
    assert len(recorded) == 33 - len(near) and {drafts for drafts, *_ in recorded} == {0}


class SomeSteps:
    """A pace that lets some steps go without drafts."""

    worth = None

    def judge(self, *_):
        pass

    measures = False

    def pinned(self, since_thinking):
        return False

    def __init__(self, *counts):
        self.counts = cycle(counts)

    def drafts(self, asked, position):
        return min(next(self.counts), asked)


@pytest.mark.parametrize("policy", [TrimPolicy.KV_EXACT, TrimPolicy.REFEED])
@pytest.mark.parametrize("counts", [(0, 0, 0, 0, 3), (0, 3, 1), (2, 0, 0)])
@pytest.mark.parametrize("rows", [drafting.RING_ROWS, 10])
def test_steps_without_drafts_are_fed_to_the_drafter_later(
    target, plain, monkeypatch, policy, counts, rows
):
    """After serial steps the drafter holds what a fresh replay gives, past the ring too."""
    monkeypatch.setattr(drafting, "RING_ROWS", rows)
    engine, tiny, head = headed(target, trim=policy)
    engine.pace = SomeSteps(*counts)
    kept, original = [], engine.target.rows
    engine.target.rows = lambda *a: (s := original(*a), kept.append(np.array(s.hidden)))[0]
    hiddens, generation = engine_prompt_hiddens(target), engine.generate(PROMPT, 40, drafts=3)
    for index, step in enumerate(generation):
        if index:
            hiddens = np.concatenate([hiddens, kept[-1][: len(step.tokens)]])
    assert generation.tokens == plain[:40]
    generation = engine.generate(PROMPT, 40, drafts=3)
    for index, _ in enumerate(generation):
        if index == 17:
            state, position = generation.drafting.state, generation.lease.rows
            generation.drafting.keep_up(position)
            head._flush(state)
            keys = position - 1
            assert (head.drafter_rows(state), head.last_pair_key(state)) == (keys, keys - 1)
            exact = tiny.run([*PROMPT, *plain][1 : keys + 1], hiddens[:keys])
            np.testing.assert_allclose(state.lease.read(CACHE), torch.stack(exact[2:]), atol=1e-4)


@pytest.mark.parametrize("shift", [-1, 0, 1])
@pytest.mark.parametrize("catchup", [True, False])
def test_no_lever_of_rows_changes_the_text(target, plain, shift, catchup):
    engine, _, head = headed(target, refeed_shift=shift, catchup=catchup)
    engine.pace = SomeSteps(0, 3, 0, 0, 2)
    assert run(engine, 40, drafts=3).tokens == plain[:40]
    assert head.runner.pool.owners == 0


def test_without_catch_up_steps_without_drafts_are_missing_context(target, plain):
    held = {}
    for catchup in (True, False):
        engine, _, head = headed(target, catchup=catchup)
        engine.pace = SomeSteps(0, 0, 1)
        generation = engine.generate(PROMPT, 20, drafts=1)
        for index, _ in enumerate(generation):
            if index == 9:
                state = generation.drafting.state
                held[catchup] = head.drafter_rows(state), generation.lease.rows
    (full, position), (thin, _) = held[True], held[False]
    assert full == position - 1 and thin < full - 3


def test_a_chain_that_is_not_sure_enough_is_dropped(target, plain):
    engine, _, head = headed(target, draft_clamp=0.99)
    generation = run(engine, 30, drafts=3)
    assert generation.tokens == plain[:30] and generation.statistics.drafted == []
    assert head.runner.pool.owners == 0
    engine, _, _ = headed(target, draft_clamp=1e-6)
    assert len(run(engine, 30, drafts=3).statistics.drafted) == 3


def test_a_stop_shortens_what_is_verified(target, plain):
    engine, _, _ = headed(target, draft_stop=0.9)
    generation = run(engine, 30, drafts=3)
    whole = run(headed(target)[0], 30, drafts=3)
    assert generation.tokens == whole.tokens == plain[:30]
    assert sum(generation.statistics.drafted) < sum(whole.statistics.drafted)


def test_ranks_are_counted_beside_and_change_nothing(target, plain, caplog):
    whole = run(headed(target)[0], 30, drafts=3)
    engine, _, _ = headed(target, shadow_topk=8, fingerprints=True)
    with caplog.at_level(logging.INFO):
        generation = run(engine, 30, drafts=3)
    counted, seen = generation.statistics, generation.statistics.coverage
    assert generation.tokens == plain[:30] and counted.accepted == whole.statistics.accepted
    assert seen.tried[0] == counted.drafted[0]
    assert seen.within[0][0] == counted.accepted[0]  # the first rank is the draft
    assert all(a <= b for a, b in zip(seen.plain()[0], seen.plain()[0][1:]))
    assert "ring: label 8" in caplog.text and "shadow: (" in caplog.text
    rings = [line.split() for line in caplog.messages if line.startswith("ring")]
    labels = {line[2]: line[-1] for line in rings}
    feeds = [line.split() for line in caplog.messages if line.startswith("feed")]
    for feed in feeds:  # the row of key k takes the hidden of label k + 1
        assert labels.get(str(int(feed[2]) + 1), feed[-1]) == feed[-1]
    assert counted.widths.widths[1].drafted == counted.drafted


def test_a_target_alone_has_no_pace(target, plain):
    engine = Engine(target)
    assert engine.pace is None and run(engine, 5).tokens == plain[:5]


def test_only_drafts_that_are_worth_their_rows_are_verified(target, plain, monkeypatch):
    """A row costs a fifth of a step: a draft of one chance in twenty is never worth it."""
    engine, _ = paced(target, plain, [[True, False, False]])
    Clock(monkeypatch, engine, [1.0, 1.2, 1.4, 1.6], 0.05)
    propose_of = engine.proposer.propose

    def sure_of_the_first(request, state):
        made = propose_of(request, state)
        return replace(made, logprobs=(-0.05, -3.0, -0.1)[: len(made.tokens)])

    engine.proposer.propose = sure_of_the_first
    whole = run(engine, 60, drafts=3)
    assert whole.tokens == plain[:60]
    assert engine.pace.worth.cost(1) == pytest.approx(1.2, rel=0.05)
    later = run(engine, 60, drafts=3)
    assert later.tokens == plain[:60] and later.statistics.drafted[1:] in ([], [0, 0])
    assert engine.pace.plain()["worth"]["tokens_per_second"] > 1.5 / 1.4


def test_depth_fixed_verifies_them_all(target, plain):
    engine, _ = paced(target, plain, [[True, False, False]], depth=Depth.FIXED)
    generation = run(engine, 31, drafts=3)
    assert generation.tokens == plain[:31] and engine.pace.worth is None
    assert generation.statistics.drafted == [15, 14, 14]  # the last step had room for one


def test_a_chosen_ladder_or_a_static_rung_keeps_the_depth():
    """Twelve sequences try two drafts only where nobody chose how many they have."""
    chosen = ({}, {"static_rung": True}, {"ladder": Ladder.parse("16:1")})
    depths = [Pace(ModelLevers(**levers), 3).drafts(3, 9, 12) for levers in chosen]
    assert depths == [2, 1, 1]
