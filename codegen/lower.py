"""A region as a kernel sees it: what is loaded, what the anchor computes, what is stored."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch.fx

from codegen.expr import Expr, accesses, make
from codegen.lazy import Lazy
from ir.graph import Graph, Role, Slot, kind_of, op_of, type_of
from ir.op import Kind
from ir.tensor import Format, TensorType

LISTED = "list"
"""What the name of a statistic begins with that holds several numbers of each row."""


@dataclass(frozen=True)
class Operand:
    """A buffer that a kernel reads or writes; `name` is the kernel's own name for it.

    `node` is the placeholder or the computed node whose value the buffer holds; `slot` tells
    weights, states and inputs from values of other regions (None).
    """

    name: str
    node: str
    type: TensorType
    slot: Slot | None = None

    @property
    def role(self) -> Role | None:
        """INPUT, WEIGHT or STATE; None for a value that another region computes."""
        return None if self.slot is None else self.slot.role


@dataclass(frozen=True)
class Stat:
    """A row statistic of the prologue: computed once per index of
    `value`, then read as `stat` nodes. A `LISTED` one holds several numbers of a row, which are
    read by their last index.
    """

    name: str
    value: Lazy


@dataclass(frozen=True)
class Store:
    """A value written to memory: `value.at(index)` may read `acc`,
    the anchor's result, at an index.
    """

    operand: Operand
    value: Lazy


@dataclass(frozen=True)
class Lowered:
    """One region, ready for a backend.

    `anchor` is the ANCHOR or STATE node (None: the region is printed from bodies alone),
    `arguments` maps the names of its signature to lazy values (the prologue, views looked through),
    `direct` to the operand where an argument is a whole buffer as it stands, `dims` binds the
    dimensions of its signature. Operands are numbered in the order of first use: reads first, then
    writes.
    """

    region: int
    nodes: tuple[torch.fx.Node, ...]
    anchor: torch.fx.Node | None
    reads: tuple[Operand, ...]
    writes: tuple[Operand, ...]
    arguments: dict[str, Lazy] = field(default_factory=dict)
    direct: dict[str, Operand] = field(default_factory=dict)
    dims: dict[str, int] = field(default_factory=dict)
    attributes: dict[str, object] = field(default_factory=dict)
    stats: tuple[Stat, ...] = ()
    stores: tuple[Store, ...] = ()

    @property
    def label(self) -> str:
        """The ops of the region, in order."""
        return "+".join(op_of(n).name for n in self.nodes if kind_of(n) is not Kind.VIEW)


class _Lowering:
    """The walk over one region's nodes."""

    def __init__(self, graph: Graph, nodes: list[torch.fx.Node]) -> None:
        self.graph = graph
        self.nodes = nodes
        self.inside = set(nodes)
        self.reads: dict[torch.fx.Node, Operand] = {}
        self.values: dict[torch.fx.Node, Lazy] = {}
        self.stats: list[Stat] = []
        self.arguments: dict[str, Lazy] = {}
        self.direct: dict[str, Operand] = {}

    def operand(self, node: torch.fx.Node) -> Operand:
        if node not in self.reads:
            slot = self.graph.slots.get(node.name) if node.op == "placeholder" else None
            self.reads[node] = Operand(f"p{len(self.reads)}", node.name, type_of(node), slot)
        return self.reads[node]

    def value(self, node: torch.fx.Node) -> Lazy:
        if node in self.values:
            return self.values[node]
        operand = self.operand(node)
        shape, format = operand.type.shape, Format.of(operand.type.format.dtype)
        return Lazy(shape, format, lambda i: make("load", *i, format=format, payload=operand.name))

    def anchor(self, node: torch.fx.Node) -> None:
        op, result = op_of(node), type_of(node)
        for name, argument in zip(op.signature.names, node.args):
            self.arguments[name] = self.value(argument)
            if argument not in self.inside:
                self.direct[name] = self.operand(argument)
        self.values[node] = Lazy(
            result.shape, result.format, lambda i: make("acc", *i, format=result.format)
        )

    def body(self, node: torch.fx.Node) -> None:
        op = op_of(node)
        value = op.body(*(self.value(a) for a in node.args), **node.kwargs)
        read_again = any(user in self.inside for user in node.users)
        if op.kind is Kind.ROW and read_again and not reads(value, "acc"):
            listed = len(value.shape) == len(self.value(node.args[0]).shape)
            name, format = f"{LISTED if listed else 's'}{len(self.stats)}", value.format
            self.stats.append(Stat(name, value))
            value = Lazy(
                tuple(value.shape), format, lambda i: make("stat", *i, format=format, payload=name)
            )
        self.values[node] = value


def reads(value: Lazy, op: str) -> bool:
    """True if an element of `value` is made of a node of kind `op` (`acc`, `stat`, ...)."""
    return bool(accesses(value.at(*(_probe(d) for d in range(len(value.shape)))), op))


def _probe(dimension: int) -> Expr:
    return make("var", format=Format.I32, payload=(f"probe{dimension}", None))


def lower(graph: Graph, region: int) -> Lowered:
    """Region `region` of a FUSED or ORDERED graph as a kernel sees it."""
    nodes = graph.regions()[region]
    walk = _Lowering(graph, nodes)
    anchor = next((n for n in nodes if kind_of(n) in (Kind.ANCHOR, Kind.STATE)), None)
    for node in nodes:
        walk.anchor(node) if node is anchor else walk.body(node)
    stores = []
    for node in nodes:
        leaves = any(user not in walk.inside for user in node.users)
        if leaves and kind_of(node) is not Kind.STATE:
            name = f"o{len(stores)}"
            stores.append(Store(Operand(name, node.name, type_of(node)), walk.values[node]))
    writes = [s.operand for s in stores]
    dims, attributes = {}, {}
    if anchor is not None:
        op = op_of(anchor)
        dims = op.signature.bind(op.name, [type_of(a).shape for a in anchor.args])
        attributes = {**op.defaults, **anchor.kwargs}
    return Lowered(
        region, tuple(nodes), anchor, tuple(walk.reads.values()), tuple(writes), walk.arguments,
        walk.direct, dims, attributes, tuple(walk.stats), tuple(stores),
    )  # fmt: skip
