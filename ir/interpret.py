"""The one interpreter: runs a graph of any level by calling the op of each node in order."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.fx

from ir.graph import Graph, MergedWeight, Role
from ir.op import Op
from ir.tensor import PackedTensor, unpacked

Values = Mapping[str, "torch.Tensor | PackedTensor"]
Readings = Mapping[Op, Callable]


def merged_rows(merged: MergedWeight, weights: Values) -> torch.Tensor | PackedTensor:
    """The rows of the parts as one tensor, packed if the parts are (one format for all parts)."""
    parts = [weights[name] for name in merged.parts]
    raw = [p.data.reshape(p.shape[0], -1) if isinstance(p, PackedTensor) else p for p in parts]
    if merged.width:
        grouped = [r.unflatten(0, (-1, merged.width)) for r in raw]
        data = torch.stack(grouped, dim=1).flatten(0, 2)
    else:
        data = torch.cat(raw)
    first = parts[0]
    if isinstance(first, PackedTensor):
        return PackedTensor(first.format, (data.shape[0], *first.shape[1:]), data)
    return data


def interpret(
    graph: Graph, inputs: Values, weights: Values, states: Mapping[str, object], *,
    double: bool = False, readings: Readings | None = None,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Output name -> value. States are written in place.

    `double` computes in float64 (weights and float inputs are widened; states must be float64
    already): the oracle that compiled programs are measured against. `readings` gives some ops
    another body, for instance ones over another kind of state or in another precision; the graph
    stays the same.
    """
    instead = readings or {}
    env: dict[torch.fx.Node, object] = {}

    def widened(value: torch.Tensor | PackedTensor) -> torch.Tensor:
        plain = unpacked(value)
        return plain.double() if double and plain.is_floating_point() else plain

    for node in graph.fx.nodes:
        if node.op == "placeholder":
            slot = graph.slots[node.name]
            if slot.role is Role.STATE:
                env[node] = states[slot.name]
            elif slot.role is Role.INPUT:
                env[node] = widened(inputs[slot.name])
            else:
                whole = merged_rows(slot.merged, weights) if slot.merged else weights[slot.name]
                env[node] = widened(whole)
        elif node.op == "call_function":
            call = instead.get(node.target, node.target)
            env[node] = call(*(env[a] for a in node.args), **node.kwargs)
        else:
            return {name: env[value] for name, value in node.args[0].items()}
    raise AssertionError("the graph has no output node")
