"""The draft head of a checkpoint folder: its sizes from config.json, its shards from the index."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from proposers.config import Contract, HeadConfig, read_record
from proposers.errors import HeadRefused

FAMILIES = ("qwen3_5", "qwen3_5_text", "qwen3_next")
SIZES = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "rms_norm_eps", "vocab_size",
)  # fmt: skip


def folder_config(folder: Path, base: Contract) -> tuple[HeadConfig, Contract, int]:
    """Sizes, contract (`base` with the folder's rotary share) and
    number of modules of a folder's head.
    """
    values = _read_json(folder, "config.json")
    family = values.get("model_type")
    values = values.get("text_config", values)
    if family not in FAMILIES:
        raise HeadRefused(
            path=folder,
            problem=f"heads of model type {family!r} are not among {', '.join(FAMILIES)}",
        )
    rope = {**values, **(values.get("rope_parameters") or values.get("rope_scaling") or {})}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise HeadRefused(
            path=folder, problem=f"its rope is scaled by {kind!r}, which a head is not"
        )
    if values.get("attention_bias"):
        raise HeadRefused(path=folder, problem="its attention has biases")
    given = {name: values[name] for name in SIZES if name in values}
    given["target_vocab_size"] = values.get("vocab_size")
    given["rope_theta"] = float(rope.get("rope_theta", 0.0))
    config = read_record(HeadConfig, given, folder)
    share = float(rope.get("partial_rotary_factor", base.partial_rotary))
    count = values.get("mtp_num_hidden_layers", values.get("num_nextn_predict_layers", 1))
    if not isinstance(count, int) or count < 1:
        raise HeadRefused(path=folder, problem=f"its config.json declares {count!r} MTP layers")
    return config, replace(base, partial_rotary=share), count


def folder_shards(folder: Path) -> list[Path]:
    """The files that hold `mtp.*` tensors: those the index names, or every safetensors file."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return sorted(folder.glob("*.safetensors"))
    table = _read_json(folder, index.name).get("weight_map", {})
    shards = sorted({folder / name for tensor, name in table.items() if tensor.startswith("mtp.")})
    absent = [path.name for path in shards if not path.is_file()]
    if absent:
        raise HeadRefused(
            path=folder, problem=f"its index names {', '.join(absent)}, which is absent"
        )
    return shards


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    try:
        values = json.loads((folder / name).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise HeadRefused(path=folder, problem=f"it has no readable {name}") from error
    if not isinstance(values, dict):
        raise HeadRefused(path=folder, problem=f"its {name} is not a JSON object")
    return values
