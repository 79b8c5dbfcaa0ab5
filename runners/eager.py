"""The runner that a proposer and a target have from the start: the graph, interpreted."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ir.binding import Binding
from ir.format import Format, TensorType
from ir.graph import Graph, GraphKey, Role
from ir.interpret import interpret
from ir.op import wide
from ir.tensor import unpacked
from runners.base import DraftRunner, Outputs
from runners.buffers import StaticBuffer, host_array, write_inputs
from runners.device_memory import host_bits
from runners.kv import KvPool
from runners.turned import TurnedCache


def state_types(binding: Binding, blocks: int | None, double: bool) -> dict[str, TensorType]:
    """The binding's states for a pool of `blocks` blocks (None: as
    declared), in f64 for the oracle.
    """
    return {
        name: replace(
            t, shape=(blocks or t.shape[0], *t.shape[1:]), format=Format.F64 if double else t.format
        )
        for name, t in binding.states.items()
    }


class EagerRunner(DraftRunner):
    """Interprets the graphs of a binding with torch on the host.

    `prepare` maps each traced graph to the one that is run: with the passes of a backend, what its
    kernels compute; without, the program as written. `double` computes in float64: the oracle.
    `pool` shares the sequences of another runner of the same binding, whose rows must be on the
    host and of the same format; rows that lie turned are copied for each step.
    """

    kind = "eager"

    def __init__(
        self, binding: Binding, *, keys: Iterable[GraphKey] | None = None,
        prepare: Callable[[Graph], Graph] = lambda graph: graph, double: bool = False,
        blocks: int | None = None, context: int | None = None, pool: KvPool | None = None,
    ) -> None:  # fmt: skip
        super().__init__(binding.name, binding.keys if keys is None else keys)
        self.binding = binding
        self.prepare = prepare
        self.double = double
        self._owns_pool = pool is None
        if pool is None:
            pool = KvPool(state_types(binding, blocks, double), context)
        self.pool = pool
        self._turned = {n: a for n, a in pool.arrays.items() if isinstance(a, TurnedCache)}
        own = {n: host_array(pool.types[n]) for n in self._turned}
        self._states = {n: _as_torch(a, pool.types[n]) for n, a in {**pool.arrays, **own}.items()}
        self._weights: dict[str, torch.Tensor] = {}
        self._graphs: dict[GraphKey, Graph] = {}
        self._buffers: dict[GraphKey, dict[str, StaticBuffer]] = {}

    def graph(self, key: GraphKey) -> Graph:
        """The graph that a step of `key` interprets."""
        if key not in self._graphs:
            self._graphs[key] = self.prepare(self.binding.graph(key))
        return self._graphs[key]

    def inputs(self, key: GraphKey) -> dict[str, TensorType]:
        """Name -> type of the inputs of `key`."""
        return {s.name: s.type for s in self.graph(key).slots.values() if s.role is Role.INPUT}

    def _run(self, key: GraphKey, inputs: dict[str, Any]) -> Outputs:
        graph = self.graph(key)
        if key not in self._buffers:
            self._buffers[key] = {
                n: StaticBuffer(n, t, host_array(t)) for n, t in self.inputs(key).items()
            }
        buffers = self._buffers[key]
        write_inputs(self.name, key, buffers, inputs)
        tensors = {n: _as_torch(b.array, b.type) for n, b in buffers.items()}
        blocks = np.unique(buffers["tables"].array) if self._turned else None
        for name, cache in self._turned.items():
            self._states[name][blocks] = _as_torch(cache[blocks], cache.type)
        with torch.inference_mode():
            outputs = interpret(
                graph, tensors, self._weights_of(graph), self._states, double=self.double
            )
        for name, cache in self._turned.items():
            cache[blocks] = host_bits(self._states[name][blocks])
        return {name: _as_numpy(value) for name, value in outputs.items()}

    def _weights_of(self, graph: Graph) -> dict[str, torch.Tensor]:
        """The graph's weights, unpacked once: a step does not pay for it again."""
        for slot in graph.slots.values():
            if slot.role is Role.WEIGHT:
                for name in slot.merged.parts if slot.merged else (slot.name,):
                    if name not in self._weights:
                        value = unpacked(self.binding.weights[name])
                        self._weights[name] = wide(value) if value.is_floating_point() else value
        return self._weights

    def close(self) -> None:
        """Frees all memory, except a pool that belongs to another runner."""
        if not self._owns_pool:
            self.pool = KvPool({}, 0)
        super().close()

    def _free(self) -> None:
        self._weights, self._states, self._graphs, self._buffers = {}, {}, {}, {}


def _as_torch(array: np.ndarray, type_: TensorType) -> torch.Tensor:
    """The array's memory as a tensor of `type_` (bf16 lives in numpy as its 16 bits)."""
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if type_.format is Format.BF16 else tensor


def _as_numpy(tensor: torch.Tensor) -> np.ndarray:
    """A host array of the tensor; bf16 and f16 are widened to f32, which loses nothing."""
    plain = tensor.detach()
    return (plain.float() if plain.dtype in (torch.bfloat16, torch.float16) else plain).numpy()
