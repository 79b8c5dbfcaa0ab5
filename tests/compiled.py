"""Compiles small graphs region by region and runs them, without an artifact in between."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from codegen.backend import ROWS, Backend
from codegen.lower import lower
from codegen.plan import Space
from codegen.planning import make_plan, weight_name
from codegen.store import KernelStore
from ir.graph import Graph, GraphKey, Mode, Role, op_of, type_of
from ir.interpret import merged_rows
from ir.op import Value
from ir.tensor import PackedTensor, TensorType
from ir.tracing import Scope, trace
from runners.turned import TurnedCache

THREADS = 2


def typed(
    program: Callable[[Scope], None], key: GraphKey, weights: Mapping[str, Value],
    states: Mapping[str, torch.Tensor],
) -> Graph:  # fmt: skip
    """The graph of a program with every node's type; each op is a region of its own."""
    graph = trace(
        program, key, {n: TensorType.of(w) for n, w in weights.items()},
        {n: TensorType.of(s) for n, s in states.items()},
    )  # fmt: skip
    for number, node in enumerate(graph.computed()):
        types = [type_of(a) for a in node.args]
        node.meta["type"] = op_of(node).infer(types, dict(node.kwargs))
        node.meta["region"] = number
    return graph


def regroup(graph: Graph, groups: Sequence[Sequence[str]]) -> Graph:
    """The graph with its regions given as groups of op names, in order of computation."""
    nodes = list(graph.computed())
    assert [op_of(n).name for n in nodes] == [name for group in groups for name in group]
    numbers = [number for number, group in enumerate(groups) for _ in group]
    for node, number in zip(nodes, numbers):
        node.meta["region"] = number
    return graph


def run(
    graph: Graph, backend: Backend, store: KernelStore, inputs: Mapping[str, torch.Tensor],
    weights: Mapping[str, Value], states: Mapping[str, torch.Tensor] | None = None,
    schedule: Callable[[Sequence], object] | None = None,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Output name -> value of the compiled graph; `states` are written in place."""
    regions = [lower(graph, number) for number in sorted(graph.regions())]
    layouts: dict[str, str] = {}
    for low in regions:
        assert not backend.problems(low), backend.problems(low)
        for operand in low.reads:
            if operand.role is Role.WEIGHT:
                wanted = backend.layout(low, operand)
                name = weight_name(operand.slot)
                if wanted is not None or name not in layouts:
                    layouts[name] = wanted or ROWS
    kernels = []
    for low in regions:
        own = {o.name: layouts[weight_name(o.slot)] for o in low.reads if o.role is Role.WEIGHT}
        choose = schedule or (
            lambda options, low=low: min(options, key=lambda s: backend.cost(low, s))
        )
        kernels.append(backend.emit(low, choose(list(backend.schedules(low))), own))
    plan = make_plan(graph, list(zip(regions, kernels)), layouts, backend.name)
    unique = list({k.name: k for k in kernels}.values())
    built = backend.build({"unit": backend.unit(plan, unique, [])}, store)
    slots = {weight_name(s): s for s in graph.slots.values() if s.role is Role.WEIGHT}
    arena = np.full(plan.arena_bytes + 64, 0xFF, np.uint8)
    arena = arena[-arena.ctypes.data % 64 :]
    caches = {name: TurnedCache(TensorType.of(s)) for name, s in (states or {}).items()}
    for name, cache in caches.items():
        cache[...] = bits(states[name])
    arrays = []
    for buffer in plan.buffers:
        if buffer.space is Space.ARENA:
            arrays.append(arena[buffer.offset :])
        elif buffer.space is Space.WEIGHT:
            slot = slots[buffer.name]
            value = merged_rows(slot.merged, weights) if slot.merged else weights[slot.name]
            arrays.append(
                raw(value) if buffer.layout == ROWS else backend.pack(value, buffer.layout)
            )
        elif buffer.space is Space.OUTPUT:
            arrays.append(np.full(buffer.type.nbytes, 0xFF, np.uint8))
        else:
            arrays.append(
                raw(inputs[buffer.name])
                if buffer.space is Space.INPUT
                else caches[buffer.name].memory
            )
    team = ctypes.CDLL(str(built["team.so"]), mode=ctypes.RTLD_GLOBAL)
    team.team_create.restype = ctypes.c_void_p
    team.team_destroy.argtypes = [ctypes.c_void_p]
    handle = team.team_create(THREADS)
    entry = getattr(ctypes.CDLL(str(built["program.so"])), plan.symbol)
    entry.argtypes = [ctypes.c_void_p] * 3
    table = (ctypes.c_void_p * len(arrays))(*(a.ctypes.data for a in arrays))
    try:
        assert entry(table, handle, None) == 0
    finally:
        team.team_destroy(handle)
    for name, cache in caches.items():
        bits(states[name])[...] = cache[...]
    return {
        name: torch.from_numpy(arrays[number])
        .view(plan.buffers[number].type.format.dtype)
        .reshape(plan.buffers[number].type.shape)
        for name, number in plan.outputs
    }


def bits(state: torch.Tensor) -> np.ndarray:
    """The memory of a state as numpy knows it: bf16 as its 16 bits."""
    whole = state.view(torch.int16) if state.dtype is torch.bfloat16 else state
    return whole.numpy().view(TensorType.of(state).format.storage)


def raw(value: Value) -> np.ndarray:
    """The memory of a tensor."""
    data = value.data if isinstance(value, PackedTensor) else value
    assert data.is_contiguous()
    return (
        data.view(torch.uint8).numpy() if data.dim() else data.reshape(1).view(torch.uint8).numpy()
    )


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    """Normal numbers from a seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def batch(rows: int) -> GraphKey:
    """The key of a program of `rows` rows."""
    return GraphKey(Mode.BATCH, rows)
