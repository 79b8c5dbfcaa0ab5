"""Draft heads from files: one safetensors file of our own format, or a
checkpoint folder with `mtp.*` tensors.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from proposers.config import QWEN35, Contract, HeadConfig, Sharing, read_record
from proposers.errors import HeadRefused
from proposers.folder import folder_config, folder_shards

FORMAT = "circuit-draft-head/1"
DRAFT_IDS, EMBEDDING, HEAD = "draft_ids", "mtp.embed_tokens.weight", "mtp.lm_head.weight"


@dataclass(frozen=True)
class HeadWeights:
    """One prediction module as loaded: its contract, sizes, tensors by name, id map and recipe.

    `unmodelled` lists what the checkpoint holds and the program of a head cannot express.
    """

    path: Path
    contract: Contract
    config: HeadConfig
    tensors: Mapping[str, torch.Tensor] = field(repr=False)
    draft_ids: torch.Tensor | None = None
    recipe: Mapping[str, Any] = field(default_factory=dict)
    unmodelled: tuple[str, ...] = ()


def expected_shapes(contract: Contract, config: HeadConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a head, the id map excepted."""
    n, d, ffn = config.hidden_size, config.head_dim, config.intermediate_size
    q, kv = config.num_attention_heads * d, config.num_key_value_heads * d
    layer = "mtp.layers.0."
    shapes = {
        "mtp.fc.weight": (n, 2 * n),
        "mtp.pre_fc_norm_embedding.weight": (n,),
        "mtp.pre_fc_norm_hidden.weight": (n,),
        "mtp.norm.weight": (n,),
        layer + "input_layernorm.weight": (n,),
        layer + "post_attention_layernorm.weight": (n,),
        layer + "self_attn.q_proj.weight": (2 * q if contract.gated_attention else q, n),
        layer + "self_attn.k_proj.weight": (kv, n),
        layer + "self_attn.v_proj.weight": (kv, n),
        layer + "self_attn.o_proj.weight": (n, q),
        layer + "mlp.gate_proj.weight": (ffn, n),
        layer + "mlp.up_proj.weight": (ffn, n),
        layer + "mlp.down_proj.weight": (n, ffn),
    }
    if contract.qk_norm:
        shapes |= {f"{layer}self_attn.{part}_norm.weight": (d,) for part in "qk"}
    if contract.embedding is Sharing.OWN:
        shapes[EMBEDDING] = (config.target_vocab_size, n)
    if contract.lm_head is Sharing.OWN:
        shapes[HEAD] = (config.vocab_size, n)
    return shapes


def load_head(path: str | Path) -> list[HeadWeights]:
    """The prediction modules at `path`, one for most heads;
    HeadRefused says what is wrong with it.
    """
    path = Path(path)
    if not path.exists():
        raise HeadRefused(path=path, problem="it does not exist")
    modules = list(_from_folder(path) if path.is_dir() else _from_file(path))
    for module in modules:
        _check(module)
    return modules


def save_head(path: str | Path, modules: list[HeadWeights]) -> None:
    """Writes modules as one file; tensors keep their formats."""
    first, tensors = modules[0], {}
    for index, module in enumerate(modules):
        prefix = f"modules.{index}." if len(modules) > 1 else ""
        tensors |= {prefix + name: t.contiguous() for name, t in module.tensors.items()}
    if first.draft_ids is not None:
        tensors[DRAFT_IDS] = first.draft_ids.to(torch.int32)
    metadata = {
        "format": FORMAT,
        "contract": json.dumps(first.contract.plain(), sort_keys=True),
        "config": json.dumps(first.config.plain(), sort_keys=True),
        "modules": str(len(modules)),
        "recipe": json.dumps(first.recipe, sort_keys=True),
    }
    save_file(tensors, str(path), metadata=metadata)


def _from_file(path: Path) -> Iterator[HeadWeights]:
    metadata, tensors = read_safetensors(path)
    if metadata.get("format") != FORMAT:
        found = metadata.get("format", "none")
        raise HeadRefused(path=path, problem=f"its metadata names format {found}, not {FORMAT}")
    contract = read_record(Contract, _json(path, metadata, "contract"), path)
    config = read_record(HeadConfig, _json(path, metadata, "config"), path)
    recipe = _json(path, metadata, "recipe") if "recipe" in metadata else {}
    count = metadata.get("modules", "1")
    if not count.isdecimal() or not 1 <= int(count) <= 16:
        raise HeadRefused(path=path, problem=f"its metadata says {count!r} modules")
    ids = tensors.pop(DRAFT_IDS, None)
    taken: set[str] = set()
    for index in range(int(count)):
        prefix = f"modules.{index}." if int(count) > 1 else ""
        own = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
        taken |= {prefix + name for name in own}
        yield HeadWeights(path, contract, config, own, ids, recipe)
    if left := sorted(tensors.keys() - taken):
        raise HeadRefused(path=path, problem=f"{', '.join(left)} belong to no module")


