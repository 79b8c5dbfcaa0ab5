"""What the passes know of a backend: answers to questions, never its name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ir.tensor import Format


@dataclass(frozen=True)
class Facts:
    """Answers of a backend that shape a program.

    `activation` maps the format of a weight to the format that its activations are rounded to; a
    weight format that is missing reads activations as they are. `interleave` is how many rows of
    one weight stand together when weights are merged in turns (None: merged weights always stand
    side by side). `argmax_tile` is the width of the tiles that a wide argmax splits into (None: it
    is never split). `recompute` lets a cheap value be computed in each region that reads it.
    `fuse=False` gives one region per node: the unfused chain that fusions are measured against.
    """

    activation: Mapping[Format, Format] = field(default_factory=dict)
    interleave: int | None = 16
    argmax_tile: int | None = 128
    recompute: bool = True
    fuse: bool = True
