"""The C++ compiler: which one there is, objects compiled side by side,
shared libraries linked from them.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from codegen.store import DiskFull, KernelStore, digest_of, writing
from ir.errors import CircuitError

if TYPE_CHECKING:
    from codegen.backend import Report


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
        found = _asked(tuple(cxx.split()))
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
    if shutil.which(command[0]) is None:
        return "there is no such program"
    try:
        answer = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as problem:
        return str(problem)
    lines = answer.stdout.strip().splitlines()
    return (
        Compiler(command, lines[0]) if answer.returncode == 0 and lines else "it gives no version"
    )


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
    with writing(store.root), tempfile.TemporaryDirectory(dir=store.root) as folder:
        for name, text in headers.items():
            (Path(folder) / name).write_text(text)
        running: dict[str, subprocess.Popen[bytes]] = {}
        try:
            while pending or running:
                while pending and len(running) < jobs:
                    name = pending.pop(0)
                    running[name] = _start(compiler, name, units[name], flags, Path(folder))
                for name in [n for n, p in running.items() if p.poll() is not None]:
                    path = _finished(compiler, name, running.pop(name), Path(folder))
                    built[name] = store.put(digests[name], ".o", path.read_bytes())
                    report("compile kernels", len(built), len(units))
                time.sleep(0.005)
        finally:
            for process in running.values():
                process.kill()
                process.wait()
    return {name: built[name] for name in units}


def _start(
    compiler: Compiler, name: str, source: str, flags: Sequence[str], folder: Path
) -> subprocess.Popen[bytes]:
    (folder / f"{name}.cpp").write_text(source)
    with open(folder / f"{name}.log", "wb") as log:
        return subprocess.Popen(
            [*compiler.command, *flags, "-c", f"{name}.cpp", "-o", f"{name}.o"],
            cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip


def _finished(
    compiler: Compiler, name: str, process: subprocess.Popen[bytes], folder: Path
) -> Path:
    """The object that `process` made; its complaint as an error if it made none."""
    path = folder / f"{name}.o"
    if process.returncode != 0 or not path.exists():
        raise _refusal(compiler, name, folder / f"{name}.log", process.returncode)
    return path


def _refusal(compiler: Compiler, unit: str, log: Path, code: int) -> CircuitError:
    lines = log.read_text(errors="replace").splitlines()
    wrong = [line for line in lines if "error" in line.lower()]
    if any("No space left" in line for line in lines):
        return DiskFull(path=log.parent)
    problem = (wrong or lines or [f"exit code {code}"])[0].strip()
    return CompilerFailed(command=" ".join(compiler.command), unit=unit, problem=problem)


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
    with writing(store.root), tempfile.TemporaryDirectory(dir=store.root) as folder:
        for unit, path in objects.items():
            shutil.copyfile(path, Path(folder) / f"{unit}.o")
        log = Path(folder) / "link.log"
        with open(log, "wb") as file:
            command = [*compiler.command, "-shared", *(f"{u}.o" for u in objects), "-o", name]
            code = subprocess.call([*command, *flags], cwd=folder, stdout=file, stderr=file)
        if code != 0:
            raise _refusal(compiler, name, log, code)
        return store.put(digest, ".so", (Path(folder) / name).read_bytes())
