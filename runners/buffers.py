"""Static buffers: memory at fixed addresses that the host writes
before a step and reads after it.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ir.bits import bf16_bits
from ir.format import Format, TensorType
from ir.key import GraphKey
from runners.errors import InputMismatch, OutOfMemory


def anonymous(nbytes: int) -> np.ndarray:
    """Zeroed memory, uint8 [nbytes], page-aligned; a page costs nothing until it is written."""
    try:
        memory = mmap.mmap(-1, max(nbytes, 1))
    except OSError as problem:
        raise OutOfMemory(nbytes=nbytes, problem=problem.strerror) from problem
    return np.frombuffer(memory, np.uint8)[:nbytes]


def shaped(raw: np.ndarray, type: TensorType) -> np.ndarray:
    """The first bytes of `raw` as an array of `type` (bf16 as its 16 bits)."""
    return raw[: type.nbytes].view(type.format.storage).reshape(type.shape)


def host_array(type: TensorType) -> np.ndarray:
    """A zeroed array of `type` on pages of its own."""
    return shaped(anonymous(type.nbytes), type)


@dataclass(frozen=True)
class StaticBuffer:
    """A named array whose address never changes."""

    name: str
    type: TensorType
    array: np.ndarray

    @property
    def address(self) -> int:
        """Where the first byte is."""
        return self.array.ctypes.data

    def fits(self, given: np.ndarray) -> bool:
        """True if `given` has the buffer's shape and a dtype that converts to the buffer's kind."""
        return given.shape == self.type.shape and (
            self._rounds(given) or np.can_cast(given.dtype, self.array.dtype, "same_kind")
        )

    def _rounds(self, given: np.ndarray) -> bool:
        """True for real numbers that a bf16 buffer rounds; its bits are taken as they are."""
        return self.type.format is Format.BF16 and given.dtype.kind == "f"

    def write(self, value: object) -> None:
        """Copies `value` (an array or a host tensor) into the buffer."""
        given = np.asarray(value)
        self.array[...] = bf16_bits(given) if self._rounds(given) else given

    def read(self) -> np.ndarray:
        """The buffer itself, not a copy: it holds these values until the next step."""
        return self.array


def write_inputs(
    name: str, key: GraphKey, buffers: Mapping[str, StaticBuffer], given: Mapping[str, object]
) -> None:
    """Fills every input buffer of a program, or none: exactly its inputs, each of its type.

    Arrays of a buffer's own dtype, which is what steps of a sequence give, are copied without more
    ado: between steps the processor's caches hold weights, and each line of Python costs.
    """
    if len(given) == len(buffers) and all(
        type(v := given.get(n)) is np.ndarray
        and v.dtype == b.array.dtype
        and v.shape == b.array.shape
        for n, b in buffers.items()
    ):
        for n, b in buffers.items():
            np.copyto(b.array, given[n])
        return
    values = {n: np.asarray(v) for n, v in given.items()}
    problems = [f"{n} is missing" for n in buffers.keys() - values.keys()]
    problems += [f"{n} is not one of them" for n in values.keys() - buffers.keys()]
    problems += [
        f"{n} is {v.dtype}[{','.join(map(str, v.shape))}]"
        for n, v in values.items()
        if n in buffers and not buffers[n].fits(v)
    ]
    if problems:
        wanted = ", ".join(f"{n} {b.type}" for n, b in buffers.items())
        raise InputMismatch(key=key, name=name, problem="; ".join(sorted(problems)), wanted=wanted)
    for n, value in values.items():
        buffers[n].write(value)
