"""The native runner: a plan's entry in a shared library, called with addresses resolved once."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from codegen.artifact import Part
from codegen.device import physical_cores
from codegen.plan import Buffer, Plan, Space
from ir.errors import CircuitError
from ir.format import TensorType
from ir.key import GraphKey
from runners.base import DraftRunner, Outputs
from runners.buffers import StaticBuffer, anonymous, shaped, write_inputs
from runners.kv import KvPool
from runners.turned import TurnedCache

PROGRAM = "program.so"
TEAM = "team.so"


class LibraryUnusable(CircuitError):
    says = "the compiled library {path} cannot be loaded: {problem}"
    hint = "compile the model again on this machine"


class StepFailed(CircuitError):
    says = "program {key} of {name} stopped with code {code}"
    hint = "run `circuit check` on the artifact"


class BadThreads(CircuitError):
    says = "a team of {threads} threads cannot work"
    hint = "give at least 1 thread, and not more than the machine has cores"


def _library(path: os.PathLike[str], mode: int) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(os.fspath(path), mode=mode)
    except OSError as problem:
        raise LibraryUnusable(path=path, problem=problem) from problem


class TeamClosed(CircuitError):
    says = "the threads that run {name} have ended"
    hint = "close the runners before the team that they share"


class Team:
    """Threads that live across steps and sleep when idle; runners of one process share one team.

    `threads` counts the caller's own thread. None: one for each physical core that the process may
    use.
    """

    def __init__(self, part: Part, threads: int | None = None) -> None:
        self.threads = physical_cores() if threads is None else threads
        if self.threads < 1:
            raise BadThreads(threads=self.threads)
        self._library = _library(part.built(TEAM), ctypes.RTLD_GLOBAL)
        self._library.team_create.restype = ctypes.c_void_p
        self._library.team_create.argtypes = [ctypes.c_int]
        self._library.team_destroy.argtypes = [ctypes.c_void_p]
        self.handle: int | None = self._library.team_create(self.threads)
        self.lock = threading.Lock()  # the threads run one step at a time, whichever runner asks

    def close(self) -> None:
        """Ends the threads; a second call does nothing."""
        if self.handle is not None:
            self._library.team_destroy(self.handle)
            self.handle = None


@dataclass(frozen=True, eq=False)
class Loaded:
    """One program with its memory: the entry, the table of addresses,
    and the buffers the host uses.
    """

    plan: Plan
    entry: Any
    table: ctypes.Array[ctypes.c_void_p]
    inputs: dict[str, StaticBuffer]
    outputs: dict[str, np.ndarray]


class NativeRunner(DraftRunner):
    """Runs the compiled programs of one part of an artifact on the processor.

    Programs share one arena and, by name, their static input and output buffers, since one step
    runs at a time. `blocks` sets the size of the KV pool (None: as compiled), `team` shares threads
    with other runners.
    """

    kind = "native"

    def __init__(
        self, part: Part, *, threads: int | None = None, team: Team | None = None,
        blocks: int | None = None, keys: Iterable[GraphKey] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(part.binding, part.keys if keys is None else keys)
        self.part = part
        self.digest = part.digest
        self._library = _library(part.built(PROGRAM), ctypes.RTLD_LOCAL)
        states = {
            n: replace(t, shape=(blocks or t.shape[0], *t.shape[1:]))
            for n, t in part.states.items()
        }
        self.pool = KvPool(states, part.context, TurnedCache)
        self._plans: dict[GraphKey, Plan] = {}
        self._inputs: dict[GraphKey, dict[str, TensorType]] = {}
        self._loaded: dict[GraphKey, Loaded] = {}
        self._memory: dict[str, np.ndarray] = {}
        self._own_team = team is None
        self.team = team or Team(
            part, threads
        )  # last: what fails before it leaves no thread behind

    def plan(self, key: GraphKey) -> Plan:
        """The plan of `key`, parsed at its first use."""
        self._check(key)
        if key not in self._plans:
            self._plans[key] = self.part.plan(key)
        return self._plans[key]

    def inputs(self, key: GraphKey) -> dict[str, TensorType]:
        """Name -> type of the inputs of `key`."""
        if key not in self._inputs:
            buffers = self.plan(key).named(Space.INPUT)
            self._inputs[key] = {name: buffer.type for name, buffer in buffers.items()}
        return self._inputs[key]

    def preload(self, keys: Iterable[GraphKey] | None = None) -> None:
        """Resolves programs before their first step; every served one when `keys` is None."""
        for key in sorted(self.keys if keys is None else keys, key=str):
            self._program(key)

    def _run(self, key: GraphKey, inputs: dict[str, Any]) -> Outputs:
        program = self._loaded.get(key) or self._program(key)
        write_inputs(self.name, key, program.inputs, inputs)
        self._enter(key, program, None)
        return dict(program.outputs)

    def _enter(self, key: GraphKey, program: Loaded, clock: int | None) -> None:
        """Runs every launch of the program; `clock` is where nanoseconds of each are stored."""
        with self.team.lock:
            if self.team.handle is None:
                raise TeamClosed(name=self.name)
            code = program.entry(program.table, self.team.handle, clock)
        if code != 0:
            raise StepFailed(key=key, name=self.name, code=code)

    def timed(self, key: GraphKey, **inputs: Any) -> np.ndarray:
        """Nanoseconds of each launch of one step, int64 [launches]."""
        with self._lock:
            self._check(key)
            program = self._program(key)
            write_inputs(self.name, key, program.inputs, inputs)
            clock = np.zeros(len(program.plan.launches), np.int64)
            self._enter(key, program, clock.ctypes.data)
            return clock

    @contextmanager
    def substituted(self, key: GraphKey, number: int, array: np.ndarray) -> Iterator[None]:
        """The program of `key` finds `array` in place of its buffer
        `number` until the block ends.
        """
        with self._lock:
            table = self._program(key).table
        before, table[number] = table[number], array.ctypes.data
        try:
            yield
        finally:
            table[number] = before

    def _program(self, key: GraphKey) -> Loaded:
        """The program of `key`, its addresses resolved at the first call."""
        if key not in self._loaded:
            plan = self.plan(key)
            entry = getattr(self._library, plan.symbol)
            entry.restype = ctypes.c_int
            entry.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
            arrays = [self._array(b) for b in plan.buffers]
            table = (ctypes.c_void_p * len(arrays))(*(a.ctypes.data for a in arrays))
            inputs = {
                b.name: StaticBuffer(b.name, b.type, shaped(a, b.type))
                for b, a in zip(plan.buffers, arrays)
                if b.space is Space.INPUT
            }
            outputs = {
                name: shaped(arrays[number], plan.buffers[number].type)
                for name, number in plan.outputs
            }
            self._loaded[key] = Loaded(plan, entry, table, inputs, outputs)
        return self._loaded[key]

    def _array(self, buffer: Buffer) -> np.ndarray:
        """The memory of a buffer, from its first byte on."""
        if buffer.space is Space.WEIGHT:
            return self.part.weight(buffer.name, buffer.layout)
        if buffer.space is Space.STATE:
            return self.pool.arrays[buffer.name].memory
        if buffer.space is Space.ARENA:
            return self._shared(Space.ARENA.value)[buffer.offset :]
        return self._shared(f"{buffer.space.value}.{buffer.name}")

    def _shared(self, name: str) -> np.ndarray:
        """Memory that every program finds under one name, as large as the largest of them wants."""
        if name not in self._memory:
            self._memory[name] = anonymous(self.part.memory[name])
        return self._memory[name]

    def _free(self) -> None:
        self._loaded, self._plans, self._memory = {}, {}, {}
        if self._own_team:
            self.team.close()
