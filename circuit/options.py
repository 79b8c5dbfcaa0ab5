"""Settings from the environment, read at the edge and nowhere else."""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path

from codegen.device import physical_cores
from ir.errors import CircuitError
from proposers.levers import ModelLevers

QUOTA = Path("/sys/fs/cgroup/cpu.max")


class BadOption(CircuitError):
    """A setting is given and cannot be used; nothing is replaced by a default."""

    says = "{name} is {given!r}: {problem}."
    hint = "{advice}"


def cache_dir() -> Path:
    """The folder for downloads: $CIRCUIT_CACHE, else ~/.cache/circuit; it need not exist."""
    given = os.environ.get("CIRCUIT_CACHE")
    return Path(given).expanduser() if given else Path.home() / ".cache" / "circuit"


def kernel_dir() -> Path:
    """The folder in which built kernels are kept between compiles."""
    return cache_dir() / "kernels"


def compiler() -> str | None:
    """The C++ compiler that $CXX names, if it names one."""
    return os.environ.get("CXX") or None


def threads(given: int | None = None) -> int:
    """How many threads to compute with: `given`, else $CIRCUIT_THREADS, else every core at hand.

    A core is at hand if this process may run on it, within the quota of its control group; two
    hardware threads of one core count once.
    """
    if given is not None:
        return _counted("--threads", str(given))
    named = os.environ.get("CIRCUIT_THREADS")
    if named:
        return _counted("CIRCUIT_THREADS", named)
    return max(1, min(physical_cores(), _quota()))


def _counted(name: str, given: str) -> int:
    if not given.strip().isdigit() or not 1 <= int(given) <= 256:
        raise BadOption(
            name=name, given=given, problem="a number of threads from 1 to 256 is needed",
            advice="Leave it out to use every core at hand.",
        )  # fmt: skip
    return int(given)


def _quota() -> int:
    """Whole cores of the control group's quota; a large number where there is none."""
    try:
        quota, period = QUOTA.read_text().split()
    except (OSError, ValueError):
        return 1 << 16
    return 1 << 16 if quota == "max" else max(1, int(quota) // int(period))


def levers() -> ModelLevers:
    """The switches of drafting; each has a variable: $CIRCUIT_TRIM,
    $CIRCUIT_DRAFTER_PREFILL and so on.
    """
    names = {f"CIRCUIT_{f.name.upper()}": f.name for f in fields(ModelLevers)}
    return ModelLevers.parse({f: os.environ[n] for n, f in names.items() if os.environ.get(n)})
