"""Row tables of a batched verify: how many rows each sequence has, as runs of equal depth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from proposers.rules.errors import BadRowTable


@dataclass(frozen=True)
class Run:
    """`count` neighbouring sequences of `depth` rows each; `contiguous`: their slots follow on."""

    depth: int
    count: int
    contiguous: bool

    def __str__(self) -> str:
        return f"{self.depth}x{self.count}" + ("" if self.contiguous else "!")


@dataclass(frozen=True)
class RowTable:
    """Runs in batch order, and whether the sequences' state is carried from the step before."""

    runs: tuple[Run, ...]
    carried: bool = True

    def __post_init__(self) -> None:
        def refuse(problem: str) -> BadRowTable:
            return BadRowTable(text=str(self), problem=problem)

        if not self.runs:
            raise refuse("it is empty")
        for run in self.runs:
            if run.depth < 1 or run.count < 1:
                raise refuse(f"run {run} has a 0")
            if run.count == 1 and run.contiguous:
                raise refuse(f"run {run} is one sequence, which is written with `!`")
        for one, other in pairwise(self.runs):
            if one.depth == other.depth:
                raise refuse(f"runs {one} and {other} are one")

    @staticmethod
    def of(depths: Sequence[int], slots: Sequence[int], *, carried: bool = True) -> RowTable:
        """The table of a batch: the longest runs of neighbours with equal depth."""
        assert len(depths) == len(slots), "one depth per slot"
        runs = []
        for depth, group in groupby(range(len(depths)), key=lambda i: depths[i]):
            held = [slots[i] for i in group]
            follows = all(b == a + 1 for a, b in pairwise(held))
            runs.append(Run(depth, len(held), len(held) > 1 and follows))
        return RowTable(tuple(runs), carried)

    @staticmethod
    def parse(text: str) -> RowTable:
        """The table printed as `text`."""
        body, runs = text.removeprefix("uncarried: "), []
        for item in body.split():
            depth, cross, count = item.removesuffix("!").partition("x")
            if not (cross and depth.isdecimal() and count.isdecimal()):
                raise BadRowTable(text=text, problem=f"`{item}` is not depth x count")
            runs.append(Run(int(depth), int(count), not item.endswith("!")))
        return RowTable(tuple(runs), carried=body == text)

    def __str__(self) -> str:
        return ("" if self.carried else "uncarried: ") + " ".join(map(str, self.runs))

    @property
    def rows(self) -> int:
        """Rows of the verify."""
        return sum(run.depth * run.count for run in self.runs)

    @property
    def sequences(self) -> int:
        """Sequences of the verify."""
        return sum(run.count for run in self.runs)
