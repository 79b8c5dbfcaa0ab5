"""Runs generated Triton modules: the part that launching one by one
and captured graphs have in common.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from codegen.aot import launch_options, load_unit
from codegen.artifact import Part
from codegen.plan import Buffer, Plan, Space
from ir.errors import CircuitError
from ir.format import TensorType
from ir.key import GraphKey, Mode
from runners.base import DraftRunner, Outputs
from runners.device_memory import DeviceState, StagedInputs, as_tensor, shaped
from runners.errors import InputMismatch
from runners.kv import KvPool

ELEMENTS = {
    "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "i32": torch.int32,
    "i64": torch.int64, "i8": torch.int8, "u8": torch.uint8,
}  # fmt: skip


class NoCudaDevice(CircuitError):
    says = "{name} is compiled for a CUDA device, and this machine has none that torch can use"
    hint = (
        "compile with `--backend cpp` for the processor, or run it where "
        "`torch.cuda.is_available()`"
    )


class DeviceTooOld(CircuitError):
    says = "{name} needs compute capability 8.0 or later, and {device} has {major}.{minor}"
    hint = "run it on an Ampere or later device, or compile with `--backend cpp`"


def interpreting() -> bool:
    """True if Triton runs kernels in its interpreter, on the host."""
    import triton

    return bool(triton.knobs.runtime.interpret)


def usable_device(name: str) -> torch.device:
    """The device that kernels run on: the current CUDA device, or
    the host under the interpreter.
    """
    if interpreting():
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise NoCudaDevice(name=name)
    major, minor = torch.cuda.get_device_capability()
    if major < 8:
        device = torch.cuda.get_device_name()
        raise DeviceTooOld(name=name, device=device, major=major, minor=minor)
    return torch.device("cuda", torch.cuda.current_device())


def bind(
    plan: Plan, modules: dict[str, Any], memory: Callable[[int], torch.Tensor], device: torch.device
) -> list[Callable[[], None]]:
    """The launches of a plan as calls without arguments, in order; `memory` gives a buffer's bytes.

    Counters of a kernel are zero before its first launch, and every launch leaves them zero.
    """
    kernels = {name: record for m in modules.values() for name, record in m.KERNELS.items()}
    calls: list[Callable[[], None]] = []

    def launch(name: str, *numbers: int) -> None:
        function, grid, warps, stages, counters, parameters = kernels[name]
        counted = torch.zeros(counters, dtype=torch.int32, device=device)
        arguments = [
            counted if number < 0 else memory(numbers[number])[offset:].view(ELEMENTS[type_])
            for number, offset, type_ in parameters
        ]
        options = launch_options(warps, stages)
        calls.append(lambda: function[grid](*arguments, **options))

    getattr(modules[f"{plan.key}.py"], plan.symbol)(launch)
    return calls


@dataclass(frozen=True, eq=False)
class Resolved:
    """One program with its memory."""

    plan: Plan
    calls: list[Callable[[], None]]
    inputs: StagedInputs
    outputs: dict[str, torch.Tensor]

    def launch(self) -> None:
        """Enqueues every launch on the current stream."""
        for call in self.calls:
            call()


class TritonRunner(DraftRunner):
    """Launches the kernels of one part of an artifact one by one, on a
    device or under the interpreter.

    Programs share one arena and, by name, their output buffers, since one step runs at a time.
    Outputs are tensors on the device; inputs may be host arrays or tensors on the device. `blocks`
    sets the size of the KV pool (None: as compiled).
    """

    kind = "triton"

    def __init__(
        self, part: Part, *, blocks: int | None = None, keys: Iterable[GraphKey] | None = None
    ) -> None:  # fmt: skip
        super().__init__(part.binding, part.keys if keys is None else keys)
        self.device = usable_device(part.binding)
        self.part = part
        self.digest = part.digest
        states = {
            n: replace(t, shape=(blocks or t.shape[0], *t.shape[1:]))
            for n, t in part.states.items()
        }
        self.pool = KvPool(states, part.context, lambda t: DeviceState(t, self.device))
        self._plans: dict[GraphKey, Plan] = {}
        self._resolved: dict[GraphKey, Resolved] = {}
        self._modules: dict[str, Any] = {}
        self._memory: dict[str, torch.Tensor] = {}

    def plan(self, key: GraphKey) -> Plan:
        """The plan of `key`, parsed at its first use."""
        self._check(key)
        if key not in self._plans:
            self._plans[key] = self.part.plan(key)
        return self._plans[key]

    def inputs(self, key: GraphKey) -> dict[str, TensorType]:
        """Name -> type of the inputs of `key`."""
        return {n: b.type for n, b in self.plan(key).named(Space.INPUT).items()}

    def read(self, output: torch.Tensor) -> np.ndarray:
        """A host copy of an output, which waits for the step; bf16 and f16 are widened to f32."""
        wide = output.float() if output.dtype in (torch.bfloat16, torch.float16) else output
        return wide.cpu().numpy().copy()

    def run_chain(self, steps: int, **inputs: Any) -> tuple[list[int], list[float], Any]:
        """The target ids of `steps` drafts made in one call, their log-probabilities, and the last
        recycled hidden [1, n]; the host waits once.
        """
        out = self.step(GraphKey(Mode.CHAIN, steps), **inputs)
        names = [f"{name}.{index}" for name in ("tokens", "logprobs") for index in range(steps)]
        made = torch.cat([out[name].double() for name in names]).tolist()  # f64 holds every id
        return [int(token) for token in made[:steps]], made[steps:], out["hidden"]

    def _run(self, key: GraphKey, inputs: dict[str, Any]) -> Outputs:
        program = self.resolve(key)
        self._ready(key, program)
        self._accept(key, program, inputs)
        program.inputs.write(inputs)
        self._launch(key, program)
        return dict(program.outputs)

    def _ready(self, key: GraphKey, program: Resolved) -> None:
        """What must be done once before the first step of `key`: nothing here."""

    def _launch(self, key: GraphKey, program: Resolved) -> None:
        program.launch()

    def _accept(self, key: GraphKey, program: Resolved, given: dict[str, Any]) -> None:
        """Raises unless exactly the program's inputs are given, each of its shape and kind."""
        types = program.inputs.types
        problems = [f"{n} is missing" for n in types.keys() - given.keys()]
        problems += [f"{n} is not one of them" for n in given.keys() - types.keys()]
        for n in types.keys() & given.keys():
            value = as_tensor(given[n], types[n])
            same_kind = value.is_floating_point() == types[n].format.is_float
            if tuple(value.shape) != types[n].shape or not same_kind:
                problems.append(f"{n} is {value.dtype}[{','.join(map(str, value.shape))}]")
        if problems:
            wanted = ", ".join(f"{n} {t}" for n, t in types.items())
            raise InputMismatch(
                key=key, name=self.name, problem="; ".join(sorted(problems)), wanted=wanted
            )

    def resolve(self, key: GraphKey) -> Resolved:
        """The program of `key` with its memory, made at the first call."""
        if key not in self._resolved:
            plan = self.plan(key)
            staged = StagedInputs(self.inputs(key), self.device)
            raws = [self._raw(b, staged) for b in plan.buffers]
            calls = bind(plan, self._units(), lambda number: raws[number], self.device)
            outputs = {n: shaped(raws[i], plan.buffers[i].type) for n, i in plan.outputs}
            self._resolved[key] = Resolved(plan, calls, staged, outputs)
        return self._resolved[key]

    @contextmanager
    def substituted(self, key: GraphKey, number: int, data: np.ndarray) -> Iterator[None]:
        """Until the block ends, weight `number` of the plan of `key` holds
        `data` instead of its own bytes.
        """
        self.resolve(key)
        weight = self._memory[f"weight.{self.plan(key).buffers[number].name}"]
        kept = weight.clone()
        weight.copy_(torch.from_numpy(np.array(data)))
        try:
            yield
        finally:
            weight.copy_(kept)

    def _units(self) -> dict[str, Any]:
        """The generated modules of the part by file name."""
        if not self._modules:
            for key in self.part.keys:
                self._modules[f"{key}.py"] = load_unit(self.part.built(f"{key}.py"))
        return self._modules

    def _raw(self, buffer: Buffer, staged: StagedInputs) -> torch.Tensor:
        """The memory of a buffer from its first byte on, uint8."""
        if buffer.space is Space.INPUT:
            return staged.raw(buffer.name)
        if buffer.space is Space.STATE:
            return self.pool.arrays[buffer.name].raw()
        if buffer.space is Space.WEIGHT:
            return self._kept(f"weight.{buffer.name}", lambda: self._weight(buffer))
        name = Space.ARENA.value if buffer.space is Space.ARENA else f"output.{buffer.name}"
        memory = self._kept(name, lambda: self._zeros(self.part.memory[name]))
        return memory[buffer.offset :]

    def _kept(self, name: str, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        if name not in self._memory:
            self._memory[name] = make()
        return self._memory[name]

    def _zeros(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(max(nbytes, 16), dtype=torch.uint8, device=self.device)

    def _weight(self, buffer: Buffer) -> torch.Tensor:
        host = np.array(self.part.weight(buffer.name, buffer.layout))
        return torch.from_numpy(host).to(self.device)

    def _free(self) -> None:
        self._resolved, self._plans, self._memory, self._modules = {}, {}, {}, {}
