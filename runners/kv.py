"""The paged cache: a pool of blocks of 16 rows, and the leases by which sequences hold them.

Block 0 is scratch: padding rows write there, nothing reads it, and no lease holds it. Blocks are
numbers; the pool's arrays (one per state, [blocks, 2, kv_heads, 16, head_dim]) live as long as the
pool and never move.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from ir.format import TensorType
from runners.buffers import host_array
from runners.errors import CacheFull, ContextFull, LeaseClosed, PoolInUse, StatesDiffer

BLOCK_ROWS = 16


def blocks_of(rows: int) -> int:
    """Blocks that `rows` rows occupy."""
    return -(-rows // BLOCK_ROWS)


class KvPool:
    """The memory of all sequences of one runner, and which block belongs to whom.

    `states` maps a state's name to its type; the types' first dimension is the number of blocks,
    scratch included. `context` is the most rows that one sequence may hold (None: as many as there
    are blocks for). `allocate` makes the array of a state, on the host unless told otherwise.
    """

    def __init__(
        self, states: Mapping[str, TensorType], context: int | None = None,
        allocate: Callable[[TensorType], Any] = host_array,
    ) -> None:  # fmt: skip
        counts = {t.shape[0] for t in states.values()}
        assert len(counts) <= 1, f"states disagree on the number of blocks: {counts}"
        self.types = dict(states)
        self.blocks = counts.pop() if counts else 1 + blocks_of(context or 0)
        self.context = (self.blocks - 1) * BLOCK_ROWS if context is None else context
        self.arrays = {name: allocate(type_) for name, type_ in states.items()}
        self._free = list(range(self.blocks - 1, 0, -1))
        self._held: dict[int, int] = {}  # block -> number of the owner that holds it
        self._owners = 0

    @property
    def free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    @property
    def owners(self) -> int:
        """Leases and detached rows that hold at least one block."""
        return len(set(self._held.values()))

    def lease(self, budget: int = 0) -> Lease:
        """A lease of an empty sequence; blocks for `budget` rows are its own until it is closed."""
        lease = Lease(self)
        lease.reserve(budget)
        lease.floor = len(lease.blocks)
        return lease

    def attach(self, rows: DetachedRows) -> Lease:
        """A lease that takes over detached rows."""
        lease = Lease(self)
        lease.blocks, lease.rows, lease.owner = rows.hand_over(self)
        return lease

    def close(self) -> None:
        """Frees the memory; refused while a lease or detached rows hold blocks."""
        if self._held:
            raise PoolInUse(count=self.owners, blocks=len(self._held))
        self.arrays = {}
        self._free = []

    def move_row(self, source: tuple[int, int], target: tuple[int, int]) -> None:
        """Copies keys and values of one row (block, line) of every state onto another, where the
        memory is.
        """
        (old, old_line), (new, new_line) = source, target
        for array in self.arrays.values():
            if hasattr(array, "move_row"):  # a state with a memory of its own kind
                array.move_row(source, target)
            else:
                array[new, :, :, new_line] = array[old, :, :, old_line]

    def new_owner(self) -> int:
        """A number that no other lease of this pool has."""
        self._owners += 1
        return self._owners

    def take(self, count: int, owner: int) -> list[int]:
        """Moves `count` blocks from the free list to `owner`: all of them, or none and an error."""
        if count > len(self._free):
            raise CacheFull(free=len(self._free), wanted=count, blocks=self.blocks - 1)
        taken = [self._free.pop() for _ in range(count)]
        self._held.update(dict.fromkeys(taken, owner))
        return taken

    def give(self, blocks: list[int], owner: int) -> None:
        """Moves blocks of `owner` back to the free list."""
        for block in reversed(blocks):
            assert self._held.pop(block, None) == owner, f"block {block} is not its giver's"
            self._free.append(block)


class Lease:
    """The rows of one sequence: blocks in order, and how many rows of them are live."""

    def __init__(self, pool: KvPool) -> None:
        self.pool = pool
        self.rows = 0
        self.floor = 0
        self.blocks: list[int] = []
        self.owner = pool.new_owner()
        self.closed = False

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def table(self, width: int) -> np.ndarray:
        """What a program reads: block numbers in order, i32 [width], 0
        (scratch) past the last block.
        """
        row = np.zeros(width, np.int32)
        row[: len(self.blocks)] = self.blocks
        return row

    def reserve(self, rows: int) -> None:
        """Makes room for `rows` rows in all; on an error the lease is as it was."""
        self._check_open()
        if rows > self.pool.context:
            raise ContextFull(rows=rows, limit=self.pool.context)
        missing = blocks_of(rows) - len(self.blocks)
        if missing > 0:
            self.blocks += self.pool.take(missing, self.owner)

    def append(self, count: int) -> int:
        """Counts `count` further rows as written, with room made for
        them; the row number of the first.
        """
        first = self.rows
        self.reserve(first + count)
        self.rows = first + count
        return first

    def begin_with(self, other: Lease, rows: int) -> None:
        """Makes copies of the first `rows` rows of another sequence of the pool the first rows of
        this one, which is empty.
        """
        assert self.pool is other.pool and not self.rows and rows <= other.rows
        self.append(rows)
        used = blocks_of(rows)
        for array in self.pool.arrays.values():
            array[self.blocks[:used]] = array[other.blocks[:used]]

    def trim(self, rows: int) -> None:
        """Keeps the first `rows` rows; blocks that become empty are
        freed, down to the lease's budget.
        """
        self._check_open()
        assert 0 <= rows <= self.rows, f"trim to {rows} of {self.rows} rows"
        self.rows = rows
        keep = max(blocks_of(rows), self.floor)
        self.pool.give(self.blocks[keep:], self.owner)
        del self.blocks[keep:]

    def keep(self, first: int, kept: Sequence[int]) -> None:
        """Makes rows `first + kept[0]`, `first + kept[1]`, ... (rising) the rows from `first` on;
        what stands after them is cut.
        """
        self._check_open()
        assert all(a < b for a, b in pairwise(kept)) and all(r >= 0 for r in kept[:1])
        assert not len(kept) or first + kept[-1] < self.rows, f"rows {kept} of {self.rows - first}"
        for place, row in enumerate(kept):
            if row != place:
                self.pool.move_row(self._slot(first + row), self._slot(first + place))
        self.trim(first + len(kept))

    def _slot(self, row: int) -> tuple[int, int]:
        """The block and the line in it where row number `row` lives."""
        return self.blocks[row // BLOCK_ROWS], row % BLOCK_ROWS

    def detach(self) -> DetachedRows:
        """The rows as an object that outlives the sequence, without
        unused blocks; the lease is closed.
        """
        self._check_open()
        self.floor = 0
        self.trim(self.rows)
        rows = DetachedRows(self.pool, self.blocks, self.rows, self.owner)
        self.blocks, self.rows, self.closed = [], 0, True
        return rows

    def close(self) -> None:
        """Frees the blocks; a second close changes nothing."""
        if not self.closed:
            self.pool.give(self.blocks, self.owner)
            self.blocks, self.rows, self.closed = [], 0, True

    def read(self, name: str) -> np.ndarray:
        """A copy of the live rows of a state held on the host, [2, kv_heads, rows, head_dim]."""
        self._check_open()
        blocks = self.pool.arrays[name][self.blocks]
        rows = np.moveaxis(np.asarray(blocks), 0, 2)  # [2, g, blocks, 16, d]
        return rows.reshape(*rows.shape[:2], -1, rows.shape[-1])[:, :, : self.rows].copy()

    def move(self, pool: KvPool) -> Lease:
        """A lease of the same rows in another pool of the same states; this one is closed."""
        self._check_open()
        shapes = [
            {n: (t.format, t.shape[1:]) for n, t in p.types.items()} for p in (self.pool, pool)
        ]
        if shapes[0] != shapes[1]:
            raise StatesDiffer(seen=sorted(shapes[0].items()), expected=sorted(shapes[1].items()))
        moved = pool.lease(min(self.floor * BLOCK_ROWS, pool.context))
        moved.append(self.rows)
        used = blocks_of(self.rows)
        for name, array in pool.arrays.items():
            array[moved.blocks[:used]] = self.pool.arrays[name][self.blocks[:used]]
        self.close()
        return moved

    def _check_open(self) -> None:
        if self.closed:
            raise LeaseClosed()


class DetachedRows:
    """Rows that no sequence uses at the moment: attached to a new sequence later, or closed."""

    def __init__(self, pool: KvPool, blocks: list[int], rows: int, owner: int) -> None:
        self.pool = pool
        self.rows = rows
        self.closed = False
        self._blocks = blocks
        self._owner = owner

    def hand_over(self, pool: KvPool) -> tuple[list[int], int, int]:
        """The blocks, the row count and the owner, for a lease of the
        same pool; these rows are closed.
        """
        if self.closed:
            raise LeaseClosed()
        assert pool is self.pool, "rows are attached to the pool that holds them"
        blocks, rows = self._blocks, self.rows
        self.closed, self._blocks, self.rows = True, [], 0
        return blocks, rows, self._owner

    def close(self) -> None:
        """Frees the blocks; a second close changes nothing."""
        if not self.closed:
            self.pool.give(self._blocks, self._owner)
            self.closed, self._blocks, self.rows = True, [], 0
