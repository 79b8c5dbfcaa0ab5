"""Writes an artifact: everything into a temporary folder beside the target, then one rename."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from codegen.backend import Backend, Report, silent
from codegen.compile import Compiled, CompileOptions, compile_binding, kernel_store
from codegen.manifest import MANIFEST, SCHEMA, WEIGHTS, canonical, manifest_digest
from codegen.packed_file import header_digest
from codegen.store import digest_of, file_digest, scratch, sync, writing
from ir.binding import Binding
from ir.errors import CircuitError
from ir.key import GraphKey

PAGE = 4096
AT_FDCWD = -100  # paths are of the working directory
LINE = 64  # bytes of a cache line: the least alignment of a stored tensor


class OutputOccupied(CircuitError):
    says = "{path} exists and is not a compiled artifact, so it is not replaced"
    hint = "choose another folder, or remove it yourself"


@contextmanager
def staging(out: Path) -> Iterator[Path]:
    """A temporary folder that becomes `out` when the block ends well and vanishes when it does not.

    An artifact that `out` already holds is replaced in the end, never changed in place.
    """
    with writing(out):
        try:
            out = out.resolve()  # a link stays, and what it leads to is replaced
        except RuntimeError as problem:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP)) from problem
        _check_replaceable(out)
        with scratch(out.parent) as room:
            folder = room / "new"
            folder.mkdir()
            yield folder
            for path in [folder, *folder.rglob("*")]:
                sync(path)
            _put(folder, out)
            sync(out.parent)


def _check_replaceable(out: Path) -> None:
    """Refuses to replace anything but an artifact and an empty folder."""
    free = not out.exists() or (out / MANIFEST).exists()
    if not free and not (out.is_dir() and not any(out.iterdir())):
        raise OutputOccupied(path=out)


def _put(folder: Path, out: Path) -> None:
    """Gives `folder` the name `out`; whatever has that name takes its place.

    At every moment one or the other, whole, has the name. Another process may do the same.
    """
    while True:
        _check_replaceable(out)
        try:
            _exchange(folder, out) if out.exists() else os.rename(folder, out)
            return
        except (FileNotFoundError, FileExistsError):
            if not folder.exists():
                raise
        except OSError as problem:
            if problem.errno != errno.ENOTEMPTY:
                raise


def _exchange(one: Path, other: Path) -> None:
    """Two folders change names: in one step where the system can, else in three."""
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "renameat2"):
        code = libc.renameat2(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), 2)
        if code == 0:
            return
        if ctypes.get_errno() not in (errno.EINVAL, errno.ENOSYS):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(other))
    aside = one.with_name("old")
    os.rename(other, aside)
    try:
        os.rename(one, other)
    finally:
        os.rename(aside, other if not other.exists() else one)


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
        (folder / "plans" / f"{key}.json").write_text(plan.text(), "utf-8")
        (folder / "graphs" / f"{key}.txt").write_text(part.graphs[key], "utf-8")
    for name, source in part.sources.items():
        (folder / "kernels" / name).write_text(source, "utf-8")
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
