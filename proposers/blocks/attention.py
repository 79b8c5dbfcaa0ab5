"""Grouped-query attention over the paged cache, with the options that decoder families add."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ir.ops import (
    add_bias,
    attention,
    columns,
    kv_write,
    linear,
    merge_heads,
    rms_norm,
    rope,
    sigmoid_gate,
    split_heads,
    tree_attention,
)
from ir.tracing import Scope
from proposers.blocks.rows import Rows


@dataclass(frozen=True)
class AttentionShape:
    """Sizes and options of one attention block.

    `gated`: q_proj holds, per head, `head_dim` query rows and then `head_dim` gate rows; the result
    of attention is scaled by the sigmoid of the gate. `qk_norm`: queries and keys are normalised
    per head, with weights `w + norm_offset`.
    """

    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    gated: bool = False
    qk_norm: bool = False
    norm_offset: float = 0.0
    qkv_bias: bool = False
    o_bias: bool = False

    @property
    def scale(self) -> float:
        """The factor on scores, one over the square root of the head's width."""
        return self.head_dim**-0.5


def projected(scope: Scope, x: Any, name: str, bias: bool) -> Any:
    """`x` through the linear `name`, plus its bias if it has one."""
    y = linear(x, scope.weight(f"{name}.weight"))
    return add_bias(y, scope.weight(f"{name}.bias")) if bias else y


def write_keys(
    scope: Scope, shape: AttentionShape, prefix: str, state: str, x: Any, rows: Rows
) -> None:
    """Stores keys and values of the normed rows `x` [m, n] in `state`:
    all that later rows need of them.
    """
    k = projected(scope, x, f"{prefix}.k_proj", shape.qkv_bias)
    v = projected(scope, x, f"{prefix}.v_proj", shape.qkv_bias)
    k, v = split_heads(k, heads=shape.kv_heads), split_heads(v, heads=shape.kv_heads)
    if shape.qk_norm:
        k = rms_norm(
            k, scope.weight(f"{prefix}.k_norm.weight"), eps=shape.eps, offset=shape.norm_offset
        )
    k = rope(k, rows.positions, rows.cos, rows.sin)
    scope.update(state, kv_write(scope.state(state), k, v, rows.slots))


def attended(q: Any, cache: Any, rows: Rows, scale: float) -> Any:
    """What each row sees of its sequence; in a tree, of its own path only."""
    where = (rows.tables, rows.row_sequence, rows.indices)
    if rows.parents is None:
        return attention(q, cache, *where, scale=scale)
    return tree_attention(q, cache, *where, rows.parents, scale=scale)


def attend(scope: Scope, shape: AttentionShape, prefix: str, state: str, x: Any, rows: Rows) -> Any:
    """The attention block's result [m, n] for normed rows `x` [m, n];
    their keys and values are stored.
    """
    q = projected(scope, x, f"{prefix}.q_proj", shape.qkv_bias)
    write_keys(scope, shape, prefix, state, x, rows)
    q = split_heads(q, heads=shape.heads)
    gate = None
    if shape.gated:
        gate = columns(q, start=shape.head_dim, stop=2 * shape.head_dim)
        q = columns(q, start=0, stop=shape.head_dim)
    if shape.qk_norm:
        q = rms_norm(
            q, scope.weight(f"{prefix}.q_norm.weight"), eps=shape.eps, offset=shape.norm_offset
        )
    q = rope(q, rows.positions, rows.cos, rows.sin)
    seen = attended(q, scope.state(state), rows, shape.scale)
    if gate is not None:
        seen = sigmoid_gate(seen, gate)
    return projected(scope, merge_heads(seen), f"{prefix}.o_proj", shape.o_bias)
