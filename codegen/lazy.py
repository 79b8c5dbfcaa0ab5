"""Lazy values: an op's body run on them tells what each element of its result is.

A `Lazy` has a shape, a format and a function from an index to an `Expr`. It answers the torch
functions that bodies of POINTWISE, ROW and VIEW ops use, so the body itself is what is printed: the
mathematics of an op stands in one place.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from codegen.expr import Expr, const, iadd, idiv, imod, imul, make, var
from ir.tensor import Format

Index = tuple[Expr, ...]
_NARROW = (Format.BF16, Format.F16)
_RANK = {Format.BOOL: 0, Format.U8: 1, Format.I32: 2, Format.I64: 3, Format.F32: 6, Format.F64: 7}


def promote(a: Format, b: Format) -> Format:
    """The format of arithmetic on elements of `a` and `b`, as torch promotes them."""
    if a == b:
        return a
    if a in _NARROW or b in _NARROW:
        other = b if a in _NARROW else a
        narrow = a if a in _NARROW else b
        return narrow if not other.is_float else Format.F32
    return max(a, b, key=_RANK.__getitem__)


class Unprintable(TypeError):
    """A body uses a torch function that no kernel can be printed
    from: a fault of the op's author.
    """


class Lazy:
    """A value known element by element; `at(index)` is the expression of one element."""

    def __init__(self, shape: tuple[int, ...], format: Format, at: Callable[[Index], Expr]) -> None:
        self.shape = torch.Size(shape)
        self.format = format
        self._at = at

    def at(self, *index: Expr) -> Expr:
        """The element at `index` (one expression per dimension)."""
        assert len(index) == len(self.shape), f"{len(index)} indices for shape {tuple(self.shape)}"
        return self._at(tuple(const(0) if n == 1 else i for i, n in zip(index, self.shape)))

    @property
    def dtype(self) -> torch.dtype:
        """The torch dtype that the body sees."""
        return self.format.dtype

    ndim = property(lambda self: len(self.shape))
    is_meta = False

    # -- elementwise -------------------------------------------------------------------------------

    @staticmethod
    def of(value: Lazy | float | bool, format: Format | None = None) -> Lazy:
        """`value` as a Lazy; numbers become scalars of `format`."""
        if isinstance(value, Lazy):
            return value
        if format is None:
            format = Format.F32 if isinstance(value, float) else Format.I32
        return Lazy((), format, lambda _: const(value, format))

    def broadcast(self, shape: tuple[int, ...]) -> Callable[[Index], Expr]:
        """The element at an index of the wider `shape`."""
        lead = len(shape) - len(self.shape)
        return lambda index: self.at(*index[lead:])

    def _binary(self, op: str, other: Lazy | float, *, swap: bool = False, result=None) -> Lazy:
        if isinstance(other, bool | int | float):
            keep = self.format.is_float or not isinstance(other, float)
            other = Lazy.of(other, self.format if keep else Format.F32)
        a, b = (other, self) if swap else (self, other)
        shape = torch.broadcast_shapes(a.shape, b.shape)
        format = promote(a.format, b.format)
        if op == "div" and not format.is_float:
            format = Format.F32
        left, right = a.broadcast(shape), b.broadcast(shape)

        def at(index: Index) -> Expr:
            x, y = cast(left(index), wide(format)), cast(right(index), wide(format))
            value = _apply(op, x, y, result or wide(format))
            return value if result else cast(value, format)

        return Lazy(shape, result or format, at)

    def unary(self, op: str) -> Lazy:
        """The function `op` of each element."""
        return Lazy(
            self.shape, self.format,
            lambda i: cast(make(op, cast(self.at(*i), wide(self.format)), format=wide(self.format)),
                           self.format),
        )  # fmt: skip

    def __add__(self, other):
        return self._binary("add", other)

    def __sub__(self, other):
        return self._binary("sub", other)

    def __mul__(self, other):
        return self._binary("mul", other)

    def __truediv__(self, other):
        return self._binary("div", other)

    def __floordiv__(self, other):
        return self._binary("floordiv", other)

    def __mod__(self, other):
        return self._binary("mod", other)

    def __rshift__(self, other):
        return self._binary("shr", other)

    def __and__(self, other):
        return self._binary("and", other)

    def __rsub__(self, other):
        return self._binary("sub", other, swap=True)

    def __rtruediv__(self, other):
        return self._binary("div", other, swap=True)

    __radd__, __rmul__ = __add__, __mul__

    def __lt__(self, other):
        return self._binary("lt", other, result=Format.BOOL)

    def __le__(self, other):
        return self._binary("le", other, result=Format.BOOL)

    def __gt__(self, other):
        return self._binary("gt", other, result=Format.BOOL)

    def __ge__(self, other):
        return self._binary("ge", other, result=Format.BOOL)

    def __eq__(self, other):
        return self._binary("eq", other, result=Format.BOOL)

    __hash__ = object.__hash__

    def __neg__(self):
        return self.unary("neg")

    def square(self):
        """Each element times itself."""
        return self * self

    def clamp(self, min: int | None = None, max: int | None = None) -> Lazy:
        """Each element held between `min` and `max`."""
        low = self if min is None else self._binary("max", min)
        return low if max is None else low._binary("min", max)

    def to(self, dtype: torch.dtype) -> Lazy:
        """The elements rounded to `dtype`."""
        format = Format.of(dtype)
        return Lazy(self.shape, format, lambda i: cast(self.at(*i), format))

    def float(self):
        """The elements in f32."""
        return self.to(torch.float32)

    def long(self):
        """The elements as indices."""
        return self.to(torch.int64)

    def column_index(self) -> Lazy:
        """The number of each column, i32, of the last dimension's length."""
        return Lazy(self.shape[-1:], Format.I32, lambda i: i[0])

    # -- reductions over the last dimension --------------------------------------------------------

    def _reduce(self, kind: str, keepdim: bool) -> Lazy:
        extent = self.shape[-1]
        shape = (*self.shape[:-1], 1) if keepdim else tuple(self.shape[:-1])
        outer = len(self.shape) - 1

        def at(index: Index) -> Expr:
            depth = 1
            inner = var("r0", extent)
            element = self.at(*index[:outer], inner)
            used = {n.payload[0] for n in element.walk() if n.op == "var"}
            used |= {n.payload[1] for n in element.walk() if n.op == "reduce"}
            while f"r{depth}" in used:
                depth += 1
            name = f"r{depth}"
            element = self.at(*index[:outer], var(name, extent))
            format = wide(self.format)
            return make(
                "reduce", cast(element, format), format=format, payload=(kind, name, extent)
            )

        return Lazy(shape, self.format, lambda i: cast(at(i), self.format))

    def mean(self, dim: int) -> Lazy:
        """The mean of each row."""
        assert dim == -1
        return self._reduce("sum", False) / float(self.shape[-1])

    def sum(self, dim: int, keepdim: bool = False) -> Lazy:
        """The sum of each row."""
        assert dim == -1
        return self._reduce("sum", keepdim)

    def amax(self, dim: int, keepdim: bool = False) -> Lazy:
        """The largest element of each row."""
        assert dim == -1
        return self._reduce("max", keepdim)

    def amin(self, dim: int, keepdim: bool = False) -> Lazy:
        """The smallest element of each row."""
        assert dim == -1
        return self._reduce("min", keepdim)

    # -- index maps --------------------------------------------------------------------------------

    def __getitem__(self, key) -> Lazy:
        keys = list(key) if isinstance(key, tuple) else [key]
        named = sum(k is not None and k is not Ellipsis for k in keys)
        fill = [slice(None)] * (len(self.shape) - named)
        where = keys.index(Ellipsis) if Ellipsis in keys else len(keys)
        keys = keys[:where] + fill + keys[where + 1 :]
        shape, maps, position = [], [], 0
        for k in keys:
            if k is None:
                shape.append(1)
                continue
            size = self.shape[position]
            if isinstance(k, int):
                maps.append((None, k % size))
            else:
                start, stop, step = k.indices(size)
                assert step == 1
                maps.append((len(shape), start))
                shape.append(stop - start)
            position += 1
        return Lazy(
            tuple(shape), self.format,
            lambda i: self.at(*(const(s) if at is None else iadd(i[at], s) for at, s in maps)),
        )  # fmt: skip

    def reshape(self, *shape: int) -> Lazy:
        """The same elements in row-major order under another shape."""
        shape = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        known = -math.prod(shape) if -1 in shape else 1
        shape = tuple(math.prod(self.shape) // known if n == -1 else n for n in shape)
        old = tuple(self.shape)

        def at(index: Index) -> Expr:
            flat = const(0)
            for i, n in zip(index, shape):
                flat = iadd(imul(flat, n), i)
            parts: list[Expr] = []
            for n in reversed(old[1:]):
                parts.append(imod(flat, n))
                flat = idiv(flat, n)
            return self.at(*([flat] if old else []), *reversed(parts))

        return Lazy(shape, self.format, at)

    def unflatten(self, dim: int, sizes: tuple[int, ...]) -> Lazy:
        """The last dimension split into `sizes`."""
        assert dim == -1
        return self.reshape(*self.shape[:-1], *sizes) if -1 not in sizes else self.reshape(
            *self.shape[:-1],
            *(self.shape[-1] // -math.prod(sizes) if n == -1 else n for n in sizes),
        )  # fmt: skip

    def flatten(self, start: int) -> Lazy:
        """The dimensions from `start` on as one."""
        start %= len(self.shape)
        return self.reshape(*self.shape[:start], math.prod(self.shape[start:]))

    # -- torch functions ---------------------------------------------------------------------------

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        from codegen.lazy_functions import FUNCTIONS

        handler = FUNCTIONS.get(function)
        if handler is None:
            raise Unprintable(f"no kernel can be printed from {function}")
        return handler(*args, **(kwargs or {}))


def wide(format: Format) -> Format:
    """The format that arithmetic on `format` is done in: narrow floats compute in f32."""
    return Format.F32 if format in _NARROW else format


def cast(value: Expr, format: Format) -> Expr:
    """`value` in `format`; a narrow value widens for free and rounds when it narrows."""
    if value.format == format:
        return value
    if value.op == "const":
        number = float(value.payload) if format.is_float else int(value.payload)
        return const(number, format)
    return make("cast", value, format=format)


def _apply(op: str, x: Expr, y: Expr, format: Format) -> Expr:
    """Arithmetic on elements; index arithmetic with constants is simplified."""
    if not format.is_float and x.format is not Format.BOOL:
        number = int(y.payload) if y.op == "const" and not isinstance(y.payload, bool) else None
        if op == "add":
            return iadd(x, y)
        if number is not None and op == "mul":
            return imul(x, number)
        if number is not None and number > 0 and op in ("floordiv", "mod"):
            return idiv(x, number) if op == "floordiv" else imod(x, number)
    return make(op, x, y, format=format)
