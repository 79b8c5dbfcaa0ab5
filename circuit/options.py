"""Settings from the environment, read at the edge and nowhere else."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path

from codegen.device import physical_cores
from ir.errors import CircuitError
from proposers.knobs import KNOBS, levers_of_knobs
from proposers.levers import ModelLevers

QUOTA = Path("/sys/fs/cgroup/cpu.max")


class BadOption(CircuitError):
    """A setting is given and cannot be used; nothing is replaced by a default."""

    says = "{name} is {given!r}: {problem}."
    hint = "{advice}"


def cache_dir() -> Path:
    """The folder for downloads: $CIRCUIT_CACHE, else ~/.cache/circuit; it need not exist."""
    given = os.environ.get("CIRCUIT_CACHE")
    return at_home(given) if given else Path.home() / ".cache" / "circuit"


def at_home(given: str | Path) -> Path:
    """The path with a leading `~` replaced by the home that it names; as it is if it names none."""
    try:
        return Path(given).expanduser()
    except RuntimeError:  # no such user
        return Path(given)


def kernel_dir() -> Path:
    """The folder in which built kernels are kept between compiles."""
    return cache_dir() / "kernels"


def compiler() -> str | None:
    """The C++ compiler that $CXX names, if it names one."""
    return os.environ.get("CXX", "").strip() or None


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
    if not given.strip().isdecimal() or not 1 <= int(given) <= 256:
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


def levers(
    given: Sequence[str] = (), file: Path | None = None, environment: Mapping[str, str] = os.environ
) -> ModelLevers:
    """The switches of drafting: defaults, then the environment, then `file`, then `given`.

    `given` are `name=value` texts of the command line; `file` is TOML with a table `[levers]`. Each
    lever has a variable ($CIRCUIT_TRIM, $CIRCUIT_DRAFT_STOP and so on), and so has each knob of
    older engines ($CIRCUIT_MTP_K_LADDER); the two must not contradict each other.
    """
    values: dict[str, object] = dict(_from_environment(environment))
    if file is not None:
        values |= _from_file(file)
    said: dict[str, str] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals:
            raise BadOption(
                name="--lever", given=text, problem="name=value is needed",
                advice="Write --lever draft_stop=0.5, for instance.",
            )  # fmt: skip
        name, value = name.strip(), value.strip()
        if said.setdefault(name, value) != value:
            raise BadOption(
                name="--lever", given=text, problem=f"{name} is {said[name]} as well",
                advice="Leave one of the two out.",
            )  # fmt: skip
    return ModelLevers.parse(values | said)


def _from_environment(environment: Mapping[str, str]) -> dict[str, str]:
    own = {f.name: f"CIRCUIT_{f.name.upper()}" for f in fields(ModelLevers)}
    values = {name: environment[v] for name, v in own.items() if environment.get(v)}
    known = {k: environment[f"CIRCUIT_{k}"] for k in KNOBS if f"CIRCUIT_{k}" in environment}
    for name, text in levers_of_knobs(known).items():
        if values.setdefault(name, text) != text:
            raise BadOption(
                name=own[name], given=values[name], problem=f"an older knob says {name} {text}",
                advice="Leave one of the two out.",
            )  # fmt: skip
    return values


def _from_file(file: Path) -> dict[str, object]:
    try:
        tables = tomllib.loads(file.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise BadOption(
            name="--levers", given=str(file), problem=f"it cannot be read as TOML ({error})",
            advice="Write a table [levers] with one `name = value` per line.",
        ) from error  # fmt: skip
    if tables.keys() != {"levers"} or not isinstance(tables["levers"], dict):
        raise BadOption(
            name="--levers", given=str(file), problem=f"it holds {', '.join(tables) or 'nothing'}",
            advice="Write one table [levers] and nothing else.",
        )  # fmt: skip
    return tables["levers"]
