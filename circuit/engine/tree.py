"""Trees of drafts: how they grow from what a head proposes, and what a verify keeps of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from proposers.base import Drafts
from proposers.rules.tree_growth import TreeGrowth, likeliest, shape_of, shares_of
from proposers.rules.tree_shape import Hedge, TreeRow, TreeShape, accept_path, tree_rows
from proposers.rules.worth import DraftWorth


def shape_for(tree: TreeShape | TreeGrowth, drafts: Drafts, worth: DraftWorth) -> TreeShape | None:
    """The shape of this step's tree: the one that is asked for, or of the likeliest nodes those
    that are worth their rows; None where no draft is.
    """
    if isinstance(tree, TreeShape):
        return tree
    known = drafts.rank_logprobs or [[0.0] for _ in drafts.tokens]
    nodes = likeliest(known, tree.verify_width - 1)
    count = worth.depth(shares_of(nodes))
    return shape_of(nodes[:count]) if count else None


def grown(root: int, drafts: Drafts, shape: TreeShape | None, room: int) -> tuple[TreeRow, ...]:
    """The rows of a tree: the drafts as its spine and the ranks after them as hedges.

    At most `room` rows: the hedges at the deepest places are left out first, then the spine's end.
    """
    if shape is None:
        return tree_rows(root, (), ())
    spine = drafts.tokens[: min(shape.spine_len, room - 1)]
    hedges = [
        Hedge(depth, rank, token)
        for depth, (count, ranks) in enumerate(zip(shape.counts, drafts.ranks, strict=False), 1)
        for rank, token in enumerate(ranks[1:count], 2)
        if depth <= len(spine)
    ]
    return tree_rows(root, spine, hedges[: room - 1 - len(spine)])


class Picks(dict):
    """The target's own pick after each row, made when it is asked for."""

    def __init__(self, pick: Callable[[int], int]) -> None:
        super().__init__()
        self._pick = pick

    def __missing__(self, row: int) -> int:
        self[row] = self._pick(row)
        return self[row]


@dataclass(frozen=True)
class Kept:
    """What a verify keeps: rows of the program from the root on, the tokens that they emit, how
    many of those were drafted, and whether the last one is a hedge.
    """

    rows: tuple[int, ...]
    tokens: tuple[int, ...]
    accepted: int
    branched: bool


def kept_path(
    rows: tuple[TreeRow, ...], pick: Callable[[int], int], stops: Callable[[int], bool]
) -> Kept:
    """The accepted path with the target's own token after it, up to the first token that stops."""
    path, own = accept_path(rows, Picks(pick))
    tokens = [*(rows[row].token for row in path), own]
    end = next((i + 1 for i, token in enumerate(tokens) if stops(token)), len(tokens))
    accepted = min(len(path), end)
    branched = accepted > 0 and rows[path[accepted - 1]].rank > 1
    return Kept((0, *path)[:end], tuple(tokens[:end]), accepted, branched)
