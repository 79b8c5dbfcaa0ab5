"""One training run in its folder: what was asked for, how far it is,
and what it measured on the way.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from circuit.train.errors import AlreadyBegun, BrokenRun, NothingToResume, OtherRun
from codegen.store import write_atomically

PLAN, STATE = "run.json", "state.safetensors"


@dataclass(frozen=True)
class Plan:
    """Everything that decides what a run computes, by the names of the command's options."""

    model: str
    sha256: str
    seed: int
    tokens: int
    steps: int
    draft_vocab: int
    batch_rows: int
    batch_columns: int
    learning_rate: float

    @property
    def falling(self) -> int:
        """The number of last steps over which the learning rate goes down."""
        return max(1, self.steps * 3 // 10)

    def ending(self, step: int) -> bool:
        """True in the last part of the run: greedy texts, all scored ids, a strict teacher."""
        return step >= self.steps - self.falling

    def share(self, step: int) -> float:
        """The part of the learning rate at `step`: a rise over 30
        steps, then flat, then down to zero.
        """
        return max(0.02, min(1.0, (step + 1) / 30, (self.steps - step) / self.falling))


@dataclass(frozen=True)
class Mark:
    """What was measured at one step: mean loss and agreement of the
    drafts, or acceptance on held-out texts.
    """

    step: int
    loss: float | None = None
    agreement: tuple[float, ...] = ()
    acceptance: tuple[float, ...] = ()
    tokens_per_step: float | None = None


@dataclass
class Progress:
    """How far a run is; `epoch` and `place` say which batch is next."""

    step: int = 0
    epoch: int = 0
    place: int = 0
    rows: int = 0
    marks: list[Mark] = field(default_factory=list)


def open_run(folder: Path, plan: Plan, resume: bool) -> None:
    """Begins a run in `folder`, or checks that the one there has the same plan."""
    path = folder / PLAN
    if not resume:
        if path.exists():
            raise AlreadyBegun(path=folder)
        write_atomically(path, json.dumps(asdict(plan), indent=1).encode())
        return
    if not path.is_file():
        raise NothingToResume(path=folder)
    try:
        before = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise BrokenRun(path=path, problem=error) from error
    for name, now in asdict(plan).items():
        if name != "model" and before.get(name) != now:
            raise OtherRun(path=folder, name=name, before=before.get(name), now=now)


def save_state(folder: Path, tensors: Mapping[str, torch.Tensor], progress: Progress) -> None:
    """Writes weights and progress as one file; the one before it stays until then."""
    told = json.dumps(asdict(progress))
    plain = {n: t.contiguous() for n, t in tensors.items()}
    write_atomically(folder / STATE, save(plain, metadata={"progress": told}))


def load_state(folder: Path) -> tuple[dict[str, torch.Tensor], Progress] | None:
    """Tensors and progress as last saved; None if nothing was."""
    path = folder / STATE
    if not path.is_file():
        return None
    try:
        with safe_open(str(path), "pt") as file:
            values = json.loads(file.metadata()["progress"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        marks = [Mark(**{k: tuple(v) if isinstance(v, list) else v for k, v in m.items()})
                 for m in values.pop("marks")]  # fmt: skip
        return tensors, Progress(**values, marks=marks)
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise BrokenRun(path=path, problem=error) from error
