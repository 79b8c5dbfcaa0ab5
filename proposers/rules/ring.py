"""The catch-up ring: the newest hiddens of the target, from which a drafter's missing rows are fed.

Labels are one ahead of the hidden that they carry: label n holds hidden n - 1. The row of pair key
k, a token at k + 1 with hidden k, is therefore fed from label k + 1, which is its rotary position.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

SHIFTS = range(-4, 5)


class CatchupRing:
    """The last `capacity` hiddens [n] in a row; a label that does not follow on starts anew.

    `shift` moves every label: a wrong one feeds wrong hiddens, which only lowers acceptance. It is
    there to show that 0 is the right mapping.
    """

    def __init__(self, capacity: int, *, shift: int = 0) -> None:
        assert capacity > 0 and shift in SHIFTS
        self.capacity, self.shift = capacity, shift
        self.newest: int | None = None
        self.count = 0
        self._rows: np.ndarray | None = None

    @property
    def labels(self) -> range:
        """The labels held, oldest first."""
        if self.newest is None:
            return range(0)
        return range(self.newest - self.count + 1, self.newest + 1)

    def put(self, label: int, hidden: np.ndarray) -> None:
        """Stores hidden `label` - 1; a gap forgets all that was held, an older label what follows.

        The hidden is copied: it may lie in a buffer that the next step writes.
        """
        label += self.shift
        if self._rows is None:
            self._rows = np.zeros((self.capacity, *hidden.shape), hidden.dtype)
        held = self.labels
        if label in held:
            self.count = label - held.start
        elif self.newest is None or label != self.newest + 1:
            self.count = 0
        self.newest, self.count = label, min(self.count + 1, self.capacity)
        self._rows[label % self.capacity] = hidden

    def put_rows(self, length: int, hiddens: Sequence[np.ndarray], accepted: int) -> None:
        """Stores the rows of a verify at `length`: rows 0 to `accepted`, both included.

        Row t has label `length` + t + 1. A bound that stops before `accepted` leaves one label
        unwritten in every step.
        """
        for row in range(accepted + 1):
            self.put(length + row + 1, hiddens[row])

    def feed(self, last_key: int, position: int) -> tuple[int, np.ndarray] | None:
        """(first key, hiddens [r, n]) of rows missing after `last_key` before a propose.

        Wanted are keys `last_key` + 1 to `position` - 2. What the ring does not hold is left out,
        and the rows end where the ring wraps: they are one piece of its memory. None: nothing held.
        """
        held = self.labels
        first, last = max(last_key + 2, held.start), min(position - 1, held.stop - 1)
        if self.newest is None or first > last:
            return None
        start = first % self.capacity
        count = min(last - first + 1, self.capacity - start)
        return first - 1, self._rows[start : start + count]

    def forget(self) -> None:
        """Empties the ring."""
        self.newest, self.count = None, 0
