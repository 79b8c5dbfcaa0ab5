"""A cache in the memory order of the C++ kernels, under the indices of every other cache."""

from __future__ import annotations

from typing import Any

import numpy as np

from ir.format import TensorType
from runners.buffers import host_array


class TurnedCache:
    """A state of the KV pool, [blocks, 2, kv_heads, 16, head_dim], whose keys lie turned in memory:
    a block holds those of a head as [head_dim, 16], side by side as attention compares them.

    Reading an index gives a copy in the order of the type, writing takes one.
    """

    def __init__(self, type_: TensorType) -> None:
        self.type = type_
        self.memory = host_array(type_)
        blocks, _, heads, rows, width = type_.shape
        turned = self.memory.reshape(blocks, 2, heads, width, rows)
        self._halves = turned[:, 0].swapaxes(2, 3), self.memory[:, 1]

    def __getitem__(self, index: Any) -> np.ndarray:
        blocks, rest = _split(index)
        return self._read(blocks)[rest]

    def __setitem__(self, index: Any, values: Any) -> None:
        blocks, rest = _split(index)
        changed = self._read(blocks)
        changed[rest] = values
        for half, part in zip(self._halves, np.moveaxis(changed, -4, 0), strict=True):
            half[blocks] = part

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """A copy of the whole state."""
        return self[...] if dtype is None else self[...].astype(dtype)

    def move_row(self, source: tuple[int, int], target: tuple[int, int]) -> None:
        """Copies keys and values of one row (block, line) onto another."""
        (old, old_line), (new, new_line) = source, target
        for half in self._halves:
            half[new, :, new_line] = half[old, :, old_line]

    def _read(self, blocks: Any) -> np.ndarray:
        return np.stack([half[blocks] for half in self._halves], -4)


def _split(index: Any) -> tuple[Any, tuple[Any, ...]]:
    """The index of the blocks, and what it picks from them."""
    if not isinstance(index, tuple):
        return index, (...,)
    blocks, rest = index[0], index[1:]
    return blocks, rest if isinstance(blocks, int | np.integer) else (slice(None), *rest)
