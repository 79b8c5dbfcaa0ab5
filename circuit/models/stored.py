"""A tensor as a file holds it: name, number format, shape and the bytes where it lies."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class StoredFormat:
    """A number format: `size` bytes hold `block` numbers; `scales`
    are the f16 fields of a block.
    """

    name: str
    block: int
    size: int
    scales: tuple[int, ...] = ()

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """The bytes of a tensor of `shape`, whose last dimension is a multiple of `block`."""
        count = 1
        for dim in shape:
            count *= dim
        return count // self.block * self.size


F32 = StoredFormat("f32", 1, 4)
F16 = StoredFormat("f16", 1, 2)
BF16 = StoredFormat("bf16", 1, 2)
Q4_0 = StoredFormat("q4_0", 32, 18, scales=(0,))
Q4_1 = StoredFormat("q4_1", 32, 20, scales=(0, 2))
Q8_0 = StoredFormat("q8_0", 32, 34, scales=(0,))
EXPONENTS = {
    "f32": (np.uint32, 0x7F800000),
    "f16": (np.uint16, 0x7C00),
    "bf16": (np.uint16, 0x7F80),
}


@dataclass(frozen=True)
class StoredTensor:
    """Where one tensor lies; `format` is None when the file's format, `spelled`, is not read."""

    name: str
    format: StoredFormat | None
    spelled: str
    shape: tuple[int, ...]
    path: Path
    offset: int
    nbytes: int


class MappedFile:
    """A file mapped privately: pages are read on first touch, and writes never reach the file."""

    def __init__(self, path: Path):
        self.path = path
        self.size = path.stat().st_size
        with path.open("rb") as file:
            self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) if self.size else b""

    def array(self, stored: StoredTensor) -> np.ndarray:
        """The bytes of `stored`, as a view `[nbytes]` of the map."""
        return np.frombuffer(self.map, np.uint8, count=stored.nbytes, offset=stored.offset)


CHUNK = 1 << 22  # bytes looked at together: large enough to be fast, small enough to stay cached


def not_finite(stored: StoredTensor, raw: np.ndarray) -> tuple[int, str] | None:
    """How many numbers of `raw` are NaN or infinite and which field they are, or None if none is.

    A block format is finite exactly when its f16 scales are, so only those are looked at.
    """
    layout = stored.format
    if not layout.scales:
        count = _count(raw, layout.name)
        return (count, layout.name) if count else None
    rows = raw.reshape(-1, layout.size)
    for at in layout.scales:
        count = sum(
            _count(np.ascontiguousarray(rows[i : i + CHUNK // 16, at : at + 2]), "f16")
            for i in range(0, len(rows), CHUNK // 16)
        )
        if count:
            return count, f"{'scale' if at == 0 else 'minimum'} of a {layout.name} block"
    return None


def _count(raw: np.ndarray, name: str) -> int:
    """The numbers in `raw` whose exponent bits are all ones."""
    kind, mask = EXPONENTS[name]
    flat, total = raw.reshape(-1), 0
    for start in range(0, flat.size, CHUNK):
        piece = flat[start : start + CHUNK]
        words = (
            piece.view(kind)
            if piece.ctypes.data % kind().itemsize == 0
            else piece.copy().view(kind)
        )
        total += int(np.count_nonzero((words & kind(mask)) == kind(mask)))
    return total
