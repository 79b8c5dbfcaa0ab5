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
import json
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from codegen.device import machine_facts
from codegen.plan import Plan
from ir.errors import CircuitError
from ir.format import TensorType
from ir.key import GraphKey

SCHEMA = 2
MANIFEST = "manifest.json"
WEIGHTS = "weights.safetensors"


class NotAnArtifact(CircuitError):
    says = "{path} is not a compiled artifact: {problem}"
    hint = "make one with `circuit compile MODEL -o DIR`"


class SchemaMismatch(CircuitError):
    says = "the artifact {path} has schema {seen}, but this version reads schema {expected}"
    hint = "compile the model again with this version"


class FileChanged(CircuitError):
    says = (
        "{file} in the artifact {path} is not what was compiled: its {what} is {seen}, "
        "recorded is {expected}"
    )
    hint = "compile the model again; files of an artifact are not edited"


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


def canonical(record: Mapping[str, Any]) -> bytes:
    """JSON bytes that are equal for equal records, readable by people."""
    return (json.dumps(record, indent=1, sort_keys=True, ensure_ascii=True) + "\n").encode()


def manifest_digest(record: Mapping[str, Any]) -> str:
    """SHA-256 of a manifest without its own `digest` field."""
    rest = {k: v for k, v in record.items() if k != "digest"}
    return hashlib.sha256(canonical(rest)).hexdigest()


def file_digest(path: Path) -> str:
    """SHA-256 of a file's content."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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
        """The plan of `key`, read from its file."""
        return Plan.parse((self.folder / "plans" / f"{key}.json").read_text())

    def graph_text(self, key: GraphKey) -> str:
        """The typed graph of `key` as it was printed."""
        return (self.folder / "graphs" / f"{key}.txt").read_text()

    def built(self, name: str) -> Path:
        """The path of a built file."""
        return self.folder / "kernels" / name

    def weight(self, name: str, layout: str) -> np.ndarray:
        """A packed weight, uint8, in the mapped file."""
        return self.artifact.tensor(self.record["weights"][f"{name}@{layout}"])


class Artifact:
    """An artifact that was found whole, for this machine. `load_artifact` makes it."""

    def __init__(self, path: Path, manifest: Mapping[str, Any]) -> None:
        self.path = path
        self.manifest = manifest
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

    @cached_property
    def _mapped(self) -> tuple[mmap.mmap, dict[str, tuple[int, int]], int]:
        """The weights file in memory, name -> (start, stop) of its data, and where data starts."""
        with open(self.path / WEIGHTS, "rb") as file:
            view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        size = int.from_bytes(view[:8], "little")
        header = json.loads(view[8 : 8 + size])
        header.pop("__metadata__", None)
        return view, {n: tuple(e["data_offsets"]) for n, e in header.items()}, 8 + size

    def tensor(self, name: str) -> np.ndarray:
        """The bytes of a stored tensor, uint8, read-only, without a copy."""
        view, spans, base = self._mapped
        start, stop = spans[name]
        return np.frombuffer(view, np.uint8, stop - start, base + start)


def load_artifact(
    path: Path, *, verify: bool = False, toolchain: Mapping[str, str] | None = None,
    sources: Mapping[str, str] | None = None,
) -> Artifact:  # fmt: skip
    """The artifact at `path`, refused unless it is whole, unedited, and made for this machine.

    Every file is compared with its recorded SHA-256 except the weights, of which the size and the
    header are compared; `verify` hashes them too. `toolchain` (a backend's facts) and `sources`
    (part -> digest of the checkpoint's weights) are compared when given.
    """
    manifest = _read_manifest(path)
    _check_files(path, manifest, verify)
    here = machine_facts()
    for name, record in manifest["parts"].items():
        _check_device(path, record["facts"], here)
        _check_toolchain(path, record["facts"], toolchain or {})
        seen = (sources or {}).get(name, record["source"])
        if seen != record["source"]:
            raise WeightMismatch(path=path, part=name, expected=record["source"], seen=seen)
    return Artifact(path, manifest)


def _read_manifest(path: Path) -> dict[str, Any]:
    file = path / MANIFEST
    if not file.is_file():
        raise NotAnArtifact(path=path, problem=f"there is no {MANIFEST} in it")
    try:
        record = json.loads(file.read_bytes())
        schema, digest = record["schema"], record["digest"]
    except (ValueError, KeyError, TypeError, RecursionError) as problem:
        raise NotAnArtifact(path=path, problem=f"{MANIFEST} cannot be read") from problem
    if schema != SCHEMA:
        raise SchemaMismatch(path=path, seen=schema, expected=SCHEMA)
    seen = manifest_digest(record)
    if seen != digest:
        raise FileChanged(path=path, file=MANIFEST, what="digest", seen=seen, expected=digest)
    return record


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


def header_digest(path: Path) -> str:
    """SHA-256 of a safetensors file's header."""
    with open(path, "rb") as file:
        size = file.read(8)
        return hashlib.sha256(size + file.read(int.from_bytes(size, "little"))).hexdigest()


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
