"""Kernels in C++: each anchor's template filled with the region's prologue and epilogue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import jinja2

from codegen.cpp_dialect import TYPES, Place, packed_type
from codegen.cpp_loops import LANES, Scope, columns_read, indented, local_columns
from codegen.expr import Expr, const, iadd, imul, var
from codegen.kernel import Kernel
from codegen.lazy import Lazy
from codegen.lower import Lowered, Operand, Store
from codegen.schedules import Schedule
from ir.format import Format
from ir.op import Kind

FOLDER = Path(__file__).parent / "templates" / "cpp"
OWN_ROWS = 96 * 1024  # bytes of rounded rows that a thread may hold on its stack


@dataclass(frozen=True)
class CppSchedule(Schedule):
    """How a region is cut up.

    `rows` by `panels` (of 16 columns) are computed at once, `chunk` units are drawn at a time by a
    thread, and `shared` prepares the rows once for all threads instead of once in each.
    """

    rows: int = 1
    panels: int = 4
    chunk: int = 1
    shared: bool = False


@cache
def templates() -> jinja2.Environment:
    """The environment of the C++ templates; `indent` shifts the lines of a hole."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER), undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, autoescape=False,
    )  # fmt: skip
    environment.filters["hole"] = lambda lines, n: "\n".join(
        " " * n + line for line in "\n".join(lines).split("\n")
    )
    return environment


def emit_kernel(lowered: Lowered, schedule: CppSchedule, layouts: Mapping[str, str]) -> Kernel:
    """The kernel of a region: the template of its anchor, or the
    one of regions without an anchor.
    """
    name = lowered.anchor.target.name if lowered.anchor is not None else "region"
    return _EMITTERS[name](_Region(lowered, schedule, layouts))


class _Region:
    """A lowered region with the C++ names of its operands."""

    def __init__(self, lowered: Lowered, schedule: CppSchedule, layouts: Mapping[str, str]) -> None:
        self.lowered = lowered
        self.schedule = schedule
        self.places = {o.name: Place(o, layouts.get(o.name)) for o in lowered.reads}
        self.dims = lowered.dims

    def kernel(self, template: str, scratch: int = 0, **holes: object) -> Kernel:
        """The filled template under a name made from what it does and what it says."""
        written = self.lowered.anchor is not None and self.lowered.anchor.target.kind is Kind.STATE
        state = (
            self.lowered.direct.get(self.lowered.anchor.target.signature.names[0])
            if written
            else None
        )
        operands = [(place, place.operand is not state) for place in self.places.values()] + [
            (Place(o), False) for o in self.lowered.writes
        ]
        source = templates().get_template(f"{template}.j2").render(
            label=self.lowered.label, operands=operands,
            dims=self.dims, schedule=self.schedule, types=TYPES, scratch=bool(scratch), **holes,
        )  # fmt: skip
        stem = self.lowered.label.replace("+", "_")[:48]
        return Kernel.of(stem, source, scratch)

    def argument(self, name: str) -> Lazy:
        """What the anchor's argument `name` holds."""
        return self.lowered.arguments[name]


def row(count: int, name: str = "i") -> Expr:
    """The loop variable over rows; the only row is row 0."""
    return var(name, count) if count > 1 else const(0)


# -- linear ----------------------------------------------------------------------------------------


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


