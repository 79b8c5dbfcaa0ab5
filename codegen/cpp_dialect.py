"""Expressions as C++: scalar code in loops of 16 lanes, which a compiler turns into vectors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from codegen.expr import Expr, const, iadd, imul, make
from codegen.lower import LISTED, Operand
from codegen.printer import Printer
from ir.format import Format

TYPES = {
    Format.F32: "float", Format.F16: "f16", Format.BF16: "bf16", Format.I32: "int32_t",
    Format.I64: "int64_t", Format.U8: "uint8_t", Format.BOOL: "bool",
}  # fmt: skip
"""Element types in memory."""

_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "floordiv": "/", "mod": "%", "shr": ">>",
    "and": "&", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==",
}  # fmt: skip
_CALLS = {
    "max": "nan_max", "min": "nan_min", "sigmoid": "sigmoid", "rsqrt": "inverse_root",
    "exp": "e_to", "log": "logf", "tanh": "tanhf",
}  # fmt: skip
_COSTLY = ("sigmoid", "exp", "log", "tanh", "rsqrt", "div", "reduce")
_FOLDS = {  # reduction -> (start for floats, start for integers, step, fold of 16 lanes)
    "sum": ("0.0f", "0", "{a} + {b}", "fold_sum"),
    "max": ("-INFINITY", "INT32_MIN", "nan_max({a}, {b})", "fold_max"),
    "min": ("INFINITY", "INT32_MAX", "nan_min({a}, {b})", "fold_min"),
}
_PACKED = {Format.F32: "F32", Format.BF16: "Bf16", Format.Q8_0: "Q8_0", Format.Q4_0: "Q4_0",
           Format.Q4_1: "Q4_1"}  # fmt: skip
PANELS = "panels16"
"""The one packed layout: panels of 16 rows of the weight (see templates/cpp/products.h)."""


def packed_type(format: Format) -> str:
    """The C++ struct that reads weights of `format` in the panel layout."""
    return _PACKED[format]


@dataclass(frozen=True)
class Place:
    """How the elements of an operand are found: its pointer's name, type and layout."""

    operand: Operand
    layout: str | None = None

    @property
    def panels(self) -> bool:
        """True if the operand is a weight in the panel layout."""
        return self.layout == PANELS

    @property
    def declaration(self) -> str:
        """The type of the operand's pointer."""
        raw = self.panels or self.operand.type.format.is_block
        return "uint8_t" if raw else TYPES[self.operand.type.format]


def flat(index: tuple[Expr, ...], shape: tuple[int, ...]) -> Expr:
    """The row-major position of `index` in `shape`."""
    position = index[0]
    for i, n in zip(index[1:], shape[1:]):
        position = iadd(imul(position, n), i)
    return position


Rewrite = Callable[[Expr, tuple[Expr, ...]], Expr | None]


def rewritten(e: Expr, rule: Rewrite) -> Expr:
    """`e` with each node replaced by `rule(node, new operands)` where that gives something."""
    done: dict[Expr, Expr] = {}
    for node in e.walk():
        args = tuple(done[a] for a in node.args)
        new = rule(node, args)
        if new is None:
            same = all(a is b for a, b in zip(args, node.args))
            new = node if same else make(node.op, *args, format=node.format, payload=node.payload)
        done[node] = new
    return done[e]


def depends_on(e: Expr, name: str) -> bool:
    """True if the loop variable `name` occurs in `e` (outside reductions that bind it)."""
    return any(n.op == "var" and n.payload[0] == name for n in e.walk())


