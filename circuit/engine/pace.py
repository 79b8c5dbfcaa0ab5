"""How many drafts a step has: by the ladder, by the throughput gate, by measured costs, by worth.
"""

from __future__ import annotations

from collections.abc import Sequence

from proposers.errors import LeverRefused
from proposers.levers import Depth, ModelLevers
from proposers.rules.cost import CostController, Goal, RunningCosts
from proposers.rules.gate import GateMode, ThroughputGate, Way
from proposers.rules.rung import ADAPTIVE_WIDTHS, Rung
from proposers.rules.worth import DraftWorth


class Pace:
    """Chooses the number of drafts of each step from the steps before; never what is written.

    It lives as long as its engine: what one text has shown holds for the next.
    """

    def __init__(self, levers: ModelLevers, most: int) -> None:
        self.levers = levers
        self.gate = (
            ThroughputGate(levers.gate_settings) if levers.gate is GateMode.AUTO else None
        )
        self.costs = RunningCosts(most) if levers.depth is Depth.COST else None
        self.worth = DraftWorth() if levers.depth is Depth.WORTH else None
        self._together: dict[int, DraftWorth] = {}  # by how many texts step together
        self.rung = Rung()
        self._controller = CostController(levers.goal)
        self._present: int | None = None
        if self.costs is not None and levers.goal is Goal.ENERGY:
            raise LeverRefused(
                name="goal", value="energy", wanted="latency or throughput: no joules are measured"
            )

    @property
    def measures(self) -> bool:
        """True if steps have to be recorded."""
        return self.gate is not None or self.costs is not None

    def pinned(self, since_thinking: int | None) -> bool:
        """True so soon after a thinking section that a step is drafted whatever was measured."""
        return self.measures and self.levers.gate_settings.pinned(since_thinking)

    def drafts(self, asked: int, position: int, width: int = 1) -> int:
        """Drafts of the next step of `width` sequences, at most `asked`, in that context."""
        wanted = self.levers.ladder.drafts(width, asked)
        adaptive = not (self.levers.static_rung or self.levers.ladder.pinned)
        asked = self.rung.drafts(width, wanted, asked, adaptive=adaptive)
        if self.gate is not None and self.gate.choose(position, width) is Way.SERIAL:
            return 0
        if self.costs is None or width > 1:
            return asked
        due = self.costs.due()
        if due is not None:
            return min(due, asked)
        self._present = self._controller.best(
            self.costs.table(), 1, self.costs.held, present=self._present, most=self.costs.most
        )
        return min(self._present, asked)

    def verified(self, logprobs: Sequence[float]) -> int:
        """How many of a chain's drafts, which have these log-probabilities, to verify."""
        return len(logprobs) if self.worth is None else self.worth.depth(logprobs)

    def judge(self, logprobs: Sequence[float], verified: int, accepted: int) -> None:
        """Takes in which of a chain's drafts held."""
        if self.worth is not None:
            self.worth.judge(logprobs, verified, accepted)

    def worth_of(self, width: int) -> DraftWorth | None:
        """The rule that weighs all drafts of `width` texts, two or more, against each other; None:
        there is none.
        """
        if self.worth is None:
            return None
        rule = self._together.setdefault(width, DraftWorth())
        rule.power = self.worth.power  # of the head, whose chains are judged one text at a time too
        return rule

    def record(self, drafts: int, accepted: int, tokens: int, seconds: float) -> None:
        """Counts a step that the head drafted, or that had no drafts."""
        if self.gate is not None:
            self.gate.record(tokens, seconds)
        if self.costs is not None:
            self.costs.record(drafts, accepted, 1e3 * seconds, min(drafts, tokens))

    def observe(
        self, width: int, drafted: Sequence[tuple[int, int]], tokens: int, seconds: float
    ) -> None:
        """Counts a step of `width` sequences, of which some drafted: (drafts, accepted) of each."""
        if self.gate is not None:
            self.gate.record(tokens, seconds)
        if width in ADAPTIVE_WIDTHS and drafted:
            p1 = sum(accepted > 0 for _, accepted in drafted) / len(drafted)
            mean = sum(accepted for _, accepted in drafted) / len(drafted)
            self.rung = self.rung.observed(max(k for k, _ in drafted), p1, mean)

    def plain(self) -> dict[str, object]:
        """What was found, as JSON values."""
        found: dict[str, object] = {}
        if self.gate is not None:
            rates = {way.value: e.rate for way, e in self.gate.estimates.items()}
            found["gate"] = {"present": self.gate.present.value, "tokens_per_second": rates}
        if self.costs is not None:
            found["costs"] = {
                "milliseconds": {str(k): ms for k, ms in sorted(self.costs.milliseconds.items())},
                "steps": {str(k): n for k, n in sorted(self.costs.seen.items())},
                "held": list(self.costs.held), "drafts": self._present,
            }  # fmt: skip
        if self.worth is not None and self.worth.base:
            found["worth"] = {
                "milliseconds": {str(k): 1e3 * self.worth.cost(k) for k in self.worth.shares},
                "tokens_per_second": self.worth.tokens / self.worth.seconds,
                "power": self.worth.power,
            }
        return found