def _linear(region: _Region) -> Kernel:
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
    epilogue = [
        line
        for store, stored in zip(low.stores, unit.stored)
        for line in _stored_columns(tile, store, u, stored, m)
    ]
    prologue = []
    if direct is None:
        prologue = [
            *scope.stats(low.stats, (row(m),)),
            *scope.fill(
                region.argument("x"), (row(m),), lambda i, t: f"x[{_last(scope, i)}] = {t};"
            ),
        ]
    return region.kernel(
        "linear", m * row_bytes if shared else 0, weight=weight, direct=direct, shared=shared,
        packed=packed_type(weight.type.format), unit=unit, total=-(-n // LANES), prologue=prologue,
        epilogue=epilogue, m=m, k=k, n=n, tile_rows=min(schedule.rows, m),
        once="true" if m <= 2 * schedule.rows else "false",
    )  # fmt: skip


def _last(scope: Scope, index: Sequence[Expr]) -> str:
    return scope.address((index[-1],), (1,))


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


# -- attention and cache writes --------------------------------------------------------------------


def _attention(region: _Region) -> Kernel:
    low = region.lowered
    m, h, g, d, t = (region.dims[x] for x in "mhgdt")
    scope = Scope(region.places)
    head = iadd(imul(row(g, "g"), h // g), row(h // g, "j"))
    index = (row(m), head)
    query = [
        *scope.stats(low.stats, index),
        *scope.fill(region.argument("q"), index, lambda i, x: f"head.q[{_last(scope, i)}] = {x};"),
    ]
    result = Scope(region.places, lambda i: f"head.acc[{i[-1]}]")
    epilogue = []
    for store in low.stores:
        shape = tuple(store.value.shape)
        assert len(shape) == 3, f"attention stores heads, not {shape}"
        epilogue += result.fill(
            store.value, index,
            lambda i, x, o=store.operand, s=shape: f"{o.name}[{result.address(i, s)}] = {x};",
        )  # fmt: skip
    return region.kernel(
        "attention", cache=low.direct["cache"], tables=low.direct["tables"], query=query,
        epilogue=epilogue, m=m, heads=h // g, g=g, d=d, t=t,
        cached=TYPES[low.direct["cache"].type.format],
        scale=repr(float(low.attributes["scale"])) + "f",
        seen=scope.scalar("int32_t", "seen", region.argument("indices").at(row(m))),
        sequence=scope.scalar("int32_t", "sequence", region.argument("row_sequence").at(row(m))),
        tile_rows=min(region.schedule.rows, m),
    )  # fmt: skip


def _kv_write(region: _Region) -> Kernel:
    low = region.lowered
    m, g, d = (region.dims[x] for x in "mgd")
    scope = Scope(region.places)
    index = (row(m), row(g, "g"))
    lines = {
        name: scope.fill(
            region.argument(name),
            index,
            lambda i, x, to=name: f"keep({to} + {_last(scope, i)}, {x});",
        )
        for name in ("k", "v")
    }
    return region.kernel(
        "kv_write", cache=low.direct["cache"], m=m, g=g, d=d,
        cached=TYPES[low.direct["cache"].type.format],
        slot=scope.scalar("int32_t", "slot", region.argument("slots").at(row(m))),
        stats=scope.stats(low.stats, index), keys=lines["k"], values=lines["v"],
    )  # fmt: skip


# -- regions without an anchor ---------------------------------------------------------------------


def _region(region: _Region) -> Kernel:
    low = region.lowered
    scope = Scope(region.places)
    rows = max((s.value.shape[0] for s in low.stores if s.value.shape), default=1)
    return region.kernel(
        "region", stores=[_elements(scope, low, s) for s in low.stores], rows=rows
    )  # fmt: skip


def _elements(scope: Scope, low: Lowered, store: Store) -> dict[str, object]:
    """Rows of a store, and the statements that compute one row `i`."""
    shape, name = tuple(store.value.shape), store.operand.name
    lead: list[Expr] = [row(shape[0])]
    if len(shape) == 1:
        statements, text = scope.text(store.value.at(*lead))
        lines = [*scope.stats(low.stats, tuple(lead)), *statements]
        return {"rows": shape[0], "lines": [*lines, _assigned(store.operand, f"{name}[i]", text)]}
    opening, closing = [], 0
    for depth, extent in enumerate(shape[1:-1]):
        lead.append(row(extent, f"j{depth}"))
        opening.append(f"for (int j{depth} = 0; j{depth} < {extent}; j{depth}++) {{")
        closing += 1
    stats = [s for s in low.stats if len(s.value.shape) <= len(lead)]
    body = [
        *scope.stats(stats, tuple(lead)),
        *scope.fill(
            store.value, tuple(lead),
            lambda i, x: _assigned(store.operand, f"{name}[{scope.address(i, shape)}]", x),
        ),
    ]  # fmt: skip
    lines = [*opening, *indented(body), *(["}"] * closing)]
    return {"rows": shape[0], "lines": lines}


def _assigned(operand: Operand, target: str, text: str) -> str:
    narrow = operand.type.format in (Format.F16, Format.BF16)
    return f"keep(&{target}, {text});" if narrow else f"{target} = {text};"


_EMITTERS = {
    "linear": _linear, "attention": _attention, "kv_write": _kv_write, "region": _region,
}  # fmt: skip
