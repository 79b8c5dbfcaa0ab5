"""What runs a program: steps by key, static shapes, one pool of KV blocks, and an orderly end."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import numpy as np

from ir.errors import CircuitError, KeyNotServed
from ir.format import TensorType
from ir.key import GraphKey, Mode
from runners.errors import PoolInUse, RunnerClosed, RunnerInUse
from runners.kv import KvPool

Outputs = dict[str, Any]
"""Output name -> array of the runner's own kind (numpy on the host);
valid until the runner's next step.
"""


class Runner(ABC):
    """Executes the programs of one binding and owns their memory for its whole life."""

    name: str
    kind: str  # eager, native, cuda graph: shown to people
    pool: KvPool
    digest: str = ""  # of the plans; empty where nothing was compiled

    def __init__(self, name: str, keys: Iterable[GraphKey]) -> None:
        self.name = name
        self.keys = frozenset(keys)
        self.closed = False
        self.captured: dict[GraphKey, Any] = {}
        self._users: list[object] = []
        self._lock = threading.Lock()

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def serves(self, key: GraphKey) -> bool:
        """True if the runner has a program for `key`."""
        return key in self.keys

    def rows(self, mode: Mode) -> tuple[int, ...]:
        """Row counts that the runner serves in a mode, ascending."""
        return tuple(sorted(k.rows for k in self.keys if k.mode is mode))

    def widest(self, mode: Mode) -> int:
        """The largest row count that the runner serves in a mode; 0 if there is none."""
        return max(self.rows(mode), default=0)

    def fitting(self, mode: Mode, rows: int) -> GraphKey | None:
        """The narrowest program of a mode that holds `rows` rows; None if there is none."""
        return next((GraphKey(mode, r) for r in self.rows(mode) if r >= rows), None)

    @abstractmethod
    def inputs(self, key: GraphKey) -> dict[str, TensorType]:
        """Name -> type of the inputs of `key`: exactly these are given to a step."""

    def step(self, key: GraphKey, **inputs: Any) -> Outputs:
        """Runs the program of `key` once. Rows written to the pool stay;
        outputs hold until the next step.
        """
        with self._lock:
            self._check(key)
            return self._run(key, inputs)

    @abstractmethod
    def _run(self, key: GraphKey, inputs: dict[str, Any]) -> Outputs:
        """One step, with the key checked and the lock held."""

    def read(self, output: Any) -> np.ndarray:
        """A host copy of an output, which outlives the next step."""
        return np.array(output)

    def close(self) -> None:
        """Frees all memory; refused while the runner is installed
        somewhere or sequences hold its rows.
        """
        with self._lock:
            if self.closed:
                return
            self.check_free()
            self.drop_captured()
            self.pool.close()
            self._free()
            self.closed = True

    def check_free(self) -> None:
        """Raises if `close` would be refused."""
        if self._users:
            users = ", ".join(type(u).__name__ for u in self._users)
            raise RunnerInUse(name=self.name, count=len(self._users), users=users)
        if self.pool.owners:
            raise PoolInUse(count=self.pool.owners, blocks=self.pool.blocks - 1 - self.pool.free)

    def drop_captured(self) -> None:
        """Forgets launch graphs that were captured over the runner's
        memory; most runners have none.
        """
        self.captured.clear()

    @abstractmethod
    def _free(self) -> None:
        """Frees what the runner owns besides its pool."""

    def hold(self, user: object) -> None:
        """Records that `user` refers to the runner, which is then not freed."""
        if self.closed:
            raise RunnerClosed(name=self.name)
        self._users.append(user)

    def release(self, user: object) -> None:
        """Forgets one reference of `user`."""
        index = next(i for i, u in enumerate(self._users) if u is user)
        del self._users[index]

    def _check(self, key: GraphKey) -> None:
        if self.closed:
            raise RunnerClosed(name=self.name)
        if key not in self.keys:
            served = ", ".join(sorted(map(str, self.keys)))
            raise KeyNotServed(binding=self.name, key=key, served=served)


class DraftRunner(Runner):
    """A runner of a draft head."""

    def run_draft(self, key: GraphKey, **inputs: Any) -> Outputs:
        """One draft step for the rows of `key`: `tokens`, `logits`, `hidden`."""
        return self.step(key, **inputs)

    def run_chain(self, steps: int, **inputs: Any) -> tuple[list[int], list[float], Any]:
        """The target ids of `steps` drafts made in one call, their log-probabilities, and the last
        recycled hidden [1, n].
        """
        out = self.step(GraphKey(Mode.CHAIN, steps), **inputs)
        tokens = [int(out[f"tokens.{index}"][0]) for index in range(steps)]
        return tokens, [float(out[f"logprobs.{index}"][0]) for index in range(steps)], out["hidden"]


class Holder(Protocol):
    """What a draft runner is installed in; without one it runs eagerly."""

    @property
    def installed(self) -> DraftRunner | None:
        """The installed runner."""

    def set_circuit_draft(self, runner: DraftRunner | None) -> None:
        """Installs a runner; None restores the eager one."""


def swap_draft(holder: Holder, build: Callable[[], DraftRunner]) -> DraftRunner:
    """Replaces the installed draft runner by the one that `build` returns, and frees the old one.

    New built, old graphs dropped, old taken out, old freed, new installed. When the build fails or
    the old runner is still referenced from elsewhere, the holder is as it was and the new runner is
    freed.
    """
    new = build()
    old = holder.installed
    if old is not None:
        holder.set_circuit_draft(None)
        try:
            old.check_free()
        except CircuitError:
            holder.set_circuit_draft(old)
            new.close()
            raise
        old.drop_captured()
        old.close()
    holder.set_circuit_draft(new)
    return new
