"""Drafts copied from the text itself: what followed the last time the newest tokens stood there.

Known as prompt lookup or n-gram drafting (Saxena 2023). It costs no forward at all, and where a
text repeats itself it is right far more often than any head; where nothing repeats it is silent and
the head drafts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

SHORTEST, LONGEST = 3, 8  # tokens that have to stand there again; the longest match decides


class Lookup:
    """The text so far, indexed by its runs of `shortest` to `longest` tokens."""

    def __init__(
        self, text: Iterable[int] = (), *, shortest: int = SHORTEST, longest: int = LONGEST
    ) -> None:
        assert 1 <= shortest <= longest
        self._lengths = range(longest, shortest - 1, -1)
        self._text: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}  # run -> index of what followed it last
        self.extend(text)

    def extend(self, tokens: Iterable[int]) -> None:
        """Appends tokens to the text."""
        for token in tokens:
            end = len(self._text)
            for length in self._lengths:
                if length <= end:
                    self._after[tuple(self._text[end - length :])] = end
            self._text.append(token)

    def drafts(self, count: int) -> Sequence[int]:
        """Up to `count` tokens that followed the newest run before; none if it is new.

        A copy that reaches the end of the text goes on with itself, so that a loop is drafted
        whole.
        """
        for length in self._lengths:
            start = (
                self._after.get(tuple(self._text[-length:])) if length <= len(self._text) else None
            )
            if start is not None:
                copied = list(self._text[start : start + count])
                while len(copied) < count:
                    copied.append(copied[len(copied) - (len(self._text) - start)])
                return copied
        return ()
