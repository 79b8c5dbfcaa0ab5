"""Seeded values on which a program may be interpreted: valid tables, dead cache rows poisoned.

Index inputs are known by the names that programs share: `ids`, `positions`, `tables`,
`row_sequence`, `indices`, `parents`, `last_row`, `bitmask`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ir.format import BLOCK
from ir.graph import Graph, Mode, Role, Slot
from ir.tensor import Format, PackedTensor, TensorType

BLOCK_ROWS = 16
Value = torch.Tensor | PackedTensor


@dataclass(frozen=True)
class Sample:
    """Inputs, weights and states of one interpretation. States are cloned by who runs on them."""

    inputs: Mapping[str, torch.Tensor]
    weights: Mapping[str, Value]
    states: Mapping[str, torch.Tensor]

    def fresh_states(self, *, double: bool = False) -> dict[str, torch.Tensor]:
        """The states again, to be written to; in f64 for the oracle."""
        return {
            n: s.double() if double and s.is_floating_point() else s.clone()
            for n, s in self.states.items()
        }


def sample(graph: Graph, seed: int, weights: Mapping[str, Value] | None = None) -> Sample:
    """Values for every slot of `graph`, the same for a seed; `weights` replace drawn ones."""
    draw = torch.Generator().manual_seed(seed)
    slots, given = list(graph.slots.values()), weights or {}
    made = {
        s.name: weight_like(s, draw)
        for s in slots
        if s.role is Role.WEIGHT and not s.merged and s.name not in given
    }
    inputs, live = _inputs(graph, draw)
    states = {s.name: _state(s, live, draw) for s in slots if s.role is Role.STATE}
    return Sample(inputs, {**made, **given}, states)


def weight_like(slot: Slot, draw: torch.Generator) -> Value:
    """A weight of the slot's type: around one for vectors, scaled by its width for matrices."""
    shape, format = slot.type.shape, slot.type.format
    if format.is_block:
        return packed_like(slot.type, draw)
    if not format.is_float:
        return torch.randint(0, max(shape[0], 2), shape, generator=draw).to(format.dtype)
    value = torch.randn(shape, generator=draw)
    value = 1 + 0.1 * value if len(shape) == 1 else value * shape[-1] ** -0.5
    return value.to(format.dtype)


def packed_like(type_: TensorType, draw: torch.Generator) -> PackedTensor:
    """Random blocks of a block format: any quants, scales that give elements of about 1/sqrt(k)."""
    data = torch.randint(0, 256, (type_.nbytes,), generator=draw, dtype=torch.uint8)
    blocks = data.reshape(-1, type_.nbytes * BLOCK // torch.Size(type_.shape).numel())
    step = type_.shape[-1] ** -0.5 / (64 if type_.format is Format.Q8_0 else 4)
    scale = (0.5 + torch.rand(len(blocks), 1, generator=draw)) * step
    blocks[:, :2] = scale.half().view(torch.uint8)
    if type_.format is Format.Q4_1:
        blocks[:, 2:4] = (-8 * scale).half().view(torch.uint8)
    return PackedTensor(type_.format, type_.shape, blocks.reshape(*type_.shape[:-1], -1))


def _inputs(graph: Graph, draw: torch.Generator) -> tuple[dict[str, torch.Tensor], set[int]]:
    """Values of the inputs, and the cache slots that hold rows from before the step."""
    types = {s.name: s.type for s in graph.slots.values() if s.role is Role.INPUT}
    inputs = {n: _plain_input(t, draw) for n, t in types.items()}
    if "indices" not in types:
        return inputs, set()
    rows = types["indices"].shape[0]
    s, t = types["tables"].shape if "tables" in types else (1, 1)
    blocks = min((x.type.shape[0] for x in graph.slots.values() if x.role is Role.STATE), default=1)
    chosen = 1 + torch.randperm(max(blocks - 1, s * t), generator=draw)[: s * t]
    tables = (chosen % blocks).clamp(min=min(1, blocks - 1)).reshape(s, t).int()
    steps = graph.key.rows if graph.key.goes_on else rows
    room = max(1, t * BLOCK_ROWS - steps)
    starts = torch.randint(0, room, (s,), generator=draw)
    sequence = torch.arange(rows) % s
    indices = starts[sequence] + torch.arange(rows) // s
    if rows > 1 and graph.key.mode is Mode.BATCH:
        indices[-1] = -1
    inputs |= {"tables": tables, "indices": indices.int(), "row_sequence": sequence.int()}
    inputs["positions"] = indices.clamp(min=0).int()
    if "last_row" in types:
        inputs["last_row"] = torch.tensor([rows - 1], dtype=torch.int32)
    if "parents" in types:
        inputs["parents"] = _parents(rows, draw)
    live = {
        int(tables[q, j // BLOCK_ROWS]) * BLOCK_ROWS + j % BLOCK_ROWS
        for q in range(s)
        for j in range(int(starts[q]))
    }
    return {n: v for n, v in inputs.items() if n in types}, live


def _parents(rows: int, draw: torch.Generator) -> torch.Tensor:
    """A random tree whose root is row 0: every other row continues one before it."""
    drawn = [int(torch.randint(0, row, (), generator=draw)) for row in range(1, rows)]
    return torch.tensor([0, *drawn], dtype=torch.int32)


def _plain_input(type_: TensorType, draw: torch.Generator) -> torch.Tensor:
    if type_.format.is_float:
        return torch.randn(type_.shape, generator=draw).to(type_.format.dtype)
    high = 2**31 - 1 if len(type_.shape) > 1 else 97
    return torch.randint(0, high, type_.shape, generator=draw).to(type_.format.dtype)


def _state(slot: Slot, live: set[int], draw: torch.Generator) -> torch.Tensor:
    """A cache whose live rows are random and whose other rows are NaN: nothing may read those."""
    value = torch.full(slot.type.shape, torch.nan)
    drawn = torch.randn(slot.type.shape, generator=draw)
    for number in live:
        value[number // BLOCK_ROWS, :, :, number % BLOCK_ROWS] = drawn[
            number // BLOCK_ROWS, :, :, number % BLOCK_ROWS
        ]
    return value.to(slot.type.format.dtype)