def _from_folder(folder: Path) -> Iterator[HeadWeights]:
    config, contract, count = folder_config(folder, QWEN35)
    tensors: dict[str, torch.Tensor] = {}
    for shard in folder_shards(folder):
        tensors |= read_safetensors(shard, prefix="mtp.")[1]
    if not tensors:
        raise HeadRefused(path=folder, problem="no file of it holds an mtp.* tensor")
    experts = any(".mlp.experts." in name or ".mlp.gate.weight" in name for name in tensors)
    unmodelled = ("its feed-forward is a mixture of experts",) if experts else ()
    if EMBEDDING in tensors:
        contract = _with(contract, embedding=Sharing.OWN)
    if HEAD in tensors:
        contract = _with(contract, lm_head=Sharing.OWN)
    shared = {n: t for n, t in tensors.items() if not n.startswith("mtp.layers.")}
    for index in range(count):
        own = {
            n.replace(f"mtp.layers.{index}.", "mtp.layers.0."): t
            for n, t in tensors.items()
            if n.startswith(f"mtp.layers.{index}.")
        }
        yield HeadWeights(folder, contract, config, shared | own, unmodelled=unmodelled)


def _with(contract: Contract, **fields: Any) -> Contract:
    return Contract(**{**contract.__dict__, **fields})


def read_safetensors(
    path: Path, prefix: str = ""
) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    """Metadata and the tensors whose names start with `prefix`; a broken file is HeadRefused."""
    try:
        with safe_open(str(path), "pt") as file:
            names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118
            return dict(file.metadata() or {}), {name: file.get_tensor(name) for name in names}
    except (SafetensorError, OSError) as error:
        raise HeadRefused(
            path=path, problem=f"it cannot be read as safetensors ({error})"
        ) from error


def _json(path: Path, metadata: Mapping[str, str], name: str) -> dict[str, Any]:
    try:
        values = json.loads(metadata[name])
    except (KeyError, json.JSONDecodeError) as error:
        raise HeadRefused(path=path, problem=f"its metadata has no readable {name}") from error
    if not isinstance(values, dict):
        raise HeadRefused(path=path, problem=f"its {name} is not a JSON object")
    return values


def _check(module: HeadWeights) -> None:
    """Refuses missing, superfluous or misshapen tensors, NaN and
    infinities, and a bad id map, all at once.
    """
    wanted = {} if module.unmodelled else expected_shapes(module.contract, module.config)
    have = module.tensors
    problems = [f"{n} {list(s)} is missing" for n, s in wanted.items() if n not in have]
    if not module.unmodelled:
        problems += [f"{n} has no place in this head" for n in have if n not in wanted]
    for name, shape in wanted.items():
        tensor = have.get(name)
        if tensor is None:
            continue
        if tuple(tensor.shape) != shape:
            problems.append(f"{name} is {list(tensor.shape)}, not {list(shape)}")
        elif not tensor.is_floating_point():
            problems.append(f"{name} is stored as {tensor.dtype}, which is not read")
        elif not bool(tensor.isfinite().all()):
            problems.append(f"{name} holds NaN or an infinity")
    problems += _id_problems(module)
    if problems:
        raise HeadRefused(path=module.path, problem="; ".join(problems))


def _id_problems(module: HeadWeights) -> list[str]:
    """What is wrong with the map from scored columns to target ids, as sentences."""
    ids, config = module.draft_ids, module.config
    if ids is None:
        return []
    if ids.dtype not in (torch.int32, torch.int64) or tuple(ids.shape) != (config.vocab_size,):
        return [f"draft_ids is {ids.dtype}{list(ids.shape)}, not int32[{config.vocab_size}]"]
    if not bool(((ids >= 0) & (ids < config.target_vocab_size)).all()):
        return [f"draft_ids holds ids outside the vocabulary of {config.target_vocab_size}"]
    return [] if len(ids.unique()) == len(ids) else ["draft_ids holds an id twice"]