class CppPrinter(Printer):
    """Prints loads from `places`, statistics by name, and the anchor's result through `acc`.

    `acc` names the array that holds the anchor's result; its index is printed by `acc_index`.
    """

    def __init__(
        self, places: Mapping[str, Place], prefix: str = "t",
        acc: Callable[[tuple[str, ...]], str] | None = None,
        known: Mapping[Expr, str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.places = places
        self.prefix = prefix
        self.acc = acc
        self.known = dict(known or {})

    def operands(self, node: Expr) -> tuple[Expr, ...]:
        """A reduction prints its element itself; what is costly and constant in it comes before."""
        if node.op != "reduce":
            return node.args
        name = node.payload[1]
        found: list[Expr] = []

        def visit(inner: Expr) -> None:
            if inner.op == "reduce" and not depends_on(inner, name):
                found.append(inner)
            else:
                for arg in inner.args:
                    visit(arg)

        visit(node.args[0])
        return tuple(dict.fromkeys(found))

    def worth_a_name(self, node: Expr, uses: int) -> bool:
        """Reductions always; other costly nodes when their text would stand twice."""
        if node in self.known:
            return False
        return node.op == "reduce" or (uses > 1 and node.op in _COSTLY)

    def expression(self, node: Expr, args: list[str]) -> str:
        """The text of `node`; what an outer scope has named keeps its name."""
        return self.known[node] if node in self.known else super().expression(node, args)

    def bind(self, name: str, node: Expr, text: str) -> str:
        """A constant of the value's type; a reduction's statements give the name themselves."""
        if node.op == "reduce":
            return text.replace("@RESULT@", name)
        return f"const {_value_type(node.format)} {name} = {text};"

    def on_const(self, node: Expr, args: list[str]) -> str:
        return number(node.payload, node.format)

    def on_var(self, node: Expr, args: list[str]) -> str:
        return node.payload[0]

    def on_stat(self, node: Expr, args: list[str]) -> str:
        listed = node.payload.startswith(LISTED)
        return f"{node.payload}[{args[-1]}]" if listed else node.payload

    def on_acc(self, node: Expr, args: list[str]) -> str:
        assert self.acc is not None, "only an epilogue reads the anchor's result"
        return self.acc(tuple(args))

    def on_load(self, node: Expr, args: list[str]) -> str:
        place = self.places[node.payload]
        name, type_ = place.operand.name, place.operand.type
        if place.panels:
            rows, k = ", ".join(args[:-1]), args[-1]
            return f"{packed_type(type_.format)}::at<{type_.shape[-1]}>({name}, {rows}, {k})"
        element = f"{name}[{args[0]}]"
        return f"cached({element})" if type_.format in (Format.F16, Format.BF16) else element

    def on_cast(self, node: Expr, args: list[str]) -> str:
        source, target = node.args[0].format, node.format
        if target in (Format.F16, Format.BF16):
            return f"as_{target.value}({args[0]})"
        if source.is_float and target is Format.F32:
            return args[0]
        return f"({TYPES[target]})({args[0]})"

    def on_where(self, node: Expr, args: list[str]) -> str:
        return f"({args[0]} ? {args[1]} : {args[2]})"

    def on_neg(self, node: Expr, args: list[str]) -> str:
        return f"(-{args[0]})"

    def on_reduce(self, node: Expr, args: list[str]) -> str:
        """A loop over the row in 16 partial results, element k in partial k % 16, then one fold."""
        kind, name, extent = node.payload
        start, whole, step, fold = _FOLDS[kind]
        start = start if node.format.is_float else whole
        known = {**self.known, **dict(zip(self.operands(node), args))}
        inner = CppPrinter(self.places, f"{self.prefix}{name}_", self.acc, known)
        inner.count = self.count
        statements, (value,) = inner.print(node.args[0])
        type_ = _value_type(node.format)
        lane, at = f"{name}l", f"{name}b"  # names that no loop outside uses
        lines = [f"const int {name} = {{first}} + {lane};", *statements,
                 f"const {type_} value = {value};",
                 f"part[{lane}] = {step.format(a=f'part[{lane}]', b='value')};"]  # fmt: skip

        def block(first: str, count: int) -> str:
            body = "\n".join(f"    {line}" for s in lines for line in s.split("\n"))
            head = f"  for (int {lane} = 0; {lane} < {count}; {lane}++) {{\n"
            return f"{head}{body.replace('{first}', first)}\n  }}"

        full, rest = extent // 16 * 16, extent % 16
        parts = [f"{type_} @RESULT@;", "{", f"  {type_} part[16];"]
        parts.append(f"  for (int {lane} = 0; {lane} < 16; {lane}++) part[{lane}] = {start};")
        if full:
            parts += [f"  for (int {at} = 0; {at} < {full}; {at} += 16)", block(at, 16)]
        if rest:
            parts.append(block(str(full), rest))
        return "\n".join([*parts, f"  @RESULT@ = {fold}(part);", "}"])

    def on_call(self, node: Expr, args: list[str]) -> str:
        if node.op in _INFIX:
            return f"({args[0]} {_INFIX[node.op]} {args[1]})"
        if node.op in ("max", "min") and not node.format.is_float:
            # operands of different widths (an index times a stride is 64 bits wide)
            kind = TYPES[node.format]
            return f"{_CALLS[node.op]}(({kind})({args[0]}), ({kind})({args[1]}))"
        return f"{_CALLS[node.op]}({', '.join(args)})"


def number(value: float, format: Format) -> str:
    """A constant in C++."""
    if not format.is_float:
        return str(int(value))
    single = np.float32(value)
    if np.isnan(single):
        return "NAN"
    if np.isinf(single):
        return "INFINITY" if single > 0 else "(-INFINITY)"
    text = repr(float(single)) if float(single) == float(value) else str(single)
    return f"{text if '.' in text or 'e' in text else text + '.0'}f"


def _value_type(format: Format) -> str:
    return "float" if format.is_float else TYPES[format]


def addressed(e: Expr, places: Mapping[str, Place]) -> Expr:
    """`e` with the index of each load turned into one row-major
    position (panels keep row and column).
    """

    def rule(node: Expr, args: tuple[Expr, ...]) -> Expr | None:
        if node.op != "load" or places[node.payload].panels:
            return None
        shape = places[node.payload].operand.type.shape
        position = flat(args, shape) if args else const(0)
        return make("load", position, format=node.format, payload=node.payload)

    return rewritten(e, rule)
