"""The throughput gate: whether drafting pays at present, by tokens per second of either way."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from proposers.rules.errors import BadGateSetting

WINDOW = 16  # steps of one way of decoding that make one measurement
BLEND = 0.3  # weight of a new measurement in a fresh estimate
LEAD = 0.05  # share of the present rate by which the other must be ahead
ROUNDS = 2  # measurements in a row that must agree on a change
DEPTH_FLOOR = 512  # contexts below this length count as equally long


class Way(Enum):
    """How steps are made."""

    DRAFTED = "drafted"
    SERIAL = "serial"

    @property
    def other(self) -> Way:
        """The way that is not this one."""
        return Way.SERIAL if self is Way.DRAFTED else Way.DRAFTED


class GateMode(Enum):
    """Whether there is a gate."""

    FORCE = "force"  # drafts wherever the request allows them
    AUTO = "auto"  # drafts as long as that is faster


@dataclass(frozen=True)
class GateSettings:
    """Recorded tokens between two looks at the other way, while serial and while drafting.

    `entry_pin`: within that many tokens after a thinking section a step is drafted whatever the
    gate says, and is not recorded.
    """

    reprobe: int = 256
    refresh: int = 1024
    entry_pin: int = 8

    def __post_init__(self) -> None:
        for name in ("reprobe", "refresh"):
            if getattr(self, name) < 1:
                raise BadGateSetting(name=name, value=getattr(self, name), wanted="1 or more")
        if self.entry_pin < 0:
            raise BadGateSetting(name="entry_pin", value=self.entry_pin, wanted="0 or more")

    def pinned(self, tokens_since_thinking: int | None) -> bool:
        """True where a draft is forced; None: no thinking section has ended."""
        return tokens_since_thinking is not None and tokens_since_thinking < self.entry_pin


@dataclass
class Estimate:
    """Tokens per second of one way, the usual deviation of a window, and whether it still holds."""

    rate: float | None = None
    deviation: float = 0.0
    fresh: bool = False

    def take(self, rate: float, *, replace: bool) -> None:
        """Takes in a window. A stale or probed estimate is replaced, and half its doubt kept."""
        if self.rate is None or replace or not self.fresh:
            self.rate, self.deviation = rate, self.deviation / 2
        else:
            self.deviation += BLEND * (abs(rate - self.rate) - self.deviation)
            self.rate += BLEND * (rate - self.rate)
        self.fresh = True


@dataclass
class ThroughputGate:
    """Chooses the way of each step from the steps recorded before; it has no clock of its own."""

    settings: GateSettings = field(default_factory=GateSettings)
    present: Way = Way.DRAFTED
    probing: bool = False
    estimates: dict[Way, Estimate] = field(default_factory=lambda: {w: Estimate() for w in Way})
    steps: int = 0  # of the open window
    tokens: int = 0
    seconds: float = 0.0
    since_probe: int = 0  # tokens
    leads: int = 0  # measurements in a row that spoke for the other way
    due: bool = False
    _depth: int | None = None
    _width: int | None = None

    def choose(self, depth: int, width: int) -> Way:
        """The way of the next step of `width` sequences whose context is `depth` tokens long.

        Where the depth has changed by a factor of two or the width has entered another bucket of
        powers of two, no estimate holds any more and the other way is looked at at once; a window
        that was open over two widths is thrown away.
        """
        depth, width = max(depth, DEPTH_FLOOR), width.bit_length()
        if self._width not in (None, width):
            self._drop_window()
            self._grow_stale()
        elif self._depth is not None and not self._depth < 2 * depth < 4 * self._depth:
            self._grow_stale()
            self._depth = depth
        if self._width != width:
            self._width, self._depth = width, depth
        cadence = self.settings.refresh if self.present is Way.DRAFTED else self.settings.reprobe
        if not self.probing and (self.due or self.since_probe >= cadence):
            self._close_window()
            self.probing, self.due, self.since_probe = True, False, 0
        return self.present.other if self.probing else self.present

    def record(self, tokens: int, seconds: float) -> None:
        """Counts a step made the way that was chosen.

        A serial step of n sequences has n tokens, a verify all that it emitted.
        """
        self.steps, self.tokens, self.seconds = (
            self.steps + 1, self.tokens + tokens, self.seconds + seconds,
        )  # fmt: skip
        self.since_probe += tokens
        if self.steps == WINDOW:
            self._close_window()

    def _close_window(self) -> None:
        """Measures the open window and, if that speaks for the other way often enough, changes."""
        if self.steps and self.seconds > 0:
            way = self.present.other if self.probing else self.present
            self.estimates[way].take(self.tokens / self.seconds, replace=self.probing)
            self._arbitrate()
        self._drop_window()

    def _arbitrate(self) -> None:
        mine, other = self.estimates[self.present], self.estimates[self.present.other]
        ahead = mine.rate is not None and other.rate is not None and other.fresh
        if ahead:
            needed = max(LEAD * mine.rate, (mine.deviation + other.deviation) / 2)
            ahead = other.rate - mine.rate > needed
        self.leads = self.leads + 1 if ahead else 0
        if self.leads == ROUNDS:
            self.present, self.leads, self.since_probe = self.present.other, 0, 0

    def _drop_window(self) -> None:
        self.steps, self.tokens, self.seconds, self.probing = 0, 0, 0.0, False

    def _grow_stale(self) -> None:
        for estimate in self.estimates.values():
            estimate.fresh = False
        self.due, self.leads = True, 0
