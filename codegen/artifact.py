"""An artifact on disk: what was compiled, read back with every doubt about it refused.

    manifest.json         schema, digests of files, and each part's plans, states, weights, facts
    weights.safetensors   packed weights, each aligned to 64 bytes or more; mapped, never copied
    PART/plans/KEY.json   canonical plans        PART/graphs/KEY.txt   the typed graphs, for people
    PART/kernels/         sources and built files
    ...                   what the application adds: tokenizer, configuration

Nothing here imports torch: a compiled program starts in the time that its files take to map.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from codegen.device import machine_facts
from codegen.manifest import WEIGHTS, FileChanged, NotAnArtifact, RecordUnfit, listed, read_manifest
from codegen.packed_file import PackedFile, header_digest
from codegen.plan import Buffer, Plan, Space
from codegen.store import file_digest
from ir.errors import CircuitError
from ir.format import TensorType
from ir.key import GraphKey


class DeviceMismatch(CircuitError):
    says = "the artifact {path} was compiled for {what} `{expected}`, but this machine has `{seen}`"
    hint = "compile the model again on this machine"


class ToolchainMismatch(CircuitError):
    says = "the artifact {path} was built with {what} `{expected}`, but `{seen}` is in use"
    hint = "compile the model again with the toolchain in use"


class WeightMismatch(CircuitError):
    says = (
        "part {part} of the artifact {path} was compiled from weights {expected}, not from {seen}"
    )
    hint = "compile the model again, or load it with the checkpoint it was compiled from"


class NoSuchPart(CircuitError):
    says = "the artifact {path} has no {part}"
    hint = "it holds: {known}"


class Replaced(CircuitError):
    says = "the artifact {path} was replaced or removed while it was loaded"
    hint = "run the command again when the other one has ended"


@dataclass(frozen=True, eq=False)
class Part:
    """One compiled binding of an artifact: a target or a draft head."""

    name: str
    artifact: Artifact
    record: Mapping[str, Any]

    @property
    def folder(self) -> Path:
        """Where the part's files are."""
        return self.artifact.path / self.name

    @property
    def binding(self) -> str:
        """The name of the binding that was compiled."""
        return self.record["binding"]

    @property
    def digest(self) -> str:
        """SHA-256 over the digests of all plans: what runs, down to offsets and kernels."""
        return self.record["digest"]

    @property
    def keys(self) -> tuple[GraphKey, ...]:
        """The programs that were compiled."""
        return tuple(GraphKey.parse(k) for k in self.record["plans"])

    @cached_property
    def states(self) -> dict[str, TensorType]:
        """Name -> type of the states, with the number of blocks that was compiled for."""
        return {n: TensorType.parse(t) for n, t in self.record["states"].items()}

    @property
    def context(self) -> int:
        """The most rows that one sequence may hold."""
        return self.record["context"]

    @property
    def memory(self) -> Mapping[str, int]:
        """Bytes of `arena`, `input.NAME` and `output.NAME` that the largest program wants."""
        return self.record["memory"]

    @property
    def contract(self) -> Mapping[str, Any]:
        """What the head and its target have agreed on, as recorded at compile time."""
        return self.record["contract"]

    @property
    def facts(self) -> Mapping[str, str]:
        """The device and the toolchain that the part was built for and with."""
        return self.record["facts"]

    def plan(self, key: GraphKey) -> Plan:
        """The plan of `key`, read from its file; RecordUnfit unless the
        part has all that it names, as large as it names it.
        """
        file = f"{self.name}/plans/{key}.json"
        try:
            plan = Plan.parse(self.artifact.read(file).decode())
            problems = [] if plan.key == key else [f"it is of {plan.key}"]
            problems += self._misfits(plan)
        except (ValueError, KeyError, TypeError, IndexError, RecursionError) as problem:
            problems = [f"it cannot be read ({type(problem).__name__})"]
        if problems:
            raise RecordUnfit(path=self.artifact.path, file=file, problem=listed(problems))
        return plan

    def _misfits(self, plan: Plan) -> Iterator[str]:
        """What a plan names that it, or the part, does not have."""
        numbers = [n for launch in plan.launches for n in launch.arguments]
        numbers += [n for _, n in plan.outputs]
        known = range(len(plan.buffers))
        yield from (f"there is no buffer {n!r}" for n in numbers if n not in known)
        if plan.arena_bytes > self.memory.get(Space.ARENA.value, 0):
            yield f"the part's arena is smaller than {plan.arena_bytes} bytes"
        for buffer in plan.buffers:
            if not self._has(buffer, plan.arena_bytes):
                yield f"{buffer.space.value} {buffer.name} of {buffer.type} does not fit"

    def _has(self, buffer: Buffer, arena_bytes: int) -> bool:
        wanted, name = buffer.type.nbytes, buffer.name
        if buffer.space is Space.ARENA:
            return 0 <= buffer.offset <= arena_bytes - wanted
        if buffer.space is Space.STATE:
            return self.states.get(name) == buffer.type
        if buffer.space is Space.WEIGHT:
            stored = self.record["weights"].get(f"{name}@{buffer.layout}")
            return stored is not None and wanted <= self.artifact.packed.nbytes(stored)
        return wanted <= self.memory.get(f"{buffer.space.value}.{name}", -1)

    def graph_text(self, key: GraphKey) -> str:
        """The typed graph of `key` as it was printed."""
        return self.artifact.read(f"{self.name}/graphs/{key}.txt").decode("utf-8")

    def built(self, name: str) -> Path:
        """The path of a built file."""
        return self.folder / "kernels" / name

    def weight(self, name: str, layout: str) -> np.ndarray:
        """A packed weight, uint8, in the mapped file."""
        return self.artifact.tensor(self.record["weights"][f"{name}@{layout}"])


