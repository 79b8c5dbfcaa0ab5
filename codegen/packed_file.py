"""The file of an artifact's packed weights, mapped: a safetensors file whose tensors are bytes."""

from __future__ import annotations

import hashlib
import mmap
from pathlib import Path

import numpy as np

from codegen.manifest import parse_strictly, shown


class PackedFile:
    """The tensors of a file, without a copy. `spans` maps a name to
    the places in the file of its first byte and of the one after its last.

    ValueError if the header is none, or speaks of bytes that the file does not have.
    """

    def __init__(self, path: Path) -> None:
        with open(path, "rb") as file:
            self._view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        base = 8 + int.from_bytes(self._view[:8], "little")
        if base > len(self._view):
            raise ValueError(f"it is said to end at byte {base} of {len(self._view)}")
        header = parse_strictly(self._view[8:base])
        if type(header) is not dict:
            raise ValueError("it is not an object")
        header.pop("__metadata__", None)
        self.spans = {name: self._span(name, entry, base) for name, entry in header.items()}

    def _span(self, name: str, entry: object, base: int) -> tuple[int, int]:
        place = entry.get("data_offsets") if type(entry) is dict else None
        if not (type(place) is list and len(place) == 2 and all(type(n) is int for n in place)):
            raise ValueError(f"{shown(name)} has no place")
        start, stop = (base + n for n in place)
        if not base <= start <= stop <= len(self._view):
            raise ValueError(f"{shown(name)} is at {place}, outside the file")
        return start, stop

    def nbytes(self, name: str) -> int:
        """Bytes of a tensor, with those that fill it up to its boundary."""
        start, stop = self.spans[name]
        return stop - start

    def tensor(self, name: str) -> np.ndarray:
        """The bytes of a tensor, uint8, read-only."""
        start, stop = self.spans[name]
        return np.frombuffer(self._view, np.uint8, stop - start, start)


def header_digest(path: Path) -> str:
    """SHA-256 of a safetensors file's header, of the whole file where the header has no end."""
    with open(path, "rb") as file:
        size = file.read(8)
        length = min(int.from_bytes(size, "little"), path.stat().st_size)
        return hashlib.sha256(size + file.read(length)).hexdigest()
