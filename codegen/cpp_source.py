"""What the kernels of the C++ backend share: schedule, templates, a region with its operands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import jinja2

from codegen.cpp_dialect import TYPES, Place
from codegen.expr import Expr, const, var
from codegen.kernel import Kernel
from codegen.lazy import Lazy
from codegen.lower import Lowered
from codegen.schedules import Schedule
from ir.op import Kind

FOLDER = Path(__file__).parent / "templates" / "cpp"


@dataclass(frozen=True)
class CppSchedule(Schedule):
    """How a region is cut up.

    `rows` by `panels` (of 16 columns) are computed at once, `chunk` units are drawn at a time by a
    thread, and `shared` prepares the rows once for all threads instead of once in each.
    """

    rows: int = 1
    panels: int = 4
    chunk: int = 1
    shared: bool = False


@cache
def templates() -> jinja2.Environment:
    """The environment of the C++ templates; `indent` shifts the lines of a hole."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER), undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, autoescape=False,
    )  # fmt: skip
    environment.filters["hole"] = lambda lines, n: "\n".join(
        " " * n + line for line in "\n".join(lines).split("\n")
    )
    return environment


class RegionSource:
    """A lowered region with the C++ names of its operands."""

    def __init__(self, lowered: Lowered, schedule: CppSchedule, layouts: Mapping[str, str]) -> None:
        self.lowered = lowered
        self.schedule = schedule
        self.places = {o.name: Place(o, layouts.get(o.name)) for o in lowered.reads}
        self.dims = lowered.dims

    def kernel(self, template: str, scratch: int = 0, **holes: object) -> Kernel:
        """The filled template under a name made from what it does and what it says."""
        written = self.lowered.anchor is not None and self.lowered.anchor.target.kind is Kind.STATE
        state = (
            self.lowered.direct.get(self.lowered.anchor.target.signature.names[0])
            if written
            else None
        )
        operands = [(place, place.operand is not state) for place in self.places.values()] + [
            (Place(o), False) for o in self.lowered.writes
        ]
        source = templates().get_template(f"{template}.j2").render(
            label=self.lowered.label, operands=operands,
            dims=self.dims, schedule=self.schedule, types=TYPES, scratch=bool(scratch), **holes,
        )  # fmt: skip
        stem = self.lowered.label.replace("+", "_")[:48]
        return Kernel.of(stem, source, scratch)

    def argument(self, name: str) -> Lazy:
        """What the anchor's argument `name` holds."""
        return self.lowered.arguments[name]


def row(count: int, name: str = "i") -> Expr:
    """The loop variable over rows; the only row is row 0."""
    return var(name, count) if count > 1 else const(0)
