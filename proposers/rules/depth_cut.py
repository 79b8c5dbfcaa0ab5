"""D-Cut: which drafts of a batch are worth verifying, by the
probability that their whole prefix holds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from proposers.rules.errors import BadCutRatio

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
        worth = sorted(
            (-math.fsum(row[:depth]), sequence, depth)
            for sequence, row in enumerate(rows)
            for depth in range(2, drafts + 1)
        )
        ratio = min(_STEPS, key=lambda step: (abs(step - self.ratio), -step))
        wanted = math.floor(count * (drafts - 1) * ratio + 0.5)
        budget = max(min(wanted, MOST_ROWS - 2 * count, count * (drafts - 1)), 0)
        kept = [1] * count
        for _, sequence, depth in worth[:budget]:
            kept[sequence] = max(kept[sequence], depth)
        return kept
