"""The manifest of an artifact: the fields it has, what each may hold, and how it is read back.

A digest that fits says that a manifest is whole, not that this program wrote it. So each field has
a rule here, a field without one is refused, and what is read is what the rules promise.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ir.errors import CircuitError
from ir.format import TensorType
from ir.key import GraphKey

SCHEMA = 2
MANIFEST = "manifest.json"
WEIGHTS = "weights.safetensors"
LARGEST = 1 << 26  # bytes of a manifest
MOST_BYTES, MOST_ROWS = 1 << 48, 1 << 31  # of memory or a file; of a context or a dimension


class NotAnArtifact(CircuitError):
    says = "{path} is not a compiled artifact: {problem}"
    hint = "make one with `circuit compile MODEL -o DIR`"


class SchemaMismatch(CircuitError):
    says = "the artifact {path} has schema {seen}, but this version reads schema {expected}"
    hint = "compile the model again with this version"


class FileChanged(CircuitError):
    says = (
        "{file} in the artifact {path} is not what was compiled: its {what} is {seen}, "
        "recorded is {expected}"
    )
    hint = "compile the model again; files of an artifact are not edited"


class RecordUnfit(CircuitError):
    says = "{file} in the artifact {path} is not one that this version writes: {problem}"
    hint = "compile the model again; files of an artifact are not edited"


def canonical(record: Mapping[str, Any]) -> bytes:
    """JSON bytes that are equal for equal records, readable by people."""
    return (json.dumps(record, indent=1, sort_keys=True, ensure_ascii=True) + "\n").encode()


def manifest_digest(record: Mapping[str, Any]) -> str:
    """SHA-256 of a manifest without its own `digest` field."""
    rest = {k: v for k, v in record.items() if k != "digest"}
    return hashlib.sha256(canonical(rest)).hexdigest()


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of the artifact at `path`, every field as its rule has it.

    NotAnArtifact if there is none, SchemaMismatch, FileChanged if its digest does not fit, and
    RecordUnfit for what fits its digest and was never written here.
    """
    file = path / MANIFEST
    if not file.is_file():
        raise NotAnArtifact(path=path, problem=f"there is no {MANIFEST} in it")
    try:
        if file.stat().st_size > LARGEST:
            raise ValueError("it is too large")
        record = parse_strictly(file.read_bytes())
        schema, digest, seen = record["schema"], record["digest"], manifest_digest(record)
    except (ValueError, KeyError, TypeError, RecursionError) as problem:
        raise NotAnArtifact(path=path, problem=f"{MANIFEST} cannot be read") from problem
    if schema != SCHEMA:
        raise SchemaMismatch(path=path, seen=shown(schema), expected=SCHEMA)
    if seen != digest:
        raise FileChanged(
            path=path, file=MANIFEST, what="digest", seen=seen, expected=shown(digest)
        )
    problems = list(_record(MANIFEST_RULES)("", record)) or list(_contradictions(record))
    if problems:
        raise RecordUnfit(path=path, file=MANIFEST, problem=listed(problems))
    return record


