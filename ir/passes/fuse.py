"""Gathers nodes into regions, one kernel each.

before    i = inverse_rms(x); n = norm_scale(x, i, g); o = linear(n, w); y = add(o, x)
after     one region @0: i, n (prologue), o (anchor), y (epilogue)

An anchor and a state write own a region each. What follows an anchor at its own index joins it
(epilogue); all else is computed where it is read (prologue), a second time for a second region
that reads it. A choice of tokens is made once, and an output is stored: they start regions too,
which share a launch where they do not wait for each other.
"""

from __future__ import annotations

import networkx as nx
import torch.fx

from ir.graph import Graph, Numerics, kind_of, op_of, type_of
from ir.op import Kind
from ir.passes.edit import duplicate
from ir.passes.facts import Facts
from ir.passes.fuel import Fuel
from ir.region import OWNERS, is_output, node_graph, read_at_own_index, region_graph


def run(graph: Graph, facts: Facts, fuel: Fuel) -> Graph:
    """The graph with `meta["region"]` on every computed node."""
    state = _Fusion(graph, facts, fuel)
    owners = [n for n in graph.computed() if _owns(n) or (not facts.fuse and not _is_view(n))]
    for owner in owners:
        state.own(owner)
    if facts.fuse:
        for owner in owners:
            state.absorb_users(owner)
    for node in reversed(list(graph.computed())):
        if "region" not in node.meta:
            state.place(node)
    if facts.fuse:
        state.share_launches()
    return graph


def _is_view(node: torch.fx.Node) -> bool:
    return kind_of(node) is Kind.VIEW


def _owns(node: torch.fx.Node) -> bool:
    """True for anchors, state writes and choices: reductions to an index, which are made once."""
    chosen = kind_of(node) is Kind.ROW and not type_of(node).format.is_float
    return kind_of(node) in OWNERS or (chosen and not op_of(node).facets.tile)


class _Fusion:
    """Regions while they grow; `deps` is the graph of regions and of nodes that have none yet."""

    def __init__(self, graph: Graph, facts: Facts, fuel: Fuel) -> None:
        self.graph = graph
        self.facts = facts
        self.fuel = fuel
        self.members: dict[int, set[torch.fx.Node]] = {}
        self.deps = node_graph(graph)

    def own(self, node: torch.fx.Node) -> int:
        """The number of a new region that starts with `node`."""
        number = len(self.members)
        self.members[number] = set()
        self.deps.add_node(number)
        node.meta.setdefault("numerics", Numerics.REFERENCE)
        self.join(node, number)
        return number

    def unit(self, node: torch.fx.Node) -> object:
        return node.meta.get("region", node)

    def join(self, node: torch.fx.Node, number: int) -> None:
        """Puts `node` in region `number`."""
        self.members[number].add(node)
        node.meta["region"] = number
        if node in self.deps:
            before, after = list(self.deps.predecessors(node)), list(self.deps.successors(node))
            self.deps.add_edges_from((b, number) for b in before if b != number)
            self.deps.add_edges_from((number, a) for a in after if a != number)
            self.deps.remove_node(node)

    def absorb_users(self, owner: torch.fx.Node) -> None:
        """Joins to the region of `owner` what follows it at its own index, as far as that goes."""
        number = owner.meta["region"]
        if kind_of(owner) is Kind.STATE:
            return
        waiting = [owner]
        while waiting:
            value = waiting.pop(0)
            for user in list(value.users):
                if "region" in user.meta or user.op == "output":
                    continue
                if _is_view(user):
                    waiting.append(user)
                elif self.may_follow(user, number) and self.fuel.spend(user, "follows with"):
                    for lane in user.args:
                        if _is_view(lane) and lane.args[0] in self.members[number]:
                            self.join(lane, number)
                    user.meta["numerics"] = user.meta.get("numerics", Numerics.EXACT)
                    self.join(user, number)
                    waiting.append(user)

    def may_follow(self, node: torch.fx.Node, number: int) -> bool:
        """True if `node` may be the epilogue of region `number`, which then still is convex."""
        inside = self.members[number]
        if not read_at_own_index(self.graph, node, inside):
            return False
        lanes = [a for a in node.args if _is_view(a) and a.args[0] in inside]
        if any(set(lane.users) != {node} for lane in lanes):
            return False
        others = {self.unit(a) for a in node.args if a.op == "call_function" and a not in lanes}
        return not any(u != number and nx.has_path(self.deps, number, u) for u in others)

    def place(self, node: torch.fx.Node) -> None:
        """Puts a node without a region where it is read; stores it where that is not allowed.

        Every reader has its region: nodes are placed last first.
        """
        readers: dict[int, list[torch.fx.Node]] = {}
        for user in node.users:
            if user.op != "output":
                readers.setdefault(user.meta["region"], []).append(user)
        copies = len(readers) + is_output(node)
        free = copies == 1 or self.facts.recompute
        inner = _is_view(node) or (free and self.fuel.spend(node, "computes in its readers"))
        if not readers or not inner:
            self.own(node)
            return
        if is_output(node):
            self.own(node)
        for number, users in readers.items():
            copy = node
            if "region" in node.meta:
                copy = duplicate(self.graph, node)
                for user in users:
                    user.replace_input_with(node, copy)
            copy.meta["numerics"] = Numerics.EXACT
            self.join(copy, number)

    def share_launches(self) -> None:
        """Makes one region of regions without an owner that do not wait for each other."""
        deps = region_graph(self.graph)
        kept: list[int] = []
        for number, nodes in self.graph.regions().items():
            if any(kind_of(n) in OWNERS for n in nodes):
                continue
            other = next((k for k in kept if not _ordered(deps, k, number)), None)
            if other is None or not self.fuel.spend(nodes[0], "shares a launch with"):
                kept.append(number)
                continue
            for node in nodes:
                node.meta["region"] = other
            deps = region_graph(self.graph)


def _ordered(deps: nx.DiGraph, a: int, b: int) -> bool:
    """True if one of two regions waits for the other."""
    return nx.has_path(deps, a, b) or nx.has_path(deps, b, a)
