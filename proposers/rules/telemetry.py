"""Counts of acceptance: by how many sequences a step had, and by rank of the drafter's choices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from proposers.rules.cost import conditional_of

MOST_RANKS = 8


@dataclass
class Acceptance:
    """Counts of steps: `drafted[i]` had a draft at position i + 1, `accepted[i]` took it.

    `tokens` is what the steps emitted: the drafts taken and the target's own token after them. A
    step that takes a draft which stops the text ends with it, and has no token of the target's own.
    """

    steps: int = 0
    tokens: int = 0
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def count(self, drafted: int, accepted: int, tokens: int) -> None:
        """Adds one step of one sequence."""
        assert accepted <= drafted and tokens in (accepted, accepted + 1)
        self.steps += 1
        self.tokens += tokens
        for counts, reached in ((self.drafted, drafted), (self.accepted, accepted)):
            counts.extend([0] * (drafted - len(counts)))
            for index in range(reached):
                counts[index] += 1

    @property
    def per_position(self) -> list[float]:
        """Share of the steps with a draft at each position that took it and all before it."""
        return [a / d for a, d in zip(self.accepted, self.drafted, strict=True)]

    @property
    def conditional(self) -> tuple[float, ...]:
        """Share by position of the drafts whose predecessors all held."""
        return conditional_of(self.accepted, self.drafted)

    @property
    def rate(self) -> float | None:
        """Accepted drafts over drafts made; None without any."""
        made = sum(self.drafted)
        return sum(self.accepted) / made if made else None

    @property
    def tokens_per_step(self) -> float:
        """Tokens emitted per step; 1 where there was no step."""
        return self.tokens / self.steps if self.steps else 1.0

    @property
    def mean_accepted(self) -> float:
        """Drafts taken per step."""
        return sum(self.accepted) / self.steps if self.steps else 0.0

    def line(self, width: int) -> str:
        """The counts as one line for people."""
        first = f"{self.per_position[0]:.3f}" if self.drafted else "-"
        return (
            f"{width} sequences: {self.steps} steps, p1 {first}, "
            f"{self.mean_accepted:.3f} accepted, {self.tokens_per_step:.3f} tokens per step"
        )

    def plain(self) -> dict[str, object]:
        """The counts as JSON values."""
        return {
            "steps": self.steps, "tokens": self.tokens,
            "drafted": list(self.drafted), "accepted": list(self.accepted),
            "per_position": self.per_position, "rate": self.rate,
            "tokens_per_step": self.tokens_per_step,
        }  # fmt: skip


@dataclass
class AcceptanceByWidth:
    """Acceptance of batches by the number of their sequences, each width for itself."""

    widths: dict[int, Acceptance] = field(default_factory=dict)

    def count(self, width: int, drafted: int, accepted: int, tokens: int) -> None:
        """Adds one sequence's part in a step of `width` sequences."""
        self.widths.setdefault(width, Acceptance()).count(drafted, accepted, tokens)

    def lines(self) -> list[str]:
        """One line per width, narrowest first."""
        return [self.widths[width].line(width) for width in sorted(self.widths)]

    def plain(self) -> dict[str, object]:
        """Width -> counts, as JSON values."""
        return {str(width): self.widths[width].plain() for width in sorted(self.widths)}


@dataclass
class TopkCoverage:
    """How often the target's pick was among the drafter's first ranks, by depth.

    What a tree with that many leaves at a depth would have caught. A depth is counted where all
    drafts before it held: elsewhere the drafter went on from a wrong token.
    """

    ranks: int
    tried: list[int] = field(default_factory=list)
    within: list[list[int]] = field(default_factory=list)  # [depth][rank]: picks of that rank

    def __post_init__(self) -> None:
        assert 1 <= self.ranks <= MOST_RANKS

    def count(self, choices: Sequence[Sequence[int]], picks: Sequence[int]) -> None:
        """Adds a step: `choices[d]` are the ids by rank at depth d + 1, `picks[d]` what was picked.

        The first of each are the drafts themselves.
        """
        for depth, (ids, pick) in enumerate(zip(choices, picks, strict=False)):
            if depth == len(self.tried):
                self.tried.append(0)
                self.within.append([0] * self.ranks)
            self.tried[depth] += 1
            for rank, token in enumerate(ids[: self.ranks]):
                if token == pick:
                    self.within[depth][rank] += 1
                    break
            if not len(ids) or ids[0] != pick:
                return

    def coverage(self, depth: int, ranks: int) -> float:
        """Share of the picks at `depth` (from 1) that were among the first `ranks` ids."""
        return sum(self.within[depth - 1][:ranks]) / self.tried[depth - 1]

    def plain(self) -> list[list[float]]:
        """Coverage by depth and number of ranks."""
        return [
            [self.coverage(depth, ranks) for ranks in range(1, self.ranks + 1)]
            for depth in range(1, len(self.tried) + 1)
        ]
