"""The cost controller: how many drafts give the most tokens for their time or their energy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from proposers.rules.errors import BadCostTable, StaleCostTable

BLEND = 0.2  # weight of a new step in a running mean


class Goal(Enum):
    """What the controller makes the most of."""

    LATENCY = "latency"  # tokens of one sequence per millisecond
    THROUGHPUT = "throughput"  # tokens of the batch per millisecond
    ENERGY = "energy"  # tokens per joule, among the depths that are nearly the fastest


def expected_tokens(conditional: Sequence[float], drafts: int) -> float:
    """Tokens of a step of `drafts` drafts: 1 + the chances that each prefix holds.

    `conditional[j]` is the chance that draft j + 1 holds once all before it did; past its end the
    last one stands in, and without any there is no chance at all.
    """
    total = prefix = 1.0
    for depth in range(drafts):
        chance = conditional[min(depth, len(conditional) - 1)] if conditional else 0.0
        prefix *= min(max(chance, 0.0), 1.0)
        total += prefix
    return total


@dataclass(frozen=True)
class CostTable:
    """Milliseconds of a step by (sequences, drafts), its drafts included; joules likewise.

    `digests` names the plans that the table was measured with: a table of other plans is refused.
    """

    milliseconds: Mapping[tuple[int, int], float]
    joules: Mapping[tuple[int, int], float] = field(default_factory=dict)
    digests: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.milliseconds:
            raise BadCostTable(problem="it is empty")
        for what, table in (("milliseconds", self.milliseconds), ("joules", self.joules)):
            for (width, drafts), cost in table.items():
                if width < 1 or drafts < 0 or not 0 < cost < float("inf"):
                    raise BadCostTable(
                        problem=f"{width} sequences with {drafts} drafts cost {cost} {what}"
                    )

    @staticmethod
    def of_parts(
        verify: Mapping[tuple[int, int], float], draft: Mapping[tuple[int, int], float],
        digests: Mapping[str, str] | None = None,
    ) -> CostTable:  # fmt: skip
        """The table of verifies and the proposes before them, both by (sequences, drafts)."""
        lacking = [key for key in verify if key[1] > 0 and key not in draft]
        if lacking:
            raise BadCostTable(problem=f"drafting is not measured for {lacking}")
        whole = {key: ms + draft.get(key, 0.0) for key, ms in verify.items()}
        return CostTable(whole, digests=digests or {})

    def check(self, live: Mapping[str, str]) -> None:
        """StaleCostTable unless every plan of the table is the live plan of that mode."""
        for mode, digest in sorted(self.digests.items()):
            if live.get(mode) != digest:
                raise StaleCostTable(mode=mode, measured=digest, live=live.get(mode, "none"))

    def depths(self, sequences: int) -> dict[int, tuple[float, float | None]]:
        """Drafts -> (milliseconds, joules) for the narrowest measured width that holds a batch.

        Past the widest the widest decides.
        """
        widths = sorted({width for width, _ in self.milliseconds})
        width = next((w for w in widths if w >= sequences), widths[-1])
        return {
            k: (ms, self.joules.get((w, k)))
            for (w, k), ms in sorted(self.milliseconds.items())
            if w == width
        }


@dataclass(frozen=True)
class CostController:
    """Picks the depth of the next steps; `margin` is what another depth must be better by.

    `slack`: with the energy goal, how much slower than the fastest a depth may be.
    """

    goal: Goal = Goal.LATENCY
    margin: float = 0.03
    slack: float = 0.05

    def __post_init__(self) -> None:
        if not (0 <= self.margin < 1 and 0 <= self.slack < 1):
            raise BadCostTable(problem=f"margin {self.margin} or slack {self.slack} is not a share")

    def best(
        self, table: CostTable, sequences: int, conditional: Sequence[float], *,
        present: int | None = None, most: int | None = None,
    ) -> int:  # fmt: skip
        """The depth of the table with the most value, at most `most`; ties go to fewer drafts.

        `present` stays unless another depth is better by more than the margin.
        """
        costs = {k: c for k, c in table.depths(sequences).items() if most is None or k <= most}
        if not costs:
            return 0
        value = self._values(costs, sequences, conditional)
        best = max(value, key=lambda k: (value[k], -k))
        if present in value and value[best] <= value[present] * (1 + self.margin):
            return present
        return best

    def _values(
        self, costs: Mapping[int, tuple[float, float | None]], sequences: int,
        conditional: Sequence[float],
    ) -> dict[int, float]:  # fmt: skip
        """Depth -> tokens per millisecond, or per joule among those that are fast enough."""
        tokens = {k: expected_tokens(conditional, k) for k in costs}
        speed = {k: tokens[k] / ms for k, (ms, _) in costs.items()}
        if self.goal is Goal.THROUGHPUT:
            return {k: sequences * s for k, s in speed.items()}
        if self.goal is Goal.LATENCY:
            return speed
        unknown = [k for k, (_, joules) in costs.items() if joules is None]
        if unknown:
            raise BadCostTable(problem=f"joules are not measured for {unknown} drafts")
        floor = (1 - self.slack) * max(speed.values())
        return {k: tokens[k] / costs[k][1] for k in costs if speed[k] >= floor}


@dataclass
class RunningCosts:
    """Costs and acceptance as the steps of a run show them: what a controller needs, measured.

    Each depth is tried `tries` times before it is judged and looked at again after `refresh` steps.
    """

    most: int
    tries: int = 4
    refresh: int = 256
    milliseconds: dict[int, float] = field(default_factory=dict)
    seen: dict[int, int] = field(default_factory=dict)
    last: dict[int, int] = field(default_factory=dict)
    held: list[float] = field(default_factory=list)  # running chances by position
    steps: int = 0

    def record(
        self, drafts: int, accepted: int, milliseconds: float, compared: int | None = None
    ) -> None:
        """Counts a step. `compared` drafts say something: those up to the first that did not hold,
        unless the text stopped before it.
        """
        self.steps += 1
        known = self.milliseconds.get(drafts)
        blended = milliseconds if known is None else known + BLEND * (milliseconds - known)
        self.milliseconds[drafts] = blended
        self.seen[drafts] = self.seen.get(drafts, 0) + 1
        self.last[drafts] = self.steps
        for position in range(min(accepted + 1, drafts) if compared is None else compared):
            hit = 1.0 if position < accepted else 0.0
            if position == len(self.held):
                self.held.append(hit)
            self.held[position] += BLEND / 4 * (hit - self.held[position])

    def due(self) -> int | None:
        """The deepest depth that has to be tried next; None if all are known and recent."""
        for drafts in range(self.most, -1, -1):
            old = self.steps - self.last.get(drafts, 0) >= self.refresh
            if self.seen.get(drafts, 0) < self.tries or old:
                return drafts
        return None

    def table(self) -> CostTable:
        """The costs of one sequence so far."""
        return CostTable({(1, k): ms for k, ms in self.milliseconds.items()})


def conditional_of(accepted: Iterable[int], drafted: Iterable[int]) -> tuple[float, ...]:
    """Chances by position from counts: `drafted[i]` steps had draft i + 1, `accepted[i]` took it.

    A draft is only judged where all before it held, so the tries of position i are its drafts among
    the steps that accepted i.
    """
    chances, before = [], None
    for taken, made in zip(accepted, drafted, strict=True):
        tries = made if before is None else min(before, made)
        if not tries:
            break
        chances.append(taken / tries)
        before = taken
    return tuple(chances)
