"""Loops over the elements of lazy values, written so that a C++ compiler makes vectors of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import numpy as np

from codegen.cpp_dialect import CppPrinter, Place, Rewrite, addressed, rewritten
from codegen.expr import Expr, accesses, const, iadd, imul, make, var
from codegen.lazy import Lazy
from codegen.lower import LISTED, Stat, reads
from ir.format import Format

LANES = 16
Index = tuple[Expr, ...]
Assign = Callable[[Index, str], str]
"""(index of an element, its text) -> the statement that stores it."""


class Scope:
    """What the statements of one kernel share: the operands' places and how the result is read."""

    def __init__(
        self, places: Mapping[str, Place], acc: Callable[[tuple[str, ...]], str] | None = None,
        rule: Rewrite | None = None,
    ) -> None:  # fmt: skip
        self.places = places
        self.acc = acc
        self.rule = rule

    def prepared(self, e: Expr) -> Expr:
        """`e` as it is printed: loads by address, the anchor's result by its place in the tile."""
        return addressed(rewritten(e, self.rule) if self.rule else e, self.places)

    def text(self, e: Expr, prefix: str = "t") -> tuple[list[str], str]:
        """(statements, text) of one expression."""
        statements, (text,) = CppPrinter(self.places, prefix, self.acc).print(self.prepared(e))
        return statements, text

    def scalar(self, type_: str, name: str, e: Expr) -> list[str]:
        """Statements that give `name` the value of `e`."""
        statements, text = self.text(e, f"{name}_")
        return [*statements, f"const {type_} {name} = {text};"]

    def stats(self, stats: Sequence[Stat], index: Index) -> list[str]:
        """Statements that compute the row statistics at the leading dimensions of `index`."""
        lines: list[str] = []
        for stat in stats:
            if stat.name.startswith(LISTED):
                lines += self._list(stat, index[: len(stat.value.shape) - 1])
                continue
            lines += self.scalar("float", stat.name, stat.value.at(*index[: len(stat.value.shape)]))
        return lines

    def _list(self, stat: Stat, lead: Index) -> list[str]:
        """Statements that compute the numbers of a listed statistic."""
        type_ = "float" if stat.value.format.is_float else "int32_t"
        fill = self.fill(
            stat.value, lead, lambda i, x: f"{stat.name}[{last_address(self, i)}] = {x};"
        )
        return [f"{type_} {stat.name}[{stat.value.shape[-1]}];", *fill]

    def stats_read(self, stats: Sequence[Stat], values: Sequence[Lazy], index: Index) -> list[str]:
        """The statements of `stats`, if `values` read any of them."""
        return self.stats(stats, index) if any(reads(v, "stat") for v in values) else []

    def fill(
        self, value: Lazy, lead: Index, assign: Assign, *, start: Expr | None = None,
        count: int | None = None, live: str | None = None,
    ) -> list[str]:  # fmt: skip
        """Loops over the last dimension at leading index `lead`.

        With `start`, over the `count` elements from there on, of which the first `live` (an
        expression in C++; None: all) exist.
        """
        whole = value.shape[-1] if count is None else count
        origin = start or const(0)
        cuts = [0, whole]
        if count is None:
            cuts = _cuts(value.at(*lead, var("column", whole)), whole)
        lines: list[str] = []
        for first, last in pairwise(cuts):
            lines += self._segment(value, lead, assign, iadd(origin, first), last - first, live)
        return lines

    def _segment(
        self, value: Lazy, lead: Index, assign: Assign, origin: Expr, count: int, live: str | None
    ) -> list[str]:
        groups, rest = divmod(count, LANES)
        lines: list[str] = []
        if groups:
            group, lane = var("c", groups), var("l", LANES)
            at = iadd(iadd(imul(group, LANES), lane), origin)
            head = f"for (int c = 0; c < {groups}; c++)" if groups > 1 else "{ const int c = 0;"
            limit = str(LANES) if live is None else f"lesser({LANES}, {live} - {LANES} * c)"
            lines += [head, *indented(self._element(value, (*lead, at), assign, limit))]
            lines += [] if groups > 1 else ["}"]
        if rest:
            lane = var("l", rest) if rest > 1 else const(0)
            at = iadd(lane, iadd(origin, groups * LANES))
            limit = str(rest) if live is None else f"lesser({rest}, {live} - {groups * LANES})"
            lines += self._element(value, (*lead, at), assign, limit)
        return lines

    def _element(self, value: Lazy, index: Index, assign: Assign, limit: str) -> list[str]:
        statements, text = self.text(value.at(*index))
        body = [*statements, assign(index, text)]
        return [f"for (int l = 0; l < {limit}; l++) {{", *indented(body), "}"]

    def address(self, index: Index, shape: Sequence[int]) -> str:
        """The row-major position of `index` in `shape`, in C++."""
        position = index[0]
        for i, n in zip(index[1:], shape[1:]):
            position = iadd(imul(position, n), i)
        return CppPrinter(self.places).print(position)[1][0]


def last_address(scope: Scope, index: Sequence[Expr]) -> str:
    """The last dimension of `index`, in C++."""
    return scope.address((index[-1],), (1,))


def indented(lines: Sequence[str]) -> list[str]:
    """`lines` two columns to the right."""
    return [f"  {line}" for block in lines for line in block.split("\n")]


def _cuts(e: Expr, whole: int) -> list[int]:
    """Where comparisons of the column with a constant change, so that
    none is left inside a segment.
    """
    cuts = {0, whole}
    for test in accesses(e, "lt"):
        left, right = test.args
        if right.op != "const" or left.format.is_float:
            continue
        position = _offset(left)
        if position is not None and 0 < int(right.payload) - position < whole:
            cuts.add(int(right.payload) - position)
    return sorted(cuts)


def _offset(e: Expr) -> int | None:
    """c where `e` is the column plus c."""
    if e.op == "var" and e.payload[0] == "column":
        return 0
    if e.op == "add" and e.args[1].op == "const":
        inner = _offset(e.args[0])
        return None if inner is None else inner + int(e.args[1].payload)
    return None


def columns_read(value: Lazy, lead: Index, column: int) -> np.ndarray:
    """The columns of the anchor's result that element `column` of a store reads, sorted."""
    e = value.at(*lead, const(column))
    spans = {n.payload[1]: n.payload[2] for n in accesses(e, "reduce")}
    found = [np.atleast_1d(_evaluated(n.args[-1], spans)) for n in accesses(e, "acc")]
    return np.unique(np.concatenate(found)) if found else np.empty(0, np.int64)


def _evaluated(e: Expr, spans: Mapping[str, int]) -> np.ndarray:
    """All values of an index expression over its reduction variables."""
    if e.op == "const":
        return np.int64(e.payload)
    if e.op == "var":
        return np.arange(spans[e.payload[0]])
    args = [_evaluated(a, spans) for a in e.args]
    if e.op == "cast":
        return args[0]
    calls = {"add": np.add, "mul": np.multiply, "floordiv": np.floor_divide, "mod": np.mod}
    return calls[e.op](*args)


def local_columns(unit: Expr, width: int) -> Rewrite:
    """The rule that counts the columns of the anchor's result from the start of its unit."""

    def rule(node: Expr, args: Index) -> Expr | None:
        if node.op != "acc":
            return None
        column = iadd(args[-1], imul(unit, -width))
        return make("acc", *args[:-1], column, format=Format.F32)

    return rule
