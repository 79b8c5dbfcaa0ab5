"""Graphs as text: Python that looks ready to run, with provenance, types and source lines."""

from __future__ import annotations

from typing import Any

import torch.fx

from ir.graph import Graph, Level, Role, Slot
from ir.region import Region, regions_of
from ir.tensor import Format


def text(graph: Graph, *, origins: bool = True) -> str:
    """The graph as Python: one line a node, with its type, numerics class and source line."""
    lines = [f"# after {graph.history[-1]}" if graph.history else "# no history"]
    whole = graph.level >= Level.FUSED and all("region" in n.meta for n in graph.computed())
    regions = regions_of(graph) if whole else []
    if regions:
        lines.append(f"# {len(regions)} launches")
    lines.append(f"def {graph.key}(")
    names = [n for n in graph.fx.nodes if n.op == "placeholder"]
    lines += [f"    {n.name}: {_slot(graph.slots[n.name])}" for n in names if n.name in graph.slots]
    lines.append("):")
    number = None
    by_number = {r.number: r for r in regions}
    for node in graph.computed():
        if regions and node.meta.get("region") != number:
            number = node.meta.get("region")
            lines.append(_heading(by_number[number]))
        lines.append("    " + _line(node, origins))
    outputs = ", ".join(f"{name!r}: {value}" for name, value in graph.outputs.items())
    return "\n".join([*lines, "    return {" + outputs + "}", ""])


def _slot(slot: Slot) -> str:
    note = f"{slot.role.value} {slot.name}"
    if slot.merged is not None and slot.merged.width:
        note += f", in turns of {slot.merged.width} rows"
    return f"{slot.type},  # {note}" if slot.role is not Role.INPUT else f"{slot.type},  # input"


def _heading(region: Region) -> str:
    return f"    # region {region.number}: {region.label} · {amount(region.bytes)}B" + (
        f" · {amount(region.flops)}flop" if region.flops else ""
    )


def _line(node: torch.fx.Node, origins: bool) -> str:
    attributes = [f"{k}={_literal(v)}" for k, v in node.kwargs.items()]
    call = f"{node.name} = ops.{_name(node)}({', '.join([*map(str, node.args), *attributes])})"
    numerics = node.meta.get("numerics")
    notes = [str(node.meta.get("type", "")), numerics.value if numerics else ""]
    notes.append(node.meta.get("origin", "") if origins else "")
    told = "  ".join(n for n in notes if n)
    return f"{call:<56}  # {told}" if told else call


def _name(node: torch.fx.Node) -> str:
    return getattr(node.target, "name", getattr(node.target, "__name__", str(node.target)))


def _literal(value: Any) -> str:
    return f"Format.{value.name}" if isinstance(value, Format) else repr(value)


def amount(number: float) -> str:
    """`number` in thousands: `1.2 k`, `34 M`."""
    for unit in ("", "k", "M", "G", "T"):
        if abs(number) < 1000 or unit == "T":
            return f"{number:.3g} {unit}"
        number /= 1000
    raise AssertionError
