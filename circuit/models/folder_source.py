"""A folder with config.json and safetensors as a source of a target."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath, PureWindowsPath

from circuit.models.errors import (
    BadJson,
    NotAModel,
    ShardMissing,
    ShardUnsafe,
    TensorNotInShard,
)
from circuit.models.safetensors_file import read_json, read_safetensors
from circuit.models.stored import MappedFile, StoredTensor

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


@dataclass
class FolderTensors:
    """The tensors of a folder, the files that hold them, and what was left out, in words."""

    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    files: dict[Path, MappedFile] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def folder_tensors(folder: Path) -> FolderTensors:
    """The tensors that the folder's index (or its single file) names; other files are only noted.

    Raises NotAModel, ShardMissing, ShardUnsafe, ShardBroken or TensorNotInShard before any tensor
    is read. No file outside the folder is opened.
    """
    found = FolderTensors()
    index = folder / INDEX
    mapping = _weight_map(index) if index.exists() else None
    if mapping is None and not (folder / SINGLE).is_file():
        raise NotAModel(path=folder, why=_what_instead(folder))
    shards = sorted(set(mapping.values())) if mapping is not None else [SINGLE]
    for shard in shards:
        if not (folder / shard).is_file():
            raise ShardMissing(folder=folder, shard=shard)
    for shard in shards:
        path = folder / shard
        found.files[path] = MappedFile(path)
        held = read_safetensors(found.files[path])
        _adopt(found, folder, shard, held, mapping)
    for stray in sorted(p.name for p in folder.glob("*.safetensors") if p.name not in shards):
        found.notes.append(
            f"{stray} is not named by the {'index' if mapping else 'checkpoint'}; skipped"
        )
    return found


def _adopt(
    found: FolderTensors,
    folder: Path,
    shard: str,
    held: dict[str, StoredTensor],
    mapping: dict[str, str] | None,
) -> None:
    """Adds the tensors of one shard; the index decides which shard a repeated name comes from."""
    if mapping is None:
        found.tensors.update(held)
        return
    absent = [name for name, where in mapping.items() if where == shard and name not in held]
    if absent:
        raise TensorNotInShard(folder=folder, tensors=", ".join(absent), shard=shard)
    for name, tensor in held.items():
        if mapping.get(name, shard) == shard:
            found.tensors[name] = tensor
        else:
            found.notes.append(
                f"{shard} repeats {name}, which the index takes from {mapping[name]}"
            )


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor name to shard name; raises ShardUnsafe on a shard that is not a plain file name."""
    mapping = read_json(index).get("weight_map")
    if not isinstance(mapping, dict) or not mapping:
        raise BadJson(path=index, why="it has no weight_map")
    for shard in mapping.values():
        plain = isinstance(shard, str) and shard not in ("", ".", "..") and "\0" not in shard
        if not plain or PurePosixPath(shard).name != shard or PureWindowsPath(shard).name != shard:
            raise ShardUnsafe(path=index, shard=shard)
    return mapping


def _what_instead(folder: Path) -> str:
    """What a folder without safetensors holds, for the message."""
    if list(folder.glob("*.bin")) or list(folder.glob("*.pt*")):
        return "it holds pickled weights (*.bin), which are not opened; convert them to safetensors"
    if list(folder.glob("*.gguf")):
        return "it holds GGUF files; name one of them"
    return f"it has neither {SINGLE} nor {INDEX}"
