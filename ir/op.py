"""An op: a torch function under a decorator that carries its dimension signature and its kind."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
import torch.fx

from ir.errors import BadOpCall
from ir.signature import Signature
from ir.tensor import Format, PackedTensor, TensorType, unpacked


class Kind(Enum):
    """What a pass may do with an op; passes look at kinds, never at names."""

    POINTWISE = (
        "pointwise"  # each result element is a function of its own index: printed from the body
    )
    ROW = "row"  # one reduction over the last dimension: printed from the body
    VIEW = "view"  # no data moves: an index map that a reader looks through
    ANCHOR = "anchor"  # owns a tiling: one template per backend, found by the op's name
    STATE = "state"  # writes its first argument and returns the handle


REGISTRY: dict[str, Op] = {}


@dataclass(frozen=True)
class Split:
    """Two ops that do one: `finish(x, partial(x, width=...))` is the op on `x`.

    `exact`: to the byte. Otherwise the two halves define the numbers.
    """

    partial: Op
    finish: Op
    exact: bool = True


@dataclass(frozen=True)
class Facets:
    """What passes may ask of an op beyond its kind; every facet has a silent default.

    `flops` counts one call from the signature's dimensions. `gathers` names the arguments of a
    POINTWISE op that have the shape of the result but are not read at the result's own index.
    `identity` says for which attributes the op returns its first argument. `tile` names the
    attribute that bounds a ROW op's reductions to tiles of the last dimension, so that the tile of
    an anchor can hold one. `split` is the pair of ops that a wide reduction splits into.
    """

    flops: Callable[..., int] | None = None
    gathers: str = ""
    identity: Callable[..., bool] | None = None
    tile: str = ""
    split: Split | None = None


class Op:
    """A named op. Called on tensors it computes; called on FX proxies it records itself."""

    def __init__(
        self, body: Callable[..., torch.Tensor], kind: Kind, signature: str, facets: Facets
    ) -> None:
        self.body = body
        self.kind = kind
        self.signature = Signature.parse(signature)
        self.facets = facets
        self._inferred: dict[tuple[Any, ...], TensorType] = {}
        self.name = self.__name__ = body.__name__
        self.__module__ = body.__module__
        self.__qualname__ = body.__qualname__
        self.__doc__ = body.__doc__
        self.defaults = {
            p.name: p.default
            for p in inspect.signature(body).parameters.values()
            if p.kind is inspect.Parameter.KEYWORD_ONLY
        }
        assert self.name not in REGISTRY, f"op {self.name} is declared twice"
        REGISTRY[self.name] = self

    def __repr__(self) -> str:
        return f"<op {self.name} {self.kind.value}: {self.signature.text}>"

    def __call__(self, *tensors: Any, **attributes: Any) -> Any:
        unknown = attributes.keys() - self.defaults.keys()
        if unknown:
            raise BadOpCall(
                op=self.name,
                problem=f"unknown attribute {sorted(unknown)}",
                signature=self.signature.text,
            )
        tracer = next((t.tracer for t in tensors if isinstance(t, torch.fx.Proxy)), None)
        if tracer is not None:
            return tracer.create_proxy("call_function", self, tensors, attributes)
        plain = [unpacked(t) for t in tensors]
        self.signature.bind(self.name, [tuple(t.shape) for t in plain])
        return self.body(*plain, **attributes)

    def infer(self, types: list[TensorType], attributes: dict[str, Any]) -> TensorType:
        """The type of the result: shape by the signature, format by the body on meta tensors."""
        key = (tuple(types), tuple(sorted(attributes.items(), key=lambda item: item[0])))
        if key not in self._inferred:
            self._inferred[key] = self._infer(types, attributes)
        return self._inferred[key]

    def _infer(self, types: list[TensorType], attributes: dict[str, Any]) -> TensorType:
        shape = self.signature.result_shape(
            self.name, [t.shape for t in types], {**self.defaults, **attributes}
        )
        metas = [torch.empty(t.shape, dtype=t.format.dtype, device="meta") for t in types]
        result = self.body(*metas, **attributes)
        assert tuple(result.shape) == shape, (
            f"op {self.name}: the body gives {tuple(result.shape)}, its signature {shape}"
        )
        return TensorType(
            shape, types[0].format if self.kind is Kind.STATE else Format.of(result.dtype)
        )

    def count_flops(self, types: list[TensorType]) -> int:
        """Floating-point operations of one call (a multiply-add counts two); 0 unless declared."""
        if self.facets.flops is None:
            return 0
        bound = self.signature.bind(self.name, [t.shape for t in types])
        wanted = inspect.signature(self.facets.flops).parameters
        return self.facets.flops(**{k: bound[k] for k in wanted})

    def elementwise(self, argument: int) -> bool:
        """True if each result element reads argument number `argument` at its own index only."""
        name, dims = self.signature.arguments[argument]
        same = dims == self.signature.result and name not in self.facets.gathers.split()
        return self.kind is Kind.POINTWISE and same

    def is_identity(self, attributes: dict[str, Any]) -> bool:
        """True if a call with `attributes` is declared to return its first argument."""
        test = self.facets.identity
        return test is not None and test(**{**self.defaults, **attributes})

    @property
    def stacked(self) -> int | None:
        """The argument of an ANCHOR whose rows are the result's columns; None if there is none.

        Stacking rows of that argument puts the results side by side.
        """
        column = self.signature.result[-1]
        holders = [i for i, (_, d) in enumerate(self.signature.arguments) if column in d]
        rows = [i for i in holders if self.signature.arguments[i][1][0] == column]
        return rows[0] if self.kind is Kind.ANCHOR and holders == rows and len(rows) == 1 else None


def _decorator(kind: Kind) -> Callable[..., Callable[[Callable[..., torch.Tensor]], Op]]:
    def with_signature(
        signature: str, **facets: Any
    ) -> Callable[[Callable[..., torch.Tensor]], Op]:
        return lambda body: Op(body, kind, signature, Facets(**facets))

    return with_signature


pointwise = _decorator(Kind.POINTWISE)
row = _decorator(Kind.ROW)
view = _decorator(Kind.VIEW)
anchor = _decorator(Kind.ANCHOR)
state = _decorator(Kind.STATE)


def wide(x: torch.Tensor) -> torch.Tensor:
    """`x` in the dtype that sums are taken in: f64 stays f64 (the oracle), all else becomes f32."""
    return x if x.dtype == torch.float64 else x.float()


def column_index(x: torch.Tensor) -> torch.Tensor:
    """The number of each column of `x`, i32 [n], for whatever the body runs on."""
    if isinstance(x, torch.Tensor):
        return torch.arange(x.shape[-1], device=x.device, dtype=torch.int32)
    return x.column_index()


Value = torch.Tensor | PackedTensor
