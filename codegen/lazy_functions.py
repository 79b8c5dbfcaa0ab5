"""The torch functions that bodies use, answered on lazy values."""

from __future__ import annotations

import torch

from codegen.expr import Expr, const, iadd, less, make
from codegen.lazy import Index, Lazy, cast, promote
from ir.format import Format


def _embedding(ids: Lazy, table: Lazy, **_options: object) -> Lazy:
    shape = (*ids.shape, *table.shape[1:])
    rank = len(ids.shape)
    return Lazy(shape, table.format, lambda i: table.at(ids.at(*i[:rank]), *i[rank:]))


def _where(condition: Lazy, a, b) -> Lazy:
    format = next(x.format for x in (a, b) if isinstance(x, Lazy))
    if isinstance(a, Lazy) and isinstance(b, Lazy):
        format = promote(a.format, b.format)
    elif isinstance(b, float) and not format.is_float:
        format = Format.F32
    a, b = Lazy.of(a, format), Lazy.of(b, format)
    shape = torch.broadcast_shapes(condition.shape, a.shape, b.shape)
    parts = [x.broadcast(shape) for x in (condition, a, b)]

    def at(index: Index) -> Expr:
        test, x, y = (part(index) for part in parts)
        return make("where", test, cast(x, format), cast(y, format), format=format)

    return Lazy(shape, format, at)


def _cat(values, dim: int = -1) -> Lazy:
    assert dim == -1
    values = [v for v in values if v.shape[-1]]
    lead, total = values[0].shape[:-1], sum(v.shape[-1] for v in values)

    def at(index: Index) -> Expr:
        column, start, chosen, tests = index[-1], 0, [], []
        for v in values:
            test = less(column, start + v.shape[-1])
            if test is not False:
                chosen.append(v.at(*index[:-1], iadd(column, -start)))
                tests.append(test)
            if test is True:
                break
            start += v.shape[-1]
        result = chosen[-1]
        for test, value in zip(tests[-2::-1], chosen[-2::-1]):
            result = make("where", test, value, result, format=value.format)
        return result

    return Lazy((*lead, total), values[0].format, at)


def _pad(x: Lazy, pads, mode: str = "constant", value: float = 0.0) -> Lazy:
    assert mode == "constant" and len(pads) == 2 and pads[0] == 0
    width = x.shape[-1]

    def at(index: Index) -> Expr:
        test = less(index[-1], width)
        filler = const(value, x.format)
        if isinstance(test, bool):
            return x.at(*index) if test else filler
        return make("where", test, x.at(*index), filler, format=x.format)

    return Lazy((*x.shape[:-1], width + pads[1]), x.format, at)


def _take_along(x: Lazy, index: Lazy, dim: int = -1) -> Lazy:
    assert dim == -1
    shape = (*torch.broadcast_shapes(x.shape[:-1], index.shape[:-1]), index.shape[-1])
    pick = index.broadcast(shape)
    return Lazy(shape, x.format, lambda i: x.at(*i[:-1], pick(i)))


FUNCTIONS = {
    torch.sigmoid: lambda x: x.unary("sigmoid"),
    torch.rsqrt: lambda x: x.unary("rsqrt"),
    torch.exp: lambda x: x.unary("exp"),
    torch.log: lambda x: x.unary("log"),
    torch.tanh: lambda x: x.unary("tanh"),
    torch.maximum: lambda a, b: a._binary("max", b),
    torch.minimum: lambda a, b: a._binary("min", b),
    torch.where: _where,
    torch.cat: _cat,
    torch.take_along_dim: _take_along,
    torch.nn.functional.embedding: _embedding,
    torch.nn.functional.pad: _pad,
}
