"""The kernels of products with stored weights: a few rows one by
one, many rows on the matrix units.
"""

from __future__ import annotations

import itertools
import math

from codegen.expr import Expr, accesses, const, iadd, make, var
from codegen.lazy import Lazy
from codegen.lower import Lowered, Store
from codegen.tiles import TYPES, Axis, power
from codegen.triton_holes import Draft, Holes, element, is_tiled, result_format, widened
from codegen.triton_schedule import BLOCK_K, TritonSchedule, lanes_of
from ir.format import BLOCK, Format


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
        self.w = Holes(lowered, limit)
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
        dtype = TYPES[result_format(self.lowered)]
        holes = {
            "rows": self.m, "columns": s.columns, "tiles": s.tiles, "block": self.block,
            "before": before,
            "sums": list(sums.values()), "segments": parts, "results": results, "stores": stores,
            "after": after, "format": dtype, "unroll": s.unroll, "row_block": s.rows,
        }  # fmt: skip
        grid = (-(-self.columns // self.tile),)
        if self.wide:
            grid = (-(-self.m // s.rows), *grid)
        name = "linear_wide" if self.wide else "linear"
        return Draft(name, holes, grid, s.warps if self.wide else 1, s.stages if self.wide else 1)

    def name_results(self, sums: dict[tuple[int, int], str]) -> None:
        for (i, c), name in sums.items():
            at = (self.rows[i] if self.m > 1 else const(0), self.lanes[c])
            acc = make("acc", *at, format=result_format(self.lowered))
            self.w.names[acc] = name.replace("a", "r", 1)

    def segment(self, start: int, stop: int, sums: dict[tuple[int, int], str]) -> dict[str, object]:
        """The loop over columns `start` to `stop` of `x`: loads, and
        which product joins which sum.
        """
        w, extent = self.w, stop - start
        inner = var("k", extent)
        cut = f"k < {extent}" if extent % self.block else ""
        k = iadd(inner, start)
        weights = {}
        xs = {}
        with w.hole() as loads, w.scope({"k": Axis("k", 1, self.block, cut)}):
            for c, lane in enumerate(self.lanes):
                weights[c] = self.weights(lane, k, start, extent)
            narrow = self.wide and self.x.format is Format.BF16
            rounded = [self.x.at(row, k) for row in self.rows]
            wanted = [r if narrow else widened(r) for r in rounded]
            w.expect(wanted)
            for i, e in enumerate(wanted):
                text = w.value(e)
                if cut:  # lanes past the end add nothing, whatever the prologue makes of zeros
                    text = f"tl.where({cut}, {text}, 0.0).to({TYPES[e.format]})"
                xs[i] = w.fresh("x")
                shape = f"({self.schedule.rows}, {self.block})"
                w.line(f"{xs[i]} = " + (f"tl.broadcast_to({text}, {shape})" if self.wide else text))
        products = [(a, weights[c], xs[i]) for (i, c), a in sums.items()]
        return {"extent": extent, "loads": loads, "products": products}

    def weights(self, lane: Expr, k: Expr, first: int, extent: int) -> str:
        """A name that holds the tile of weight rows `lane` at columns
        `k`; lanes past the end are zero.
        """
        w = self.w
        format = Format.of(self.weight.type.format.dtype)
        axes = {}
        if self.wide:
            cut = w.axes["column"].mask.replace("column", "weight_row")
            axes["column"] = Axis("weight_row", 0, self.schedule.columns, cut)
        with w.scope(axes):
            load = make("load", lane, k, format=format, payload=self.weight.name)
            whole = self.whole_blocks(first, extent)
            text = self.block_tile(lane, first, extent) if whole else w.value(load)
            to = Format.BF16 if self.wide and self.x.format is Format.BF16 else Format.F32
            name = w.fresh("w")
            w.line(f"{name} = {text}" + (f".to({TYPES[to]})" if format is not to else ""))
        return name

    def whole_blocks(self, first: int, extent: int) -> bool:
        """True if columns `first` to `first + extent` of a weight
        are whole blocks of its format.
        """
        numbers = (self.k, self.block, first, extent)
        return self.weight.type.format.is_block and not any(n % BLOCK for n in numbers)

    def block_tile(self, lane: Expr, first: int, extent: int) -> str:
        """A tile of block-format weights: quants and each scale once,
        spread over its block in registers.
        """
        w, name, rows, block = self.w, self.weight.name, self.schedule.columns, self.block
        row, cut = w.bound(lane), w.mask(lane)

        def tile(stem: str, per: int) -> str:
            at = w.fresh("b")
            start = f"start // {per}" if not first else f"(start + {first}) // {per}"
            w.line(f"{at} = {start} + tl.arange(0, {block // per})[None, :]")
            inside = f"({at} < {(first + extent) // per})" if extent % block else ""
            mask = " & ".join(m for m in (cut, inside) if m)
            return w.load(f"{stem} + {row}.to(tl.int64) * {self.k // per} + {at}", mask)

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
        """Stores that reduce over the program's tile: read back from
        the row that it has just written.
        """
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


def linear(lowered: Lowered, schedule: TritonSchedule) -> Draft:
    """The kernel of a region around a product with a stored weight."""
    return _Linear(lowered, schedule, wide=schedule.rows > 0).draft()
