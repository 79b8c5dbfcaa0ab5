"""The paged cache of a program's states, and the leases through which sequences hold blocks of it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ir.format import TensorType
from runners.errors import CacheFull

BLOCK_ROWS = 16
SCRATCH = 0


class KvPool:
    """Every state of a binding as one array [blocks, 2, kv_heads, 16, head_dim]; block 0 is scratch.

    A block number means the same block in every state. Arrays are made once and never move, so a program
    may keep their addresses. bf16 is held as its 16 bits.
    """

    def __init__(self, states: Mapping[str, TensorType]) -> None:
        counts = {type_.shape[0] for type_ in states.values()}
        assert len(counts) == 1, "all states of a binding have one number of blocks"
        self.blocks = counts.pop()
        self.types = dict(states)
        self.arrays = {n: np.zeros(t.shape, t.format.storage) for n, t in states.items()}
        self._free = list(range(self.blocks - 1, SCRATCH, -1))

    @property
    def free(self) -> int:
        """Blocks that no lease holds."""
        return len(self._free)

    def lease(self) -> Lease:
        """A new lease without blocks."""
        return Lease(self)

    def take(self, count: int) -> list[int]:
        """`count` free blocks, lowest first; CacheFull, with nothing taken, when there are fewer."""
        if count > len(self._free):
            raise CacheFull(free=len(self._free), blocks=self.blocks - 1, wanted=count)
        return [self._free.pop() for _ in range(count)]

    def give_back(self, blocks: list[int]) -> None:
        """Makes `blocks` free again, to be taken lowest first."""
        assert not set(blocks) & set(self._free), "a block is given back twice"
        self._free = sorted([*self._free, *blocks], reverse=True)


class Lease:
    """The cache blocks of one sequence; `rows` of them are written, in order from its row 0."""

    def __init__(self, pool: KvPool, blocks: list[int] | None = None, rows: int = 0) -> None:
        self.pool = pool
        self.blocks = [] if blocks is None else blocks
        self.rows = rows

    def reserve(self, rows: int) -> None:
        """Makes room for `rows` rows in all; CacheFull leaves the lease as it was."""
        missing = -(-rows // BLOCK_ROWS) - len(self.blocks)
        if missing > 0:
            self.blocks += self.pool.take(missing)

    def append(self, count: int) -> int:
        """Counts `count` further rows as written, with room made for them; the number of the first."""
        first = self.rows
        self.reserve(first + count)
        self.rows = first + count
        return first

    def trim(self, rows: int) -> None:
        """Keeps the first `rows` rows; blocks past them go back to the pool."""
        assert 0 <= rows <= self.rows, f"cannot keep {rows} of {self.rows} rows"
        self.rows = rows
        keep = -(-rows // BLOCK_ROWS)
        self.pool.give_back(self.blocks[keep:])
        del self.blocks[keep:]

    def table(self, width: int) -> np.ndarray:
        """The block numbers in order, i32 [width]; places past the last block name the scratch block."""
        row = np.full(width, SCRATCH, np.int32)
        row[: len(self.blocks)] = self.blocks
        return row

    def detach(self) -> tuple[list[int], int]:
        """The blocks and row count, which the caller owns from now on; the lease is left empty."""
        blocks, rows = self.blocks, self.rows
        self.blocks, self.rows = [], 0
        return blocks, rows

    def close(self) -> None:
        """Gives all blocks back; a second call does nothing."""
        blocks, _ = self.detach()
        self.pool.give_back(blocks)
