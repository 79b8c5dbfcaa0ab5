"""The choices that the Triton backend leaves open, and what its cost model expects of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from codegen.expr import Expr, accesses, const, var
from codegen.lower import Lowered
from codegen.schedules import Schedule
from codegen.triton_holes import element, is_tiled
from ir.format import Format

BLOCK_K = 256
"""Columns of a weight row that one warp reads at a time. Part of
the order of sums: never a choice.
"""
FEW_ROWS = 8
"""The most rows that are computed row by row; more rows go to the matrix units."""
_SHARED = 144 * 1024  # bytes of shared memory that the stages of a tile may take
_TILE_RATE, _EXACT_RATE, _CACHE_RATE = 4.5e12, 0.4e12, 4.0e10  # a second, of one processor
_SUMS = 8  # accumulator tiles of one warp, 8 registers a lane each; one column is always allowed
_REGISTERS = 240
PROCESSORS = 132
_BANDWIDTH, _IN_FLIGHT = 4.3e12, 32 * 1024


@dataclass(frozen=True)
class TritonSchedule(Schedule):
    """Choices of one kernel; none of them changes the order in which a row's products are added.

    `columns` results of each row are computed together, `tiles` times in turn a program; `unroll`
    steps of the loop over k stand together. `rows` > 0 computes on the matrix units, `rows` by
    `columns` results a program over `block_k` at a time in `stages` stages.
    """

    columns: int = 1
    tiles: int = 1
    unroll: int = 1
    rows: int = 0
    block_k: int = BLOCK_K
    warps: int = 1
    stages: int = 1


def width_of(lowered: Lowered) -> int | None:
    """Columns of the tile that a store of the region reduces over; None if there is none."""
    for store in lowered.stores:
        probe = [var(f"probe{d}", n) for d, n in enumerate(store.value.shape)]
        for node in accesses(store.value.at(*probe), "reduce"):
            if accesses(node, "acc"):
                return node.payload[2]
    return None


def lanes_of(lowered: Lowered) -> list[Expr]:
    """The columns of the anchor's result that one stored column
    reads, as expressions of `column`.
    """
    found: dict[Expr, None] = {}
    wide = lowered.dims["m"] > FEW_ROWS
    row = var("row", lowered.dims["m"]) if wide else const(0)
    for store in lowered.stores:
        if not is_tiled(store):
            column = var("column", math.prod(store.operand.type.shape[1:]))
            _, value = element(store, row, column)
            found.update((acc.args[1], None) for acc in accesses(value, "acc"))
    return list(found)


def linear_space(lowered: Lowered) -> Iterator[TritonSchedule]:
    """Schedules of a product."""
    width, m = width_of(lowered), lowered.dims["m"]
    if m > FEW_ROWS:
        yield from _wide_space(lowered, width)
        return
    lanes, blocks = len(lanes_of(lowered)), lowered.direct["weight"].type.format.is_block
    for columns in (1, 2, 4, 8):
        if columns > 1 and m * lanes * columns > _SUMS:
            continue
        if width:
            yield TritonSchedule(columns=columns, tiles=width // columns)
            continue
        for tiles in (1, 2, 4):
            for unroll in (1, 2):
                wanted = registers(m, lanes, columns, unroll)
                if unroll > 1 and (blocks or m > 4 or wanted > _REGISTERS):
                    continue
                yield TritonSchedule(columns=columns, tiles=tiles, unroll=unroll)


def _wide_space(lowered: Lowered, width: int | None) -> Iterator[TritonSchedule]:
    """Schedules of a product on the matrix units: tiles whose sums fit
    the registers of their warps, and whose stages fit shared memory.
    """
    m, lanes, exact = lowered.dims["m"], len(lanes_of(lowered)), _is_exact(lowered)
    heights = (16,) if m <= 16 else (64,) if m <= 64 or exact else (64, 128)
    widths = (max(16, width),) if width else (32, 64, 128) if m <= 16 else (64, 128, 256)
    block, size, most = (32, 4, 64 * 128) if exact else (64, 2, 128 * 128)
    for rows, columns in itertools.product(heights, widths):
        sums = rows * columns * lanes
        if sums > most and not width:
            continue
        warps = 4 if rows == 16 or sums <= 4096 else 8
        for stages in (3, 4):
            if stages == 3 or stages * block * (rows + columns * lanes) * size <= _SHARED:
                yield TritonSchedule(
                    columns=columns, rows=rows, block_k=block, warps=warps, stages=stages
                )


def _is_exact(lowered: Lowered) -> bool:
    """True if a product of many rows multiplies in f32, which the matrix units do not."""
    return lowered.arguments["x"].format is not Format.BF16


def registers(m: int, lanes: int, columns: int, unroll: int) -> int:
    """About how many registers a lane wants: sums, weights in flight, rows in flight, addresses."""
    return 8 * m * lanes * columns + 4 * (lanes * columns + m) * unroll + 64


def linear_cost(lowered: Lowered, schedule: TritonSchedule) -> float:
    """Seconds expected: bytes over bandwidth, less where too few bytes are
    in flight, plus reading the row.
    """
    m, n, k = (lowered.dims[d] for d in "mnk")
    weights = lowered.direct["weight"].type.nbytes
    if schedule.rows:
        return _wide_cost(lowered, schedule)
    lanes = len(lanes_of(lowered))
    registers = (
        8 * m * lanes * schedule.columns + 8 * schedule.columns * lanes * schedule.unroll + 48
    )
    resident = max(1, min(32, 65536 // (32 * registers)))
    programs = n / lanes / (schedule.columns * schedule.tiles)
    warps = min(resident, programs / PROCESSORS)
    in_flight = warps * schedule.columns * lanes * BLOCK_K * (weights / (n * k)) * schedule.unroll
    row_bytes = 2 * m * k * programs * (1 + schedule.tiles)
    slow = max(1.0, _IN_FLIGHT / max(in_flight, 1))
    return weights / _BANDWIDTH * slow + row_bytes / (6 * _BANDWIDTH)


def _wide_cost(lowered: Lowered, schedule: TritonSchedule) -> float:
    """Seconds expected on the matrix units: reading the weights once, or the waves of programs,
    each as long as its products or its reads take.
    """
    (m, n, k), lanes = (lowered.dims[d] for d in "mnk"), len(lanes_of(lowered))
    exact, weights = _is_exact(lowered), lowered.direct["weight"].type.nbytes
    tall = -(-m // schedule.rows)
    waves = -(-tall * -(-n // lanes // schedule.columns) // PROCESSORS)
    lines = schedule.columns * lanes
    products = 2 * schedule.rows * lines / (_EXACT_RATE if exact else _TILE_RATE)
    reads = (schedule.rows * (4 if exact else 2) + lines * weights / (n * k)) / _CACHE_RATE
    seconds = max(weights / _BANDWIDTH, waves * k * max(products, reads))
    return seconds * (1 + abs(schedule.stages - 3) / 100)
