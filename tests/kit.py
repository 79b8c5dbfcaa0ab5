"""Both draft heads over interpreted and compiled programs, with one oracle for their drafts."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import heads
import numpy as np
import pytest
import torch
from native import native_runners

from proposers.base import DraftProposer
from proposers.levers import ModelLevers
from proposers.mtp_binding import make_mtp_head
from proposers.mtp_program import CACHE
from proposers.multi_module import MultiModuleMtpHead
from proposers.options import DraftOptions, head_keys
from runners.base import DraftRunner

OPTIONS = DraftOptions(
    heads.CONTEXT, head_keys(batches=(2, 4), chunk=8, chain=3), sequences=9
)
BLOCKS = 1 + 9 * heads.CONTEXT // 16
MODULES = 3


def tiny_heads() -> list[heads.TinyHead]:
    """Three heads that borrow from one target; their programs are the same."""
    made = [heads.make_head(mapped=False, seed=seed) for seed in range(MODULES)]
    for tiny in made[1:]:
        tiny.side = made[0].side
    return made


TINIES = tiny_heads()


def compiled(folder: Path, store: Path) -> list[DraftRunner]:
    """A native runner of each tiny head."""
    bindings = {
        f"draft{i}": make_mtp_head(tiny.weights, tiny.side, OPTIONS).circuit_draft(
            OPTIONS, ModelLevers()
        )
        for i, tiny in enumerate(TINIES)
    }
    return list(native_runners(folder, store, bindings, blocks=BLOCKS).values())


@dataclass
class Side:
    """One head as a proposer: `MtpHead` if `single`, else a head of three modules."""

    single: bool
    levers: ModelLevers = field(default_factory=ModelLevers)

    def __post_init__(self) -> None:
        used = TINIES[:1] if self.single else TINIES
        self.modules = [make_mtp_head(t.weights, t.side, OPTIONS, levers=self.levers) for t in used]
        self.head: DraftProposer = (
            self.modules[0] if self.single else MultiModuleMtpHead(self.modules)
        )

    def install(self, runners: list[DraftRunner] | None) -> None:
        """Drafts with these runners from now on; None: with the interpreter."""
        for index, module in enumerate(self.modules):
            module.set_circuit_draft(None if runners is None else runners[index])

    def caches(self, state) -> list[np.ndarray]:
        """The live rows of each module's cache, [2, g, rows, d]."""
        states = [state] if self.single else state.modules
        return [
            s.lease.read(CACHE) if s.lease is not None else np.zeros((2, 2, 0, 12)) for s in states
        ]

    def flush(self, state) -> None:
        """Writes the rows that wait."""
        for module, inner in zip(self.modules, [state] if self.single else state.modules):
            module._flush(module._adopt(inner))

    @property
    def owners(self) -> int:
        """Leases alive in the pools of the runners in place."""
        return sum(module.runner.pool.owners for module in self.modules)


@dataclass
class Rows:
    """Inputs of the rows of one module's cache, as the oracle takes them."""

    tokens: list[int] = field(default_factory=list)
    hiddens: list[np.ndarray] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)

    def add(self, token: int, hidden: np.ndarray, position: int) -> None:
        """Appends a row."""
        self.tokens.append(token)
        self.hiddens.append(np.asarray(hidden, np.float64))
        self.positions.append(position)

    def with_row(self, *row) -> Rows:
        """These rows and one more."""
        more = Rows(list(self.tokens), list(self.hiddens), list(self.positions))
        more.add(*row)
        return more

    def run(self, tiny: heads.TinyHead) -> tuple[torch.Tensor, ...]:
        """The oracle's stream, normed stream, keys and values."""
        return tiny.run(self.tokens, np.stack(self.hiddens), self.positions)


@dataclass(frozen=True)
class Exact:
    """An oracle's drafts, the rows that they add to each module, and the least lead of a draft."""

    drafts: tuple[int, ...]
    added: list[tuple[int, np.ndarray, int]]
    margin: float


def exact_drafts(rows: list[Rows], token: int, hidden, position: int, count: int) -> Exact:
    """The drafts after `rows`, one entry per module (a single head has one and uses it again)."""
    single = len(rows) == 1
    drafts, added, margins = [], [], []
    chain = rows[0]
    for index in range(count):
        added.append((token, np.asarray(hidden, np.float64), position + index))
        tiny = TINIES[0 if single else index]
        chain = (chain if single else rows[index]).with_row(*added[-1])
        x, final, _, _ = chain.run(tiny)
        top = tiny.logits(final[-1]).topk(2).values
        margins.append(float(top[0] - top[1]))
        token, hidden = tiny.best(final[-1]), x[-1].numpy()
        drafts.append(token)
    return Exact(tuple(drafts), added, min(margins, default=np.inf))


@pytest.fixture(scope="module")
def runners(tmp_path_factory, kernel_folder):
    """A compiled runner of each tiny head."""
    made = compiled(tmp_path_factory.mktemp("heads"), kernel_folder)
    yield made
    for runner in made:
        runner.close()


@pytest.fixture(params=["eager", "compiled"])
def side(request, runners):
    """A single head, interpreted or compiled; nothing of it is left over."""
    made = Side(True)
    if request.param == "compiled":
        made.install(runners[:1])
    yield made
    assert made.owners == 0
    made.install(None)
