"""Splits a wide reduction over an anchor's result in two: inside tiles, and over the tiles.

before    t = argmax(linear(x, w))                         # 49152 columns read again
after     y = linear(x, w); c = tile_argmax(y, width=128)  # in the epilogue of the anchor
          t = finish_argmax(y, c)                          # over 384 candidates
"""

from __future__ import annotations

import torch.fx

from ir.graph import Graph, Numerics, kind_of, op_of, type_of
from ir.op import Kind
from ir.passes.edit import insert
from ir.passes.facts import Facts
from ir.passes.fuel import Fuel


def run(graph: Graph, facts: Facts, fuel: Fuel) -> Graph:
    """The graph with wide choices split into candidates of tiles and a choice between them."""
    width, tiled = facts.argmax_tile, {}
    for node in list(graph.computed()):
        pair = op_of(node).facets.split
        if width is None or pair is None or not _behind_anchor(node.args[0]):
            continue
        if type_of(node.args[0]).shape[-1] > width and fuel.spend(node, "splits"):
            attributes = {pair.partial.facets.tile: width}
            value = node.args[0]
            place = value, pair.partial
            if place not in tiled:  # several choices between the same candidates
                tiled[place] = insert(graph, node, pair.partial, (value,), attributes, like=node)
            partial = tiled[place]
            known = pair.finish.defaults
            kept = {n: v for n, v in {**node.kwargs, **attributes}.items() if n in known}
            given = (value, partial, *node.args[1:])
            finish = insert(graph, node, pair.finish, given, kept, like=node)
            numerics = Numerics.EXACT if pair.exact else Numerics.REFERENCE
            partial.meta["numerics"] = finish.meta["numerics"] = numerics
            node.replace_all_uses_with(finish)
            graph.fx.erase_node(node)
    return graph


def _behind_anchor(node: torch.fx.Node) -> bool:
    """True if `node` is an anchor's result, or elementwise in one."""
    while kind_of(node) is Kind.POINTWISE and op_of(node).elementwise(0):
        node = node.args[0]
    return kind_of(node) is Kind.ANCHOR
