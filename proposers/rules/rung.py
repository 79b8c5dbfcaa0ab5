"""The rung table, and the adaptive rung that chooses between one and
two drafts for mid-size batches.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from proposers.rules.errors import BadRungTable

ADAPTIVE_WIDTHS = range(9, 17)
ENTER, LEAVE = 1.32, 1.30  # token ratio of two drafts over one: to go to two, and to come back
FAST, SLOW = 0.5, 0.15  # weights of a new sample in the two averages
PROBE_GAIN, PROBE_FLUSHES = 0.08, 2048


def parse_rungs(text: str) -> tuple[tuple[int, int], ...]:
    """(least active count, drafts) items of `min_active:drafts`
    text; must start at 1 and increase.
    """
    rungs: list[tuple[int, int]] = []
    for item in text.split(","):
        low, colon, drafts = (part.strip() for part in item.partition(":"))
        if not (colon and low.isdecimal() and drafts.isdecimal()):
            raise BadRungTable(text=text, problem=f"`{item.strip()}` is not min_active:drafts")
        if int(drafts) < 1:
            raise BadRungTable(text=text, problem=f"`{item.strip()}` has fewer than 1 draft")
        rungs.append((int(low), int(drafts)))
    if rungs[0][0] != 1:
        raise BadRungTable(text=text, problem=f"it starts at {rungs[0][0]}, not at 1")
    if any(b[0] <= a[0] for a, b in itertools.pairwise(rungs)):
        raise BadRungTable(text=text, problem="its counts do not increase")
    return tuple(rungs)


def rung_drafts(rungs: tuple[tuple[int, int], ...], n_active: int) -> int:
    """Drafts of the last rung whose least count is not above
    `n_active` (below the first: the first).
    """
    return next((drafts for low, drafts in reversed(rungs) if low <= n_active), rungs[0][1])


def token_ratio(p1: float, mean_accepted: float) -> float:
    """Tokens per step with two drafts over tokens with one, from
    acceptance measured with two drafts.

    `p1` is the share of first drafts accepted; with p2c = clamp((mean_accepted - p1) / p1, 0, 1),
    the chance that the second draft holds once the first did, the ratio is 1 + p1 * p2c / (1 + p1).
    """
    if p1 <= 0:
        return 1.0
    p2c = min(max((mean_accepted - p1) / p1, 0.0), 1.0)
    return 1 + p1 * p2c / (1 + p1)


@dataclass(frozen=True)
class Rung:
    """The adaptive rung's memory: averages of acceptance, the depth it
    is at, and when it last looked.
    """

    depth: int = 1
    fast_p1: float | None = None
    slow_p1: float | None = None
    accepted: float | None = None  # mean accepted of two-draft steps; None until one was seen
    flush_p1: float = 0.0  # the slow average when depth 2 was last measured
    flushes: int = 0  # steps since then

    def observed(self, drafts: int, p1: float, mean_accepted: float) -> Rung:
        """The memory after a step of `drafts` drafts with these
        acceptances; its depth may change.
        """
        fast = _blend(self.fast_p1, p1, FAST)
        slow = _blend(self.slow_p1, p1, SLOW)
        if drafts < 2:
            return Rung(self.depth, fast, slow, self.accepted, self.flush_p1, self.flushes + 1)
        accepted = _blend(self.accepted, mean_accepted, FAST)
        ratio = token_ratio(fast, accepted)
        depth = 2 if ratio >= ENTER else 1 if ratio < LEAVE else self.depth
        return Rung(depth, fast, slow, accepted, slow, 0)

    def drafts(
        self, n_active: int, ladder_drafts: int, num_drafts: int, *, adaptive: bool = True
    ) -> int:
        """Drafts for this step: never below the ladder, two at most,
        only for batches of 9 to 16.

        `adaptive` is False where a person chose the ladder or a static rung: the ladder decides.
        """
        if not adaptive or n_active not in ADAPTIVE_WIDTHS or num_drafts < 2:
            return ladder_drafts
        return max(ladder_drafts, 2 if self.depth == 2 or self.probes() else 1)

    def probes(self) -> bool:
        """True when two drafts are due to be measured: never seen, acceptance rose, or long ago."""
        if self.accepted is None:
            return True
        rose = self.slow_p1 is not None and self.slow_p1 - self.flush_p1 >= PROBE_GAIN
        return rose or self.flushes >= PROBE_FLUSHES


def _blend(known: float | None, sample: float, weight: float) -> float:
    return sample if known is None else known + weight * (sample - known)
