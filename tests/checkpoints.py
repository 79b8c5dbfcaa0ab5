"""Tiny random checkpoints made by the transformers package's own
model classes, and edits of them.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
FAMILIES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {}),
    "llama-bias": (
        transformers.LlamaConfig,
        transformers.LlamaForCausalLM,
        {"attention_bias": True},
    ),
    "llama-mha": (
        transformers.LlamaConfig,
        transformers.LlamaForCausalLM,
        {"num_key_value_heads": 4, "head_dim": 16},
    ),
    "mistral": (
        transformers.MistralConfig,
        transformers.MistralForCausalLM,
        {"sliding_window": None, "head_dim": 12},
    ),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM, {}),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, {"head_dim": 16}),
}
ROPES = {
    "none": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 2.0,
        "original_max_position_embeddings": 64,
    },
}


def make_model(family: str, *, rope: str = "none", tied: bool = False, seed: int = 0, **changes):
    """A random model in f32 whose norms, biases and weights are all away from their defaults."""
    config_class, model_class, extra = FAMILIES[family]
    config = config_class(
        **{**SIZES, **extra, **changes}, rope_parameters=dict(ROPES[rope]), tie_word_embeddings=tied
    )
    torch.manual_seed(seed)
    model = model_class(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.normal_(1.0 if "norm" in name else 0.0, 0.1 if weight.ndim == 1 else 0.2)
    return model


def save_folder(
    model, folder: Path, *, shards: int = 1, dtype: torch.dtype = torch.float32
) -> Path:
    """Saves `model` in `dtype` as `shards` safetensors files (with an index if more than one)."""
    size = sum(p.numel() * dtype.itemsize for p in model.parameters())
    model.to(dtype).save_pretrained(
        folder, max_shard_size=size // shards + 1 if shards > 1 else "9GB"
    )
    model.float()
    return folder


def edit_json(path: Path, **changes: object) -> None:
    """Sets keys of a JSON file; a value of `...` removes the key."""
    found = json.loads(path.read_text())
    for key, value in changes.items():
        if value is ...:
            found.pop(key, None)
        else:
            found[key] = value
    path.write_text(json.dumps(found))


def edit_tensors(path: Path, **changes: torch.Tensor | None) -> None:
    """Sets tensors of a safetensors file; None removes one. Dots are
    spelled as double underscores.
    """
    tensors = load_file(path)
    for key, value in changes.items():
        name = key.replace("__", ".")
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value
    save_file(tensors, path, metadata={"format": "pt"})
