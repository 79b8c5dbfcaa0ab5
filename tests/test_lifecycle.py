"""Histories of sequences over both heads, interpreted and compiled side by side.

Whatever happened, drafts are those of the oracle, and all live rows those of a fresh replay.
"""

from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field

import heads
import kit
import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from proposers.base import ProposeRequest

LENGTH = 40  # no text grows past it, so that every draft has a position
TIE = 1e-4  # two logits nearer than this may fall either way in f32
STEPS = 300  # rules that a run must have carried out
DONE = Counter()


@dataclass(eq=False)
class Sequence:
    """A text with made-up target hiddens, its state on each side, and drafts that wait.

    `rows` are the inputs of the cache rows that each module should hold.
    """

    single: bool
    text: list[int]
    hiddens: np.ndarray
    states: list = field(default_factory=list)
    rows: list[kit.Rows] = field(default_factory=list)
    drafts: tuple[int, ...] = ()
    added: list = field(default_factory=list)

    @property
    def position(self) -> int:
        """Where the newest token stands."""
        return len(self.text) - 1

    @property
    def missing(self) -> range:
        """Pair keys that a single head should hold before its next propose, and does not."""
        return range(len(self.rows[0].tokens), self.position - 1) if self.single else range(0)

    def request(self, count: int) -> ProposeRequest:
        """The next propose."""
        hidden = self.hiddens[self.position - 1]
        return ProposeRequest(self.text[-1], hidden, self.position, count)


@contextmanager
def failing(side, at):
    """A block in which step number `at` of the side's runners fails."""
    count = iter(range(99))
    held = [(module.runner, module.runner.step) for module in side.modules]

    def patched(step):
        return lambda key, **inputs: step(key, **inputs) if next(count) < at else 1 / 0

    for runner, step in held:
        runner.step = patched(step)
    try:
        yield
    finally:
        for runner, _ in held:
            del runner.step


