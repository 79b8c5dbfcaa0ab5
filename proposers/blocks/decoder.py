"""A pre-norm decoder layer: attention and SwiGLU, each added to the residual stream."""

from __future__ import annotations

from typing import Any

from ir.ops import add, linear, rms_norm, silu_mul
from ir.tracing import Scope
from proposers.blocks.attention import AttentionShape, attend
from proposers.blocks.rows import Rows


def swiglu(scope: Scope, prefix: str, x: Any) -> Any:
    """The feed-forward result [m, n] for normed rows `x` [m, n]."""
    gate = linear(x, scope.weight(f"{prefix}.gate_proj.weight"))
    up = linear(x, scope.weight(f"{prefix}.up_proj.weight"))
    return linear(silu_mul(gate, up), scope.weight(f"{prefix}.down_proj.weight"))


def decoder_layer(
    scope: Scope, shape: AttentionShape, prefix: str, state: str, x: Any, rows: Rows
) -> Any:
    """The residual stream [m, n] after the layer whose weights start with `prefix`."""
    normed = layer_input(scope, shape, prefix, x)
    x = add(x, attend(scope, shape, f"{prefix}.self_attn", state, normed, rows))
    normed = rms_norm(
        x, scope.weight(f"{prefix}.post_attention_layernorm.weight"),
        eps=shape.eps, offset=shape.norm_offset,
    )  # fmt: skip
    return add(x, swiglu(scope, f"{prefix}.mlp", normed))


def layer_input(scope: Scope, shape: AttentionShape, prefix: str, x: Any) -> Any:
    """The normed rows that the attention of layer `prefix` reads."""
    weight = scope.weight(f"{prefix}.input_layernorm.weight")
    return rms_norm(x, weight, eps=shape.eps, offset=shape.norm_offset)
