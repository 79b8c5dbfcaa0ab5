"""Dimension signatures: `"x[m,k] weight[n,k] -> [m,n]"` parsed, unified, applied."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

from ir.errors import BadOpCall, DimMismatch, RankMismatch

Shape = tuple[int, ...]
_ARGUMENT = re.compile(r"(\w+)\[([^\]]*)\]")


def _dims(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _evaluate(expression: str, bound: dict[str, int]) -> int:
    """The value of a dimension expression over bound names (`+ - * //` and integers)."""
    names = {n.id for n in ast.walk(ast.parse(expression, mode="eval")) if isinstance(n, ast.Name)}
    missing = names - bound.keys()
    if missing:
        raise KeyError(", ".join(sorted(missing)))
    return int(eval(compile(expression, "<dim>", "eval"), {"__builtins__": {}}, bound))


@dataclass(frozen=True)
class Signature:
    """Argument names with their dimension names, and the dimensions of the result.

    A dimension is a name (bound at its first use), an integer (which must be met), or, in the
    result only, an expression over bound names and attributes. A leading `...` stands for any
    dimensions.
    """

    text: str
    arguments: tuple[tuple[str, tuple[str, ...]], ...]
    result: tuple[str, ...]

    @staticmethod
    def parse(text: str) -> Signature:
        """The signature written as `text`."""
        left, right = text.split("->")
        arguments = tuple((name, _dims(dims)) for name, dims in _ARGUMENT.findall(left))
        return Signature(text, arguments, _dims(right.strip()[1:-1]))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tensor arguments in order."""
        return tuple(name for name, _ in self.arguments)

    def bind(self, op: str, shapes: list[Shape]) -> dict[str, int]:
        """Dimension name -> size, from the arguments' shapes; a disagreement is an error."""
        if len(shapes) != len(self.arguments):
            raise BadOpCall(
                op=op,
                problem=f"{len(shapes)} tensors given, {len(self.arguments)} expected",
                signature=self.text,
            )
        bound: dict[str, int] = {}
        first: dict[str, str] = {}
        for (argument, dims), shape in zip(self.arguments, shapes, strict=True):
            rank = len(dims)
            if dims[:1] == ("...",):
                dims, shape = dims[1:], shape[len(shape) - rank + 1 :]
            if len(dims) != len(shape):
                raise RankMismatch(
                    op=op,
                    argument=argument,
                    shape=shape,
                    pattern=dims,
                    rank=rank,
                    signature=self.text,
                )
            for dim, size in zip(dims, shape, strict=True):
                expected = int(dim) if dim.isdigit() else bound.setdefault(dim, size)
                if expected != size:
                    raise DimMismatch(
                        op=op, dim=dim, seen=size, argument=argument, bound=expected,
                        first=first.get(dim, "the signature"), signature=self.text,
                        shapes=dict(zip(self.names, shapes, strict=True)),
                    )  # fmt: skip
                first.setdefault(dim, argument)
        return bound

    def result_shape(self, op: str, shapes: list[Shape], attributes: dict[str, object]) -> Shape:
        """The shape of the result for arguments of `shapes`."""
        bound = self.bind(op, shapes)
        numbers = {k: int(v) for k, v in attributes.items() if isinstance(v, int)}
        lead: Shape = ()
        dims = self.result
        if dims[:1] == ("...",):
            dims = dims[1:]
            lead = shapes[0][: len(shapes[0]) - len(self.arguments[0][1]) + 1]
        return lead + tuple(_evaluate(dim, {**bound, **numbers}) for dim in dims)
