"""Which drafts of a batch to verify, by the chances that their whole prefixes hold: a share of them
(D-Cut), or those that are worth their rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from proposers.rules.errors import BadCutRatio
from proposers.rules.worth import DraftWorth

MOST_ROWS = 160  # of one batched verify
_STEPS = (0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class DepthCut:
    """`ratio` of the drafts after the first stay (snapped to
    quarters); off beyond `max_sequences`.
    """

    ratio: float = 0.75
    max_sequences: int = 8
    enabled: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.ratio <= 1:
            raise BadCutRatio(value=self.ratio)

    def applies(self, width: int, drafts: int) -> bool:
        """True for a batch of `width` sequences with `drafts` drafts each."""
        return self.enabled and drafts >= 2 and width <= self.max_sequences

    def retained(self, logprobs: Sequence[Sequence[float]], drafts: int) -> list[int]:
        """Drafts kept of each sequence, at least the first.

        Draft j > 1 is worth the sum of its log-probabilities up to j; the best stay, ties by
        sequence and then depth. A list of another length than `drafts` counts as certain: all
        zeros.
        """
        count = len(logprobs)
        rows = [lp if len(lp) == drafts else [0.0] * drafts for lp in logprobs]
        worth = [draft for draft in likeliest_drafts(rows) if draft[2] > 1]
        ratio = min(_STEPS, key=lambda step: (abs(step - self.ratio), -step))
        wanted = math.floor(count * (drafts - 1) * ratio + 0.5)
        budget = max(min(wanted, MOST_ROWS - 2 * count, count * (drafts - 1)), 0)
        kept = [1] * count
        for _, sequence, depth in worth[:budget]:
            kept[sequence] = max(kept[sequence], depth)
        return kept


def likeliest_drafts(logprobs: Sequence[Sequence[float]]) -> list[tuple[float, int, int]]:
    """(minus the log of its prefix's chance, sequence, depth) of each draft, the likeliest first.

    A draft is no likelier than the one before it, which comes first then: every start of the list
    holds whole prefixes.
    """
    return sorted(
        (-math.fsum(row[:depth]), sequence, depth)
        for sequence, row in enumerate(logprobs)
        for depth in range(1, len(row) + 1)
    )


def worthwhile(logprobs: Sequence[Sequence[float]], worth: DraftWorth) -> list[int]:
    """Drafts kept of each sequence: as many of the likeliest of all as bring more than they cost.

    They are weighed as one chain whose prefixes have the drafts' chances.
    """
    drafts = likeliest_drafts([[min(lp, 0.0) for lp in row] for row in logprobs])
    logs = [0.0, *(-cost for cost, _, _ in drafts)]
    count = worth.depth([new - old for old, new in pairwise(logs)])
    kept = [0] * len(logprobs)
    for _, sequence, depth in drafts[:count]:
        kept[sequence] = depth
    return kept
