"""Scalar expressions of a kernel: what one element of a value is, as a function of its index.

`Expr` nodes are interned, so equal expressions are one object and a printer can bind each shared
one to a name once. Index arithmetic simplifies itself from the extents of the loop variables, which
makes chains of views print as the plain address they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ir.tensor import Format

_INTERNED: dict[tuple[object, ...], Expr] = {}


@dataclass(frozen=True, eq=False)
class Expr:
    """One interned node: `op`, its operands, the format of its value, and a payload.

    Ops: const (payload number) · var (payload (name, extent)) · load (payload operand name;
    operands are the index of each dimension) · stat (payload name; row index) · acc (the anchor's
    result at an index) · reduce (payload (kind, var, extent); operand is the element) · cast ·
    where · arithmetic and functions by name.
    """

    op: str
    args: tuple[Expr, ...]
    format: Format
    payload: object = None

    def __repr__(self) -> str:
        if self.op in ("const", "var"):
            return str(self.payload if self.op == "const" else self.payload[0])
        inner = ", ".join(map(repr, self.args))
        label = self.op if self.payload is None else f"{self.op}:{self.payload}"
        return f"{label}({inner})"

    def walk(self) -> Iterator[Expr]:
        """This node and all below it, operands first, each once."""
        seen: set[int] = set()

        def visit(node: Expr) -> Iterator[Expr]:
            if id(node) not in seen:
                seen.add(id(node))
                for arg in node.args:
                    yield from visit(arg)
                yield node

        return visit(self)


def make(op: str, *args: Expr, format: Format, payload: object = None) -> Expr:
    """The interned node with these parts."""
    key = (op, tuple(id(a) for a in args), format, payload, type(payload))
    node = _INTERNED.get(key)
    if node is None:
        node = _INTERNED[key] = Expr(op, args, format, payload)
    return node


def const(value: float, format: Format = Format.I32) -> Expr:
    """A number."""
    return make("const", format=format, payload=value)


def var(name: str, extent: int | None = None) -> Expr:
    """A loop variable with values 0 .. extent - 1 (None: not known)."""
    return make("var", format=Format.I32, payload=(name, extent))


def bounds(e: Expr) -> tuple[int, int] | None:
    """Smallest and largest value of an index expression, where they are known."""
    if e.op == "const":
        return int(e.payload), int(e.payload)
    if e.op == "var":
        extent = e.payload[1]
        return None if extent is None else (0, extent - 1)
    if e.op in ("add", "mul", "floordiv", "mod"):
        a, b = bounds(e.args[0]), bounds(e.args[1])
        if e.op == "mod" and e.args[1].op == "const":
            return 0, int(e.args[1].payload) - 1
        if a is None or b is None:
            return None
        if e.op == "add":
            return a[0] + b[0], a[1] + b[1]
        if e.op == "floordiv":
            return (a[0] // b[0], a[1] // b[0]) if b[0] == b[1] and b[0] > 0 else None
        corners = [x * y for x in a for y in b]
        return min(corners), max(corners)
    return None


def _terms(e: Expr) -> tuple[dict[Expr, int], int]:
    """An index expression as {term: coefficient} and a constant."""
    if e.op == "const":
        return {}, int(e.payload)
    if e.op == "add":
        left, c = _terms(e.args[0])
        right, d = _terms(e.args[1])
        total = dict(left)
        for term, factor in right.items():
            total[term] = total.get(term, 0) + factor
        return total, c + d
    if e.op == "mul" and e.args[1].op == "const":
        inner, c = _terms(e.args[0])
        k = int(e.args[1].payload)
        return {t: f * k for t, f in inner.items()}, c * k
    return {e: 1}, 0


def _rejoined(terms: dict[Expr, int]) -> dict[Expr, int]:
    """`terms` with each `n * (a // n) + a % n` written as `a`."""
    for part in [t for t in terms if t.op == "mod" and t.args[1].op == "const"]:
        quotient = make("floordiv", *part.args, format=Format.I32)
        factor = terms[part]
        if factor and terms.get(quotient, 0) == factor * int(part.args[1].payload):
            terms = {t: f for t, f in terms.items() if t not in (part, quotient)}
            for term, f in _terms(part.args[0])[0].items():
                terms[term] = terms.get(term, 0) + f * factor
    return terms


def _sum(terms: dict[Expr, int], constant: int) -> Expr:
    total: Expr | None = None
    terms = _rejoined(terms)
    for term, factor in terms.items():
        if factor == 0:
            continue
        part = term if factor == 1 else make("mul", term, const(factor), format=Format.I32)
        total = part if total is None else make("add", total, part, format=Format.I32)
    if total is None:
        return const(constant)
    return total if constant == 0 else make("add", total, const(constant), format=Format.I32)


def iadd(a: Expr, b: Expr | int) -> Expr:
    """Index sum, with like terms joined."""
    b = const(b) if isinstance(b, int) else b
    left, c = _terms(a)
    right, d = _terms(b)
    merged = dict(left)
    for term, factor in right.items():
        merged[term] = merged.get(term, 0) + factor
    return _sum(merged, c + d)


def imul(a: Expr, k: int) -> Expr:
    """Index times a constant."""
    terms, c = _terms(a)
    return _sum({t: f * k for t, f in terms.items()}, c * k)


def _divided(a: Expr, n: int) -> tuple[Expr, Expr]:
    """(w, r) with a = n * w + r: the terms of an index that n divides, and all the others."""
    terms, c = _terms(a)
    whole = {t: f // n for t, f in terms.items() if f % n == 0}
    return _sum(whole, c // n), _sum({t: f for t, f in terms.items() if f % n}, c % n)


def _below(e: Expr, n: int) -> bool:
    limits = bounds(e)
    return limits is not None and limits[0] >= 0 and limits[1] < n


def idiv(a: Expr, n: int) -> Expr:
    """Floor of a non-negative index over n."""
    if n == 1:
        return a
    whole, rest = _divided(a, n)
    if _below(rest, n):
        return whole
    if rest.op == "floordiv" and rest.args[1].op == "const":
        return iadd(whole, idiv(rest.args[0], n * int(rest.args[1].payload)))
    return iadd(whole, make("floordiv", rest, const(n), format=Format.I32))


def imod(a: Expr, n: int) -> Expr:
    """A non-negative index modulo n."""
    if n == 1:
        return const(0)
    rest = _divided(a, n)[1]
    if _below(rest, n):
        return rest
    if rest.op == "floordiv" and rest.args[1].op == "const":
        step = int(rest.args[1].payload)
        return idiv(imod(rest.args[0], n * step), step)
    return make("mod", rest, const(n), format=Format.I32)


def less(a: Expr, n: int) -> Expr | bool:
    """Whether an index is below n: True or False where the extents decide it."""
    limits = bounds(a)
    if limits is not None and limits[1] < n:
        return True
    if limits is not None and limits[0] >= n:
        return False
    return make("lt", a, const(n), format=Format.BOOL)


def accesses(e: Expr, op: str) -> list[Expr]:
    """The distinct nodes of kind `op` below `e` (for example all `acc` or all `load` nodes)."""
    return [node for node in e.walk() if node.op == op]
