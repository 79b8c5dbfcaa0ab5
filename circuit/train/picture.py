"""The curves of a run as a picture: loss, and how often drafts are right."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Sequence
from pathlib import Path

from circuit.train.run import ALL_COLUMNS, STRICT, Mark
from codegen.store import write_atomically
from ir.errors import CircuitError

COLOURS = ("#1b6ca8", "#d1791f", "#4f8f3a")
INK, GRID = "#333333", "#dddddd"


class NoPictures(CircuitError):
    says = "The curves of a training cannot be drawn: matplotlib is not installed."
    hint = "Install it with `pip install matplotlib`; it is part of the extra `train`."


def require_pictures() -> None:
    """NoPictures if curves cannot be drawn here: told before a long run, not after it."""
    if importlib.util.find_spec("matplotlib") is None:
        raise NoPictures()


def draw(marks: Sequence[Mark], path: Path, title: str) -> None:
    """Writes a PNG of the curves to `path`."""
    require_pictures()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.5, 4.6), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    _loss(left, [m for m in marks if m.loss is not None])
    _accepted(right, marks)
    for axes in (left, right):
        axes.set_xlabel("step", color=INK)
        axes.grid(color=GRID, linewidth=0.7)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=INK)
    figure.suptitle(title, color=INK, fontsize=11)
    sink = io.BytesIO()
    figure.savefig(sink, format="png")
    write_atomically(path, sink.getvalue())


def _loss(axes, marks: Sequence[Mark]) -> None:
    axes.plot([m.step for m in marks], [m.loss for m in marks], color=COLOURS[0], linewidth=1.6)
    for part, said in ((STRICT, "half of the lesson: first choices"), (ALL_COLUMNS, "all ids")):
        place = part * max((m.step for m in marks), default=0)
        axes.axvline(place, color=INK, linewidth=0.8, linestyle=":")
        axes.text(
            place, 0.98, f"{said} ", rotation=90, fontsize=7, color=INK,
            ha="right", va="top", transform=axes.get_xaxis_transform(),
        )  # fmt: skip
    axes.set_title("loss over three draft steps (weighted cross entropy)", color=INK, fontsize=10)


def _accepted(axes, marks: Sequence[Mark]) -> None:
    """Held-out acceptance by position as points, agreement in training as thin lines."""
    trained = [m for m in marks if m.agreement]
    measured = [m for m in marks if m.acceptance]
    for position, colour in enumerate(COLOURS):
        axes.plot(
            [m.step for m in trained], [m.agreement[position] for m in trained],
            color=colour, linewidth=0.9, alpha=0.5,
            label="in training, given the drafts before it" if position == 0 else None,
        )  # fmt: skip
        axes.plot(
            [m.step for m in measured], [m.acceptance[position] for m in measured],
            color=colour, linewidth=1.8, marker="o", markersize=4,
            label=f"draft {position + 1} accepted, held-out texts",
        )  # fmt: skip
    axes.set_ylim(0, 1)
    axes.set_title("drafts that are the target's own tokens", color=INK, fontsize=10)
    axes.legend(
        fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2
    )
