"""What options of several commands are written as, and how a command is carried out."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from circuit.report import Record, Screen, carry_out


class WeightChoice(StrEnum):
    """The formats that weights can be compiled in."""

    native = "native"
    f32 = "f32"
    bf16 = "bf16"
    q8_0 = "q8_0"


class BackendChoice(StrEnum):
    """The backends that kernels can be generated for."""

    cpp = "cpp"
    triton = "triton"


class PageFormat(StrEnum):
    """What `circuit show` writes."""

    text = "text"
    svg = "svg"
    html = "html"


Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on stdout, nothing else.")
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Folder = Annotated[Path, typer.Argument(metavar="DIR", help="An artifact of `circuit compile`.")]
Threads = Annotated[
    int | None, typer.Option("--threads", min=1, max=256, help="Threads; by default every core.")
]


def run(action: Callable[[Screen], Record], as_json: bool, debug: bool) -> None:
    """Carries out a command and ends it with its exit code."""
    raise typer.Exit(carry_out(action, as_json=as_json, debug=debug))
