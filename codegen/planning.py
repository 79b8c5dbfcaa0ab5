"""From lowered regions and their kernels to the plan of one program."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch.fx

from codegen.arena import Value, place
from codegen.kernel import Kernel
from codegen.plan import Buffer, Launch, Plan, Space
from ir.errors import CircuitError
from ir.format import Format, TensorType
from ir.graph import Graph, Role, Slot, kind_of, op_of, type_of
from ir.op import Kind

if TYPE_CHECKING:
    from codegen.lower import Lowered, Operand


class UnboundOutput(CircuitError):
    says = "output `{output}` of program {key} is computed by no launch"
    hint = "bind a value that an op computes with `scope.output`"


def weight_name(slot: Slot) -> str:
    """The name of a weight in plans and artifacts; merged parts in
    turns of 16 rows end in `/16`.
    """
    turns = slot.merged.width if slot.merged else 0
    return f"{slot.name}/{turns}" if turns else slot.name


def make_plan(
    graph: Graph,
    regions: Sequence[tuple[Lowered, Kernel]],
    layouts: Mapping[str, str],
    backend: str,
) -> Plan:
    """The plan that launches `regions` in order; `layouts` gives the
    layout of each weight by its name.
    """
    planner = _Planner(graph, layouts)
    launches = [planner.launch(n, low, kernel) for n, (low, kernel) in enumerate(regions)]
    return planner.plan(launches, backend)


class _Planner:
    """Numbers buffers in the order of first use and notes when arena values live."""

    def __init__(self, graph: Graph, layouts: Mapping[str, str]) -> None:
        self.graph = graph
        self.layouts = layouts
        self.nodes = {n.name: n for n in graph.fx.nodes}
        self.bound: dict[str, str] = {}  # node name -> its first output name
        for output, node in graph.outputs.items():
            self.bound.setdefault(node.name, output)
        self.buffers: list[Buffer] = []
        self.numbers: dict[tuple[Space, str], int] = {}
        self.alive: dict[str, list[int]] = {}  # arena value -> first and last launch
        self.written: set[str] = set()

    def number(self, buffer: Buffer) -> int:
        """The number of a buffer, new or known."""
        at = self.numbers.setdefault((buffer.space, buffer.name), len(self.buffers))
        if at == len(self.buffers):
            self.buffers.append(buffer)
        return at

    def buffer(self, node: torch.fx.Node) -> Buffer:
        """What holds the value of `node`; the handle of a state is the state."""
        while kind_of(node) is Kind.STATE:
            node = node.args[0]
        slot = self.graph.slots.get(node.name) if node.op == "placeholder" else None
        if slot is None:
            output = self.bound.get(node.name)
            return Buffer(
                Space.OUTPUT if output else Space.ARENA, output or node.name, type_of(node)
            )
        if slot.role is Role.WEIGHT:
            name = weight_name(slot)
            return Buffer(Space.WEIGHT, name, slot.type, self.layouts[name])
        return Buffer(Space.STATE if slot.role is Role.STATE else Space.INPUT, slot.name, slot.type)

    def use(self, buffer: Buffer, launch: int) -> int:
        """The number of `buffer`, which `launch` reads or writes."""
        if buffer.space is Space.ARENA:
            self.alive.setdefault(buffer.name, [launch, launch])[1] = launch
        return self.number(buffer)

    def launch(self, number: int, lowered: Lowered, kernel: Kernel) -> Launch:
        """The launch of one region: its reads, its writes, its scratch."""
        buffers = [self.buffer(self.nodes[o.node]) for o in (*lowered.reads, *lowered.writes)]
        self.written |= {o.node for o in lowered.writes}
        if kernel.scratch_bytes:
            scratch = TensorType((kernel.scratch_bytes,), Format.U8)
            buffers.append(Buffer(Space.ARENA, f"scratch.{number}", scratch))
        arguments = tuple(self.use(b, number) for b in buffers)
        flops = sum(op_of(n).count_flops([type_of(a) for a in n.args]) for n in lowered.nodes)
        numerics = {c for n in lowered.nodes if (c := n.meta.get("numerics"))}
        return Launch(
            kernel.name, arguments, lowered.region, lowered.label, flops, _moved(lowered, buffers),
            tuple(sorted(c.value for c in numerics)),
        )  # fmt: skip

    def plan(self, launches: Sequence[Launch], backend: str) -> Plan:
        """The plan of `launches`, with arena offsets and every output bound to its buffer."""
        for name, slot in self.graph.slots.items():
            if slot.role is Role.INPUT:  # an input that no launch reads is an input all the same
                self.number(self.buffer(self.nodes[name]))
        outputs = []
        for output, node in sorted(self.graph.outputs.items()):
            buffer = self.buffer(node)
            if buffer.space is Space.OUTPUT and node.name not in self.written:
                raise UnboundOutput(output=output, key=self.graph.key)
            outputs.append((output, self.number(buffer)))
        values = [
            Value(b.name, b.type.nbytes, *self.alive[b.name])
            for b in self.buffers
            if b.space is Space.ARENA
        ]
        arena = place(values)
        buffers = tuple(
            Buffer(b.space, b.name, b.type, b.layout, arena.offsets[b.name])
            if b.space is Space.ARENA
            else b
            for b in self.buffers
        )
        key = self.graph.key
        return Plan(key, backend, buffers, tuple(launches), tuple(outputs), arena.nbytes)


def _moved(lowered: Lowered, buffers: Sequence[Buffer]) -> int:
    """Bytes of weights and values that the region must move: each once;
    rows of states are not counted.
    """
    inside = set(lowered.nodes)
    reads = sum(
        _read(operand, inside)
        for operand, buffer in zip(lowered.reads, buffers)
        if buffer.space is not Space.STATE
    )
    return reads + sum(o.type.nbytes for o in lowered.writes)


def _read(operand: Operand, inside: set[torch.fx.Node]) -> int:
    """Bytes of `operand` that are read: no more elements than its
    pointwise readers have results.
    """
    users = [n for n in inside if any(a.name == operand.node for a in n.args)]
    whole = operand.type.nbytes
    if not all(kind_of(n) is Kind.POINTWISE for n in users):
        return whole
    wanted = sum(math.prod(type_of(n).shape) for n in users)
    return min(whole, wanted * whole // max(1, math.prod(operand.type.shape)))
