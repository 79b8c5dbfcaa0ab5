"""Trees that grow where a head is unsure: of all its first choices, those that are likeliest to be
accepted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from proposers.rules.errors import BadTreeShape
from proposers.rules.tree_shape import MAX_NODES, MAX_RANK, TreeShape

AUTO = "auto"
DEEPEST = 4  # of a tree that grows: what hangs deeper is seldom reached

@dataclass(frozen=True)
class Node:
    """A place in a tree, and the chance that the target's text runs through it."""

    chance: float
    depth: int
    rank: int


def likeliest(logprobs: Sequence[Sequence[float]], most: int) -> list[Node]:
    """The `most` nodes with the largest chances, falling; each cut of the list is a tree.

    `logprobs` are those of a head's best ids at each depth of the spine, falling.

    A node's chance is that of the spine above it times its own. A choice is no likelier than the
    one ranked before it and a node no likelier than the spine above it, so these come before it.
    """
    nodes, above = [], 1.0
    for depth, ranked in enumerate(logprobs, 1):
        least = 1.0
        for rank, logprob in enumerate(ranked[:MAX_RANK], 1):
            least = min(least, math.exp(logprob))
            nodes.append(Node(above * least, depth, rank))
        above *= min(1.0, math.exp(ranked[0]))
    return sorted(nodes, key=lambda n: (-n.chance, n.depth, n.rank))[:most]


def shape_of(nodes: Sequence[Node]) -> TreeShape:
    """The shape that holds the nodes of a cut, at least one."""
    counts = [0] * max(node.depth for node in nodes)
    for node in nodes:
        counts[node.depth - 1] += 1
    return TreeShape(tuple(counts))


def shares_of(nodes: Sequence[Node]) -> list[float]:
    """Log-probabilities whose running products are the nodes' chances: the nodes as if they were
    the drafts of a chain, for rules that weigh one.
    """
    logs = [math.log(node.chance) if node.chance > 0 else -math.inf for node in nodes]
    before = [0.0, *logs]
    return [
        new - old if new > -math.inf else -math.inf for new, old in zip(logs, before, strict=False)
    ]


@dataclass(frozen=True)
class TreeGrowth:
    """A tree of another shape in each step, of at most `verify_width` rows."""

    verify_width: int = MAX_NODES + 1

    def __post_init__(self) -> None:
        if not 2 <= self.verify_width <= MAX_NODES + 1:
            raise BadTreeShape(
                text=f"{AUTO}:{self.verify_width}", problem=f"{self.verify_width} rows hold none",
                rank=MAX_RANK, nodes=MAX_NODES,
            )  # fmt: skip

    @property
    def spine_len(self) -> int:
        """Depth of the spine that is drafted."""
        return min(DEEPEST, self.verify_width - 1)

    @property
    def ranks(self) -> int:
        """Choices that are wanted at each depth."""
        return min(MAX_RANK, self.verify_width - 1)


def parse_tree(text: str) -> TreeShape | TreeGrowth:
    """`auto`, `auto:R` for trees of at most R rows, or a shape such as `2,2,1`."""
    word, _, rows = text.strip().partition(":")
    if word != AUTO:
        return TreeShape.parse(text)
    if not rows:
        return TreeGrowth()
    if not rows.isdecimal():
        raise BadTreeShape(
            text=text, problem=f"`{rows}` is not a count", rank=MAX_RANK, nodes=MAX_NODES
        )
    return TreeGrowth(int(rows))
