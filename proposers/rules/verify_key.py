"""The order of sequences in a batched verify, and the key under
which its captured graph is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

CANONICAL_MIN_WIDTH = 8
_NO_FLAGS = 0xFFFFFFFF


@dataclass(frozen=True)
class CanonicalRule:
    """Whether depths are re-paired with slots so that few distinct
    keys occur. `min_width` 0: always.
    """

    enabled: bool = True
    min_width: int = CANONICAL_MIN_WIDTH

    def applies(self, width: int) -> bool:
        """True for a batch of `width` sequences: the whole batch, not a chunk of it."""
        return self.enabled and width >= self.min_width


def verify_batch_permutation(
    slots: Sequence[int], depths: Sequence[int], canonical: bool
) -> list[int]:
    """The order of dispatch: by slot if canonical (depths unread),
    else deepest first, then by slot.
    """
    assert len(slots) == len(depths), "one depth per slot"
    index = range(len(slots))
    if canonical:
        return sorted(index, key=lambda i: (slots[i], i))
    return sorted(index, key=lambda i: (-depths[i], slots[i], i))


def verify_batch_order(
    slots: Sequence[int], depths: Sequence[int], canonical: bool
) -> tuple[list[int], list[int]]:
    """(order of dispatch, depth of each in that order).

    A canonical batch lays its depths, deepest first, onto ascending slots: a sequence may get
    another depth than it asked for. Otherwise each sequence keeps its own.
    """
    order = verify_batch_permutation(slots, depths, canonical)
    if canonical:
        return order, sorted(depths, reverse=True)
    return order, [depths[i] for i in order]


def verify_graph_key(
    pairs: Sequence[tuple[int, int]], *, null_steps: bool, write_on_accept: bool
) -> tuple[int, ...]:
    """slot, depth, slot, depth, ... as dispatched, closed by a word that holds the two flags."""
    words = [word for pair in pairs for word in pair]
    return (*words, _NO_FLAGS - int(null_steps) - 2 * int(write_on_accept))


def key_has_slot(key: Sequence[int], slot: int) -> bool:
    """True if `slot` is one of the key's slots; depths and the closing word do not count."""
    return slot in key[:-1:2]
