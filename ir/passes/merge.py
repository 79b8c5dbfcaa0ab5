"""Merges sibling products: one pass over the rows of `x` for all weights that read it.

Side by side, results are columns: before    q = linear(x, wq); k = linear(x, wk); v = linear(x, wv)
after     qkv = linear(x, wq|wk|wv); q, k, v = columns(qkv, ...), columns(qkv, ...), columns(qkv,
...)

In turns of 16 rows, where all results meet in one elementwise node, so that one tile holds them
all: before    h = silu_mul(linear(x, gate), linear(x, up)) after     both = linear(x, gate|up, 16
rows in turns); h = silu_mul(lane(both, 0), lane(both, 1))

A weight that anything else reads (a tied embedding) is not merged, since it would be stored twice;
neither is a product whose result is chosen from, since its epilogue belongs to the choice.
"""

from __future__ import annotations

import torch.fx

from ir.graph import Graph, MergedWeight, Numerics, Role, Slot, kind_of, op_of, type_of
from ir.op import Kind
from ir.ops.shape import columns, lane
from ir.passes.edit import add_weight, insert, prune
from ir.passes.facts import Facts
from ir.passes.fuel import Fuel
from ir.region import is_output
from ir.tensor import TensorType


def run(graph: Graph, facts: Facts, fuel: Fuel) -> Graph:
    """The graph with sibling products merged."""
    families = [f for f in _families(graph) if len(f) > 1]
    merged: dict[tuple[torch.fx.Node, ...], torch.fx.Node] = {}
    for weights, together in _by_weights(families).items():
        widths = {_turns(family, facts) for family in together}
        width = widths.pop() if len(widths) == 1 else 0
        readers = {u for w in weights for u in w.users}
        if readers != {n for family in together for n in family}:
            continue
        for family in together:
            if weights in merged or fuel.spend(family[0], f"merges {len(family)} products at"):
                if weights not in merged:
                    merged[weights] = _merged_weight(graph, weights, width)
                _merge(graph, family, merged[weights], width)
    prune(graph)
    return graph


def _families(graph: Graph) -> list[list[torch.fx.Node]]:
    """Products of one value with plain weights of one format, in program order."""
    families: dict[tuple[object, ...], list[torch.fx.Node]] = {}
    for node in graph.computed():
        if _mergeable(graph, node):
            weight = type_of(node.args[op_of(node).stacked])
            others = tuple(a for i, a in enumerate(node.args) if i != op_of(node).stacked)
            attributes = tuple(sorted(node.kwargs.items(), key=lambda i: i[0]))
            key = (node.target, others, attributes, weight.format, weight.shape[1:])
            families.setdefault(key, []).append(node)
    return list(families.values())


def _mergeable(graph: Graph, node: torch.fx.Node) -> bool:
    """True for a product with a plain weight, whose result is neither chosen from nor an output."""
    op = op_of(node)
    if op.stacked is None:
        return False
    weight = node.args[op.stacked]
    slot = graph.slots.get(weight.name) if weight.op == "placeholder" else None
    chosen = any(u.op == "call_function" and op_of(u).facets.split for u in node.users)
    plain = slot is not None and slot.role is Role.WEIGHT and slot.merged is None
    return plain and not chosen and not is_output(node)


def _by_weights(
    families: list[list[torch.fx.Node]],
) -> dict[tuple[torch.fx.Node, ...], list[list[torch.fx.Node]]]:
    """The families by the weights that they read: the steps of a chain read the same ones."""
    found: dict[tuple[torch.fx.Node, ...], list[list[torch.fx.Node]]] = {}
    for family in families:
        weights = tuple(n.args[op_of(n).stacked] for n in family)
        if len(set(weights)) == len(weights):
            found.setdefault(weights, []).append(family)
    return found


def _turns(family: list[torch.fx.Node], facts: Facts) -> int:
    """How many rows of each weight stand together: 0 for side by side."""
    width, readers = facts.interleave, {u for n in family for u in n.users}
    if width is None or len(readers) != 1:
        return 0
    (reader,) = readers
    if kind_of(reader) is not Kind.POINTWISE or any(len(n.users) != 1 for n in family):
        return 0
    whole = all(
        op_of(reader).elementwise(i) for i, a in enumerate(reader.args) if a in family
    ) and {type_of(n).shape for n in family} == {type_of(reader).shape}
    return width if whole and type_of(reader).shape[-1] % width == 0 else 0


def _merged_weight(graph: Graph, weights: tuple[torch.fx.Node, ...], width: int) -> torch.fx.Node:
    """The placeholder of the rows of all `weights`."""
    names = tuple(graph.slots[w.name].name for w in weights)
    one = type_of(weights[0])
    rows = sum(type_of(w).shape[0] for w in weights)
    type_ = TensorType((rows, *one.shape[1:]), one.format)
    slot = Slot(Role.WEIGHT, joined_name(names), type_, MergedWeight(names, width))
    return add_weight(graph, slot)


def _merge(graph: Graph, family: list[torch.fx.Node], weight: torch.fx.Node, width: int) -> None:
    """Replaces the family by one product over the merged weight and views of its result."""
    first, op = family[0], op_of(family[0])
    args = tuple(weight if i == op.stacked else a for i, a in enumerate(first.args))
    whole = insert(graph, first, op, args, dict(first.kwargs), like=first)
    whole.meta["numerics"] = first.meta.get("numerics", Numerics.EXACT)
    start = 0
    for number, node in enumerate(family):
        stop = start + type_of(node).shape[-1]
        if width:
            attributes = {"index": number, "of": len(family), "width": width}
            part = insert(graph, first, lane, (whole,), attributes, like=node)
        else:
            part = insert(
                graph, first, columns, (whole,), {"start": start, "stop": stop}, like=node
            )
        node.replace_all_uses_with(part)
        start = stop
    for node in family:
        graph.fx.erase_node(node)


def joined_name(names: tuple[str, ...]) -> str:
    """One name for several: `layers.0.{q_proj,k_proj}.weight`, the common ends written once."""
    parts = [n.split(".") for n in names]
    shortest = min(map(len, parts))
    head = next((i for i in range(shortest) if len({p[i] for p in parts}) > 1), shortest - 1)
    tail = next((i for i in range(shortest - head) if len({p[-1 - i] for p in parts}) > 1), 0)
    middles = [".".join(p[head : len(p) - tail]) for p in parts]
    ends = [".".join(parts[0][:head]), "{" + ",".join(middles) + "}"]
    return ".".join([e for e in ends if e] + parts[0][len(parts[0]) - tail :][: tail or 0])
