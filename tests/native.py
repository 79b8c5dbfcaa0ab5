"""Bindings compiled to native code, for tests that run one body over every runner."""

from __future__ import annotations

from pathlib import Path

from codegen.artifact import load_artifact
from codegen.backend_cpp import CppBackend
from codegen.compile import CompileOptions
from codegen.save import compile_artifact
from ir.binding import Binding
from runners.native import NativeRunner, Team


def native_runners(
    folder: Path, store: Path, bindings: dict[str, Binding], blocks: int
) -> dict[str, NativeRunner]:
    """A native runner of each binding, on one team of two threads;
    the artifact lies in `folder`.
    """
    path = compile_artifact(
        folder / "artifact", {name: (b, b.keys) for name, b in bindings.items()}, CppBackend(),
        CompileOptions(store=store), recorded={}, extras={},
    )  # fmt: skip
    parts = load_artifact(path).parts
    team = Team(next(iter(parts.values())), 2)
    return {name: NativeRunner(part, team=team, blocks=blocks) for name, part in parts.items()}
