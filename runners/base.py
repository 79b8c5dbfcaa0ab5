"""What runs a program: one verb per step, over arrays, whatever is underneath."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import numpy as np

from ir.key import GraphKey, Mode
from runners.kv import KvPool

Outputs = Mapping[str, np.ndarray]


class Runner(ABC):
    """The programs of one binding over one paged cache.

    Nothing here depends on torch, so that a compiled artifact is run without importing it.
    """

    name: str
    keys: tuple[GraphKey, ...]
    pool: KvPool
    digest: str = ""  # of the plan; empty where nothing was compiled

    def serves(self, key: GraphKey) -> bool:
        """True if there is a program for `key`."""
        return key in self.keys

    def widest(self, mode: Mode) -> int:
        """The largest row count of the programs of `mode`; 0 if there is none."""
        return max((key.rows for key in self.keys if key.mode is mode), default=0)

    @abstractmethod
    def step(self, key: GraphKey, **inputs: np.ndarray) -> Outputs:
        """Runs the program of `key` once; its outputs by name, valid until the next step.

        Inputs are i32 and f32 arrays of the exact shapes of the program. States are written in place.
        """

    @abstractmethod
    def close(self) -> None:
        """Frees what the runner owns; a second call does nothing."""


class DraftRunner(Runner):
    """A runner of a draft head's programs."""

    def run_draft(self, key: GraphKey, **inputs: np.ndarray) -> Outputs:
        """One draft step for the rows of `key`: `tokens`, `logits`, `hidden`."""
        return self.step(key, **inputs)

    def run_chain(self, steps: int, **inputs: np.ndarray) -> tuple[list[int], np.ndarray]:
        """The target ids of `steps` drafts made in one launch list, and the last recycled hidden [1, n]."""
        out = self.step(GraphKey(Mode.CHAIN, steps), **inputs)
        return [int(out[f"tokens.{index}"][0]) for index in range(steps)], out["hidden"]
