"""Invariants of graphs, level by level. The docstring of a rule is the sentence shown when it
breaks.

A rule yields the nodes that break it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import networkx as nx
import torch.fx

from ir.graph import Graph, Level, Role, kind_of, op_of
from ir.op import Kind, Op
from ir.passes.infer import inferred
from ir.region import OWNERS, read_at_own_index, region_graph, regions_of

Rule = Callable[[Graph], Iterator[torch.fx.Node]]


def calls_ops(graph: Graph) -> Iterator[torch.fx.Node]:
    """Every node is a placeholder, the output, or a call of a declared op."""
    for node in graph.fx.nodes:
        call = node.op == "call_function" and isinstance(node.target, Op)
        if not call and node.op not in ("placeholder", "output"):
            yield node


def tensors_are_nodes(graph: Graph) -> Iterator[torch.fx.Node]:
    """Tensors are positional arguments, attributes are keywords that the op declares."""
    for node in graph.computed():
        known = node.kwargs.keys() <= op_of(node).defaults.keys()
        if not known or not all(isinstance(a, torch.fx.Node) for a in node.args):
            yield node


def placeholders_have_slots(graph: Graph) -> Iterator[torch.fx.Node]:
    """Every placeholder has a slot of its type, in the same order, and no slot stands alone."""
    placeholders = [n for n in graph.fx.nodes if n.op == "placeholder"]
    if [n.name for n in placeholders] != list(graph.slots):
        yield from (n for n in placeholders if n.name not in graph.slots)
        yield graph.output_node
        return
    yield from (n for n in placeholders if n.meta.get("type") != graph.slots[n.name].type)


def outputs_are_computed(graph: Graph) -> Iterator[torch.fx.Node]:
    """Every output is the result of an op, and no output is a state's handle."""
    for node in graph.outputs.values():
        if kind_of(node) in (None, Kind.STATE):
            yield node


def handles_are_linear(graph: Graph) -> Iterator[torch.fx.Node]:
    """A state's handle is written once at most, after every other reader of it."""
    place = {node: i for i, node in enumerate(graph.fx.nodes)}
    for node in graph.computed():
        if kind_of(node) is Kind.STATE:
            others = [u for u in node.args[0].users if u is not node and u.op != "output"]
            late = [u for u in others if place[u] > place[node]]
            twice = [u for u in others if kind_of(u) is Kind.STATE and u.args[0] is node.args[0]]
            if late or twice:
                yield node


def writes_have_states(graph: Graph) -> Iterator[torch.fx.Node]:
    """What a state write changes is a state of the program."""
    for node in graph.computed():
        if kind_of(node) is Kind.STATE:
            handle = node.args[0]
            while handle.op == "call_function" and kind_of(handle) is Kind.STATE:
                handle = handle.args[0]
            if handle.op != "placeholder" or graph.slots[handle.name].role is not Role.STATE:
                yield node


def types_are_inferred(graph: Graph) -> Iterator[torch.fx.Node]:
    """Every node has the type that its op infers from its arguments."""
    types = inferred(graph)
    yield from (n for n in types if n.meta.get("type") != types[n])


def merged_weights_fit(graph: Graph) -> Iterator[torch.fx.Node]:
    """A merged weight has two parts or more, and turns of equal length for all of them."""
    for node in graph.fx.nodes:
        merged = graph.slots[node.name].merged if node.op == "placeholder" else None
        if merged is None:
            continue
        turn = merged.width * len(merged.parts)
        if len(merged.parts) < 2 or (turn and graph.slots[node.name].type.shape[0] % turn):
            yield node


def nothing_is_dead(graph: Graph) -> Iterator[torch.fx.Node]:
    """Every computed value is read, except the handles of states."""
    yield from (n for n in graph.computed() if not n.users and kind_of(n) is not Kind.STATE)


def regions_are_whole(graph: Graph) -> Iterator[torch.fx.Node]:
    """Every computed node belongs to a region."""
    yield from (n for n in graph.computed() if not isinstance(n.meta.get("region"), int))


def one_owner(graph: Graph) -> Iterator[torch.fx.Node]:
    """A region holds one anchor or state write at most."""
    for region in regions_of(graph):
        yield from [n for n in region.nodes if kind_of(n) in OWNERS][1:]


def regions_are_acyclic(graph: Graph) -> Iterator[torch.fx.Node]:
    """Regions can run one after another: none waits, through others, for itself."""
    deps = region_graph(graph)
    if not nx.is_directed_acyclic_graph(deps):
        stuck = nx.find_cycle(deps)[0][0]
        yield graph.regions()[stuck][0]


def views_stay_inside(graph: Graph) -> Iterator[torch.fx.Node]:
    """A view is read in its own region only: it is an index map, not memory."""
    for node in graph.computed():
        if kind_of(node) is Kind.VIEW:
            homes = {u.meta["region"] for u in node.users if u.op != "output"}
            if homes - {node.meta["region"]}:
                yield node


def epilogues_keep_index(graph: Graph) -> Iterator[torch.fx.Node]:
    """What follows an anchor in its region reads the anchor's result at its own index only."""
    for region in regions_of(graph):
        if region.anchor is None:
            continue
        behind = {region.anchor}
        for node in region.nodes:
            lanes = kind_of(node) is Kind.VIEW and any(u in region.nodes for u in node.users)
            if (any(a in behind for a in node.args) and not lanes) or any(
                kind_of(a) is Kind.VIEW and a.args[0] in behind for a in node.args
            ):
                if not read_at_own_index(graph, node, behind):
                    yield node
                behind.add(node)


def regions_stand_in_order(graph: Graph) -> Iterator[torch.fx.Node]:
    """Nodes of a region stand together, and regions are numbered as they stand."""
    expected = -1
    for node in graph.computed():
        if node.meta["region"] not in (expected, expected + 1):
            yield node
            return
        expected = node.meta["region"]


RULES: dict[Level, tuple[Rule, ...]] = {
    Level.TRACED: (
        calls_ops, tensors_are_nodes, placeholders_have_slots, outputs_are_computed,
        writes_have_states, handles_are_linear,
    ),
    Level.TYPED: (types_are_inferred, merged_weights_fit, nothing_is_dead),
    Level.FUSED: (
        regions_are_whole, one_owner, regions_are_acyclic, views_stay_inside, epilogues_keep_index,
    ),
    Level.ORDERED: (regions_stand_in_order,),
}  # fmt: skip


def rules_of(level: Level) -> list[Rule]:
    """The rules that a graph of `level` keeps, those of lower levels first."""
    return [rule for lower in Level if lower <= level for rule in RULES[lower]]


def broken(graph: Graph) -> tuple[Rule, torch.fx.Node] | None:
    """The first rule of the graph's level that is broken, and the node that breaks it."""
    for rule in rules_of(graph.level):
        for node in rule(graph):
            return rule, node
    return None
