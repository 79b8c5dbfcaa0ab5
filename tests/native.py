"""Bindings compiled to native code, for tests that run one body over every runner."""

from __future__ import annotations

from circuit.backends import BACKENDS
from codegen.artifact import load_artifact
from codegen.compile import CompileOptions
from codegen.save import compile_artifact
from ir.binding import Binding
from runners.native import NativeRunner, Team


def native_runners(folder, bindings: dict[str, Binding], blocks: int) -> dict[str, NativeRunner]:
    """A native runner of each binding, on one team of two threads; skips where there is no compiler."""
    path = compile_artifact(
        folder / "artifact", {name: (b, b.keys) for name, b in bindings.items()}, BACKENDS["cpp"](),
        CompileOptions(store=folder / "kernels"), recorded={}, extras={},
    )  # fmt: skip
    artifact = load_artifact(path)
    parts = artifact.parts
    team = Team(next(iter(parts.values())), 2)
    return {name: NativeRunner(part, team=team, blocks=blocks) for name, part in parts.items()}
