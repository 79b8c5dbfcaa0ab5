"""One region or one program through the Triton backend and its
interpreter, beside the eager graph.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch

from codegen.aot import load_unit
from codegen.backend_triton import TritonBackend
from codegen.interpreted import round_as_hardware
from codegen.lower import Lowered, lower
from codegen.plan import Plan, Space
from codegen.planning import make_plan, weight_name
from codegen.schedules import Schedule, ScheduleBook
from ir.graph import DECODE, Graph, GraphKey, Role, op_of, type_of
from ir.interpret import interpret, merged_rows
from ir.tensor import TensorType
from ir.tracing import Scope, trace
from runners.device_memory import shaped
from runners.launcher import bind, interpreting

Values = dict[str, torch.Tensor]


def typed(graph: Graph, region_of: Callable[[int], int]) -> Graph:
    """The graph with types and regions on its nodes; `region_of` maps
    a node's position to its region.
    """
    for position, node in enumerate(graph.computed()):
        node.meta["type"] = op_of(node).infer([type_of(a) for a in node.args], node.kwargs)
        node.meta["region"] = region_of(position)
    return graph


def device() -> torch.device:
    """The CUDA device where there is one; the host, under the interpreter, elsewhere."""
    if interpreting():
        round_as_hardware()
        return torch.device("cpu")
    return torch.device("cuda")


class Case:
    """A program over given weights, states and inputs, all of it in as
    many regions as `region_of` says.
    """

    def __init__(
        self, program: Callable[[Scope], None], weights: Mapping[str, object] | None = None,
        states: Values | None = None, key: GraphKey = DECODE,
        region_of: Callable[[int], int] = lambda _: 0, backend: TritonBackend | None = None,
    ) -> None:  # fmt: skip
        self.weights, self.states = dict(weights or {}), dict(states or {})
        types = {n: TensorType.of(w) for n, w in self.weights.items()}
        kinds = {n: TensorType.of(s) for n, s in self.states.items()}
        self.graph = typed(trace(program, key, types, kinds), region_of)
        self.backend = backend or TritonBackend()

    def lowered(self) -> list[Lowered]:
        """The regions of the program."""
        return [lower(self.graph, number) for number in self.graph.regions()]

    def eager(self, inputs: Values) -> Values:
        """The outputs of the interpreted graph; states are left as they were."""
        states = {n: s.clone() for n, s in self.states.items()}
        out = interpret(self.graph, inputs, self.weights, states)
        return {**out, **{f"state {n}": s for n, s in states.items()}}

    def triton(self, inputs: Values, schedule: Schedule | None = None) -> Values:
        """The outputs and the states of the generated kernels, from poisoned memory."""
        chosen = [
            (low, schedule or ScheduleBook().choose(low, self.backend)) for low in self.lowered()
        ]
        kernels, layouts = [], {}
        for low, choice in chosen:
            assert not self.backend.problems(low), self.backend.problems(low)
            for o in low.reads:
                if o.role is Role.WEIGHT:
                    layouts[weight_name(o.slot)] = self.backend.layout(low, o)
            kernels.append(self.backend.emit(low, choice, layouts))
        plan = make_plan(
            self.graph,
            [(low, k) for (low, _), k in zip(chosen, kernels)],
            layouts,
            self.backend.name,
        )
        unique = list({k.name: k for k in kernels}.values())
        text = self.backend.unit(plan, unique, [])
        return self.launch(plan, text, inputs)

    def launch(self, plan: Plan, text: str, inputs: Values) -> Values:
        """Runs the unit `text` of `plan` once."""
        where = device()
        arena = torch.full((max(plan.arena_bytes, 16),), 0xFF, dtype=torch.uint8, device=where)
        states = {n: s.clone().to(where) for n, s in self.states.items()}
        raws = [self.memory(b, plan, arena, states, inputs).to(where) for b in plan.buffers]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"{plan.key}.py"
            path.write_text(text)
            module = load_unit(path)
            for call in bind(plan, {path.name: module}, lambda i: raws[i], where):
                call()
        out = {n: shaped(raws[i], plan.buffers[i].type).cpu() for n, i in plan.outputs}
        return {**out, **{f"state {n}": s.cpu() for n, s in states.items()}}

    def memory(self, b, plan: Plan, arena: torch.Tensor, states: Values, inputs: Values):
        """The bytes of one buffer."""
        if b.space is Space.ARENA:
            return arena[b.offset :]
        if b.space is Space.STATE:
            return states[b.name].reshape(-1).view(torch.uint8)
        if b.space is Space.INPUT:
            return inputs[b.name].contiguous().reshape(-1).view(torch.uint8)
        if b.space is Space.OUTPUT:
            return torch.full((b.type.nbytes,), 0xFF, dtype=torch.uint8)
        slot = next(
            s
            for s in self.graph.slots.values()
            if s.role is Role.WEIGHT and weight_name(s) == b.name
        )
        value = merged_rows(slot.merged, self.weights) if slot.merged else self.weights[slot.name]
        packed = self.backend.pack(value, b.layout)
        assert packed.dtype == np.uint8 and packed.nbytes == self.backend.packed_bytes(
            b.type, b.layout
        )
        return torch.from_numpy(np.array(packed))
