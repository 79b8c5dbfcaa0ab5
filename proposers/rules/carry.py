"""Drafter rows carried from one turn to the next: what of them a new prompt may use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class Refusal(Enum):
    """Why a turn starts without carried rows."""

    NO_CARRY = "nothing is carried"
    FOREIGN_SESSION = "the carried rows are another session's"
    PREFIX_MISMATCH = "the new prompt does not begin as the carried text does"
    FOREIGN_HIDDENS = "the captured hiddens are another sequence's"
    NO_HIDDENS = "hiddens of the rows to append are not captured"


@dataclass(frozen=True)
class Adopted:
    """Carried rows in use: how many, how many were appended to them, and the first key appended."""

    rows: int
    appended: int
    first_key: int


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens that both begin with."""
    return next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )


@dataclass(frozen=True)
class CarriedRows:
    """What a carried entry holds: its text, rows, newest pair key, and the session it is of.

    Session 0 is nobody's: such rows are used by no one.
    """

    tokens: tuple[int, ...]
    rows: int
    last_pair_key: int | None
    session: int

    def usable_by(self, prompt: Sequence[int], session: int) -> tuple[int, int] | None:
        """(rows, newest key) that a prompt of `session` may keep; None: none of them.

        The row of key k holds token k + 1: a common prefix of c tokens covers keys up to c - 2.
        """
        if session == 0 or session != self.session or self.last_pair_key is None or self.rows < 1:
            return None
        common = common_prefix(self.tokens, prompt)
        if common < 2:
            return None
        key = min(self.last_pair_key, common - 2)
        rows = self.rows - (self.last_pair_key - key)
        return (rows, key) if rows > 0 else None

    def refusal(self, session: int) -> Refusal:
        """Why `usable_by` says None."""
        if self.last_pair_key is None or self.rows < 1:
            return Refusal.NO_CARRY
        if session == 0 or session != self.session:
            return Refusal.FOREIGN_SESSION
        return Refusal.PREFIX_MISMATCH


def plan_append(last_key: int, prompt_len: int, lo: int, hi: int) -> tuple[int, int] | None:
    """(first key, rows) to append after `last_key` for a prompt, from hiddens [lo, hi).

    The last key that a prompt of P tokens needs is P - 2. Keys before `lo` are skipped: rows are
    compacted, so that a missing one is only missing context. None: nothing is needed, or the
    capture ends too early.
    """
    last_needed = prompt_len - 2
    first = max(last_key + 1, lo)
    if first > last_needed or hi <= last_needed:
        return None
    return first, last_needed - first + 1
