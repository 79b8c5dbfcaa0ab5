"""Keys of programs: a mode and a row count. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class Mode(Enum):
    """What the rows of a program are."""

    DECODE = "decode"  # one row
    VERIFY = "verify"  # rows of one sequence
    BATCH = "batch"  # rows of up to `rows` sequences: one of each, or several of some
    CHAIN = "chain"  # `rows` draft steps in one launch list
    MASKED = "masked"  # a draft step under a grammar mask
    SPINE = "spine"  # a chain that gives the best few tokens of each step
    TREE = "tree"  # rows of one sequence with a parent table
    PREFILL = "prefill"  # a chunk of a prompt


@dataclass(frozen=True, order=True)
class GraphKey:
    """A mode and a row count: one program. Rows of CHAIN and SPINE are draft steps."""

    mode: Mode = field(compare=False)
    rows: int
    sort: str = field(init=False, repr=False, default="")

    def __post_init__(self) -> None:
        object.__setattr__(self, "sort", self.mode.value)

    def __hash__(self) -> int:
        return hash((self.mode, self.rows))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GraphKey) and (self.mode, self.rows) == (other.mode, other.rows)

    @property
    def goes_on(self) -> bool:
        """True if the rows are steps that one row goes on for, each from the one before."""
        return self.mode in (Mode.CHAIN, Mode.SPINE)

    def __str__(self) -> str:
        return self.mode.name if self.mode is Mode.DECODE else f"{self.mode.name}_{self.rows}"

    @staticmethod
    def parse(text: str) -> GraphKey:
        """The key printed as `text` (`DECODE`, `VERIFY_3`, `CHAIN_2`, ...)."""
        name, _, rows = text.rpartition("_")
        return DECODE if text == "DECODE" else GraphKey(Mode[name], int(rows))


DECODE = GraphKey(Mode.DECODE, 1)
