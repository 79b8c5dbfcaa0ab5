"""Schedules: the choices that a backend leaves open for a region, and the book of tuned ones."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch.fx

from codegen.store import write_atomically
from ir.errors import CircuitError
from ir.graph import op_of, type_of

if TYPE_CHECKING:
    from codegen.backend import Backend
    from codegen.lower import Lowered


@dataclass(frozen=True)
class Schedule:
    """Base of a backend's schedule record, whose fields are the
    search space (integers and booleans).
    """

    def text(self) -> str:
        """The choices as canonical JSON."""
        return json.dumps(asdict(self), sort_keys=True)


class BadScheduleBook(CircuitError):
    says = "{path} is not a schedule book: {problem}"
    hint = "delete the file, or tune again; without it the cost model chooses"


def region_text(lowered: Lowered) -> str:
    """The region as text in which nothing names a layer: ops, attributes, operand types, wiring."""
    numbers: dict[torch.fx.Node, str] = {}
    lines = []
    for node in lowered.nodes:
        arguments = []
        for a in node.args:
            arguments.append(numbers.setdefault(a, f"{type_of(a)} ${len(numbers)}"))
        attributes = [f"{k}={v}" for k, v in sorted(node.kwargs.items())]
        name = numbers.setdefault(node, f"%{len(numbers)}")
        lines.append(f"{name} = {op_of(node).name}({', '.join(arguments + attributes)})")
    lines += [f"store {w.type}" for w in lowered.writes]
    return "\n".join(lines)


def region_digest(lowered: Lowered) -> str:
    """SHA-256 of `region_text`: equal for the same region of every layer."""
    return hashlib.sha256(region_text(lowered).encode()).hexdigest()


S = TypeVar("S", bound=Schedule)


@dataclass
class ScheduleBook:
    """Tuned choices, keyed by (region digest, device, toolchain). A silent
    book leaves it to the cost model.
    """

    entries: dict[tuple[str, str, str], dict[str, int]] = field(default_factory=dict)

    @staticmethod
    def load(path: Path) -> ScheduleBook:
        """The book at `path`; an absent file is an empty book."""
        if not path.exists():
            return ScheduleBook()
        try:
            rows = json.loads(path.read_text())["entries"]
            return ScheduleBook(
                {(r["region"], r["device"], r["toolchain"]): r["schedule"] for r in rows}
            )
        except (ValueError, KeyError, TypeError) as problem:
            raise BadScheduleBook(path=path, problem=problem) from problem

    def save(self, path: Path) -> None:
        """Writes the book to `path`, whole or not at all."""
        rows = [
            {"region": region, "device": device, "toolchain": toolchain, "schedule": schedule}
            for (region, device, toolchain), schedule in sorted(self.entries.items())
        ]
        write_atomically(path, json.dumps({"entries": rows}, indent=1, sort_keys=True).encode())

    def put(self, lowered: Lowered, backend: Backend, schedule: Schedule) -> None:
        """Records a tuned choice."""
        self.entries[_key(lowered, backend)] = asdict(schedule)

    def choose(self, lowered: Lowered, backend: Backend) -> Schedule:
        """The tuned schedule if it is still in the search space, else
        the cheapest of the cost model.
        """
        space = list(backend.schedules(lowered))
        assert space, f"backend {backend.name} has no schedule for {lowered.label}"
        tuned = self.entries.get(_key(lowered, backend)) if self.entries else None
        for schedule in space:
            if asdict(schedule) == tuned:
                return schedule
        return min(space, key=lambda s: (backend.cost(lowered, s), s.text()))


def _key(lowered: Lowered, backend: Backend) -> tuple[str, str, str]:
    facts = backend.facts()
    device = " ".join(facts.get(k, "") for k in ("machine", "system", "isa"))
    toolchain = " ".join(
        f"{k}={v}" for k, v in sorted(facts.items()) if k not in ("machine", "system", "isa")
    )
    return region_digest(lowered), device, toolchain
