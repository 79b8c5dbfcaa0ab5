"""Products with a packed weight: the unit of columns, the rows prepared first, what is stored."""

from __future__ import annotations

from dataclasses import dataclass

from codegen.cpp_dialect import packed_type
from codegen.cpp_loops import LANES, Scope, columns_read, last_address, local_columns
from codegen.cpp_source import RegionSource, row
from codegen.expr import Expr, imul, var
from codegen.kernel import Kernel
from codegen.lower import Lowered, Store
from ir.format import Format

OWN_ROWS = 96 * 1024  # bytes of rounded rows that a thread may hold on its stack


@dataclass(frozen=True)
class Unit:
    """The columns that are computed together: `panels` panels, `stored[i]` columns of store i."""

    panels: int
    count: int
    stored: tuple[int, ...]


def unit_of(lowered: Lowered, panels: int) -> Unit:
    """The smallest unit of at least `panels` panels whose stores read nothing outside it."""
    columns = lowered.dims["n"]
    total = -(-columns // LANES)
    size = panels
    while True:
        stored = [_stored(s, columns, size * LANES, lowered.dims["m"]) for s in lowered.stores]
        if all(stored):
            return Unit(size, -(-total // size), tuple(stored))
        size *= 2
        assert size < 4 * total + 64, f"no tile of {lowered.label} holds what its stores read"


def _stored(store: Store, columns: int, width: int, rows: int) -> int:
    """How many columns of a store read only the first `width`
    columns of the result; 0 if ill-cut.
    """
    extent, lead = store.value.shape[-1], (row(rows),)
    count = 0
    while count < extent and count < width:
        read = columns_read(store.value, lead, count)
        if read.size and read[-1] >= width:
            break
        count += 1
    if count == extent:
        return count
    second = columns_read(store.value, lead, count) if count else None
    regular = second is not None and second[0] >= width and extent <= count * -(-columns // width)
    return count if regular else 0


def linear_kernel(region: RegionSource) -> Kernel:
    """The kernel of a region around a product."""
    low, schedule = region.lowered, region.schedule
    m, k, n = (region.dims[d] for d in "mkn")
    scope = Scope(region.places)
    weight = low.direct["weight"]
    unit = unit_of(low, schedule.panels)
    row_bytes = rounded_bytes(weight.type.format, k)
    direct = low.direct.get("x") if weight.type.format is Format.F32 else None
    shared = direct is None and (schedule.shared or m * row_bytes > OWN_ROWS)
    u = var("u", unit.count)
    tile = Scope(
        region.places, lambda index: f"tile[r][{index[-1]}]", local_columns(u, unit.panels * LANES)
    )
    epilogue = scope.stats_read(low.stats, [s.value for s in low.stores], (row(m),))
    epilogue += [
        line
        for store, stored in zip(low.stores, unit.stored)
        for line in _stored_columns(tile, store, u, stored, m)
    ]
    prologue = []
    if direct is None:
        prologue = [
            *scope.stats(low.stats, (row(m),)),
            *scope.fill(
                region.argument("x"), (row(m),), lambda i, t: f"x[{last_address(scope, i)}] = {t};"
            ),
        ]
    return region.kernel(
        "linear", m * row_bytes if shared else 0, weight=weight, direct=direct, shared=shared,
        weight_argument=low.reads.index(weight),
        packed=packed_type(weight.type.format), unit=unit, total=-(-n // LANES), prologue=prologue,
        epilogue=epilogue, m=m, k=k, n=n, tile_rows=min(schedule.rows, m),
        once="true" if m <= 2 * schedule.rows else "false",
    )  # fmt: skip


def _stored_columns(scope: Scope, store: Store, u: Expr, stored: int, m: int) -> list[str]:
    """Loops that store the columns of one unit."""
    shape = tuple(store.value.shape)
    assert len(shape) == 2, f"a linear stores rows of columns, not {shape}"
    exact = shape[1] % stored == 0
    start = imul(u, stored)
    live = None if exact else f"({shape[1]} - {stored} * u)"
    name = store.operand.name
    return scope.fill(
        store.value, (row(m),), lambda i, t: f"{name}[{scope.address(i, shape)}] = {t};",
        start=start, count=stored, live=live,
    )  # fmt: skip


def rounded_bytes(weight: Format, k: int) -> int:
    """Bytes of one row of activations as products with `weight` read
    it, 64-byte aligned for blocks.
    """
    if weight is Format.F32:
        return 4 * k
    if weight is Format.BF16:
        return (k + 1) // 2 * 4
    return -(-(k + 12 * (k // 32)) // 64) * 64