class Artifact:
    """An artifact that was found whole, for this machine. `load_artifact` makes it."""

    def __init__(self, path: Path, manifest: Mapping[str, Any], packed: PackedFile) -> None:
        self.path = path
        self.manifest = manifest
        self.packed = packed
        self.parts = {n: Part(n, self, record) for n, record in manifest["parts"].items()}

    def part(self, name: str) -> Part:
        """The part `name`: target or draft."""
        if name not in self.parts:
            raise NoSuchPart(path=self.path, part=name, known=", ".join(self.parts))
        return self.parts[name]

    @property
    def options(self) -> Mapping[str, Any]:
        """What the application recorded when it compiled."""
        return self.manifest["options"]

    def extra(self, name: str) -> Path:
        """The path of a file that the application added."""
        return self.path / name

    def read(self, name: str) -> bytes:
        """The bytes of a file of the artifact as they were compiled;
        FileChanged if they are others by now.
        """
        file, expected = self.path / name, self.manifest["files"].get(name, "nothing")
        data = file.read_bytes() if file.is_file() else None
        seen = "missing" if data is None else hashlib.sha256(data).hexdigest()
        if data is None or seen != expected:
            raise FileChanged(
                path=self.path, file=name, what="SHA-256", seen=seen, expected=expected
            )
        return data

    def tensor(self, name: str) -> np.ndarray:
        """The bytes of a stored tensor, uint8, read-only, without a copy."""
        return self.packed.tensor(name)


def load_artifact(
    path: Path, *, verify: bool = False, toolchain: Mapping[str, str] | None = None,
    sources: Mapping[str, str] | None = None,
) -> Artifact:  # fmt: skip
    """The artifact at `path`, refused unless it is whole, unedited, and made for this machine.

    Every file is compared with its recorded SHA-256 except the weights, of which the size and the
    header are compared; `verify` hashes them too. `toolchain` (a backend's facts) and `sources`
    (part -> digest of the checkpoint's weights) are compared when given.
    """
    before = _identity(path)
    try:
        manifest = read_manifest(path)
        _check_files(path, manifest, verify)
        packed = _packed(path, manifest)
    except (FileChanged, NotAnArtifact, FileNotFoundError) as problem:
        if _identity(path) != before:
            raise Replaced(path=path) from problem
        raise
    if _identity(path) != before:  # what was checked and what is mapped must be one artifact
        raise Replaced(path=path)
    here = machine_facts()
    for name, record in manifest["parts"].items():
        _check_device(path, record["facts"], here)
        _check_toolchain(path, record["facts"], toolchain or {})
        seen = (sources or {}).get(name, record["source"])
        if seen != record["source"]:
            raise WeightMismatch(path=path, part=name, expected=record["source"], seen=seen)
    return Artifact(path, manifest, packed)


def _identity(path: Path) -> tuple[int, int] | None:
    """The folder that has the name `path` now; None if there is none."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _packed(path: Path, manifest: Mapping[str, Any]) -> PackedFile:
    """The weights file, mapped; RecordUnfit if it lacks a tensor that a part names."""
    try:
        packed = PackedFile(path / WEIGHTS)
        problems = [
            f"parts.{name}.weights names {tensor}, which it does not hold"
            for name, record in manifest["parts"].items()
            for tensor in record["weights"].values()
            if tensor not in packed.spans
        ]
    except (ValueError, RecursionError) as problem:
        problems = [f"its header cannot be read: {problem}"]
    if problems:
        raise RecordUnfit(path=path, file=WEIGHTS, problem=listed(problems))
    return packed


def _check_files(path: Path, manifest: Mapping[str, Any], verify: bool) -> None:
    for name, expected in manifest["files"].items():
        file = path / name
        seen = file_digest(file) if file.is_file() else "missing"
        if seen != expected:
            raise FileChanged(path=path, file=name, what="SHA-256", seen=seen, expected=expected)
    weights, file = manifest["weights"], path / WEIGHTS
    checks = [("size", lambda: file.stat().st_size if file.is_file() else "missing", "bytes")]
    checks.append(("header's SHA-256", lambda: header_digest(file), "header"))
    if verify:
        checks.append(("SHA-256", lambda: file_digest(file), "sha256"))
    for what, measure, field in checks:
        if (seen := measure()) != weights[field]:
            raise FileChanged(
                path=path, file=WEIGHTS, what=what, seen=seen, expected=weights[field]
            )


def _check_device(path: Path, built: Mapping[str, str], here: Mapping[str, str]) -> None:
    for what in ("machine", "system"):
        if built.get(what, here[what]) != here[what]:
            raise DeviceMismatch(path=path, what=what, expected=built[what], seen=here[what])
    missing = set(built.get("isa", "").split()) - set(here["isa"].split())
    if missing:
        raise DeviceMismatch(
            path=path, what="instruction set", expected=built["isa"],
            seen=f"no {' '.join(sorted(missing))}",
        )  # fmt: skip


def _check_toolchain(path: Path, built: Mapping[str, str], use: Mapping[str, str]) -> None:
    for what in sorted(use.keys() - {"machine", "system", "isa"}):
        if built.get(what) != use[what]:
            raise ToolchainMismatch(
                path=path, what=what, expected=built.get(what, "none"), seen=use[what]
            )
