"""What a generation counted: steps, drafts made and accepted per position, time."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from proposers.rules.telemetry import AcceptanceByWidth, TopkCoverage


class Finish(Enum):
    """Why a generation ended."""

    STOP = "stop"  # a stop token, which is the last one emitted
    LENGTH = "length"  # as many tokens as were asked for
    CONTEXT = "context"  # the context is full
    CLOSED = "closed"  # the reader did not want more


@dataclass
class Statistics:
    """Counts of one generation. `drafted[i]` steps had a draft at
    position i + 1, `accepted[i]` took it.

    The token that the prompt gives is not a step's. `widths` holds the same counts by how many
    sequences a step had; `coverage` the ranks of the target's picks, where they are asked for.
    """

    prompt_tokens: int = 0
    steps: int = 0
    looked_up: int = 0  # steps whose drafts were copied from the text
    branched: int = 0  # steps whose last accepted draft was a hedge of a tree
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    prompt_seconds: float = 0.0
    seconds: float = 0.0
    finish: Finish | None = None
    widths: AcceptanceByWidth = field(default_factory=AcceptanceByWidth)
    coverage: TopkCoverage | None = None

    def count(self, drafted: int, accepted: int, width: int = 1) -> None:
        """Adds one step of `width` sequences."""
        self.steps += 1
        self.widths.count(width, drafted, accepted)
        for counts, reached in ((self.drafted, drafted), (self.accepted, accepted)):
            counts.extend([0] * (drafted - len(counts)))
            for index in range(reached):
                counts[index] += 1

    @property
    def accepted_per_position(self) -> list[float]:
        """Share of the steps with a draft at each position that
        accepted it, all before it included.
        """
        return [a / d for a, d in zip(self.accepted, self.drafted, strict=True)]

    @property
    def mean_accepted_length(self) -> float:
        """Tokens per step: the accepted drafts and the target's own."""
        return 1 + sum(self.accepted) / self.steps if self.steps else 0.0
