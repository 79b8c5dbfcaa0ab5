"""Offsets for values that live for a few launches, so that no two that live together overlap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import networkx as nx

ALIGNMENT = 256


@dataclass(frozen=True)
class Value:
    """A value of `nbytes` alive from launch `first` (which writes it)
    to launch `last`, both included.
    """

    name: str
    nbytes: int
    first: int
    last: int


@dataclass(frozen=True)
class Arena:
    """Offset of each value, and the size of the whole."""

    offsets: dict[str, int]
    nbytes: int


def aligned(nbytes: int, alignment: int = ALIGNMENT) -> int:
    """`nbytes` rounded up to the alignment."""
    return -(-nbytes // alignment) * alignment


def interference(values: Sequence[Value]) -> nx.Graph:
    """The graph whose edges join values that are alive during one launch."""
    graph = nx.Graph()
    graph.add_nodes_from(v.name for v in values)
    alive: list[Value] = []
    for value in sorted(values, key=lambda v: (v.first, v.name)):
        alive = [v for v in alive if v.last >= value.first]
        graph.add_edges_from((v.name, value.name) for v in alive)
        alive.append(value)
    return graph


def place(values: Sequence[Value]) -> Arena:
    """An arena in which values that interfere never overlap: first fit,
    by start, then the larger first.
    """
    graph = interference(values)
    sizes = {v.name: aligned(v.nbytes) for v in values}
    assert len(sizes) == len(values), "names of arena values are unique"
    offsets: dict[str, int] = {}
    for value in sorted(values, key=lambda v: (v.first, -v.nbytes, v.name)):
        taken = sorted(
            (offsets[other], offsets[other] + sizes[other])
            for other in graph.neighbors(value.name)
            if other in offsets
        )
        at = 0
        for start, stop in taken:
            if at + sizes[value.name] <= start:
                break
            at = max(at, stop)
        offsets[value.name] = at
    total = max((offsets[v.name] + sizes[v.name] for v in values), default=0)
    return Arena(offsets, total)
