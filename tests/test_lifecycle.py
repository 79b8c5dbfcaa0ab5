"""Histories of sequences over one head: whatever happened, its rows are those of a fresh replay."""

from dataclasses import dataclass, field

import heads
import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    precondition,
    rule,
)

from proposers.base import ProposeRequest
from proposers.mtp_binding import make_mtp_head
from proposers.mtp_program import CACHE
from proposers.options import DraftOptions, head_keys
from runners.base import swap_draft
from runners.eager import EagerRunner

OPTIONS = DraftOptions(heads.CONTEXT, head_keys(batches=(2, 4), chunk=8), sequences=4)
TINY = heads.make_head(mapped=False)
LENGTH = 40  # no text grows past it, so that every draft has a position


@dataclass(eq=False)
class Sequence:
    """A text with made-up target hiddens, the drafter's state for it,
    and drafts that wait for a verify.
    """

    text: list[int]
    state: object
    hiddens: np.ndarray
    drafts: tuple[int, ...] = ()
    carried: list = field(default_factory=list)

    @property
    def keys(self) -> int:
        """Pair keys that the drafter should hold when nothing is drafted: all but the newest."""
        return len(self.text) - 2


class Histories(RuleBasedStateMachine):
    """Prompts, drafts, verifications, swaps, carried rows and ends, in any order."""

    sequences = Bundle("sequences")

    def __init__(self):
        super().__init__()
        self.head = make_mtp_head(TINY.weights, TINY.side, OPTIONS)
        self.runners = [self.runner()]
        self.head.set_circuit_draft(self.runners[0])
        self.live: list[Sequence] = []

    def runner(self):
        return EagerRunner(self.head.circuit_draft(OPTIONS, self.head.levers), double=True)

    @precondition(lambda self: len(self.live) < 4)
    @rule(
        target=sequences, length=st.integers(2, 20), seed=st.integers(0, 99), budget=st.booleans()
    )
    def begin(self, length, seed, budget):
        rng = np.random.default_rng(seed)
        text = rng.integers(0, heads.VOCAB, length + 1).tolist()
        hiddens = rng.normal(size=(heads.CONTEXT, heads.HIDDEN)).astype(np.float32)
        state = self.head.alloc_state_for(LENGTH) if budget else self.head.alloc_state()
        wrote = self.head.prefill_drafter(text[:length], hiddens[:length], state)
        assert wrote == length - 1
        self.live.append(Sequence(text, state, hiddens))
        return self.live[-1]

    @rule(sequence=sequences, count=st.integers(1, 4))
    def propose(self, sequence, count):
        if sequence.drafts or len(sequence.text) > LENGTH:
            return
        position = len(sequence.text) - 1
        request = ProposeRequest(sequence.text[-1], sequence.hiddens[position - 1], position, count)
        sequence.drafts = self.head.propose(request, sequence.state).tokens
        exact = TINY.chain(sequence.text[1:], sequence.hiddens[:position], count)
        assert list(sequence.drafts) == exact
        assert self.head.drafter_rows(sequence.state) == sequence.keys + count

    @precondition(lambda self: sum(not s.drafts for s in self.live) > 1)
    @rule(count=st.integers(1, 3))
    def propose_together(self, count):
        ready = [s for s in self.live if not s.drafts and len(s.text) <= LENGTH]
        if len(ready) < 2:
            return
        requests = [
            ProposeRequest(s.text[-1], s.hiddens[len(s.text) - 2], len(s.text) - 1, count)
            for s in ready
        ]
        for s, drafts in zip(ready, self.head.propose_batch(requests, [s.state for s in ready])):
            s.drafts = drafts.tokens
            assert list(s.drafts) == TINY.chain(s.text[1:], s.hiddens[: len(s.text) - 1], count)

    @rule(sequence=sequences, share=st.floats(0, 1), token=st.integers(0, heads.VOCAB - 1))
    def verify(self, sequence, share, token):
        if not sequence.drafts:
            return
        accepted, position = round(share * len(sequence.drafts)), len(sequence.text) - 1
        taken = list(sequence.drafts[:accepted])
        sequence.text += [*taken, token]
        sequence.drafts = ()
        self.head.after_verify(accepted, sequence.state)
        hiddens = sequence.hiddens[position : position + accepted]
        wrote = self.head.catchup_batch([taken], [hiddens], [position + 1], [sequence.state])
        assert wrote == accepted

    @rule(sequence=sequences)
    def carry(self, sequence):
        if sequence.drafts:
            return
        blocks, count, key = self.head.take_drafter_kv(sequence.state)
        assert (count, key) == (sequence.keys, sequence.keys - 1)
        assert self.head.drafter_rows(sequence.state) == 0
        self.head.free_state(sequence.state)
        sequence.state = self.head.alloc_state()
        assert self.head.install_drafter_kv(sequence.state, blocks, count, key)

    @rule(keep=st.booleans())
    def swap(self, keep):
        """Another runner takes over; the old one is freed once no sequence has rows in it."""
        if keep or self.live:
            self.runners.append(self.runner())
            self.head.set_circuit_draft(self.runners[-1])
        else:
            self.runners[-1] = swap_draft(self.head, self.runner)

    @rule(sequence=consumes(sequences))
    def end(self, sequence):
        self.head.free_state(sequence.state)
        self.head.free_state(sequence.state)
        assert self.head.drafter_rows(sequence.state) == 0
        self.live.remove(sequence)

    @invariant()
    def rows_are_those_of_a_fresh_replay(self):
        for sequence in self.live:
            state = sequence.state
            if sequence.drafts:
                continue
            assert self.head.drafter_rows(state) == sequence.keys
            assert self.head.last_pair_key(state) == sequence.keys - 1
            written = state.lease.rows
            exact = TINY.run(sequence.text[1 : written + 1], sequence.hiddens[:written])[2:]
            np.testing.assert_allclose(state.lease.read(CACHE), torch.stack(exact), atol=1e-4)

    @invariant()
    def no_block_is_lost(self):
        held = sum(runner.pool.blocks - 1 - runner.pool.free for runner in self.runners)
        leases = [s.state.lease for s in self.live if s.state.lease is not None]
        assert held == sum(len(lease.blocks) for lease in leases)
        assert len({(id(x.pool), b) for x in leases for b in x.blocks}) == held

    def teardown(self):
        for sequence in self.live:
            self.head.free_state(sequence.state)
        self.head.set_circuit_draft(None)
        for runner in self.runners:
            runner.close()


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=20, stateful_step_count=15, deadline=None)
