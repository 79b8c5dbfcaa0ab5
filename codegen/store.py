"""How files and folders are written so that they are whole or not there, and the kernel store:
built files under names that are digests of what they were built from.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import shutil
import time
import uuid
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ir.errors import CircuitError

if TYPE_CHECKING:
    from collections.abc import Iterator

LOG = logging.getLogger(__name__)
SCRATCH = ".circuit-"
YOUNG = 60.0  # seconds in which a folder without a lock may be one that is just being made


class DiskFull(CircuitError):
    says = "the disk is full while {path} is written"
    hint = "free some space and run the command again; nothing half-written is left"


class CannotWrite(CircuitError):
    says = "{path} cannot be written: {problem}"
    hint = "choose another folder, or change its permissions"


class StoreUnwritable(CannotWrite):
    says = "built kernels cannot be kept in {path}: {problem}"
    hint = "change its permissions, or name another folder in $CIRCUIT_CACHE"


@contextmanager
def writing(path: Path, refused: type[CannotWrite] = CannotWrite) -> Iterator[None]:
    """Turns the operating system's refusals while `path` is written into errors that name it."""
    try:
        yield
    except OSError as problem:
        if problem.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise DiskFull(path=path) from problem
        raise refused(path=path, problem=problem.strerror or problem) from problem


def sync(path: Path) -> None:
    """Makes a file's content, or the names in a folder, durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def _lock(folder: Path) -> Iterator[bool]:
    """Holds the lock of `folder` until the block or the process ends; gives False if another has
    it, or if there are no locks here.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True
    finally:
        os.close(handle)


@contextmanager
def scratch(parent: Path) -> Iterator[Path]:
    """A new folder in `parent`, removed at the end; first it removes
    those that dead processes have left there.
    """
    parent.mkdir(parents=True, exist_ok=True)
    _sweep(parent)
    folder = parent / f"{SCRATCH}{uuid.uuid4().hex[:12]}"
    with ExitStack() as held:
        held.callback(shutil.rmtree, folder, ignore_errors=True)
        folder.mkdir()
        held.enter_context(_lock(folder))
        yield folder


def _sweep(parent: Path) -> None:
    """Removes the scratch folders in `parent` that no process holds any more."""
    for path in parent.glob(f"{SCRATCH}*"):
        try:
            if time.time() - path.lstat().st_mtime > YOUNG:
                with _lock(path) as free:
                    if free:
                        shutil.rmtree(path, ignore_errors=True)
        except OSError as problem:  # its owner has just removed it, or it is another user's
            LOG.debug("%s is left where it is: %s", path, problem)


def write_atomically(path: Path, data: bytes) -> None:
    """Writes `data` to `path`, whole or not at all; DiskFull and CannotWrite name the path."""
    with writing(path):
        write_file(path, data)


def write_file(path: Path, data: bytes) -> None:
    """Writes `data` to `path`, whole or not at all: a temporary file, fsync, rename.

    A link stays, and what it leads to is replaced; a device or a pipe takes the bytes as they come.
    """
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    path = Path(os.path.realpath(path))
    with scratch(path.parent) as folder:
        part = folder / "part"
        part.write_bytes(data)
        sync(part)
        os.replace(part, path)


def file_digest(path: Path) -> str:
    """SHA-256 of a file's content."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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

    An entry's name ends in a digest of its content, so that one that was cut short or changed since
    is seen, removed, and built again.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        with self.filled():
            root.mkdir(parents=True, exist_ok=True)

    def filled(self) -> AbstractContextManager[None]:
        """A block in which the store is written: refusals of the system become errors about it."""
        return writing(self.root, StoreUnwritable)

    def get(self, digest: str, suffix: str) -> Path | None:
        """The built file of `digest`; None if there is none that is whole."""
        for path in sorted((self.root / digest[:2]).glob(f"{digest}.*{suffix}")):
            try:
                if path.name == self._name(digest, suffix, path.read_bytes()):
                    return path
                LOG.warning("%s is not what was built; it is built again", path)
                path.unlink()
            except OSError as problem:
                LOG.warning("%s cannot be read (%s); it is built again", path, problem.strerror)
        return None

    def put(self, digest: str, suffix: str, data: bytes) -> Path:
        """Keeps `data` as the file of `digest` and returns its path."""
        path = self.root / digest[:2] / self._name(digest, suffix, data)
        with self.filled():
            write_file(path, data)
        return path

    @staticmethod
    def _name(digest: str, suffix: str, data: bytes) -> str:
        return f"{digest}.{hashlib.sha256(data).hexdigest()[:16]}{suffix}"
