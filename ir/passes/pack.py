"""Tells each product with a stored weight which format its activations are rounded to.

before    y = linear(x, w)                            # w: q4_1[960,576]
after     y = linear(x, w, activation=Format.Q8_0)    # numerics: differs
"""

from __future__ import annotations

from ir.graph import Graph, Numerics, op_of, type_of
from ir.passes.facts import Facts
from ir.passes.fuel import Fuel

ATTRIBUTE = "activation"


def run(graph: Graph, facts: Facts, fuel: Fuel) -> Graph:
    """The graph with the activation formats that the backend uses for each weight format."""
    for node in graph.computed():
        op = op_of(node)
        if op.stacked is None or ATTRIBUTE not in op.defaults:
            continue
        format = facts.activation.get(type_of(node.args[op.stacked]).format)
        if format is not None:  # what the kernels read, not a rewrite that fuel could refuse
            node.kwargs = {**node.kwargs, ATTRIBUTE: format}
            node.meta["numerics"] = Numerics.DIFFERS
    return graph


def unrounded(graph: Graph) -> Graph:
    """A copy whose activations are read as they are: the graph before this pass."""
    plain = graph.clone()
    for node in plain.computed():
        node.kwargs = {k: v for k, v in node.kwargs.items() if k != ATTRIBUTE}
    return plain
