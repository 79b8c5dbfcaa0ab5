"""What fills the holes of Triton templates: the templates, drafts of
kernels, statements collected hole by hole.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import jinja2

from codegen.expr import Expr, accesses, idiv, imod, make, var
from codegen.lower import Lowered, Store
from codegen.tiles import TileWriter
from ir.format import Format

_TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates" / "triton"),
    trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    undefined=jinja2.StrictUndefined,
)  # fmt: skip
for _spaces in (4, 8, 12):
    _TEMPLATES.filters[f"indent{_spaces}"] = lambda lines, n=_spaces: "\n".join(
        " " * n + line for line in lines
    )
_TEMPLATES.filters["dedent4"] = lambda text: "\n".join(t[4:] for t in text.splitlines())


def render(template: str, **holes: object) -> str:
    """The template with its holes filled."""
    return _TEMPLATES.get_template(f"{template}.j2").render(**holes)


@dataclass
class Draft:
    """A kernel before it has a name: the template's holes and the launch."""

    template: str
    holes: dict[str, object]
    grid: tuple[int, ...]
    warps: int
    stages: int = 1
    scratch_bytes: int = 0
    counters: int = 0


class Holes(TileWriter):
    """A writer whose statements are collected hole by hole, each at its own indentation."""

    @contextmanager
    def hole(self) -> Iterator[list[str]]:
        kept, depth = self.lines, self._depth
        self.lines, self._depth = [], 0
        yield self.lines
        self.lines, self._depth = kept, depth

    def store(self, store: Store, index: list[Expr], text: str, tile: str = "") -> None:
        """Writes one value (or tile of values) of a store at `index`."""
        pointer = self.address(store.operand, index) + (f" + {tile}" if tile else "")
        mask = self.mask(*index)
        self.line(f"tl.store({pointer}, {text}{f', mask={mask}' if mask else ''})")


def unflattened(flat: Expr, shape: tuple[int, ...]) -> list[Expr]:
    """The index over `shape` of element number `flat`."""
    index: list[Expr] = []
    for size in reversed(shape[1:]):
        index.append(imod(flat, size))
        flat = idiv(flat, size)
    return [flat, *reversed(index)] if shape else []


def element(store: Store, row: Expr, column: Expr) -> tuple[list[Expr], Expr]:
    """The index of a store at a row and a flat column, and the value there."""
    shape = store.operand.type.shape
    index = [row, *unflattened(column, shape[1:])]
    return index, store.value.at(*index)


def is_tiled(store: Store) -> bool:
    """True for a store that reduces over tiles of the anchor's result."""
    value = store.value.at(*(var(f"probe{d}", n) for d, n in enumerate(store.value.shape)))
    return any(accesses(node, "acc") for node in accesses(value, "reduce"))


def result_format(lowered: Lowered) -> Format:
    """The format of the anchor's result."""
    return lowered.anchor.meta["type"].format


def widened(e: Expr) -> Expr:
    """A number in f32."""
    return e if e.format is Format.F32 else make("cast", e, format=Format.F32)
