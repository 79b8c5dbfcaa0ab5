"""Ending a chain early: a draft whose log-probability is below ln(threshold) is the last one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from proposers.rules.errors import BadStopThreshold


@dataclass(frozen=True)
class DraftStop:
    """A confidence threshold in (0, 1)."""

    threshold: float

    def __post_init__(self) -> None:
        if not 0 < self.threshold < 1:  # NaN fails every comparison
            raise BadStopThreshold(value=self.threshold)

    @property
    def log_threshold(self) -> float:
        """Natural logarithm of the threshold."""
        return math.log(self.threshold)

    def goes_on(self, logprob: float) -> bool:
        """True if a chain may continue after a draft of this log-probability."""
        return logprob >= self.log_threshold

    def chain_depth(self, logprobs: Sequence[float]) -> int:
        """Drafts to verify: up to and including the first below the threshold; all if none is."""
        for depth, logprob in enumerate(logprobs, 1):
            if not self.goes_on(logprob):
                return depth
        return len(logprobs)
