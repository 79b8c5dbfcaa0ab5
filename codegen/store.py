"""The kernel store: built files under names that are digests of what they were built from."""

from __future__ import annotations

import errno
import hashlib
import os
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ir.errors import CircuitError

if TYPE_CHECKING:
    from collections.abc import Iterator


class DiskFull(CircuitError):
    says = "the disk is full while {path} is written"
    hint = "free some space and run the command again; nothing half-written is left"


class CannotWrite(CircuitError):
    says = "{path} cannot be written: {problem}"
    hint = "choose another folder, or change its permissions"


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns the operating system's refusals while `path` is written into errors that name it."""
    try:
        yield
    except OSError as problem:
        if problem.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise DiskFull(path=path) from problem
        raise CannotWrite(path=path, problem=problem.strerror or problem) from problem


def sync_folder(folder: Path) -> None:
    """Makes the names in `folder` durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomically(path: Path, data: bytes, told: Path | None = None) -> None:
    """Writes `data` to `path`, whole or not at all: a temporary file, fsync, rename.

    An error names `told`, where that says more to a person than `path`.
    """
    with writing(told or path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, path)
        finally:
            Path(name).unlink(missing_ok=True)


def digest_of(*parts: str | bytes) -> str:
    """SHA-256 over parts, each preceded by its length, so that no two
    lists of parts agree by accident.
    """
    sha = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        sha.update(len(data).to_bytes(8, "little"))
        sha.update(data)
    return sha.hexdigest()


class KernelStore:
    """A folder of built files by digest. Several processes may share it: an
    entry appears whole or not at all.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        with writing(root):
            root.mkdir(parents=True, exist_ok=True)

    def path(self, digest: str, suffix: str) -> Path:
        """Where the file of `digest` stands, built or not."""
        return self.root / digest[:2] / f"{digest}{suffix}"

    def get(self, digest: str, suffix: str) -> Path | None:
        """The built file of `digest`; None if it has not been built."""
        path = self.path(digest, suffix)
        return path if path.exists() else None

    def put(self, digest: str, suffix: str, data: bytes) -> Path:
        """Keeps `data` as the file of `digest` and returns its path."""
        path = self.path(digest, suffix)
        write_atomically(path, data, told=self.root)
        return path
