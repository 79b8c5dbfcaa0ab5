"""The eager runner: interprets the graphs of a binding with torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from ir.format import Format
from ir.graph import Graph, Role
from ir.interpret import interpret
from ir.key import GraphKey
from runners.base import DraftRunner, Outputs
from runners.errors import InputMismatch, RunnerClosed
from runners.kv import KvPool

if TYPE_CHECKING:
    from ir.binding import Binding


class EagerRunner(DraftRunner):
    """Runs a binding by calling its ops in order; a graph is traced at the first step of its key.

    `double` computes in float64, the oracle that compiled programs are measured against; its cache is
    float64 as well.
    """

    def __init__(self, binding: Binding, *, double: bool = False) -> None:
        self.name, self.keys = binding.name, binding.keys
        self._binding, self._double, self._closed = binding, double, False
        states = binding.states
        if double:
            states = {n: type(t)(t.shape, Format.F64) for n, t in states.items()}
        self.pool = KvPool(states)
        self._states = {n: _as_torch(a, states[n].format) for n, a in self.pool.arrays.items()}
        self._graphs: dict[GraphKey, Graph] = {}

    def graph(self, key: GraphKey) -> Graph:
        """The traced graph of `key`."""
        if key not in self._graphs:
            self._graphs[key] = self._binding.graph(key)
        return self._graphs[key]

    def step(self, key: GraphKey, **inputs: np.ndarray) -> Outputs:
        """Interprets the graph of `key`; outputs are new arrays."""
        if self._closed:
            raise RunnerClosed(name=self.name)
        graph = self.graph(key)
        self._check(graph, inputs)
        tensors = {name: torch.from_numpy(np.ascontiguousarray(a)) for name, a in inputs.items()}
        with torch.no_grad():
            outputs = interpret(
                graph, tensors, self._binding.weights, self._states, double=self._double
            )
        return {name: _as_numpy(value) for name, value in outputs.items()}

    def _check(self, graph: Graph, inputs: dict[str, np.ndarray]) -> None:
        wanted = {s.name: s.type for s in graph.slots.values() if s.role is Role.INPUT}
        for name in wanted.keys() | inputs.keys():
            problem = None
            if name not in inputs:
                problem = f"{name} is missing"
            elif name not in wanted:
                problem = f"{name} is not one of them"
            elif tuple(inputs[name].shape) != wanted[name].shape:
                problem = f"{name} has shape {list(inputs[name].shape)}"
            if problem:
                raise InputMismatch(
                    key=graph.key, name=self.name, problem=problem,
                    wanted=", ".join(f"{n} {t}" for n, t in wanted.items()),
                )  # fmt: skip

    def close(self) -> None:
        """Drops graphs and states."""
        self._closed = True
        self._graphs.clear()
        self._states.clear()


def _as_torch(array: np.ndarray, format: Format) -> torch.Tensor:
    """A tensor over the memory of `array`."""
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if format is Format.BF16 else tensor


def _as_numpy(value: torch.Tensor) -> np.ndarray:
    return (value.float() if value.dtype in (torch.bfloat16, torch.float16) else value).numpy()
