"""Where the rows of a program stand: their rotary positions, cache slots and what each may see."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ir.graph import GraphKey, Mode
from ir.ops import advance, slot_at
from ir.ops.attention import BLOCK_ROWS
from ir.tracing import Scope


def row_count(key: GraphKey) -> int:
    """Rows that a program of `key` computes at once; the steps of a chain have one row each."""
    return 1 if key.goes_on else key.rows


def sequence_count(key: GraphKey) -> int:
    """Sequences whose caches a program of `key` reads."""
    return key.rows if key.mode is Mode.BATCH else 1


def blocks_for(rows: int) -> int:
    """Cache blocks that hold `rows` rows of one sequence."""
    return -(-rows // BLOCK_ROWS)


@dataclass(frozen=True)
class Rows:
    """Index inputs of a program: `positions`, `row_sequence`,
    `indices`, `slots` [m]; `tables` [s, t].

    `indices` is a row's number in its sequence (-1: a padding row, which writes to the scratch
    block and attends to nothing); `slots` is where its key and value go; `cos` and `sin` are the
    rotary tables. `parents` [m] of a TREE are the rows that its rows continue.
    """

    positions: Any
    tables: Any
    row_sequence: Any
    indices: Any
    slots: Any
    cos: Any
    sin: Any
    parents: Any = None

    @staticmethod
    def read(scope: Scope, max_context: int) -> Rows:
        """The rows of the program under `scope`, from its index inputs."""
        m = row_count(scope.key)
        tables = scope.input("tables", sequence_count(scope.key), blocks_for(max_context))
        row_sequence = scope.input("row_sequence", m)
        indices = scope.input("indices", m)
        return Rows(
            positions=scope.input("positions", m),
            tables=tables,
            row_sequence=row_sequence,
            indices=indices,
            slots=slot_at(tables, row_sequence, indices),
            cos=scope.weight("rope.cos"),
            sin=scope.weight("rope.sin"),
            parents=scope.input("parents", m) if scope.key.mode is Mode.TREE else None,
        )

    def advanced(self, by: int) -> Rows:
        """The rows `by` places later in the same sequences: the next step of a chain."""
        indices = advance(self.indices, by=by)
        return replace(
            self,
            positions=advance(self.positions, by=by),
            indices=indices,
            slots=slot_at(self.tables, self.row_sequence, indices),
        )
