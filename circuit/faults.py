"""Faults planted in memory, to show that a check would see them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from codegen.plan import Plan, Space
from ir.key import DECODE

if TYPE_CHECKING:
    from runners.native import NativeRunner


@dataclass(frozen=True)
class Fault:
    """One changed byte of one weight of DECODE: the vector or the matrix that stands first in its plan."""

    name: str
    dimensions: int


FAULTS = (Fault("one byte of a norm", 1), Fault("one byte of a matrix", 2))
EXPONENT_BIT = 0x40


@contextmanager
def planted(runner: NativeRunner, fault: Fault) -> Iterator[None]:
    """DECODE of `runner` reads a copy of one weight with one byte changed until the block ends."""
    plan = runner.plan(DECODE)
    number = _victim(plan, fault)
    buffer = plan.buffers[number]
    changed = np.array(runner.part.weight(buffer.name, buffer.layout))
    changed[_place(changed)] ^= EXPONENT_BIT
    with runner.substituted(DECODE, number, changed):
        yield


def _victim(plan: Plan, fault: Fault) -> int:
    """Number of the first weight that a launch reads and that has the fault's number of dimensions."""
    for launch in plan.launches:
        for number in launch.arguments:
            buffer = plan.buffers[number]
            right = buffer.space is Space.WEIGHT and buffer.type.format.is_float
            if right and len(buffer.type.shape) == fault.dimensions and "rope" not in buffer.name:
                return number
    raise AssertionError(f"the plan of {plan.key} reads no weight of {fault.dimensions} dimensions")


def _place(weight: np.ndarray) -> int:
    """A byte in the middle that holds high bits of a number: the last of four."""
    return len(weight) // 2 // 4 * 4 + 3
