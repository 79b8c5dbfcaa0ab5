"""Edits of a graph that keep names unique, types present and source lines known."""

from __future__ import annotations

import copy
import re
from typing import Any

import torch.fx

from ir.graph import Graph, Level, Role, Slot, kind_of, type_of
from ir.op import Kind, Op


def fresh_name(graph: Graph, stem: str) -> str:
    """`stem`, or `stem_1`, `stem_2`, ...: the first that no node of the graph has."""
    taken = {n.name for n in graph.fx.nodes}
    number, name = 0, stem
    while name in taken:
        number += 1
        name = f"{stem}_{number}"
    return name


def insert(
    graph: Graph, before: torch.fx.Node, op: Op, args: tuple[torch.fx.Node, ...],
    attributes: dict[str, Any], like: torch.fx.Node,
) -> torch.fx.Node:  # fmt: skip
    """The new node `op(*args, **attributes)` in front of `before`, with the origin of `like`."""
    with graph.fx.inserting_before(before):
        node = graph.fx.create_node("call_function", op, args, attributes)
    node.name = fresh_name(graph, op.name) if _taken(graph, node) else node.name
    node.meta["origin"] = like.meta.get("origin", "?")
    if graph.level >= Level.TYPED:
        node.meta["type"] = op.infer([type_of(a) for a in args], attributes)
    return node


def duplicate(graph: Graph, node: torch.fx.Node) -> torch.fx.Node:
    """A second node that computes what `node` does, right in front of it."""
    with graph.fx.inserting_before(node):
        twin = graph.fx.node_copy(node)
    twin.name = fresh_name(graph, twin.name) if _taken(graph, twin) else twin.name
    twin.meta = copy.copy(node.meta)
    return twin


def add_weight(graph: Graph, slot: Slot) -> torch.fx.Node:
    """The placeholder of a new weight `slot`, after all other placeholders."""
    last = [n for n in graph.fx.nodes if n.op == "placeholder"][-1]
    name = fresh_name(graph, "_".join(re.findall(r"\w+", slot.name)))
    with graph.fx.inserting_after(last):
        node = graph.fx.create_node("placeholder", name, (), {}, name=name)
    node.name = name
    node.meta["type"] = slot.type
    graph.slots[name] = slot
    return node


def prune(graph: Graph) -> int:
    """Removes nodes whose results nothing reads, and unread weights; returns how many.

    State writes stay: later steps read them. Inputs and states stay: they are the interface.
    """
    removed = 0
    for node in reversed(list(graph.fx.nodes)):
        weight = node.op == "placeholder" and graph.slots[node.name].role is Role.WEIGHT
        pure = node.op == "call_function" and kind_of(node) is not Kind.STATE
        if not node.users and (weight or pure):
            if weight:
                del graph.slots[node.name]
            graph.fx.erase_node(node)
            removed += 1
    return removed


def _taken(graph: Graph, node: torch.fx.Node) -> bool:
    return any(n.name == node.name for n in graph.fx.nodes if n is not node)
