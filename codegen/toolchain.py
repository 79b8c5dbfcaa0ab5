"""The C++ compiler: which one there is, objects compiled side by side,
shared libraries linked from them.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from codegen.manifest import shown
from codegen.store import DiskFull, KernelStore, digest_of, scratch
from ir.errors import CircuitError

if TYPE_CHECKING:
    from codegen.backend import Report


MAGIC = {"Linux": b"\x7fELF", "Darwin": (b"\xcf\xfa\xed\xfe", b"\xca\xfe\xba\xbe")}
ROOM = 1 << 20  # bytes; a compiler that has less and says nothing could not write its complaint
PATIENCE = 2.0  # seconds that a compiler has to end by itself


class NoCompiler(CircuitError):
    says = "no C++17 compiler was found (tried {tried})"
    hint = "install g++ or clang++, name one in $CXX, or `pip install ziglang`"


class CompilerUnusable(CircuitError):
    says = "the compiler {command} cannot be used: {problem}"
    hint = "name a C++17 compiler in $CXX, or unset it to use the system's own"


class CompilerFailed(CircuitError):
    says = "the compiler {command} refuses the generated unit {unit}: {problem}"
    hint = "try another compiler in $CXX; the unit itself is at fault if several refuse it"


@dataclass(frozen=True)
class Compiler:
    """A command that compiles C++17, and the first line of what it says of itself."""

    command: tuple[str, ...]
    version: str


def find_compiler(cxx: str | None = None) -> Compiler:
    """The compiler named by `cxx` (the value of $CXX), else c++, g++,
    clang++, else the ziglang wheel.
    """
    if cxx:
        found = _asked((cxx,) if shutil.which(cxx) else tuple(cxx.split()))
        if isinstance(found, str):
            raise CompilerUnusable(command=cxx, problem=found)
        return found
    tried = [("c++",), ("g++",), ("clang++",)]
    if importlib.util.find_spec("ziglang"):
        tried.append((sys.executable, "-m", "ziglang", "c++"))
    for command in tried:
        found = _asked(command)
        if isinstance(found, Compiler):
            return found
    raise NoCompiler(tried=", ".join([*(" ".join(c) for c in tried[:3]), "ziglang c++"]))


def _asked(command: tuple[str, ...]) -> Compiler | str:
    """The compiler that answers to `command`, or why there is none."""
    found = shutil.which(command[0])
    if found is None:
        return "there is no such program"
    if os.path.dirname(command[0]):  # it is run in another folder than the one it is named from
        command = (os.path.abspath(found), *command[1:])
    try:
        answer = subprocess.run(
            [*command, "--version"], capture_output=True, stdin=subprocess.DEVNULL, timeout=60
        )
    except subprocess.TimeoutExpired:
        return "it does not say its version within a minute"
    except OSError as problem:
        return problem.strerror or str(problem)
    lines = answer.stdout.decode("utf-8", "replace").strip().splitlines()
    if answer.returncode != 0 or not lines:
        return "it gives no version"
    return Compiler(command, "".join(c if c.isprintable() else "?" for c in lines[0]))


def compile_objects(
    compiler: Compiler, units: Mapping[str, str], flags: Sequence[str], headers: Mapping[str, str],
    store: KernelStore, report: Report, jobs: int = 2,
) -> dict[str, Path]:  # fmt: skip
    """Unit name -> object file, at most `jobs` compilers at a time;
    what `store` has is not built again.

    `headers` maps file names to the texts that units may include. The bytes of an object depend on
    the compiler, the flags, the headers and the unit alone, not on where it is built.
    """
    shared = digest_of(
        compiler.version, *flags, *(f"{n}\n{text}" for n, text in sorted(headers.items()))
    )
    digests = {name: digest_of(shared, name, source) for name, source in units.items()}
    built = {n: path for n, d in digests.items() if (path := store.get(d, ".o"))}
    pending = sorted(units.keys() - built.keys(), key=lambda n: (-len(units[n]), n))
    report("compile kernels", len(built), len(units))
    if not pending:
        return {name: built[name] for name in units}
    with store.filled(), scratch(store.root) as folder:
        for name, text in headers.items():
            (folder / name).write_text(text, "utf-8")
        with _ended() as running:
            while pending or running:
                while pending and len(running) < jobs:
                    name = pending.pop(0)
                    (folder / f"{name}.cpp").write_text(units[name], "utf-8")
                    words = [*flags, "-c", f"{name}.cpp", "-o", f"{name}.o"]
                    running[name] = _start(compiler, name, words, folder)
                for name in [n for n, p in running.items() if p.poll() is not None]:
                    data = _made(compiler, name, f"{name}.o", running.pop(name), folder)
                    built[name] = store.put(digests[name], ".o", data)
                    report("compile kernels", len(built), len(units))
                time.sleep(0.005)
    return {name: built[name] for name in units}


@contextmanager
def _ended() -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """A table of running compilers; those still in it at the end are
    ended, with the processes that they have started.
    """
    running: dict[str, subprocess.Popen[bytes]] = {}
    try:
        yield running
    finally:
        for sent in (signal.SIGTERM, signal.SIGKILL):  # after the first they remove what they wrote
            for process in running.values():
                if process.poll() is None:
                    os.killpg(process.pid, sent)
            for process in running.values():
                try:
                    process.wait(None if sent is signal.SIGKILL else PATIENCE)
                except subprocess.TimeoutExpired:
                    continue


def _start(
    compiler: Compiler, name: str, words: Sequence[str], folder: Path
) -> subprocess.Popen[bytes]:
    """The compiler at work on `words` in `folder`, a process group of its own."""
    with open(folder / f"{name}.log", "wb") as log:
        try:
            return subprocess.Popen(
                [*compiler.command, *words], cwd=folder, stdin=subprocess.DEVNULL, stdout=log,
                stderr=log, process_group=0,
            )  # fmt: skip
        except OSError as problem:
            raise CompilerUnusable(
                command=" ".join(compiler.command), problem=problem.strerror or problem
            ) from problem


def _made(
    compiler: Compiler, name: str, file: str, process: subprocess.Popen[bytes], folder: Path
) -> bytes:
    """The file that `process` made; its complaint as an error if it made none."""
    path = folder / file
    data = path.read_bytes() if path.is_file() else b""
    usable = data and data.startswith(MAGIC.get(platform.system(), b""))
    if process.returncode != 0 or not usable:
        raise _refusal(compiler, name, folder / f"{name}.log", process.returncode)
    return data


def _refusal(compiler: Compiler, unit: str, log: Path, code: int) -> CircuitError:
    lines = log.read_text("utf-8", "replace").splitlines()
    full = [line.strip() for line in lines if "No space left" in line or "size limit" in line]
    silenced = code != 0 and not lines and shutil.disk_usage(log.parent).free < ROOM
    if full or silenced or code == -signal.SIGXFSZ:
        said = f" (the compiler says: {full[0]})" if full else ""
        return DiskFull(path=f"{unit}.o{said}")
    wrong = [line for line in lines if "error" in line.lower()]
    if code < 0:
        problem = f"it was ended by {signal.Signals(-code).name}"
    elif code == 0:
        problem = "it ends well, but makes no file that this machine can use"
    else:
        problem = (wrong or lines[-1:] or [f"exit code {code}"])[0].strip()
    return CompilerFailed(
        command=" ".join(compiler.command), unit=unit, problem=shown(problem, 300)
    )


def link_library(
    compiler: Compiler, name: str, objects: Mapping[str, Path], flags: Sequence[str],
    store: KernelStore,
) -> Path:  # fmt: skip
    """The shared library of `objects`, kept in `store` under the
    digest of what it is linked from.
    """
    digest = digest_of(compiler.version, name, *flags, *(p.stem for p in objects.values()))
    if (known := store.get(digest, ".so")) is not None:
        return known
    with store.filled(), scratch(store.root) as folder, _ended() as running:
        for unit, path in objects.items():
            shutil.copyfile(path, folder / f"{unit}.o")
        words = ["-shared", *(f"{u}.o" for u in objects), "-o", name, *flags]
        running[name] = _start(compiler, name, words, folder)
        running[name].wait()
        return store.put(digest, ".so", _made(compiler, name, name, running[name], folder))
