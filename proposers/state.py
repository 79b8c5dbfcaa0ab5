"""What a proposer keeps for one sequence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Self

import numpy as np

from proposers.errors import ForeignState
from runners.kv import Lease


class ProposerState:
    """An opaque per-sequence object; only the proposer that made it looks inside."""

    @classmethod
    def of(cls, state: ProposerState, proposer: object) -> Self:
        """`state` as a `cls`; ForeignState if it is of another kind."""
        if not isinstance(state, cls):
            raise ForeignState(proposer=type(proposer).__name__, given=type(state).__name__)
        return state


@dataclass(frozen=True)
class Row:
    """One drafter row to write: a token, the hidden [n] of the position
    before it, its rotary position.
    """

    token: int
    hidden: np.ndarray
    position: int


@dataclass
class MtpState(ProposerState):
    """The drafter's cache of one sequence and what the last propose did.

    `pending` rows are accepted and counted as held, but not yet in the cache: the next propose
    writes them together with its own row, so that the head's weights are read once for all of them.
    """

    lease: Lease | None = None
    pending: list[Row] = field(default_factory=list)
    last_num_drafted: int = 0
    last_pair_key: int | None = None
    last_drafts: tuple[int, ...] = ()

    @property
    def rows(self) -> int:
        """Drafter rows held, pending ones included: where the next row goes."""
        return (self.lease.rows if self.lease else 0) + len(self.pending)

    def drafted(self, tokens: Sequence[int], position: int) -> None:
        """Records the drafts of a propose at `position`, each of which has its row."""
        self.last_num_drafted, self.last_drafts = len(tokens), tuple(tokens)
        self.last_pair_key = position + len(tokens) - 2

    def drop(self, count: int) -> None:
        """Cuts the newest `count` rows, as far as there are that
        many, and moves the pair key back.
        """
        count = min(count, self.rows)
        written = max(count - len(self.pending), 0)
        del self.pending[len(self.pending) - (count - written) :]
        if self.lease is not None and written:
            self.lease.trim(self.lease.rows - written)
        if self.last_pair_key is not None:
            key = self.last_pair_key - count
            self.last_pair_key = key if self.rows else None

    def snapshot(self) -> tuple[int, list[Row], int, int | None, tuple[int, ...]]:
        """What `restore` needs to undo what is done from now on."""
        held = self.lease.rows if self.lease else 0
        return held, list(self.pending), self.last_num_drafted, self.last_pair_key, self.last_drafts

    def restore(self, known: tuple[int, list[Row], int, int | None, tuple[int, ...]]) -> None:
        """Takes the state back to a snapshot: rows written since are no longer held."""
        held, self.pending, self.last_num_drafted, self.last_pair_key, self.last_drafts = known
        if self.lease is not None:
            self.lease.trim(held)

    def clear(self) -> None:
        """Gives the cache back and forgets everything; a second call does nothing."""
        if self.lease is not None:
            self.lease.close()
        self.lease, self.last_pair_key = None, None
        self.pending, self.last_num_drafted, self.last_drafts = [], 0, ()


@contextmanager
def undone_on_error(states: Sequence[MtpState]) -> Iterator[None]:
    """A block after which the states are as before if it raises: they advance by success only."""
    known = [state.snapshot() for state in states]
    try:
        yield
    except BaseException:
        for state, before in zip(states, known, strict=True):
            state.restore(before)
        raise


@dataclass
class MultiModuleState(ProposerState):
    """One state per module, and how many modules drafted last."""

    modules: Sequence[MtpState]
    last_num_drafted: int = 0
