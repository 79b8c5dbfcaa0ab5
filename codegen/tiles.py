"""Expressions as Triton code: index variables become tiles of rank two,
and all else follows by broadcasting.
"""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from codegen.expr import Expr, bounds, const, make
from codegen.lower import Lowered, Operand
from codegen.triton_blocks import block_element
from ir.format import Format

TYPES = {
    Format.F32: "tl.float32", Format.F16: "tl.float16", Format.BF16: "tl.bfloat16",
    Format.F64: "tl.float64", Format.I32: "tl.int32", Format.I64: "tl.int64",
    Format.BOOL: "tl.int1",
}  # fmt: skip
_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "floordiv": "//", "mod": "%", "shr": ">>", "and": "&",
    "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==",
}  # fmt: skip
_CALLS = {
    "rsqrt": "tl.rsqrt({})", "exp": "tl.exp({})", "log": "tl.log({})", "neg": "(-{})",
    "max": "tl.maximum({}, {})", "min": "tl.minimum({}, {})", "div": "tl.div_rn({}, {})",
    "sigmoid": "(1.0 / (1.0 + tl.exp(-{})))", "tanh": "(1.0 - 2.0 / (tl.exp(2.0 * {}) + 1.0))",
}  # fmt: skip
_IDENTITY = {"sum": "0.0", "max": 'float("-inf")', "min": 'float("inf")'}
_JOIN = {"sum": "{} + {}", "max": "tl.maximum({}, {})", "min": "tl.minimum({}, {})"}
LARGEST = 2**31 - 1


def power(n: int) -> int:
    """The smallest power of two that is at least `n`."""
    return 1 << max(0, n - 1).bit_length()


@dataclass(frozen=True)
class Axis:
    """A loop variable as a tile: its text, the dimension that it spans
    (None: one number), size and mask.

    `mask` is text that is true where the variable is inside its extent, empty where it always is.
    """

    text: str
    dim: int | None = None
    size: int = 1
    mask: str = ""


