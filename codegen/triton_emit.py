"""From a lowered region to the text of a Triton kernel: what fills the holes of each template."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import jinja2

from codegen.expr import Expr, accesses, const, iadd, idiv, imod, imul, make, var
from codegen.kernel import Kernel
from codegen.lazy import Lazy
from codegen.lower import Lowered, Operand, Store
from codegen.tiles import TYPES, Axis, TileWriter, power
from codegen.triton_schedule import BLOCK_K, TritonSchedule, lanes_of
from ir.format import BLOCK, Format

_TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates" / "triton"),
    trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    undefined=jinja2.StrictUndefined,
)  # fmt: skip
for _spaces in (4, 8, 12):
    _TEMPLATES.filters[f"indent{_spaces}"] = lambda lines, n=_spaces: "\n".join(
        " " * n + line for line in lines
    )
_TEMPLATES.filters["dedent4"] = lambda text: "\n".join(t[4:] for t in text.splitlines())


def render(template: str, **holes: object) -> str:
    """The template with its holes filled."""
    return _TEMPLATES.get_template(f"{template}.j2").render(**holes)


SPAN = 128
"""Rows of context that one program of `attention` covers; spans start at multiples of it."""
CHUNK = 16
"""Rows of context that one program of `attention` reads at a time. Part of the order of sums."""
POINTER_TYPES = {
    Format.F32: "fp32", Format.F16: "fp16", Format.BF16: "bf16", Format.I32: "i32",
    Format.I64: "i64", Format.U8: "u8", Format.BOOL: "u8",
    Format.Q8_0: "i8", Format.Q4_0: "u8", Format.Q4_1: "u8",
}  # fmt: skip


@dataclass
class Draft:
    """A kernel before it has a name: the template's holes and the launch."""

    template: str
    holes: dict[str, object]
    grid: tuple[int, ...]
    warps: int
    stages: int = 1
    scratch_bytes: int = 0
    counters: int = 0
    extra: list[str] = field(default_factory=list)


class _Holes(TileWriter):
    """A writer whose statements are collected hole by hole, each at its own indentation."""

    @contextmanager
    def hole(self) -> Iterator[list[str]]:
        kept, depth = self.lines, self._depth
        self.lines, self._depth = [], 0
        yield self.lines
        self.lines, self._depth = kept, depth

    def store(self, store: Store, index: list[Expr], text: str, tile: str = "") -> None:
        """Writes one value (or tile of values) of a store at `index`."""
        pointer = self.address(store.operand, index) + (f" + {tile}" if tile else "")
        mask = self.mask(*index)
        self.line(f"tl.store({pointer}, {text}{f', mask={mask}' if mask else ''})")


def unflattened(flat: Expr, shape: tuple[int, ...]) -> list[Expr]:
    """The index over `shape` of element number `flat`."""
    index: list[Expr] = []
    for size in reversed(shape[1:]):
        index.append(imod(flat, size))
        flat = idiv(flat, size)
    return [flat, *reversed(index)] if shape else []


def element(store: Store, row: Expr, column: Expr) -> tuple[list[Expr], Expr]:
    """The index of a store at a row and a flat column, and the value there."""
    shape = store.operand.type.shape
    index = [row, *unflattened(column, shape[1:])]
    return index, store.value.at(*index)


def is_tiled(store: Store) -> bool:
    """True for a store that reduces over tiles of the anchor's result."""
    value = store.value.at(*(var(f"probe{d}", n) for d, n in enumerate(store.value.shape)))
    return any(accesses(node, "acc") for node in accesses(value, "reduce"))


# -- linear -----------------------------------------------------------------------------------------


def segments(x: Lazy, k: int) -> list[tuple[int, int]]:
    """Ranges of the columns of `x` inside which no concatenation changes its operand."""
    inner = var("k", k)
    cuts = {0, k}
    for node in x.at(const(0), inner).walk():
        if node.op == "lt" and node.args[1].op == "const":
            left, limit = node.args[0], int(node.args[1].payload)
            if left is inner:
                cuts.add(limit)
            elif left.op == "add" and left.args[0] is inner and left.args[1].op == "const":
                cuts.add(limit - int(left.args[1].payload))
    inside = sorted(c for c in cuts if 0 <= c <= k)
    return list(itertools.pairwise(inside))


