"""The target's own pick after a row of logits: the first maximum, or a
draw that depends on its place only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from circuit.engine.errors import SamplingRefused

HEAD_START = (
    1024  # candidates looked at first; the rest is sorted only when their mass is not enough
)


@dataclass(frozen=True)
class Sampling:
    """How tokens are picked. `temperature` 0 is greedy; `top_k` 0 and
    `top_p` 1 leave everything in.

    The draw for output token i is a function of `seed` and i alone, so that drafts do not change
    it: a draft is accepted when it is the token that the target draws in its place, which keeps the
    target's law.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise SamplingRefused(name="temperature", value=self.temperature, wanted="0 or more")
        if not 0 <= self.top_p <= 1:
            raise SamplingRefused(name="top_p", value=self.top_p, wanted="between 0 and 1")
        if self.top_k < 0:
            raise SamplingRefused(name="top_k", value=self.top_k, wanted="0 or more")
        if not 0 <= self.seed < 1 << 64:
            raise SamplingRefused(name="seed", value=self.seed, wanted="a number of 64 bits")

    @property
    def greedy(self) -> bool:
        """True if every pick is the first maximum."""
        return self.temperature == 0 or self.top_k == 1 or self.top_p == 0

    def pick(self, logits: np.ndarray, index: int) -> int:
        """The token drawn from `logits` [v] as output number `index`."""
        if self.greedy:
            return int(logits.argmax())
        ids, mass = self._candidates(logits)
        uniform = np.random.Generator(np.random.Philox(key=self.seed, counter=index)).random()
        below = np.cumsum(mass)
        return int(
            ids[min(int(np.searchsorted(below, uniform * below[-1], "right")), len(ids) - 1)]
        )

    def _candidates(self, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Ids and weights to draw from: the likeliest first (ties by
        id), cut by top_k and then top_p.
        """
        wide = logits.astype(np.float64) / self.temperature
        weights = np.exp(wide - wide.max())
        count = len(weights) if self.top_k == 0 else min(self.top_k, len(weights))
        if count == len(weights) and self.top_p == 1:
            return np.arange(count), weights
        total = weights.sum() if count == len(weights) else None
        first = min(count, HEAD_START)
        ids = _largest(weights, first)
        if first < count and (total is None or weights[ids].sum() < self.top_p * total):
            ids = _largest(weights, count)
        mass = weights[ids]
        total = mass.sum() if total is None else total
        keep = int(np.searchsorted(np.cumsum(mass), self.top_p * total, "left")) + 1
        return ids[:keep], mass[:keep]


def _largest(weights: np.ndarray, count: int) -> np.ndarray:
    """Indices of the `count` largest weights, largest first, equal ones by index."""
    if count < len(weights):
        edge = np.partition(weights, len(weights) - count)[len(weights) - count]
        above, equal = np.flatnonzero(weights > edge), np.flatnonzero(weights == edge)
        pool = np.sort(np.concatenate([above, equal[: count - len(above)]]))
    else:
        pool = np.arange(len(weights))
    return pool[np.argsort(-weights[pool], kind="stable")]
