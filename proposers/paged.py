"""What a proposer with a paged cache of its own does with it: leases,
pending rows, rows carried over.
"""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Sequence
from typing import NoReturn

import numpy as np

from ir.key import DECODE, Mode
from proposers.base import DraftProposer
from proposers.errors import BadRequest
from proposers.mtp_steps import write_rows
from proposers.state import MtpState, ProposerState, Row, undone_on_error
from runners.base import DraftRunner
from runners.kv import BLOCK_ROWS, DetachedRows


class PagedProposer(DraftProposer):
    """A proposer whose rows live in the pool of its runner; a state
    follows when the runner is replaced.
    """

    @property
    @abstractmethod
    def runner(self) -> DraftRunner:
        """What the head drafts with."""

    @property
    def context(self) -> int:
        """Rows that the programs can reach in one sequence."""
        return self.runner.inputs(DECODE)["tables"].shape[1] * BLOCK_ROWS

    def alloc_state(self) -> MtpState:
        """A state without cache blocks; they are taken as rows come."""
        return MtpState()

    def alloc_state_for(self, budget_tokens: int) -> MtpState:
        """A state whose cache blocks for `budget_tokens` rows are its own, a context's at most.

        sys.maxsize says that the budget is unknown: blocks are then taken as rows come.
        """
        if budget_tokens == sys.maxsize:
            return self.alloc_state()
        return MtpState(self.runner.pool.lease(min(max(budget_tokens, 0), self.context)))

    def free_state(self, state: ProposerState) -> None:
        """Gives the cache blocks back."""
        MtpState.of(state, self).clear()

    def catchup_drafter(
        self, tokens: Sequence[int], hiddens: np.ndarray, row_base: int, pos_base: int,
        state: ProposerState,
    ) -> int:  # fmt: skip
        """Rows queued for the next propose; 0 where `row_base` is not the append point."""
        if not isinstance(state, MtpState) or row_base != state.rows or len(tokens) < 2:
            return 0
        return self._queue(tokens[1:], hiddens, pos_base, state)

    def catchup_batch(
        self, tokens: Sequence[Sequence[int]], hiddens: Sequence[np.ndarray],
        first_pos: Sequence[int], states: Sequence[ProposerState],
    ) -> int:  # fmt: skip
        """Rows queued for the next propose of each sequence."""
        if not len(tokens) == len(hiddens) == len(first_pos) == len(states):
            self._refuse("tokens, hiddens, positions and states are of different lengths")
        mine = [MtpState.of(state, self) for state in states]
        given = zip(tokens, hiddens, first_pos, mine, strict=True)
        return sum(self._queue(t, h, p, s) for t, h, p, s in given)

    def _queue(
        self, tokens: Sequence[int], hiddens: np.ndarray, first: int, state: MtpState
    ) -> int:
        if len(tokens) != len(hiddens):
            self._refuse(f"{len(tokens)} tokens for {len(hiddens)} hiddens")
        for j, (token, hidden) in enumerate(zip(tokens, hiddens, strict=True)):
            state.pending.append(Row(int(token), np.array(hidden), first + j))
        if len(tokens):
            state.last_pair_key = first + len(tokens) - 2
        if len(state.pending) >= self.runner.widest(Mode.VERIFY):
            self._flush(self._adopt(state))
        return len(tokens)

    def prefill_drafter(
        self, prompt_tokens: Sequence[int], hiddens: np.ndarray, state: ProposerState
    ) -> int:
        """Row i from token i + 1 and hidden i, keys and values only; 0
        if the state holds rows already.
        """
        if not isinstance(state, MtpState) or state.rows or len(prompt_tokens) < 2:
            return 0
        if not (self.levers.drafter_prefill and self.runner.widest(Mode.PREFILL)):
            return 0
        mine = self._adopt(state)
        given = enumerate(zip(prompt_tokens[1:], hiddens, strict=False), start=1)
        rows = [Row(int(token), hidden, position) for position, (token, hidden) in given]
        with undone_on_error([mine]):
            mine.lease.reserve(len(rows))
            write_rows(self.runner, mine, rows)
            mine.last_pair_key = len(rows) - 1
        return len(rows)

    def drafter_rows(self, state: ProposerState) -> int:
        """Rows held, pending ones included."""
        return state.rows if isinstance(state, MtpState) else 0

    def last_pair_key(self, state: ProposerState) -> int | None:
        """The key of the newest row."""
        return state.last_pair_key if isinstance(state, MtpState) else None

    def take_drafter_kv(self, state: ProposerState) -> tuple[DetachedRows, int, int] | None:
        """The rows moved out, their count and the last key; the state is as fresh afterwards."""
        if not isinstance(state, MtpState) or not state.rows:
            return None
        self._flush(self._adopt(state))
        rows, key = state.rows, state.last_pair_key
        taken = state.lease.detach(), rows, key
        state.lease = None
        state.clear()
        return taken

    def install_drafter_kv(
        self, state: ProposerState, blocks: DetachedRows, rows: int, last_pair_key: int
    ) -> bool:
        """True if the rows are now the fresh state's; they must be of the current runner's pool."""
        fits = isinstance(state, MtpState) and state.rows == 0 and not blocks.closed
        if not (fits and blocks.pool is self.runner.pool and 0 < rows <= blocks.rows):
            return False
        state.clear()
        state.lease = blocks.pool.attach(blocks)
        state.lease.trim(rows)
        state.last_pair_key = last_pair_key
        return True

    def free_drafter_kv(self, blocks: DetachedRows | None) -> None:
        """Frees rows that were taken and are not wanted any more."""
        if blocks is not None:
            blocks.close()

    def _adopt(self, state: ProposerState) -> MtpState:
        """The state, with a lease in the pool of the current runner."""
        mine = MtpState.of(state, self)
        pool = self.runner.pool
        if mine.lease is None:
            mine.lease = pool.lease()
        elif mine.lease.pool is not pool:
            mine.lease = mine.lease.move(pool)
        return mine

    def _flush(self, state: MtpState) -> None:
        """Writes the pending rows now."""
        if state.pending:
            with undone_on_error([state]):
                rows, state.pending = state.pending, []
                write_rows(self.runner, state, rows)

    def _refuse(self, problem: str) -> NoReturn:
        raise BadRequest(proposer=type(self).__name__, problem=problem)
