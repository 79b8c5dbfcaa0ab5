"""Index inputs of a step: which rows of which sequences a program computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ir.key import GraphKey, Mode
from runners.base import Runner
from runners.errors import BadTree
from runners.kv import Lease


@dataclass(frozen=True)
class Lane:
    """`count` rows of one sequence, from row number `first`, the
    first at rotary position `position`.
    """

    lease: Lease
    first: int
    position: int
    count: int = 1


def index_inputs(runner: Runner, key: GraphKey, lanes: Sequence[Lane]) -> dict[str, np.ndarray]:
    """`tables`, `row_sequence`, `indices` and `positions` of a step over `lanes`, in order.

    Rows and sequences that the program has beyond them are padding (index -1).
    """
    types = runner.inputs(key)
    sequences, width = types["tables"].shape
    (rows,) = types["indices"].shape
    if sequences == len(lanes) == 1 and lanes[0].count == rows:
        return _one_sequence(lanes[0], width)
    tables = np.zeros((sequences, width), np.int32)
    indices = np.full(rows, -1, np.int32)
    positions, owner = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
    at = 0
    for number, lane in enumerate(lanes):
        blocks = lane.lease.blocks
        tables[number, : len(blocks)] = blocks
        part = slice(at, at + lane.count)
        steps = np.arange(lane.count, dtype=np.int32)
        indices[part] = lane.first + steps
        positions[part] = lane.position + steps
        owner[part] = number
        at += lane.count
    return {"tables": tables, "row_sequence": owner, "indices": indices, "positions": positions}


def _one_sequence(lane: Lane, width: int) -> dict[str, np.ndarray]:
    """The inputs of a step that is filled by one sequence."""
    first, position, count = lane.first, lane.position, lane.count
    return {
        "tables": lane.lease.table(width)[None],
        "row_sequence": np.zeros(count, np.int32),
        "indices": np.arange(first, first + count, dtype=np.int32),
        "positions": np.arange(position, position + count, dtype=np.int32),
    }


def depths(parents: Sequence[int]) -> list[int]:
    """How many rows stand between each row of a tree and its root, which is row 0; BadTree if the
    table is none.
    """
    if not len(parents) or parents[0] != 0:
        raise BadTree(parents=list(parents), problem="row 0 is not its own parent")
    found = [0]
    for row, parent in enumerate(parents[1:], start=1):
        if not 0 <= parent < row:
            raise BadTree(parents=list(parents), problem=f"row {row} continues row {parent}")
        found.append(found[parent] + 1)
    return found


def tree_key(runner: Runner, parents: Sequence[int]) -> GraphKey:
    """The narrowest TREE program for the rows of a tree; BadTree for a table that is no tree, or
    for more rows than there is a program for.
    """
    count = len(depths(parents))
    key = runner.fitting(Mode.TREE, count)
    if key is None:
        most = runner.widest(Mode.TREE)
        raise BadTree(
            parents=list(parents), problem=f"there are {count} rows, and programs for up to {most}"
        )
    return key


def tree_inputs(
    runner: Runner, key: GraphKey, lease: Lease, first: int, parents: Sequence[int]
) -> dict[str, np.ndarray]:
    """The index inputs of a tree whose root is row `first` of the sequence, at that position.

    Row i is stored in row `first + i` and stands as far behind the root as it is deep.
    """
    count = len(parents)
    inputs = index_inputs(runner, key, [Lane(lease, first, first, count)])
    inputs["positions"][:count] = np.array(depths(parents), np.int32) + first
    inputs["parents"] = np.arange(key.rows, dtype=np.int32)  # a padding row is a root of its own
    inputs["parents"][:count] = parents
    return inputs


def padded(values: np.ndarray, rows: int) -> np.ndarray:
    """`values` [k, ...] with zero rows after them, [rows, ...]."""
    if len(values) == rows:
        return values
    out = np.zeros((rows, *values.shape[1:]), values.dtype)
    out[: len(values)] = values
    return out


def writing_key(runner: Runner, rows: int) -> GraphKey:
    """The narrowest program that takes in `rows` rows of one sequence, else the widest there is.

    What suits a draft head, whose PREFILL computes keys and values only.
    """
    modes = (Mode.PREFILL, Mode.VERIFY, Mode.DECODE)
    fitting = [key for mode in modes if (key := runner.fitting(mode, rows)) is not None]
    if fitting:
        return min(fitting, key=lambda key: key.rows)
    widest = [GraphKey(mode, runner.widest(mode)) for mode in modes if runner.widest(mode)]
    return max(widest, key=lambda key: key.rows)
