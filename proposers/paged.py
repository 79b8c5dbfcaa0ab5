"""What a proposer with a paged cache of its own does with it: leases,
pending rows, rows carried over.
"""

from __future__ import annotations

from abc import abstractmethod

from proposers.base import DraftProposer
from proposers.mtp_steps import write_rows
from proposers.state import MtpState, ProposerState
from runners.base import DraftRunner
from runners.kv import DetachedRows


class PagedProposer(DraftProposer):
    """A proposer whose rows live in the pool of its runner; a state
    follows when the runner is replaced.
    """

    @property
    @abstractmethod
    def runner(self) -> DraftRunner:
        """What the head drafts with."""

    def alloc_state(self) -> MtpState:
        """A state without cache blocks; they are taken as rows come."""
        return MtpState()

    def alloc_state_for(self, budget_tokens: int) -> MtpState:
        """A state whose cache blocks for `budget_tokens` rows are its
        own (sys.maxsize: none are).
        """
        pool = self.runner.pool
        return MtpState(pool.lease(budget_tokens) if budget_tokens <= pool.context else None)

    def free_state(self, state: ProposerState) -> None:
        """Gives the cache blocks back."""
        MtpState.of(state, self).clear()

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
            rows, state.pending = state.pending, []
            write_rows(self.runner, state, rows)