def parse_strictly(data: bytes) -> Any:
    """The value of JSON text; ValueError for a name given twice and for numbers beyond JSON's."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) < len(pairs):
            raise ValueError("a name is given twice")
        return made

    def beyond(text: str) -> None:
        raise ValueError(f"{text} is no number of JSON")

    return json.loads(data.decode("utf-8"), object_pairs_hook=once, parse_constant=beyond)


def shown(value: object, most: int = 80) -> str:
    """A value as errors quote it: short, on one line."""
    text = value if isinstance(value, str) and value.isprintable() else ascii(value)
    return text if len(text) <= most else f"{text[: most - 3]}..."


def listed(problems: list[str], most: int = 3) -> str:
    """The first few problems, and how many there are beside them."""
    rest = f"; and {len(problems) - most} more" if len(problems) > most else ""
    return "; ".join(shown(p, 240) for p in problems[:most]) + rest


# -- rules ---------------------------------------------------------------------------------------
# A rule is given a field's path and its value, and yields what is wrong with it as sentences.

Rule = Callable[[str, Any], Iterator[str]]


def _such(what: str, fits: Callable[[Any], bool]) -> Rule:
    def rule(where: str, value: Any) -> Iterator[str]:
        try:
            good = fits(value)
        except (ValueError, KeyError, TypeError, AttributeError):
            good = False
        if not good:
            yield f"{where} is {shown(value)}, not {what}"

    return rule


def _whole(least: int, most: int) -> Rule:
    return _such(
        f"a whole number from {least} to {most}", lambda n: type(n) is int and least <= n <= most
    )


def _map(name: Rule, rule: Rule) -> Rule:
    def of(where: str, value: Any) -> Iterator[str]:
        if type(value) is not dict:
            yield f"{where} is {shown(value)}, not an object"
            return
        for key, inner in value.items():
            yield from name(f"a name in {where}", key)
            yield from rule(f"{where}.{shown(key)}", inner)

    return of


def _record(fields: Mapping[str, Rule]) -> Rule:
    def of(where: str, value: Any) -> Iterator[str]:
        if type(value) is not dict:
            yield f"{where or 'the manifest'} is {shown(value)}, not an object"
            return
        inside = f"{where}." if where else ""
        yield from (f"there is no {inside}{name}" for name in fields if name not in value)
        yield from (f"{inside}{shown(n)} is not a field" for n in value if n not in fields)
        for name, rule in fields.items():
            if name in value:
                yield from rule(f"{inside}{name}", value[name])

    return of


LONGEST_PATH = 255  # bytes; a single name may not be longer on most file systems


def _is_path(text: Any) -> bool:
    parts = text.split("/") if type(text) is str and text.isprintable() else [""]
    plain = all(part not in ("", ".", "..") and "\\" not in part for part in parts)
    return plain and len(text.encode()) <= LONGEST_PATH


def _is_key(text: str) -> bool:
    key = GraphKey.parse(text)
    return str(key) == text and 1 <= key.rows < MOST_ROWS


def _is_state(text: str) -> bool:
    type_ = TensorType.parse(text)
    whole = all(1 <= n < MOST_ROWS for n in type_.shape) and len(type_.shape) > 0
    return str(type_) == text and whole and type_.nbytes <= MOST_BYTES


_ANY: Rule = _map(_such("a text", lambda s: True), lambda where, value: iter(()))
_TEXT = _such("a text", lambda s: type(s) is str and s.encode() is not None)
_FILE = _such("the path of a file inside the artifact", _is_path)
_PART = _such("the name of a part", lambda s: _is_path(s) and "/" not in s)
_DIGEST = _such(
    "a SHA-256", lambda s: type(s) is str and len(s) == 64 and not set(s) - set("0123456789abcdef")
)

PART_RULES: Mapping[str, Rule] = {
    "binding": _TEXT,
    "backend": _TEXT,
    "digest": _DIGEST,
    "plans": _map(_such("the key of a program", _is_key), _DIGEST),
    "states": _map(_TEXT, _such("the type of a state", _is_state)),
    "context": _whole(0, MOST_ROWS),
    "contract": _ANY,
    "facts": _map(_TEXT, _TEXT),
    "source": _DIGEST,
    "weights": _map(_such("`name@layout`", lambda s: all(s.rpartition("@"))), _TEXT),
    "memory": _map(_TEXT, _whole(0, MOST_BYTES)),
}
MANIFEST_RULES: Mapping[str, Rule] = {
    "schema": _whole(SCHEMA, SCHEMA),
    "digest": _DIGEST,
    "options": _ANY,
    "files": _map(_FILE, _DIGEST),
    "weights": _record({"bytes": _whole(8, MOST_BYTES), "header": _DIGEST, "sha256": _DIGEST}),
    "parts": _map(_PART, _record(PART_RULES)),
}


def _contradictions(manifest: Mapping[str, Any]) -> Iterator[str]:
    """What two fields of a manifest say of each other that cannot both be."""
    files = manifest["files"]
    if not manifest["parts"]:
        yield "parts is empty"
    for name, part in manifest["parts"].items():
        for key, digest in part["plans"].items():
            file = f"{name}/plans/{key}.json"
            if files.get(file) != digest:
                yield f"files.{file} is {shown(files.get(file))}, but its plan is {digest}"
            if f"{name}/graphs/{key}.txt" not in files:
                yield f"files lacks {name}/graphs/{key}.txt"
        if len({TensorType.parse(t).shape[0] for t in part["states"].values()}) > 1:
            yield f"parts.{name}.states differ in their number of blocks"
