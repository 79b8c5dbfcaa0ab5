"""Writes an artifact: everything into a temporary folder beside the target, then one rename."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from codegen.artifact import (
    MANIFEST,
    SCHEMA,
    WEIGHTS,
    canonical,
    file_digest,
    header_digest,
    manifest_digest,
)
from codegen.backend import Backend, Report, silent
from codegen.compile import Compiled, CompileOptions, compile_binding, kernel_store
from codegen.store import digest_of, sync_folder, writing
from ir.binding import Binding
from ir.errors import CircuitError
from ir.key import GraphKey

PAGE = 4096
LINE = 64  # bytes of a cache line: the least alignment of a stored tensor


class OutputOccupied(CircuitError):
    says = "{path} exists and is not a compiled artifact, so it is not replaced"
    hint = "choose another folder, or remove it yourself"


@contextmanager
def staging(out: Path) -> Iterator[Path]:
    """A temporary folder that becomes `out` when the block ends well and vanishes when it does not.

    An artifact that `out` already holds is replaced in the end, never changed in place.
    """
    out = out.resolve()  # a link stays, and what it leads to is replaced
    if out.exists() and not (out / MANIFEST).exists() and not _is_empty_folder(out):
        raise OutputOccupied(path=out)
    folder = out.parent / f".{out.name}.{os.getpid()}.new"
    aside = folder.with_suffix(".old")
    with writing(out):
        try:
            folder.mkdir(parents=True)
            yield folder
            _sync_tree(folder)
            if out.exists():
                os.rename(out, aside)
            os.rename(folder, out)
            sync_folder(out.parent)
        finally:
            if aside.exists() and not out.exists():
                os.rename(aside, out)
            shutil.rmtree(folder, ignore_errors=True)
            shutil.rmtree(aside, ignore_errors=True)


def _is_empty_folder(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def _sync_tree(folder: Path) -> None:
    for path in [folder, *folder.rglob("*")]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def compile_artifact(
    out: Path, bindings: Mapping[str, tuple[Binding, Iterable[GraphKey]]], backend: Backend,
    options: CompileOptions, *, recorded: Mapping[str, Any], extras: Mapping[str, bytes],
    report: Report = silent,
) -> Path:  # fmt: skip
    """Compiles bindings (part name -> binding and its keys) into the
    artifact `out`, whole or not at all.

    `recorded` is kept as the artifact's options, `extras` are files that stand beside the parts.
    """
    with staging(out) as folder, kernel_store(options.store, folder.parent) as store:
        parts = {
            name: compile_binding(binding, keys, backend, options, store, report)
            for name, (binding, keys) in bindings.items()
        }
        write_parts(folder, parts, recorded, extras, report)
    return out


def write_parts(
    folder: Path, parts: Mapping[str, Compiled], options: Mapping[str, Any],
    extras: Mapping[str, bytes], report: Report = silent,
) -> None:  # fmt: skip
    """Fills `folder` with the artifact of `parts`; `extras` are further files by relative path."""
    for name, part in parts.items():
        _write_part(folder / name, part)
    for name, data in extras.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    files = {
        str(p.relative_to(folder)): file_digest(p) for p in sorted(folder.rglob("*")) if p.is_file()
    }
    stored = write_weights(folder / WEIGHTS, parts, report)
    manifest: dict[str, Any] = {
        "schema": SCHEMA,
        "options": dict(options),
        "files": files,
        "weights": {
            "bytes": (folder / WEIGHTS).stat().st_size,
            "header": header_digest(folder / WEIGHTS),
            "sha256": file_digest(folder / WEIGHTS),
        },
        "parts": {name: _part_record(part, stored[name]) for name, part in parts.items()},
    }
    manifest["digest"] = manifest_digest(manifest)
    (folder / MANIFEST).write_bytes(canonical(manifest))


def _write_part(folder: Path, part: Compiled) -> None:
    for sub in ("plans", "graphs", "kernels"):
        (folder / sub).mkdir(parents=True, exist_ok=True)
    for key, plan in part.plans.items():
        (folder / "plans" / f"{key}.json").write_text(plan.text())
        (folder / "graphs" / f"{key}.txt").write_text(part.graphs[key])
    for name, source in part.sources.items():
        (folder / "kernels" / name).write_text(source)
    for name, path in part.built.items():
        shutil.copyfile(path, folder / "kernels" / name)


def _part_record(part: Compiled, stored: Mapping[str, str]) -> dict[str, Any]:
    return {
        "binding": part.binding.name,
        "backend": part.backend,
        "digest": digest_of(*(plan.digest for plan in part.plans.values())),
        "plans": {str(key): plan.digest for key, plan in part.plans.items()},
        "states": {n: str(t) for n, t in part.binding.states.items()},
        "context": part.context,
        "contract": _plain(part.binding.contract),
        "facts": dict(part.facts),
        "source": part.source,
        "weights": dict(stored),
        "memory": part.memory(),
    }


def _plain(contract: Mapping[str, object]) -> dict[str, Any]:
    """The contract as JSON values; what JSON has no word for is written as text."""
    return json.loads(json.dumps(dict(contract), default=str))


def write_weights(
    path: Path, parts: Mapping[str, Compiled], report: Report = silent
) -> dict[str, dict[str, str]]:
    """Writes the packed weights of all parts; part -> `name@layout` -> name of the stored tensor.

    Equal bytes are stored once. Tensors of a page or more start on a page, smaller ones on a cache
    line: each is stored as plain bytes with zeros up to the next boundary, since the format allows
    no holes.
    """
    uses = [(name, part, use) for name, part in parts.items() for use in part.weights]
    large = [u for u in uses if u[1].packed_bytes(u[2]) >= PAGE]
    small = [u for u in uses if u[1].packed_bytes(u[2]) < PAGE]
    longest = {f"{name}/{use.id}": _entry(2**48, 2**48) for name, _, use in uses}
    reserved = -(-(8 + len(json.dumps(longest)) + 64) // PAGE) * PAGE
    header: dict[str, Any] = {}
    known: dict[bytes, str] = {}
    stored: dict[str, dict[str, str]] = {name: {} for name in parts}
    with open(path, "wb") as file:
        file.write(bytes(reserved))
        for done, (name, part, use) in enumerate([*large, *small]):
            report("pack weights", done, len(uses))
            data = part.packed(use)
            tensor = known.setdefault(hashlib.sha256(data).digest(), f"{name}/{use.id}")
            stored[name][use.id] = tensor
            if tensor not in header:
                start = file.tell() - reserved
                file.write(data.data)
                file.write(bytes(-data.nbytes % (PAGE if data.nbytes >= PAGE else LINE)))
                header[tensor] = _entry(start, file.tell() - reserved)
        report("pack weights", len(uses), len(uses))
        text = json.dumps(header, separators=(",", ":")).encode()
        file.seek(0)
        file.write((reserved - 8).to_bytes(8, "little"))
        file.write(text.ljust(reserved - 8))
    return stored


def _entry(start: int, stop: int) -> dict[str, Any]:
    return {"dtype": "U8", "shape": [stop - start], "data_offsets": [start, stop]}
