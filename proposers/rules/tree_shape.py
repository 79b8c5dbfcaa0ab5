"""Shapes of draft trees: a spine with hedge leaves, their rows, and
the path that a verify accepts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from proposers.rules.errors import BadTreeShape

MAX_RANK = 4
MAX_NODES = 7  # the root excluded: a verify has at most 8 rows


@dataclass(frozen=True)
class TreeShape:
    """`counts[d]` nodes at depth d + 1: one continues the spine,
    the others are leaves beside it.
    """

    counts: tuple[int, ...]

    def __post_init__(self) -> None:
        def refuse(problem: str) -> BadTreeShape:
            text = ",".join(map(str, self.counts))
            return BadTreeShape(text=text, problem=problem, rank=MAX_RANK, nodes=MAX_NODES)

        if not self.counts:
            raise refuse("it is empty")
        for count in self.counts:
            if not 1 <= count <= MAX_RANK:
                raise refuse(f"{count} nodes at one depth")
        if self.nodes > MAX_NODES:
            raise refuse(f"it has {self.nodes} nodes")

    @staticmethod
    def parse(text: str) -> TreeShape:
        """The shape written as node counts by depth, such as `1,2,2,2`."""
        items = [item.strip() for item in text.split(",")] if text.strip() else []
        for item in items:
            if not item.isdecimal():
                raise BadTreeShape(
                    text=text, problem=f"`{item}` is not a count", rank=MAX_RANK, nodes=MAX_NODES
                )
        return TreeShape(tuple(int(item) for item in items))

    @property
    def nodes(self) -> int:
        """Drafts in the tree."""
        return sum(self.counts)

    @property
    def spine_len(self) -> int:
        """Depth of the spine."""
        return len(self.counts)

    @property
    def verify_width(self) -> int:
        """Rows of its verify: the root and every node."""
        return self.nodes + 1

    @property
    def ranks(self) -> int:
        """Choices of the drafter that it needs at a depth."""
        return max(self.counts)

    @property
    def is_chain(self) -> bool:
        """True without hedges."""
        return all(count == 1 for count in self.counts)

    @property
    def shape_id(self) -> int:
        """The counts as hexadecimal digits, the first depth highest."""
        return int("".join(f"{count:x}" for count in self.counts), 16)


@dataclass(frozen=True)
class TreeRow:
    """One row of a tree verify: its token, depth (root 0), and the row
    it continues (the root: itself).
    """

    token: int
    depth: int
    parent: int
    rank: int = 1


@dataclass(frozen=True)
class Hedge:
    """A leaf beside the spine: `rank` 2 is the drafter's second choice at `depth`."""

    depth: int
    rank: int
    token: int


def tree_rows(root: int, spine: Sequence[int], hedges: Sequence[Hedge]) -> tuple[TreeRow, ...]:
    """Row 0 the root, rows 1..L the spine, then the hedges as given (by depth, then rank)."""
    assert all(1 <= h.depth <= len(spine) and 2 <= h.rank <= MAX_RANK for h in hedges)
    rows = [TreeRow(root, 0, 0)]
    rows += [TreeRow(token, depth, depth - 1) for depth, token in enumerate(spine, 1)]
    rows += [TreeRow(h.token, h.depth, h.depth - 1, h.rank) for h in hedges]
    return tuple(rows)


def accept_path(rows: Sequence[TreeRow], picks: Sequence[int]) -> tuple[list[int], int]:
    """(accepted rows in order, the target's own token after them);
    `picks[r]` is its pick after row r.

    From the root the wanted token is the pick of the current row; the spine row of the next depth
    is tried, then its hedges in order. A hedge ends the walk, and so does a depth without a match.
    """
    spine_len = sum(row.rank == 1 for row in rows) - 1
    path: list[int] = []
    current = 0
    for depth in range(1, spine_len + 1):
        hedges = (r for r in range(spine_len + 1, len(rows)) if rows[r].depth == depth)
        match = next((r for r in (depth, *hedges) if rows[r].token == picks[current]), None)
        if match is None:
            break
        path.append(match)
        current = match
        if match != depth:
            break
    return path, picks[current]