class _Linear:
    """What both templates of `linear` share: sums by column expression, segments, epilogue."""

    def __init__(self, lowered: Lowered, schedule: TritonSchedule, wide: bool) -> None:
        self.lowered, self.schedule, self.wide = lowered, schedule, wide
        self.m, self.n, self.k = (lowered.dims[d] for d in "mnk")
        self.x, self.weight = lowered.arguments["x"], lowered.direct["weight"]
        self.plain = [s for s in lowered.stores if not is_tiled(s)]
        self.tiled = [s for s in lowered.stores if is_tiled(s)]
        self.columns = math.prod(self.plain[0].operand.type.shape[1:])
        assert all(math.prod(s.operand.type.shape[1:]) == self.columns for s in self.plain)
        self.lanes = lanes_of(lowered)
        self.tile = schedule.columns * (1 if wide else schedule.tiles)
        self.block = min(schedule.block_k if wide else BLOCK_K, max(16, power(self.k)))
        limit = 4096 if wide else 1024
        self.w = _Holes(lowered, limit)
        self.column = var("column", self.columns)
        self.rows = [var("row", self.m)] if wide else [const(i) for i in range(self.m)]
        cut = f"column < {self.columns}" if self.columns % self.tile else ""
        self.w.axes["column"] = Axis("column", 1 if wide else 0, schedule.columns, cut)
        if wide:
            row_cut = f"row < {self.m}" if self.m % schedule.rows else ""
            self.w.axes["row"] = Axis("row", 0, schedule.rows, row_cut)

    def draft(self) -> Draft:
        w, s = self.w, self.schedule
        values = [element(p, row, self.column) for row in self.rows for p in self.plain]
        sums = {(i, c): f"a{i}_{c}" for i in range(len(self.rows)) for c in range(len(self.lanes))}
        with w.hole() as before:
            for row in self.rows:
                w.hoist(self.x.at(row, var("k", self.k)), {"k"})
        parts = [self.segment(start, stop, sums) for start, stop in segments(self.x, self.k)]
        results = [(a.replace("a", "r", 1), a) for a in sums.values()]
        with w.hole() as stores, w.scope():
            self.name_results(sums)
            w.expect(v for _, v in values)
            for (index, value), store in zip(values, self.plain * len(self.rows)):
                w.store(store, index, w.value(value))
        with w.hole() as after, w.scope():
            self.tiles()
        dtype = TYPES[_result(self.lowered)]
        holes = {
            "rows": self.m, "columns": s.columns, "tiles": s.tiles, "block": self.block, "before": before,
            "sums": list(sums.values()), "segments": parts, "results": results, "stores": stores,
            "after": after, "format": dtype, "unroll": s.unroll, "row_block": s.rows,
        }  # fmt: skip
        grid = (-(-self.columns // self.tile),)
        if self.wide:
            grid = (*grid, -(-self.m // s.rows))
        name = "linear_wide" if self.wide else "linear"
        return Draft(name, holes, grid, s.warps if self.wide else 1, s.stages if self.wide else 1)

    def name_results(self, sums: dict[tuple[int, int], str]) -> None:
        for (i, c), name in sums.items():
            at = (self.rows[i] if self.m > 1 else const(0), self.lanes[c])
            acc = make("acc", *at, format=_result(self.lowered))
            self.w.names[acc] = name.replace("a", "r", 1)

    def segment(self, start: int, stop: int, sums: dict[tuple[int, int], str]) -> dict[str, object]:
        """The loop over columns `start` to `stop` of `x`: loads, and which product joins which sum."""
        w, extent = self.w, stop - start
        inner = var("k", extent)
        cut = f"k < {extent}" if extent % self.block else ""
        k = iadd(inner, start)
        weights = {}
        xs = {}
        with w.hole() as loads, w.scope({"k": Axis("k", 1, self.block, cut)}):
            for c, lane in enumerate(self.lanes):
                weights[c] = self.weights(lane, k)
            narrow = self.wide and self.x.format is Format.BF16
            rounded = [self.x.at(row, k) for row in self.rows]
            wanted = [r if narrow else _wide(r) for r in rounded]
            w.expect(wanted)
            for i, e in enumerate(wanted):
                text = w.value(e)
                if self.wide and cut:  # lanes past the end must add nothing
                    text = f"tl.where({cut}, {text}, 0.0).to({TYPES[e.format]})"
                xs[i] = w.fresh("x")
                shape = f"({self.schedule.rows}, {self.block})"
                w.line(f"{xs[i]} = " + (f"tl.broadcast_to({text}, {shape})" if self.wide else text))
        products = [(a, weights[c], xs[i]) for (i, c), a in sums.items()]
        return {"extent": extent, "loads": loads, "products": products}

    def weights(self, lane: Expr, k: Expr) -> str:
        """A name that holds the tile of weight rows `lane` at columns `k`; lanes past the end are zero."""
        w = self.w
        format = Format.of(self.weight.type.format.dtype)
        axes = {}
        if self.wide:
            cut = w.axes["column"].mask.replace("column", "weight_row")
            axes["column"] = Axis("weight_row", 0, self.schedule.columns, cut)
        with w.scope(axes):
            load = make("load", lane, k, format=format, payload=self.weight.name)
            text = self.block_tile(lane, k) if self.fast_blocks(k) else w.value(load)
            to = Format.BF16 if self.wide and self.x.format is Format.BF16 else Format.F32
            name = w.fresh("w")
            w.line(f"{name} = {text}" + (f".to({TYPES[to]})" if format is not to else ""))
        return name

    def fast_blocks(self, k: Expr) -> bool:
        """True if a tile of weights holds whole blocks."""
        whole = self.k % self.block == 0 and self.block % BLOCK == 0
        return self.weight.type.format.is_block and whole and not self.w.mask(k)

    def block_tile(self, lane: Expr, k: Expr) -> str:
        """A tile of block-format weights: quants and each scale once, spread over its block in registers."""
        w, name, rows, block = self.w, self.weight.name, self.schedule.columns, self.block
        row, mask = w.bound(lane), w.mask(lane)
        first = int(k.args[1].payload) if k.op == "add" else 0

        def tile(stem: str, per: int) -> str:
            start = f"(start + {first}) // {per}" if first else f"start // {per}"
            lanes = f"({start} + tl.arange(0, {block // per})[None, :])"
            return w.load(f"{stem} + ({row}).to(tl.int64) * {self.k // per} + {lanes}", mask)

        def spread(stem: str) -> str:
            shape = f"({rows}, {block // BLOCK}, {BLOCK})"
            values = f"{tile(stem, BLOCK)}.to(tl.float32)[:, :, None]"
            return f"tl.reshape(tl.broadcast_to({values}, {shape}), ({rows}, {block}))"

        format = self.weight.type.format
        if format is Format.Q8_0:
            return f"({tile(name, 1)}.to(tl.float32) * {spread(f'{name}_scale')})"
        byte = w.fresh("q")
        w.line(f"{byte} = {tile(name, 2)}.to(tl.int32)")
        quants = f"tl.interleave({byte} & 15, {byte} >> 4).to(tl.float32)"
        if format is Format.Q4_0:
            return f"(({quants} - 8.0) * {spread(f'{name}_scale')})"
        return f"({quants} * {spread(f'{name}_scale')} + {spread(f'{name}_least')})"

    def tiles(self) -> None:
        """Stores that reduce over the program's tile: read back from the row that it has just written."""
        w = self.w
        for store in self.tiled:
            count = store.operand.type.shape[1]
            w.axes["tile"] = Axis("program", None)
            for row in self.rows:
                index = [row, var("tile", count)]
                value = _read_back(store.value.at(*index), self.plain)
                w.expect([value])
                w.store(store, index, w.value(value), tile="tl.zeros((1, 1), tl.int32)")


def _read_back(e: Expr, plain: list[Store]) -> Expr:
    """`e` with the values that `plain` stores replaced by loads of what was stored."""
    known: dict[Expr, Expr] = {}
    for acc in accesses(e, "acc"):
        for store in plain:
            value = store.value.at(*acc.args)
            name, format = store.operand.name, store.operand.type.format
            known[value] = make("load", *acc.args, format=format, payload=name)

    def rebuilt(node: Expr) -> Expr:
        if node not in known:
            args = tuple(rebuilt(a) for a in node.args)
            known[node] = make(node.op, *args, format=node.format, payload=node.payload)
        return known[node]

    return rebuilt(e)


def _result(lowered: Lowered) -> Format:
    return lowered.anchor.meta["type"].format


def _wide(e: Expr) -> Expr:
    return e if e.format is Format.F32 else make("cast", e, format=Format.F32)


def linear(lowered: Lowered, schedule: TritonSchedule) -> Draft:
    """The kernel of a region around a product with a stored weight."""
    return _Linear(lowered, schedule, wide=schedule.rows > 0).draft()


# -- attention and the cache ------------------------------------------------------------------------


def _group_axes(w: _Holes, lowered: Lowered) -> tuple[Expr, Expr, Expr, str]:
    dims = lowered.dims
    cut = f"dim < {dims['d']}" if power(dims["d"]) != dims["d"] else ""
    w.axes |= {
        "row": Axis("row"), "group": Axis("group"), "dim": Axis("dim", 1, power(dims["d"]), cut),
    }  # fmt: skip
    return var("row", dims["m"]), var("group", dims["g"]), var("dim", dims["d"]), cut


def attention(lowered: Lowered, schedule: TritonSchedule) -> Draft:
    """The kernel of a region around attention over the paged cache."""
    d = lowered.dims
    w = _Holes(lowered, 1024)
    row, group, dim, cut = _group_axes(w, lowered)
    per = d["h"] // d["g"]
    heads = [iadd(imul(group, per), h) for h in range(per)]
    args = lowered.arguments
    with w.hole() as place:
        last, sequence = (w.bound(args[a].at(row)) for a in ("indices", "row_sequence"))
    with w.hole() as queries:
        wanted = w.expect(_wide(args["q"].at(row, h, dim)) for h in heads)
        query = []
        for e in wanted:
            text = w.value(e)
            query.append(w.fresh("q"))
            w.line(f"{query[-1]} = " + (f"tl.where({cut}, {text}, 0.0)" if cut else text))
    result = [f"result{h}" for h in range(per)]
    with w.hole() as stores, w.scope():
        for h, name in zip(heads, result):
            at = [
                const(0) if n == 1 else e for e, n in zip((row, h, dim), (d["m"], d["h"], d["d"]))
            ]
            w.names[make("acc", *at, format=_result(lowered))] = name
        flat = [iadd(imul(h, d["d"]), dim) for h in heads]
        items = [(s, *element(s, row, c)) for c in flat for s in lowered.stores]
        w.expect(v for *_, v in items)
        for store, index, value in items:
            w.store(store, index, w.value(value))
    context = d["t"] * 16
    spans = -(-context // SPAN)
    part = per * (power(d["d"]) + 8)
    holes = {
        "rows": d["m"], "group": per, "groups": d["g"], "heads": d["h"], "dims": d["d"],
        "dim_block": power(d["d"]), "dim_mask": f" & ({cut})" if cut else "", "chunk": CHUNK,
        "span": SPAN, "spans": spans, "context": context, "place": place, "last": last, "sequence": sequence,
        "sequences": d["s"], "width": d["t"], "blocks": d["b"], "queries": queries, "query": query,
        "joint": min(16, power(spans)), "cache": lowered.direct["cache"].name, "tables": lowered.direct["tables"].name,
        "scale": repr(float(lowered.attributes["scale"])), "format": TYPES[_result(lowered)],
        "result": result, "stores": stores, "part": part, "scratch": "scratch", "counters": "counters",
    }  # fmt: skip
    split = spans > 1
    return Draft(
        "attention", holes, (d["m"] * d["g"], spans), schedule.warps,
        scratch_bytes=4 * d["m"] * d["g"] * spans * part if split else 0,
        counters=d["m"] * d["g"] if split else 0,
    )  # fmt: skip


def kv_write(lowered: Lowered, schedule: TritonSchedule) -> Draft:
    """The kernel of a region around a write to the paged cache."""
    d = lowered.dims
    w = _Holes(lowered, 1024)
    row, group, dim, cut = _group_axes(w, lowered)
    args = lowered.arguments
    with w.hole() as loads:
        k, v = w.expect([args["k"].at(row, group, dim), args["v"].at(row, group, dim)])
        slot = w.bound(args["slots"].at(row))
        texts = [w.value(k), w.value(v)]
    with w.hole() as stores:
        flat = iadd(imul(group, d["d"]), dim)
        for s in lowered.stores:
            index, value = element(s, row, flat)
            w.store(s, index, w.value(value))
    cache = lowered.direct["cache"]
    holes = {
        "rows": d["m"], "groups": d["g"], "dims": d["d"], "dim_block": power(d["d"]), "loads": loads,
        "slot": slot, "slots": d["b"] * 16, "cache": cache.name, "k": texts[0], "v": texts[1],
        "mask": f", mask={cut}" if cut else "", "stores": stores, "format": TYPES[cache.type.format],
    }  # fmt: skip
    return Draft("kv_write", holes, (d["m"], d["g"]), 1)


# -- regions printed from bodies alone --------------------------------------------------------------


def body(lowered: Lowered, schedule: TritonSchedule) -> Draft:
    """The kernel of a region without an anchor: every store by itself, from the bodies of its ops."""
    w = _Holes(lowered, 1024 * schedule.warps)
    parts, first = [], 0
    for store in lowered.stores:
        shape = store.operand.type.shape or (1,)
        probe = store.value.at(*(var(f"probe{i}", n) for i, n in enumerate(store.value.shape)))
        row_wise = _reduces(probe, f"probe{len(store.value.shape) - 1}")
        lead = shape if row_wise else shape[:-1]
        size = 1 if row_wise else min(power(shape[-1]), 128 * schedule.warps)
        blocks = 1 if row_wise else -(-shape[-1] // size)
        programs = math.prod(lead) * blocks
        with w.hole() as lines, w.scope():
            here = w.fresh("here")
            w.line(f"{here} = program - {first}")
            w.axes["at"] = Axis(here)
            at = var("at", programs)
            index = unflattened(idiv(at, blocks), lead) if lead else []
            if not row_wise:
                column, cut = w.fresh("c"), shape[-1] % size
                start = w.value(imul(imod(at, blocks), size))
                w.line(f"{column} = {start} + tl.arange(0, {size})[None, :]")
                w.axes["last"] = Axis(column, 1, size, f"{column} < {shape[-1]}" if cut else "")
                index.append(var("last", shape[-1]))
            value = store.value.at(*index[: len(store.value.shape)])
            w.expect([value])
            tile = "tl.zeros((1, 1), tl.int32)" if row_wise else ""
            w.store(store, index[: len(store.operand.type.shape)], w.value(value), tile)
        parts.append({"first": first, "last": first + programs, "body": lines})
        first += programs
    return Draft("body", {"parts": parts}, (first,), schedule.warps)


def _reduces(value: Expr, last: str) -> bool:
    """True if an element reduces a row that its last index chooses: then each element is a program's work."""

    def reads(node: Expr) -> bool:
        return any(n.op == "var" and n.payload[0] == last for n in node.walk())

    return any(n.op == "reduce" or (n.op == "stat" and reads(n)) for n in value.walk())


EMITTERS: dict[str, Callable[[Lowered, TritonSchedule], Draft]] = {
    "linear": linear, "attention": attention, "kv_write": kv_write,
}  # fmt: skip


# -- kernels ----------------------------------------------------------------------------------------


def pieces(operand: Operand) -> list[tuple[str, int, str]]:
    """(parameter name, byte offset, element type) of the parts of a buffer that kernels read."""
    type_ = operand.type
    if not type_.format.is_block:
        return [(operand.name, 0, POINTER_TYPES[type_.format])]
    count = math.prod(type_.shape)
    quants = count if type_.format is Format.Q8_0 else count // 2
    parts = [
        (operand.name, 0, POINTER_TYPES[type_.format]),
        (f"{operand.name}_scale", quants, "fp16"),
    ]
    if type_.format is Format.Q4_1:
        parts.append((f"{operand.name}_least", quants + count // BLOCK * 2, "fp16"))
    return parts


def emit(lowered: Lowered, schedule: TritonSchedule) -> Kernel:
    """The kernel of a region, with the record by which it is launched."""
    name = None if lowered.anchor is None else lowered.anchor.target.name
    draft = EMITTERS[name](lowered, schedule) if name else body(lowered, schedule)
    parameters, names = [], []
    for number, operand in enumerate((*lowered.reads, *lowered.writes)):
        for piece, offset, type_ in pieces(operand):
            names.append(piece)
            parameters.append((number, offset, type_))
    if draft.scratch_bytes:
        names.append("scratch")
        parameters.append((len(lowered.reads) + len(lowered.writes), 0, "fp32"))
    if draft.counters:
        names.append("counters")
        parameters.append((-1, 0, "i32"))
    text = render(draft.template, parameters=", ".join(names), label=lowered.label, **draft.holes)
    lines = [line.rstrip() for line in text.splitlines()]
    source = "\n".join(line for line in lines if line) + "\n"
    record = (
        f'KERNELS["@KERNEL@"] = (\n    @KERNEL@, {draft.grid}, {draft.warps}, {draft.stages}, '
        f"{draft.counters},\n    {tuple(parameters)},\n)\n"
    )
    return Kernel.of(name or "body", f"{source}\n\n{record}", draft.scratch_bytes)
