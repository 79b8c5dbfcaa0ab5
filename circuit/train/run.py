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

# Parts of a run after which the learning rate falls, the lesson is strict and every right chain
# goes on, texts are greedy ones alone, and all scored ids take part.
FLAT, STRICT, GREEDY_ONLY, ALL_COLUMNS = 0.3, 0.6, 0.75, 0.88

# Parts of a run after which the running average of the weights is put aside; what is shipped is the
# mean of these and of the one at the end.
AVERAGED = (0.85,)


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

    def past(self, part: float, step: int) -> bool:
        """True once `part` of the run is behind."""
        return step >= part * self.steps

    def passes(self, part: float, step: int) -> bool:
        """True for the one `step` that leaves `part` of the run behind."""
        return self.past(part, step + 1) and not self.past(part, step)

    def share(self, step: int) -> float:
        """The part of the learning rate at `step`: a rise over 30
        steps, then flat, then down to zero.
        """
        left = (self.steps - step) / max(1.0, (1 - FLAT) * self.steps)
        return max(0.01, min(1.0, (step + 1) / 30, left))

    def width(self, step: int, scored: int) -> int:
        """How many of the `scored` ids a batch is taught on at `step`:
        few, then half, at the end all.
        """
        if self.past(ALL_COLUMNS, step):
            return scored
        return max(self.batch_columns, scored // 2 if self.past(STRICT, step) else 0)


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