class TileWriter:
    """Statements of one Triton kernel, written as expressions are asked for.

    Every address that the extents do not prove in range is clamped into its buffer, so that no
    value of an index input, whatever it holds, makes a kernel touch memory outside its operands.
    """

    def __init__(self, lowered: Lowered, reduce_tile: int) -> None:
        self.lines: list[str] = []
        self.axes: dict[str, Axis] = {}
        self.operands: dict[str, Operand] = {o.name: o for o in lowered.reads + lowered.writes}
        self.stats = {s.name: s.value for s in lowered.stats}
        self.reduce_tile = reduce_tile
        self.names: ChainMap[Expr, str] = ChainMap()
        self.uses: dict[Expr, int] = {}
        self._count = 0
        self._depth = 1

    # -- statements --------------------------------------------------------------------------------

    def line(self, text: str) -> None:
        """Appends one statement."""
        self.lines.append("    " * self._depth + text)

    @contextmanager
    def block(self, head: str) -> Iterator[None]:
        """Statements of a loop or branch; names bound inside it end with it."""
        self.line(head)
        self._depth += 1
        with self.scope():
            yield
        self._depth -= 1

    @contextmanager
    def scope(self, axes: Mapping[str, Axis] | None = None) -> Iterator[None]:
        """Names (and axes) that hold for a while."""
        before, self.axes = self.axes, {**self.axes, **(axes or {})}
        self.names = self.names.new_child()
        yield
        self.names, self.axes = self.names.parents, before

    def fresh(self, stem: str = "t") -> str:
        """A name not used before."""
        self._count += 1
        return f"{stem}{self._count}"

    def text(self) -> str:
        """All statements."""
        return "\n".join(self.lines)

    # -- values ------------------------------------------------------------------------------------

    def expect(self, exprs: Iterable[Expr]) -> list[Expr]:
        """Counts uses, so that what several of `exprs` share gets a
        name; returns them as a list.
        """
        exprs = list(exprs)
        seen: set[Expr] = set()
        for e in exprs:
            self.uses[e] = self.uses.get(e, 0) + 1
            for node in e.walk():
                if node not in seen:
                    seen.add(node)
                    for a in node.args:
                        self.uses[a] = self.uses.get(a, 0) + 1
        return exprs

    def value(self, e: Expr) -> str:
        """The text of `e`, after the statements that it needs."""
        known = self.names.get(e)
        if known is not None:
            return known
        text = getattr(self, f"_{e.op}", self._arithmetic)(e)
        shared = self.uses.get(e, 0) > 1 or e.op in ("load", "reduce")
        if shared and not text.isidentifier() and e.op not in ("const", "var"):
            name = self.fresh()
            self.line(f"{name} = {text}")
            text = name
        if text.isidentifier():
            self.names[e] = text
        return text

    def bound(self, e: Expr) -> str:
        """A name that holds `e`."""
        text = self.value(e)
        if not text.isidentifier():
            name = self.names[e] = self.fresh()
            self.line(f"{name} = {text}")
            return name
        return text

    def hoist(self, e: Expr, names: set[str]) -> None:
        """Binds what `e` needs that does not depend on the variables
        `names`, before their loop opens.
        """
        if not self.depends(e, names):
            if e.op not in ("const", "var", "acc"):
                self.bound(e)
            return
        for a in e.args:
            self.hoist(a, names)

    def depends(self, e: Expr, names: set[str]) -> bool:
        """True if `e` reads one of the variables `names`."""
        return any(n.op == "var" and n.payload[0] in names for n in e.walk())

    def variables(self, e: Expr) -> list[Axis]:
        """The axes of the variables that `e` reads outside reductions."""
        names: dict[str, None] = {}
        stack = [e]
        while stack:
            node = stack.pop()
            if node.op == "var":
                names[node.payload[0]] = None
            elif node.op == "reduce":
                inner = node.payload[1]
                stack += [n for n in node.walk() if n.op == "var" and n.payload[0] != inner]
            else:
                stack += node.args
        return [self.axes[n] for n in sorted(names) if n in self.axes]

    def mask(self, *exprs: Expr) -> str:
        """Text that is true where every variable of `exprs` is inside
        its extent; empty if always.
        """
        masks = dict.fromkeys(a.mask for e in exprs for a in self.variables(e) if a.mask)
        return " & ".join(f"({m})" for m in masks)

    def address(self, operand: Operand, index: Iterable[Expr]) -> str:
        """Pointer text of one element; products with strides are taken in 64 bits."""
        shape = operand.type.shape
        parts, fixed = [operand.name], 0
        for position, (i, size) in enumerate(zip(index, shape, strict=True)):
            stride = math.prod(shape[position + 1 :])
            if i.op == "const":
                fixed += min(max(int(i.payload), 0), size - 1) * stride
                continue
            text = self._inside(i, size)
            text = text if text.isidentifier() or text.startswith("tl.") else f"({text})"
            parts.append(f"{text}.to(tl.int64) * {stride}" if stride > 1 else text)
        return " + ".join(parts + ([str(fixed)] if fixed else []))

    def _inside(self, i: Expr, size: int) -> str:
        limits, held = bounds(i), i
        if limits is None or limits[0] < 0:
            held = make("max", held, const(0), format=i.format)
        if limits is None or limits[1] >= size:
            held = make("min", held, const(size - 1), format=i.format)
        return self.value(i) if held is i else self.bound(held)

    def load(self, pointer: str, mask: str) -> str:
        """Text of a load; lanes outside the mask read zero."""
        return f"tl.load({pointer}, mask={mask}, other=0)" if mask else f"tl.load({pointer})"

    # -- one method per kind of expression ---------------------------------------------------------

    def _const(self, e: Expr) -> str:
        text = repr(e.payload)
        if isinstance(e.payload, float) and not math.isfinite(e.payload):
            text = f'float("{e.payload}")'
        if e.format in (Format.BF16, Format.F16):  # a bare number would be taken as f32 or i32
            return f"tl.full((1, 1), {text}, tl.float32).to({TYPES[e.format]})"
        return text

    def _var(self, e: Expr) -> str:
        return self.axes[e.payload[0]].text

    def _stat(self, e: Expr) -> str:
        return self.bound(self.stats[e.payload].at(*e.args))

    def _load(self, e: Expr) -> str:
        operand = self.operands[e.payload]
        mask = self.mask(*e.args)
        if not operand.type.format.is_block:
            return self.load(self.address(operand, e.args), mask)
        return block_element(self, operand, e.args, mask)

    def _acc(self, e: Expr) -> str:
        raise AssertionError(f"{e} is not a result that this kernel computes")

    def _cast(self, e: Expr) -> str:
        return f"{self.value(e.args[0])}.to({TYPES[e.format]})"

    def _where(self, e: Expr) -> str:
        return f"tl.where({', '.join(self.value(a) for a in e.args)})"

    def _arithmetic(self, e: Expr) -> str:
        texts = [self.value(a) for a in e.args]
        if e.op in _INFIX:
            return f"({texts[0]} {_INFIX[e.op]} {texts[1]})"
        return _CALLS[e.op].format(*texts)

    # -- reductions --------------------------------------------------------------------------------

    def _reduce(self, e: Expr) -> str:
        """A reduction along dimension 1: one tile, or a loop of tiles
        joined lane by lane and then across.
        """
        kind, variable, extent = e.payload
        (element,) = e.args
        rows = max([1, *(a.size for a in self.variables(e) if a.dim == 0)])
        size = min(power(extent), max(16, self.reduce_tile // rows))
        identity = _IDENTITY[kind]
        if not e.format.is_float:
            identity = {"sum": 0, "max": -LARGEST - 1, "min": LARGEST}[kind]
        self.hoist(element, {variable})
        column = self.fresh("c")
        axis = Axis(column, 1, size, f"{column} < {extent}" if extent % size else "")
        lanes = f"tl.arange(0, {size})[None, :]"
        watch = kind == "max" and e.format.is_float
        if size >= extent:
            self.line(f"{column} = {lanes}")
            with self.scope({variable: axis}):
                total = self._masked(element, axis, identity, (rows, size))
            return self._across(kind, total, f"{total} != {total}" if watch else "")
        total, bad = self.fresh("a"), self.fresh("b")
        self.line(f"{total} = tl.full(({rows}, {size}), {identity}, {TYPES[e.format]})")
        if watch:
            self.line(f"{bad} = tl.zeros(({rows}, {size}), tl.int1)")
        start = self.fresh("k")
        with self.block(f"for {start} in range(0, {extent}, {size}):"):
            self.line(f"{column} = {start} + {lanes}")
            with self.scope({variable: axis}):
                part = self._masked(element, axis, identity, (rows, size))
            self.line(f"{total} = {_JOIN[kind].format(total, part)}")
            if watch:
                self.line(f"{bad} = {bad} | ({part} != {part})")
        return self._across(kind, total, bad if watch else "")

    def _masked(self, element: Expr, axis: Axis, identity: object, shape: tuple[int, int]) -> str:
        text = self.value(element)
        if axis.mask:
            text = f"tl.where({axis.mask}, {text}, {identity})"
        name = self.fresh()
        self.line(f"{name} = tl.broadcast_to({text}, {shape})")
        return name

    def _across(self, kind: str, total: str, bad: str) -> str:
        """The reduction of a tile over its lanes; a maximum over lanes with a NaN is NaN."""
        text = f"tl.{kind}({total}, 1, keep_dims=True)"
        if not bad:
            return text
        nan = f"tl.max(({bad}).to(tl.int32), 1, keep_dims=True) > 0"
        return f'tl.where({nan}, float("nan"), {text})'
