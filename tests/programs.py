"""Tiny targets and heads for tests of the language: weight and state types, graphs of any key."""

from __future__ import annotations

from circuit.models.config import Family, RopeSpec, TargetConfig
from circuit.models.target import EMBEDDING, HEAD, NORM, cache_states, target_program
from ir.graph import Graph, GraphKey
from ir.passes.facts import Facts
from ir.tensor import Format, TensorType
from ir.tracing import trace
from proposers import mtp_program
from proposers.blocks.rows import blocks_for
from proposers.config import QWEN35, Contract, HeadConfig

CONTEXT = 64
CPU = Facts({Format.BF16: Format.BF16, **{f: Format.Q8_0 for f in Format if f.is_block}})
PLAIN = Facts(fuse=False, argmax_tile=None, interleave=None)


def target_config(**changes: object) -> TargetConfig:
    """A target of two layers: 64 columns, 4 query heads on 2 key-value heads, 300 tokens."""
    sizes = {
        "family": Family.LLAMA, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 300,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "rms_norm_eps": 1e-5, "rope": RopeSpec(1e4), "max_position_embeddings": CONTEXT,
    }  # fmt: skip
    return TargetConfig(**{**sizes, **changes})


def matrix(rows: int, columns: int, format: Format) -> TensorType:
    """The type of a weight matrix."""
    return TensorType((rows, columns), format)


def block_types(prefix: str, c: TargetConfig | HeadConfig, format: Format, **options: bool) -> dict:
    """Weight types of one decoder layer; `options`: gated, qk_norm, bias."""
    n, f, d = c.hidden_size, c.intermediate_size, c.head_dim
    q, kv = c.num_attention_heads * d, c.num_key_value_heads * d
    gate = 2 if options.get("gated") else 1
    types = {
        "self_attn.q_proj": matrix(q * gate, n, format), "self_attn.k_proj": matrix(kv, n, format),
        "self_attn.v_proj": matrix(kv, n, format), "self_attn.o_proj": matrix(n, q, format),
        "mlp.gate_proj": matrix(f, n, format), "mlp.up_proj": matrix(f, n, format),
        "mlp.down_proj": matrix(n, f, format), "input_layernorm": TensorType((n,), Format.F32),
        "post_attention_layernorm": TensorType((n,), Format.F32),
    }  # fmt: skip
    if options.get("qk_norm"):
        norm = TensorType((d,), Format.F32)
        types |= {"self_attn.q_norm": norm, "self_attn.k_norm": norm}
    named = {f"{prefix}.{k}.weight": t for k, t in types.items()}
    if options.get("bias"):
        for k in ("q_proj", "k_proj", "v_proj"):
            rows = types[f"self_attn.{k}"].shape[0]
            named[f"{prefix}.self_attn.{k}.bias"] = TensorType((rows,), Format.F32)
    return named


def rope_types(dim: int) -> dict[str, TensorType]:
    """Types of the rotary tables for `dim` rotated columns."""
    table = TensorType((CONTEXT, dim // 2), Format.F32)
    return {"rope.cos": table, "rope.sin": table}


def target_graph(
    key: GraphKey, format: Format = Format.F32, *, normed_hidden: bool = False, **changes: object
) -> Graph:
    """The TRACED graph of a tiny target."""
    c = target_config(**changes)
    weights = {EMBEDDING: matrix(c.vocab_size, c.hidden_size, format), **rope_types(c.head_dim)}
    weights[NORM] = TensorType((c.hidden_size,), Format.F32)
    if not c.tie_word_embeddings:
        weights[HEAD] = matrix(c.vocab_size, c.hidden_size, format)
    for index in range(c.num_hidden_layers):
        prefix = f"model.layers.{index}"
        weights |= block_types(prefix, c, format, qk_norm=c.qk_norm, bias=c.qkv_bias)
    cache = Format.F16 if format.is_block else format
    states = cache_states(
        c.num_hidden_layers, c.num_key_value_heads, c.head_dim, cache, 1 + 4 * blocks_for(CONTEXT)
    )
    program = target_program(c, CONTEXT, normed_hidden=normed_hidden)
    return trace(program, key, weights, states, "target")


def head_graph(
    key: GraphKey, format: Format = Format.F32, contract: Contract | None = None, *,
    mapped: bool = True, **changes: int,
) -> Graph:  # fmt: skip
    """The TRACED graph of a tiny multi-token-prediction head; QWEN35 is the gated contract."""
    contract = contract or Contract()
    sizes = {
        "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-6, "vocab_size": 200,
        "target_vocab_size": 300,
    }  # fmt: skip
    c = HeadConfig(**{**sizes, **changes})
    n, norm = c.hidden_size, TensorType((c.hidden_size,), Format.F32)
    rotary = int(c.head_dim * contract.partial_rotary)
    weights = {
        mtp_program.EMBEDDING: matrix(c.target_vocab_size, n, format),
        mtp_program.HEAD: matrix(c.vocab_size, n, format),
        "mtp.fc.weight": matrix(n, 2 * n, format),
        "mtp.pre_fc_norm_embedding.weight": norm, "mtp.pre_fc_norm_hidden.weight": norm,
        "mtp.norm.weight": norm, **rope_types(rotary),
        **block_types(
            mtp_program.LAYER, c, format, gated=contract.gated_attention, qk_norm=contract.qk_norm
        ),
    }  # fmt: skip
    if mapped:
        weights[mtp_program.DRAFT_IDS] = TensorType((c.vocab_size,), Format.I32)
    cache = Format.F16 if format.is_block else format
    states = cache_states(1, c.num_key_value_heads, c.head_dim, cache, 1 + 4 * blocks_for(CONTEXT))
    program = mtp_program.mtp_program(contract, c, CONTEXT, mapped=mapped)
    return trace(program, key, weights, states, "head")


__all__ = ["CONTEXT", "CPU", "PLAIN", "QWEN35", "head_graph", "target_config", "target_graph"]
