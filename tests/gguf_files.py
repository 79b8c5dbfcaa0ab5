"""GGUF files written by the `gguf` package from transformers'
models, as its converter lays them out.
"""

from __future__ import annotations

import re
from pathlib import Path

import gguf
import numpy as np
import torch

TYPES = {
    name: getattr(gguf.GGMLQuantizationType, name)
    for name in ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1")
}
NAMES = gguf.get_tensor_name_map


def interleave(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of q or k in the order that llama-family files have."""
    return (
        rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
        .swapaxes(1, 2)
        .reshape(rows.shape)
    )


def write_gguf(
    model,
    path: Path,
    *,
    format: str = "F32",
    embedding: str | None = None,
    change=None,
    tensors=None,
) -> dict[str, np.ndarray]:
    """Writes `model` with its matrices in `format`; returns the dequantised f32 weights by HF name.

    `change(writer)` may add metadata; `tensors(dict)` may edit the arrays (file name to f32 array).
    """
    config = model.config
    arch = {"mistral": "llama"}.get(config.model_type, config.model_type)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], config.num_hidden_layers)
    writer = gguf.GGUFWriter(path, arch)
    add_metadata(writer, model)
    if change is not None:
        change(writer)
    state = model.state_dict()
    if config.tie_word_embeddings:
        state.pop("lm_head.weight")
    arrays = {}
    for name, weight in state.items():
        match = re.search(r"\.([qk])_proj\.", name)
        if arch == "llama" and match:
            heads = config.num_attention_heads if match[1] == "q" else config.num_key_value_heads
            weight = interleave(weight, heads)
        arrays[names.get_name(name, try_suffixes=(".weight", ".bias"))] = weight.numpy()
    if tensors is not None:
        tensors(arrays)
    for name, array in arrays.items():
        chosen = embedding or format if name in ("token_embd.weight", "output.weight") else format
        kind = TYPES[chosen if array.ndim == 2 else "F32"]
        writer.add_tensor(name, gguf.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return arrays


def add_metadata(writer: gguf.GGUFWriter, model) -> None:
    """The metadata of a converted model."""
    config = model.config
    head_dim = model.model.layers[0].self_attn.head_dim
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(head_dim)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_vocab_size(config.vocab_size)
