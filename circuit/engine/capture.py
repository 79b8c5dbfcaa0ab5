"""The shared buffer of prompt hiddens, for heads that take their context in later."""

from __future__ import annotations

import numpy as np

from proposers.rules.capture import Capture


class HiddenCapture:
    """Hiddens [rows, n] by absolute position, of the sequence that wrote last.

    A head whose prompt prefill works in the target's own buffers waits for its first propose;
    until then another prompt may have come. The ticket tells: a reader that does not own the rows
    gets none.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.owner = Capture()
        self._buffer: np.ndarray | None = None

    def write(self, ticket: int, first: int, hiddens: np.ndarray) -> None:
        """Stores the rows from position `first` on, as far as the buffer reaches."""
        if self._buffer is None:
            self._buffer = np.zeros((self.rows, hiddens.shape[1]), hiddens.dtype)
        fits = max(min(len(hiddens), self.rows - first), 0)
        self._buffer[first : first + fits] = hiddens[:fits]
        self.owner.wrote(ticket, min(first, self.rows), first + fits)

    def read(self, ticket: int) -> tuple[int, np.ndarray]:
        """(position of the first row, rows) that belong to `ticket`; none for anyone else."""
        lo, hi = self.owner.owned_by(ticket)
        if self._buffer is None:
            return 0, np.zeros((0, 0))
        return lo, self._buffer[lo:hi]
