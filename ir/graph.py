"""A typed view over `torch.fx.Graph`: levels, graph keys, and what each placeholder stands for."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, IntEnum

import torch.fx

from ir.key import DECODE, GraphKey, Mode
from ir.op import Kind, Op
from ir.tensor import TensorType

__all__ = [
    "DECODE", "Graph", "GraphKey", "Level", "MergedWeight", "Mode", "Numerics", "Role", "Slot",
    "kind_of", "op_of", "type_of",
]  # fmt: skip


class Level(IntEnum):
    """How far a graph has come; each level keeps the invariants of `ir/verify.py` for it."""

    TRACED = 0  # as the program wrote it
    TYPED = 1  # every node has a TensorType; weights have their stored formats
    FUSED = 2  # every computed node belongs to one region
    ORDERED = 3  # nodes stand in launch order, a region's nodes together


class Numerics(Enum):
    """What a rewrite does to the bytes of a result; `meta["numerics"]` of the nodes it made."""

    EXACT = "exact"  # the same bytes as the nodes it replaces, on the same backend
    REFERENCE = "reference"  # defines the bytes that exact rewrites are held to
    DIFFERS = "differs"  # another rounding or format, because the target of the build asks for it


class Role(Enum):
    """What a placeholder stands for."""

    INPUT = "input"  # a static buffer that the host writes before a step
    WEIGHT = "weight"  # a constant of the binding
    STATE = "state"  # memory that lives across steps


@dataclass(frozen=True)
class MergedWeight:
    """Rows of several weights as one: side by side, or in turns of `width` rows (width > 0)."""

    parts: tuple[str, ...]
    width: int = 0


@dataclass(frozen=True)
class Slot:
    """A placeholder: its role, its name in the binding (weights may be merged), its type."""

    role: Role
    name: str
    type: TensorType
    merged: MergedWeight | None = None


@dataclass
class Graph:
    """A program: an fx graph whose nodes carry type, origin and, once fused, region in `meta`.

    `slots` maps placeholder names to what they stand for, in placeholder order. `outputs` maps
    output names to nodes through the fx output node, whose single argument is a dict. `history`
    names the passes run so far.
    """

    key: GraphKey
    fx: torch.fx.Graph
    slots: dict[str, Slot]
    level: Level = Level.TRACED
    history: tuple[str, ...] = ()

    def clone(self) -> Graph:
        """A copy whose nodes may be changed without touching this graph."""
        new = torch.fx.Graph()
        mapping: dict[torch.fx.Node, torch.fx.Node] = {}
        for node in self.fx.nodes:
            mapping[node] = new.node_copy(node, lambda n: mapping[n])
            mapping[node].name = node.name
            mapping[node].meta = copy.copy(node.meta)
        return Graph(self.key, new, dict(self.slots), self.level, self.history)

    @property
    def outputs(self) -> dict[str, torch.fx.Node]:
        """Output name -> node."""
        return dict(self.output_node.args[0])

    @property
    def output_node(self) -> torch.fx.Node:
        """The fx output node."""
        return next(n for n in reversed(self.fx.nodes) if n.op == "output")

    def computed(self) -> Iterator[torch.fx.Node]:
        """The nodes that are ops, in order."""
        return (n for n in self.fx.nodes if n.op == "call_function")

    def regions(self) -> dict[int, list[torch.fx.Node]]:
        """Region number -> its nodes in order (FUSED and later)."""
        found: dict[int, list[torch.fx.Node]] = {}
        for node in self.computed():
            found.setdefault(node.meta["region"], []).append(node)
        return found


def op_of(node: torch.fx.Node) -> Op:
    """The op of a computed node."""
    assert isinstance(node.target, Op), f"node {node} calls {node.target}, which is not an op"
    return node.target


def kind_of(node: torch.fx.Node) -> Kind | None:
    """The kind of a computed node; None for placeholders and the output."""
    return op_of(node).kind if node.op == "call_function" else None


def type_of(node: torch.fx.Node) -> TensorType:
    """The type of a node (TYPED and later; placeholders always have one)."""
    return node.meta["type"]
