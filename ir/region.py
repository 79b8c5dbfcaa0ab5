"""Regions: sets of nodes that one kernel computes, the graph of them, and what each costs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import networkx as nx
import torch.fx

from ir.graph import Graph, kind_of, op_of, type_of
from ir.op import Kind

OWNERS = (Kind.ANCHOR, Kind.STATE)


@dataclass(frozen=True)
class Region:
    """One launch: `nodes` in order, at most one of them an anchor or a state write.

    `reads` are the placeholders and the nodes of other regions whose values it loads; `stores` are
    its nodes that are outputs or that other regions read.
    """

    number: int
    nodes: tuple[torch.fx.Node, ...]
    anchor: torch.fx.Node | None
    reads: tuple[torch.fx.Node, ...]
    stores: tuple[torch.fx.Node, ...]

    @property
    def label(self) -> str:
        """The ops of the region in order, views left out."""
        return " + ".join(op_of(n).name for n in self.nodes if kind_of(n) is not Kind.VIEW)

    @property
    def flops(self) -> int:
        """Floating-point operations that its ops declare."""
        return sum(op_of(n).count_flops([type_of(a) for a in n.args]) for n in self.nodes)

    @property
    def bytes(self) -> int:
        """Bytes of weights and values that must move, each once, gathers by what they gather.

        Rows of states are not counted: how many there are is a value, not a shape.
        """
        inside = set(self.nodes)
        read = sum(
            max(_touched(r, n) for n in r.users if n in inside)
            for r in self.reads
            if not _is_handle(r)
        )
        kept = [n for n in self.stores if kind_of(n) is not Kind.STATE]
        return read + sum(type_of(n).nbytes for n in kept)


def _is_handle(node: torch.fx.Node) -> bool:
    """True for a state, before or after a write to it."""
    written = any(kind_of(u) is Kind.STATE and u.args[0] is node for u in node.users)
    return written or kind_of(node) is Kind.STATE


def _touched(value: torch.fx.Node, reader: torch.fx.Node) -> int:
    """Bytes of `value` that `reader` touches: all, or what a gather can reach."""
    whole, result = type_of(value), type_of(reader)
    if kind_of(reader) is Kind.POINTWISE:
        reached = min(1.0, 2 * math.prod(result.shape) / max(1, math.prod(whole.shape)))
        return math.ceil(whole.nbytes * reached)
    return whole.nbytes


def is_output(node: torch.fx.Node) -> bool:
    """True if the program returns the value of `node`."""
    return any(u.op == "output" for u in node.users)


def regions_of(graph: Graph) -> list[Region]:
    """The regions of a FUSED or ORDERED graph, by number."""
    found = []
    for number, nodes in sorted(graph.regions().items()):
        inside = set(nodes)
        reads = dict.fromkeys(a for n in nodes for a in n.args if a not in inside)
        stores = [n for n in nodes if any(u not in inside for u in n.users)]
        anchor = next((n for n in nodes if kind_of(n) in OWNERS), None)
        found.append(Region(number, tuple(nodes), anchor, tuple(reads), tuple(stores)))
    return found


def region_graph(graph: Graph) -> nx.DiGraph:
    """Region numbers with an edge where one must run before another.

    A region runs after those whose values it reads, and a state write after the regions that read
    the handle it replaces.
    """
    deps = nx.DiGraph()
    for node in graph.computed():
        deps.add_node(node.meta["region"])
        deps.add_edges_from(_edges_into(node, lambda n: n.meta["region"]))
    return deps


def node_graph(graph: Graph) -> nx.DiGraph:
    """Computed nodes with an edge where one must run before another."""
    deps = nx.DiGraph()
    for node in graph.computed():
        deps.add_node(node)
        deps.add_edges_from(_edges_into(node, lambda n: n))
    return deps


def _edges_into(node: torch.fx.Node, unit: Callable[[torch.fx.Node], object]) -> list[tuple]:
    before = [a for a in node.args if a.op == "call_function"]
    if kind_of(node) is Kind.STATE:
        before += [u for u in node.args[0].users if u is not node and u.op == "call_function"]
    return [(unit(b), unit(node)) for b in before if unit(b) != unit(node)]


def read_at_own_index(graph: Graph, node: torch.fx.Node, inside: set[torch.fx.Node]) -> bool:
    """True if `node` reads each value of `inside` only where it writes: it can follow an anchor.

    Lanes of an anchor over interleaved weights count as its own index, since one tile holds them.
    A reduction inside tiles follows the value that it reduces.
    """
    op, own = op_of(node), []
    for number, argument in enumerate(node.args):
        lanes = kind_of(argument) is Kind.VIEW and interleaved(graph, argument.args[0])
        if argument in inside or (lanes and argument.args[0] in inside):
            own.append(op.elementwise(number) or (number == 0 and bool(op.facets.tile)))
    return bool(own) and all(own)


def interleaved(graph: Graph, node: torch.fx.Node) -> bool:
    """True for an anchor over weights that are merged in turns."""
    stacked = op_of(node).stacked if node.op == "call_function" else None
    slot = None if stacked is None else graph.slots.get(node.args[stacked].name)
    return slot is not None and slot.merged is not None and slot.merged.width > 0


def critical_path(
    graph: Graph, cost: Callable[[Region], float] = lambda r: float(r.bytes)
) -> tuple[list[int], float]:
    """Numbers of the dearest chain of regions that run one after another, and its cost."""
    costs = {r.number: cost(r) for r in regions_of(graph)}
    deps = region_graph(graph)
    best: dict[int, tuple[float, int | None]] = {}
    for number in nx.topological_sort(deps):
        before = max(((best[p][0], p) for p in deps.predecessors(number)), default=(0.0, None))
        best[number] = (before[0] + costs[number], before[1])
    end = max(best, key=lambda n: best[n][0], default=None)
    path: list[int] = []
    while end is not None:
        path.append(end)
        end = best[end][1]
    return path[::-1], best[path[0]][0] if path else 0.0
