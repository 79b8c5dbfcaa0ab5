"""A GGUF file as a source of a target: canonical names, and which rows are interleaved."""

from __future__ import annotations

import re
from dataclasses import replace

from circuit.models.config import Family, TargetConfig
from circuit.models.gguf_file import GgufHeader
from circuit.models.stored import StoredTensor

TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
IN_BLOCK = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


def canonical_tensors(header: GgufHeader) -> dict[str, StoredTensor]:
    """The stored tensors under the model's own names; a name with no counterpart stays as it is.

    `rope_freqs.weight` is left out: it is part of the configuration.
    """
    found = {}
    for name, stored in header.tensors.items():
        if name != "rope_freqs.weight":
            found[canonical_name(name)] = replace(stored, name=canonical_name(name))
    return found


def canonical_name(name: str) -> str:
    """`blk.3.attn_q.weight` gives `model.layers.3.self_attn.q_proj.weight`."""
    match = BLOCK.fullmatch(name)
    if match and match[2] in IN_BLOCK:
        return f"model.layers.{match[1]}.{IN_BLOCK[match[2]]}.{match[3]}"
    return TOP.get(name, name)


def interleaved_heads(config: TargetConfig) -> dict[str, int]:
    """The number of heads of each tensor whose rows a GGUF file of this family interleaves."""
    if config.family is not Family.LLAMA:
        return {}
    heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads}
    return {
        f"model.layers.{i}.self_attn.{part}_proj.{kind}": count
        for i in range(config.num_hidden_layers)
        for part, count in heads.items()
        for kind in ("weight", "bias")
    }
