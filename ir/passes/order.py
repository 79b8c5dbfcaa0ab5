"""Puts nodes in launch order: regions in topological order, the nodes of a region together.

before    n = norm(x) @0; r = rope(k) @2; q = linear(n, w) @0; kv_write(cache, r, v, s) @2
after     n = norm(x) @0; q = linear(n, w) @0; r = rope(k) @1; kv_write(cache, r, v, s) @1

Of the regions that may come next, the one that the program wrote first does.
"""

from __future__ import annotations

import networkx as nx

from ir.graph import Graph
from ir.passes.facts import Facts
from ir.passes.fuel import Fuel
from ir.region import region_graph


def run(graph: Graph, facts: Facts, fuel: Fuel) -> Graph:
    """The graph in launch order, its regions numbered from 0 in that order."""
    place = {node: i for i, node in enumerate(graph.fx.nodes)}
    members = graph.regions()
    first = {number: max(place[n] for n in nodes) for number, nodes in members.items()}
    launches = list(nx.lexicographical_topological_sort(region_graph(graph), key=first.get))
    end = graph.output_node
    for number, old in enumerate(launches):
        for node in members[old]:
            end.prepend(node)
            node.meta["region"] = number
    return graph
