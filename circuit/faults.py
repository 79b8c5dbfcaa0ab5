"""Faults planted in memory, to show that a check would see them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from codegen.plan import Plan, Space
from ir.key import DECODE, GraphKey

if TYPE_CHECKING:
    from runners.native import NativeRunner


@dataclass(frozen=True)
class Fault:
    """One changed byte of a weight of a program: of its first vector, or of its first matrix."""

    name: str
    dimensions: int


FAULTS = (Fault("one byte of a norm", 1), Fault("one byte of a matrix", 2))
EXPONENT_BIT = 0x40
# A low bit of one of many weights may be too small to matter, so several bytes are tried, scattered
# over the weight, so that bytes of every kind (scales too) are among them.
PLACES = 256
STRIDE = 2654435761


def seen(
    runner: NativeRunner, fault: Fault, is_wrong: Callable[[], bool], key: GraphKey = DECODE
) -> bool:
    """True if `is_wrong` says so while one byte is changed for the program of `key`, for at least
    one of the places tried.
    """
    return any(_seen_at(runner, key, fault, place, is_wrong) for place in range(PLACES))


def _seen_at(
    runner: NativeRunner, key: GraphKey, fault: Fault, place: int, is_wrong: Callable[[], bool]
) -> bool:
    plan = runner.plan(key)
    number = _victim(plan, fault)
    buffer = plan.buffers[number]
    changed = np.array(runner.part.weight(buffer.name, buffer.layout))
    changed[_offset(len(changed), place)] ^= EXPONENT_BIT
    with runner.substituted(key, number, changed):
        return is_wrong()


def _victim(plan: Plan, fault: Fault) -> int:
    """Number of the first weight that a launch reads whole and that has
    the fault's number of dimensions.
    """
    for launch in plan.launches:
        for number in launch.arguments:
            buffer = plan.buffers[number]
            if buffer.space is not Space.WEIGHT or not buffer.type.format.is_float:
                continue
            whole = launch.bytes >= buffer.type.nbytes  # of a table only some rows are read
            if whole and len(buffer.type.shape) == fault.dimensions:
                return number
    raise AssertionError(f"the plan of {plan.key} reads no weight of {fault.dimensions} dimensions")


def _offset(size: int, place: int) -> int:
    """Byte number `place` to try of a weight of `size` bytes."""
    return (place + 1) * STRIDE % size
