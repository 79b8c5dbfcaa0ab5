"""A strict reader of safetensors headers; every bound is checked against the file's length.

Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from circuit.models import stored
from circuit.models.errors import BadJson, DuplicateKey, ShardBroken
from circuit.models.stored import MappedFile, StoredTensor

READ_FORMATS = {"F32": stored.F32, "F16": stored.F16, "BF16": stored.BF16}


def read_safetensors(file: MappedFile) -> dict[str, StoredTensor]:
    """The tensors of a mapped safetensors file; raises ShardBroken, DuplicateKey or BadJson."""
    path = file.path
    if file.size < 8:
        raise ShardBroken(
            path=path, why=f"it has {file.size} bytes, fewer than the 8 of a header length"
        )
    length = int.from_bytes(file.map[:8], "little")
    if length > file.size - 8:
        raise ShardBroken(
            path=path,
            why=f"its header claims {length} bytes and the file has "
            f"{file.size - 8} after the length",
        )
    header = parse_json(path, bytes(file.map[8 : 8 + length]))
    header.pop("__metadata__", None)
    start, tensors = 8 + length, {}
    for name, record in header.items():
        tensors[name] = _tensor(path, name, record, start, file.size)
    _check_tiling(path, tensors, start, file.size)
    return tensors


def _tensor(path: Path, name: str, record: object, start: int, size: int) -> StoredTensor:
    """One header record as a tensor with absolute offset."""
    try:
        spelled, shape = record["dtype"], tuple(record["shape"])
        begin, end = record["data_offsets"]
    except (TypeError, KeyError, ValueError):
        raise ShardBroken(path=path, why=f"the record of {name} is malformed") from None
    if not all(type(n) is int and n >= 0 for n in (*shape, begin, end)) or begin > end:
        raise ShardBroken(path=path, why=f"the record of {name} has an impossible shape or place")
    if start + end > size:
        raise ShardBroken(
            path=path, why=f"{name} ends at byte {start + end} and the file has {size}"
        )
    layout = READ_FORMATS.get(spelled)
    if layout is not None and layout.nbytes(shape) != end - begin:
        raise ShardBroken(
            path=path,
            why=f"{name} {list(shape)} of {spelled} needs "
            f"{layout.nbytes(shape)} bytes and has {end - begin}",
        )
    return StoredTensor(name, layout, str(spelled), shape, path, start + begin, end - begin)


def _check_tiling(path: Path, tensors: Mapping[str, StoredTensor], start: int, size: int) -> None:
    """Raises ShardBroken unless the tensors fill the file after its
    header without gap or overlap.
    """
    at = start
    for tensor in sorted(tensors.values(), key=lambda t: (t.offset, t.nbytes)):
        if tensor.offset != at:
            raise ShardBroken(
                path=path, why=f"{tensor.name} begins at byte {tensor.offset} where {at} is next"
            )
        at += tensor.nbytes
    if at != size:
        raise ShardBroken(
            path=path, why=f"its header accounts for {at} bytes and the file has {size}"
        )


def parse_json(path: Path, raw: bytes) -> dict[str, object]:
    """The JSON object in `raw`; raises BadJson, or DuplicateKey when an object repeats a key."""

    def once(pairs: list[tuple[str, object]]) -> dict[str, object]:
        made: dict[str, object] = {}
        for key, value in pairs:
            if key in made:
                raise DuplicateKey(path=path, key=key)
            made[key] = value
        return made

    try:
        found = json.loads(raw.decode("utf-8"), object_pairs_hook=once)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise BadJson(path=path, why=str(error)) from None
    if not isinstance(found, dict):
        raise BadJson(path=path, why="it is not an object")
    return found


def read_json(path: Path) -> dict[str, object]:
    """The JSON object in the file at `path`."""
    return parse_json(path, path.read_bytes())
