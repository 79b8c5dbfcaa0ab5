"""Drops what computes nothing new: identities, repeated nodes, nodes that nothing reads.

before    p = advance(positions, by=0); h = merge_heads(split_heads(x)); s = slot_at(t, r, i)
          a = rope(k, p, cos, sin); u = slot_at(t, r, i); add(h, h); kv_write(cache, a, v, u)
after     s = slot_at(t, r, i)
          a = rope(k, positions, cos, sin); kv_write(cache, a, v, s)
"""

from __future__ import annotations

import torch
import torch.fx

from ir.graph import Graph, kind_of, op_of
from ir.op import Kind
from ir.passes.edit import prune
from ir.passes.facts import Facts
from ir.passes.fuel import Fuel
from ir.passes.infer import inferred
from ir.tensor import TensorType


def run(graph: Graph, facts: Facts, fuel: Fuel) -> Graph:
    """The graph without identities, repetitions and unread nodes, its placeholders first."""
    first = next(graph.computed(), graph.output_node)
    for node in [n for n in graph.fx.nodes if n.op == "placeholder"]:
        first.prepend(node)
    types = inferred(graph)
    known: dict[tuple[object, ...], torch.fx.Node] = {}
    for node in list(graph.computed()):
        same = _source(node, types)
        if same is None and kind_of(node) is not Kind.STATE:
            attributes = {**op_of(node).defaults, **node.kwargs}
            key = (node.target, node.args, tuple(sorted(attributes.items(), key=lambda i: i[0])))
            same = known.setdefault(key, node)
        if same not in (None, node) and fuel.spend(node, "drops"):
            node.replace_all_uses_with(same)
            graph.fx.erase_node(node)
    prune(graph)
    return graph


def _source(node: torch.fx.Node, types: dict[torch.fx.Node, TensorType]) -> torch.fx.Node | None:
    """The node whose value `node` repeats: by its declaration, or through views that undo each
    other.
    """
    if op_of(node).is_identity(dict(node.kwargs)):
        return node.args[0]
    views, source = [], node
    while kind_of(source) is Kind.VIEW:
        views.append(source)
        source = source.args[0]
        if types[source].shape == types[node].shape and _undone(views, types[source].shape):
            return source
    return None


def _undone(views: list[torch.fx.Node], shape: tuple[int, ...]) -> bool:
    """True if the views, last first, give back a tensor of `shape` as it was."""
    start = value = torch.arange(torch.Size(shape).numel(), dtype=torch.int32).reshape(shape)
    for view in reversed(views):
        value = view.target(value, **view.kwargs)
    return torch.equal(start, value)
