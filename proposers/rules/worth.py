"""Verifying what is worth it: of the drafts of a chain, those that bring more tokens than their
rows cost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

MEMORY = 0.98  # weight of all steps before, against a new one, in the rate
BLEND = 0.1  # weight of a new step in a running cost
PRIOR = 0.06  # of a step without drafts: what a draft's row adds, until it is measured
LEARN = 0.01  # how far one judged draft moves the power of chances
POWERS = (0.25, 2.0)
OUTLIER = 2.0  # a step that takes longer than this many times its mean counts as that many


@dataclass
class DraftWorth:
    """Chooses how many drafts of each step to verify, from their log-probabilities and from what
    the steps before took.

    Tokens per time over a whole text are most when each step takes the depth k with the largest
    E(k) - rate * cost(k): E(k) = 1 + the chances that each prefix of k drafts holds, cost(k) the
    time of the verify, and rate the tokens per time that the text runs at (Dinkelbach, "On
    Nonlinear Fractional Programming", 1967). The drafts themselves are made already, so their time
    counts in the rate alone. Costs are kept as one running time and a share of it for each depth,
    since all depths grow with the context alike. A head is often less sure than it might be, or
    surer: a draft of probability p holds with chance p ** power, and the power is what makes the
    chances of judged drafts add up to those that held.
    """

    tokens: float = 0.0
    seconds: float = 0.0
    base: float = 0.0  # seconds of a verify whose share is 1
    shares: dict[int, float] = field(default_factory=dict)
    tried: dict[int, int] = field(default_factory=dict)  # steps of each depth
    power: float = 1.0

    def depth(self, logprobs: Sequence[float]) -> int:
        """Drafts to verify, 0 to all of them; all as long as nothing is measured."""
        if not self.base:
            return len(logprobs)
        rate = self.tokens / self.seconds
        best, most, expected, prefix = 0, 1.0 - rate * self.cost(0), 1.0, 1.0
        for count, logprob in enumerate(logprobs, 1):
            prefix *= self.chance(logprob)
            expected += prefix
            worth = expected - rate * self.cost(count)
            if worth > most:
                best, most = count, worth
        return best

    def chance(self, logprob: float) -> float:
        """The chance that a draft of this log-probability holds where all before it do."""
        return math.exp(self.power * min(logprob, 0.0))

    def judge(self, logprobs: Sequence[float], verified: int, accepted: int) -> None:
        """Learns from a chain of which `verified` drafts were compared and `accepted` held.

        A draft says something only where all before it held.
        """
        for place, logprob in enumerate(logprobs[: min(verified, accepted + 1)]):
            missed = float(place < accepted) - self.chance(logprob)
            self.power = min(max(self.power - LEARN * missed, POWERS[0]), POWERS[1])

    def cost(self, drafts: int) -> float:
        """Seconds of a verify of `drafts` drafts, as measured or by the nearest measured depth."""
        if drafts in self.shares:
            return self.base * self.shares[drafts]
        near = min(self.shares, key=lambda k: (abs(k - drafts), k))
        return self.base * self.shares[near] * (1 + PRIOR * drafts) / (1 + PRIOR * near)

    def record(self, drafts: int, tokens: int, verify: float, whole: float) -> None:
        """Counts a step: drafts verified, its tokens, seconds of the verify and of the whole."""
        self.tokens = MEMORY * self.tokens + tokens
        self.seconds = MEMORY * self.seconds + whole
        if not self.base:
            self.base, self.shares, self.tried = verify, {drafts: 1.0}, {drafts: 1}
            return
        expected = self.cost(drafts)
        seen = min(verify, OUTLIER * expected) / expected
        share = expected / self.base
        self.tried[drafts] = self.tried.get(drafts, 0) + 1
        weight = max(BLEND, 1 / self.tried[drafts]) / 2  # a guess gives way to the first steps
        self.shares[drafts] = share * (1 + weight * (seen - 1))
        self.base *= 1 + BLEND * (seen - 1) / 2
