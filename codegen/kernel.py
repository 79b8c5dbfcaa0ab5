"""A kernel: source text under a name that is its content."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

NAME = "@KERNEL@"


@dataclass(frozen=True)
class Kernel:
    """One function of a translation unit.

    It is called with the operands of its region in order: `Lowered.reads`, then `Lowered.writes`,
    then, when `scratch_bytes` > 0, one pointer to so many bytes that live for the launch only and
    hold anything at its start. Two regions whose kernels have one name run the same code, so a name
    is emitted once per program.
    """

    name: str
    source: str
    scratch_bytes: int = 0

    @staticmethod
    def of(stem: str, source: str, scratch_bytes: int = 0) -> Kernel:
        """The kernel of `source`, in which `@KERNEL@` stands for its
        name: the stem and a content hash.
        """
        digest = hashlib.sha256(f"{scratch_bytes}\n{source}".encode()).hexdigest()[:16]
        name = f"{stem}_{digest}"
        return Kernel(name, source.replace(NAME, name), scratch_bytes)
