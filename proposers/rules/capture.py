"""Whose hiddens a shared buffer holds: an interval of positions under a ticket."""

from __future__ import annotations

from dataclasses import dataclass

NOBODY = 0


@dataclass
class Capture:
    """Positions [lo, hi) of the buffer belong to the sequence of `ticket`; 0 is nobody's."""

    ticket: int = NOBODY
    lo: int = 0
    hi: int = 0
    issued: int = 0

    def new_ticket(self) -> int:
        """A number for a sequence, from 1 up, never given twice."""
        self.issued += 1
        return self.issued

    def wrote(self, ticket: int, lo: int, hi: int) -> None:
        """Records rows [lo, hi). The owner's interval grows if they touch it; else it is replaced.

        A gap would otherwise pass hiddens of an earlier text for those of this one.
        """
        assert ticket > NOBODY and lo <= hi
        if ticket == self.ticket and lo <= self.hi and hi >= self.lo:
            self.lo, self.hi = min(lo, self.lo), max(hi, self.hi)
        else:
            self.ticket, self.lo, self.hi = ticket, lo, hi

    def owned_by(self, ticket: int) -> tuple[int, int]:
        """The interval, or (0, 0) for anyone but the owner."""
        return (self.lo, self.hi) if ticket == self.ticket != NOBODY else (0, 0)
