"""A plan: the launches of one program, the buffers they read and write, and a digest of it all.

Nothing here imports torch: a compiled program is loaded from these records alone.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from enum import Enum

from ir.format import TensorType
from ir.key import GraphKey


class Space(Enum):
    """Where a buffer lives."""

    ARENA = "arena"  # at `offset` of the arena, for a few launches
    WEIGHT = "weight"  # a packed constant of the artifact
    STATE = "state"  # the KV pool's memory, alive across steps
    INPUT = "input"  # a static buffer that the host writes before a step
    OUTPUT = "output"  # a static buffer that the host reads after a step


@dataclass(frozen=True)
class Buffer:
    """Memory that launches name by number. `name` is the binding's
    name, or the value's for the arena.

    `offset` counts bytes from the start of the arena and is 0 elsewhere. `layout` tells how a
    weight is packed; every other buffer is row-major.
    """

    space: Space
    name: str
    type: TensorType
    layout: str = "rows"
    offset: int = 0


@dataclass(frozen=True)
class Launch:
    """One kernel over buffers. `bytes` counts each weight, state row
    and value that it must move once.
    """

    kernel: str
    arguments: tuple[int, ...]
    region: int
    label: str
    flops: int
    bytes: int
    numerics: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """The launches of one program in order. `outputs` maps output names to buffer numbers.

    `backend` is its name and a digest of the text that its kernels include.
    """

    key: GraphKey
    backend: str
    buffers: tuple[Buffer, ...]
    launches: tuple[Launch, ...]
    outputs: tuple[tuple[str, int], ...]
    arena_bytes: int

    @property
    def symbol(self) -> str:
        """Name of the entry that runs this plan."""
        return f"circuit_run_{self.key}"

    def named(self, space: Space) -> dict[str, Buffer]:
        """Name -> buffer of one space, in plan order (not for the
        arena, whose names may repeat).
        """
        return {b.name: b for b in self.buffers if b.space is space}

    def text(self) -> str:
        """Canonical text: equal plans have equal text, and `parse` gives the plan back."""
        return json.dumps(self._record(), sort_keys=True, separators=(",", ":"))

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical text."""
        return hashlib.sha256(self.text().encode()).hexdigest()

    def _record(self) -> dict[str, object]:
        return {
            "key": str(self.key),
            "backend": self.backend,
            "arena_bytes": self.arena_bytes,
            "outputs": [list(o) for o in self.outputs],
            "buffers": [
                [b.space.value, b.name, str(b.type), b.layout, b.offset] for b in self.buffers
            ],
            "launches": [
                [n.kernel, list(n.arguments), n.region, n.label, n.flops, n.bytes, list(n.numerics)]
                for n in self.launches
            ],
        }

    @staticmethod
    def parse(text: str) -> Plan:
        """The plan whose canonical text is `text`."""
        record = json.loads(text)
        return Plan(
            GraphKey.parse(record["key"]),
            record["backend"],
            tuple(
                Buffer(Space(space), name, TensorType.parse(type_), layout, offset)
                for space, name, type_, layout, offset in record["buffers"]
            ),
            tuple(
                Launch(kernel, tuple(arguments), region, label, flops, moved, tuple(numerics))
                for kernel, arguments, region, label, flops, moved, numerics in record["launches"]
            ),
            tuple((name, number) for name, number in record["outputs"]),
            record["arena_bytes"],
        )