class Histories(RuleBasedStateMachine):
    """Prompts, drafts, verifications, catch-up, carried rows, swaps, failures and ends, in any
    order, over sequences of a single head and of a head of three modules.
    """

    runners: list  # compiled; one per module, for all histories

    def __init__(self):
        super().__init__()
        self.sides = {s: [kit.Side(s), kit.Side(s)] for s in (True, False)}
        self.compiled = 1  # which side of each head drafts with compiled programs
        self.live: list[Sequence] = []
        self.touched: list[Sequence] = []
        self.place()

    def place(self):
        """Compiled runners into one side of each head; the single head has its own."""
        for single, sides in self.sides.items():
            sides[1 - self.compiled].install(None)
            sides[self.compiled].install(self.runners[0:1] if single else self.runners[1:])

    def ready(self, *, drafted=False, single=None, more=lambda s: True):
        """Sequences that a rule may take."""
        return [
            s for s in self.live
            if bool(s.drafts) is drafted and single in (None, s.single) and more(s)
            and (drafted or len(s.text) <= LENGTH)
        ]  # fmt: skip

    def both(self, sequence):
        """(head, state) of a sequence on either side."""
        return [(side.head, st) for side, st in zip(self.sides[sequence.single], sequence.states)]

    def did(self, what, *sequences):
        DONE[what] += 1
        self.touched = list(sequences)

    @initialize(lengths=st.tuples(st.integers(2, 20), st.integers(2, 20)), seed=st.integers(0, 99))
    def begin_two(self, lengths, seed):
        """Two sequences of the single head, so that batches are there to be made."""
        for number, length in enumerate(lengths):
            self.begin(length, seed + number, False, True, [])

    @precondition(lambda self: len(self.live) < 4)
    @rule(length=st.integers(2, 20), seed=st.integers(0, 99), budget=st.booleans(),
          single=st.booleans(), cuts=st.lists(st.integers(1, 7), max_size=4))  # fmt: skip
    def begin(self, length, seed, budget, single, cuts):
        """A prompt, taken in as one prefill and then in random pieces."""
        rng = np.random.default_rng(seed)
        text = rng.integers(0, heads.VOCAB, length + 1).tolist()
        hiddens = rng.normal(size=(heads.CONTEXT, heads.HIDDEN)).astype(np.float32)
        sequence = Sequence(single, text, hiddens, rows=[kit.Rows() for _ in range(3)])
        sequence.rows = sequence.rows[:1] if single else sequence.rows
        for side in self.sides[single]:
            head = side.head
            state = head.alloc_state_for(LENGTH) if budget else head.alloc_state()
            sequence.states.append(state)
            first = max(length - sum(cuts), 1)
            at = head.prefill_drafter(text[:first], hiddens[:first], state)
            assert at == (first - 1 if single else 0)
            for cut in cuts if single else ():
                part = slice(at, min(at + cut, length - 1))
                if part.start < part.stop:
                    tokens = text[part.start : part.stop + 1]
                    at += head.catchup_drafter(tokens, hiddens[part], at, at + 1, state)
            assert head.drafter_rows(state) == (length - 1 if single else 0)
        for key in range(length - 1 if single else 0):
            sequence.rows[0].add(text[key + 1], hiddens[key], key + 1)
        self.live.append(sequence)
        self.did("begin", sequence)

    def catch_up(self, sequence, count, batched=True):
        """Feeds `count` of the missing rows with the target's hiddens."""
        keys = sequence.missing[:count]
        if not keys:
            return
        tokens = [sequence.text[key + 1] for key in keys]
        hiddens = sequence.hiddens[keys[0] : keys[-1] + 1]
        for head, state in self.both(sequence):
            if batched:
                wrote = head.catchup_batch([tokens], [hiddens], [keys[0] + 1], [state])
            else:
                rows = head.drafter_rows(state)
                given = [sequence.text[keys[0]], *tokens]
                wrote = head.catchup_drafter(given, hiddens, rows, keys[0] + 1, state)
                assert head.catchup_drafter(given, hiddens, rows + 99, keys[0] + 1, state) == 0
            assert wrote == len(keys)
            assert head.last_pair_key(state) == keys[-1]
        for token, key in zip(tokens, keys):
            sequence.rows[0].add(token, sequence.hiddens[key], key + 1)

    @precondition(lambda self: self.ready(more=lambda s: s.missing))
    @rule(which=st.integers(0, 3), count=st.integers(1, 9), batched=st.booleans())
    def catch_up_some(self, which, count, batched):
        ready = self.ready(more=lambda s: s.missing)
        sequence = ready[which % len(ready)]
        self.catch_up(sequence, count, batched)
        self.did("catch up", sequence)

    def drafted(self, sequence, drafts, exact):
        """Takes drafts of both sides: equal, and the oracle's, unless two ids are nearly tied."""
        sequence.drafts, sequence.added = drafts[0], exact.added
        if exact.margin > TIE:
            assert drafts[0] == drafts[1] == exact.drafts
        elif drafts[0] != exact.drafts or drafts[0] != drafts[1]:
            self.drop(sequence)

    @precondition(lambda self: self.ready())
    @rule(which=st.integers(0, 3), count=st.integers(1, 4))
    def propose(self, which, count):
        sequence = (ready := self.ready())[which % len(ready)]
        self.catch_up(sequence, LENGTH)
        count = count if sequence.single else min(count, kit.MODULES)
        request = sequence.request(count)
        exact = kit.exact_drafts(
            sequence.rows, request.last_token, request.target_hidden, request.position, count
        )
        drafts = [head.propose(request, state).tokens for head, state in self.both(sequence)]
        for head, state in self.both(sequence):
            held = len(sequence.rows[0].tokens) + count if sequence.single else 0
            assert head.drafter_rows(state) == held
        self.did("propose", sequence)
        self.drafted(sequence, drafts, exact)

    @precondition(lambda self: len(self.ready(single=True)) > 1)
    @rule(count=st.integers(1, 3))
    def propose_together(self, count):
        ready = self.ready(single=True)
        for sequence in ready:
            self.catch_up(sequence, LENGTH)
        requests = [s.request(count) for s in ready]
        exact = [
            kit.exact_drafts(s.rows, r.last_token, r.target_hidden, r.position, count)
            for s, r in zip(ready, requests)
        ]
        made = [
            side.head.propose_batch(requests, [s.states[i] for s in ready])
            for i, side in enumerate(self.sides[True])
        ]
        self.did("propose together", *ready)
        for sequence, one, other, wanted in zip(ready, *made, exact):
            self.drafted(sequence, [one.tokens, other.tokens], wanted)

    @precondition(lambda self: self.ready())
    @rule(which=st.integers(0, 3), at=st.integers(0, 3))
    def fail(self, which, at):
        """A propose whose step `at` fails leaves what was there; one that does not is discarded."""
        sequence = (ready := self.ready())[which % len(ready)]
        for side, (head, state) in zip(self.sides[sequence.single], self.both(sequence)):
            before = head.drafter_rows(state), head.last_pair_key(state)
            with failing(side, at):
                try:
                    head.propose(sequence.request(3), state)
                except ZeroDivisionError:
                    DONE["failed"] += 1
                else:
                    head.after_verify(0, state)
                    if sequence.single:
                        state.drop(1)  # the propose's own row, which is exact
                        state.last_pair_key = before[1]
            assert (head.drafter_rows(state), head.last_pair_key(state)) == before
        self.did("fail", sequence)

    @precondition(lambda self: self.ready(drafted=True))
    @rule(which=st.integers(0, 3), share=st.floats(0, 1), token=st.integers(0, heads.VOCAB - 1))
    def verify(self, which, share, token):
        sequence = (ready := self.ready(drafted=True))[which % len(ready)]
        accepted, drafted = round(share * len(sequence.drafts)), len(sequence.drafts)
        sequence.text += [*sequence.drafts[:accepted], token]
        sequence.drafts = ()
        for head, state in self.both(sequence):
            head.after_verify(accepted, state)
        kept = 1 if sequence.single else accepted
        for index in range(min(kept, drafted)):
            sequence.rows[index].add(*sequence.added[index])
        self.did("verify", sequence)

    @precondition(lambda self: self.ready())
    @rule(which=st.integers(0, 3), token=st.integers(0, heads.VOCAB - 1))
    def go_on_without_drafts(self, which, token):
        sequence = (ready := self.ready())[which % len(ready)]
        sequence.text.append(token)
        self.did("serial", sequence)

    @precondition(lambda self: self.ready())
    @rule(which=st.integers(0, 3), renew=st.booleans())
    def carry(self, which, renew):
        sequence = (ready := self.ready())[which % len(ready)]
        for index, (head, state) in enumerate(self.both(sequence)):
            taken = head.take_drafter_kv(state)
            if not sequence.single:
                assert taken is None and not head.install_drafter_kv(state, None, 1, 1)
                continue
            held = len(sequence.rows[0].tokens)
            if not held:
                assert taken is None
                continue
            assert taken[1:] == (held, sequence.rows[0].positions[-1] - 1)
            assert (head.drafter_rows(state), head.last_pair_key(state)) == (0, None)
            if renew:
                head.free_state(state)
                sequence.states[index] = state = head.alloc_state()
            assert head.install_drafter_kv(state, *taken)
            assert not head.install_drafter_kv(state, *taken)
        self.did("carry", sequence)

    @rule()
    def swap(self):
        """What was interpreted is compiled from now on, and the other way round."""
        self.compiled = 1 - self.compiled
        self.place()
        self.did("swap", *self.live)

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 3))
    def end(self, which):
        sequence = self.live[which % len(self.live)]
        self.drop(sequence)
        self.did("end")

    def drop(self, sequence):
        for head, state in self.both(sequence):
            head.free_state(state)
            head.free_state(state)
            assert head.drafter_rows(state) == 0 and head.last_pair_key(state) is None
        self.live.remove(sequence)

    @invariant()
    def rows_are_those_of_a_fresh_replay(self):
        """Of the sequences that the last rule touched: the others' must not have changed."""
        touched, self.touched = [s for s in self.touched if s in self.live], []
        for sequence in touched:
            self.compare(sequence)

    def compare(self, sequence):
        if sequence.drafts:
            return
        exact = [
            torch.stack(rows.run(tiny)[2:]) if rows.tokens else None
            for rows, tiny in zip(sequence.rows, kit.TINIES)
        ]
        for side, state in zip(self.sides[sequence.single], sequence.states):
            for rows, cache in zip(exact, side.caches(state)):
                written = cache.shape[2]
                if rows is not None:
                    np.testing.assert_allclose(cache, rows[:, :, :written], atol=2e-4)
            if sequence.single:
                pending = len(state.pending)
                assert written + pending == len(sequence.rows[0].tokens)
            else:
                assert [c.shape[2] for c in side.caches(state)] == [
                    len(r.tokens) for r in sequence.rows
                ]

    @invariant()
    def no_block_is_lost(self):
        pools = {id(r.pool): r.pool for r in self.runners}
        pools |= {
            id(m.runner.pool): m.runner.pool
            for sides in self.sides.values() for side in sides for m in side.modules
        }  # fmt: skip
        leases = [
            lease
            for sequence in self.live for state in sequence.states
            for inner in ([state] if sequence.single else state.modules)
            if (lease := inner.lease) is not None
        ]  # fmt: skip
        pools |= {id(lease.pool): lease.pool for lease in leases}
        held = sum(pool.blocks - 1 - pool.free for pool in pools.values())
        assert held == sum(len(lease.blocks) for lease in leases)
        assert len({(id(x.pool), b) for x in leases for b in x.blocks}) == held

    def teardown(self):
        """The whole replay: every sequence's rows, drafts of each, and nothing left over."""
        for sequence in list(self.live):
            if sequence.drafts:
                for head, state in self.both(sequence):
                    head.after_verify(0, state)
                sequence.drafts = ()
                if sequence.single:
                    sequence.rows[0].add(*sequence.added[0])
            for side, state in zip(self.sides[sequence.single], sequence.states):
                side.flush(state)
            self.compare(sequence)
            self.drop(sequence)
        for sides in self.sides.values():
            for side in sides:
                assert side.owners == 0
                side.install(None)
        assert all(runner.pool.owners == 0 for runner in self.runners)


@pytest.fixture(scope="module")
def runners(tmp_path_factory, kernel_folder):
    """Compiled runners: the single head's, and one per module."""
    single, *_ = kit.compiled(tmp_path_factory.mktemp("single"), kernel_folder)
    modules = kit.compiled(tmp_path_factory.mktemp("modules"), kernel_folder)
    yield [single, *modules]
    for runner in (single, *modules):
        runner.close()


def test_lifecycle(runners):
    Histories.runners = runners
    DONE.clear()
    run_state_machine_as_test(
        Histories, settings=settings(max_examples=16, stateful_step_count=30, deadline=None)
    )
    assert sum(DONE.values()) - DONE["failed"] >= STEPS, DONE
    assert DONE["failed"] >= 2
    assert DONE.keys() == {
        "failed", "begin", "propose", "propose together", "verify", "catch up", "serial", "carry",
        "swap", "fail", "end",
    }  # fmt: skip
