"""What a generation counted: steps, drafts made and accepted per position, time."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from proposers.rules.telemetry import Acceptance, AcceptanceByWidth, TopkCoverage


class Finish(Enum):
    """Why a generation ended."""

    STOP = "stop"  # a stop token, which is the last one emitted
    LENGTH = "length"  # as many tokens as were asked for
    CONTEXT = "context"  # the context is full
    CLOSED = "closed"  # the reader did not want more


@dataclass
class Statistics:
    """Counts of one generation. The token that the prompt gives is not a step's.

    `widths` holds the counts of acceptance by how many sequences a step had; `coverage` the ranks
    of the target's picks, where they are asked for.
    """

    prompt_tokens: int = 0
    looked_up: int = 0  # steps whose drafts were copied from the text
    branched: int = 0  # steps whose last accepted draft was a hedge of a tree
    prompt_seconds: float = 0.0
    seconds: float = 0.0
    finish: Finish | None = None
    acceptance: Acceptance = field(default_factory=Acceptance)
    widths: AcceptanceByWidth = field(default_factory=AcceptanceByWidth)
    coverage: TopkCoverage | None = None

    def count(self, drafted: int, accepted: int, tokens: int, width: int = 1) -> None:
        """Adds one step of `width` sequences, which emitted `tokens`."""
        self.acceptance.count(drafted, accepted, tokens)
        self.widths.count(width, drafted, accepted, tokens)

    @property
    def steps(self) -> int:
        """Steps after the prompt."""
        return self.acceptance.steps

    @property
    def drafted(self) -> list[int]:
        """Steps that had a draft at each position."""
        return self.acceptance.drafted

    @property
    def accepted(self) -> list[int]:
        """Steps that took the draft at each position."""
        return self.acceptance.accepted

    @property
    def accepted_per_position(self) -> list[float]:
        """Share of the steps with a draft at each position that
        accepted it, all before it included.
        """
        return self.acceptance.per_position

    @property
    def mean_accepted_length(self) -> float:
        """Tokens emitted per step; 0 without a step."""
        return self.acceptance.tokens_per_step if self.steps else 0.0
