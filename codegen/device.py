"""The machine that runs this process: what it is, what it can execute, how many cores it has."""

from __future__ import annotations

import os
import platform
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")


def machine_facts() -> dict[str, str]:
    """`machine`, `system`, and `isa`: the instruction-set extensions
    that the operating system reports.
    """
    return {
        "machine": platform.machine(),
        "system": platform.system(),
        "isa": " ".join(sorted(_extensions())),
    }


def _fields() -> list[tuple[str, str]]:
    if not _CPUINFO.exists():
        return []
    pairs = (line.partition(":") for line in _CPUINFO.read_text().splitlines())
    return [(name.strip(), value.strip()) for name, _, value in pairs]


def _extensions() -> set[str]:
    for name, value in _fields():
        if name in ("flags", "Features"):
            return set(value.split())
    return set()


def physical_cores() -> int:
    """Cores that this process may use, two hardware threads of one
    core counted once; at least 1.
    """
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    cores, package = set(), "0"
    for name, value in _fields():
        if name == "physical id":
            package = value
        elif name == "core id":
            cores.add((package, value))
    return max(1, min(usable or 1, len(cores) or usable or 1))


def processor_name() -> str:
    """The processor's own name, for reports."""
    return next((v for n, v in _fields() if n == "model name"), platform.processor())
