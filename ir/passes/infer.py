"""Gives every node its type.

before    y = linear(x, w)                   # no type
after     y = linear(x, w)                   # f32[2,960]
"""

from __future__ import annotations

import torch.fx

from ir.errors import CircuitError, Mistyped
from ir.graph import Graph, op_of
from ir.passes.facts import Facts
from ir.passes.fuel import Fuel
from ir.tensor import TensorType


def inferred(graph: Graph) -> dict[torch.fx.Node, TensorType]:
    """The type of each placeholder and computed node, from the placeholders alone; or Mistyped."""
    types: dict[torch.fx.Node, TensorType] = {}
    for node in graph.fx.nodes:
        if node.op == "placeholder":
            types[node] = graph.slots[node.name].type
        elif node.op == "call_function":
            try:
                types[node] = op_of(node).infer([types[a] for a in node.args], dict(node.kwargs))
            except CircuitError as error:
                raise Mistyped(
                    origin=node.meta.get("origin", "?"),
                    sentence=error.sentence, advice=error.advice,
                ) from error  # fmt: skip
    return types


def run(graph: Graph, facts: Facts, fuel: Fuel) -> Graph:
    """The graph with `meta["type"]` on every node."""
    for node, type_ in inferred(graph).items():
        node.meta["type"] = type_
    return graph
