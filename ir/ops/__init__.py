"""The closed set of ops that heads and targets are written in."""

from ir.ops.act import add, add_bias, sigmoid_gate, silu_mul
from ir.ops.attention import attention, kv_write, slot_at, tree_attention
from ir.ops.choose import (
    argmax,
    finish_argmax,
    finish_mass,
    finish_ranks,
    log_chance,
    log_mass,
    log_share,
    mask_ids,
    mask_logits,
    next_rank,
    take,
    tile_argmax,
    tile_mass,
)
from ir.ops.embed import embed, select_rows, zero_at
from ir.ops.linear import linear
from ir.ops.norm import inverse_rms, norm_scale, rms_norm
from ir.ops.rope import rope
from ir.ops.shape import (
    advance,
    column,
    columns,
    concat,
    lane,
    merge_heads,
    split_heads,
    stood_up,
)

__all__ = [
    "add", "add_bias", "advance", "argmax", "attention", "column", "columns", "concat",
    "embed", "finish_argmax", "finish_mass", "finish_ranks", "inverse_rms", "kv_write",
    "lane", "linear", "log_chance", "log_mass", "log_share", "mask_ids", "mask_logits",
    "merge_heads", "next_rank", "norm_scale", "rms_norm", "rope", "select_rows",
    "sigmoid_gate", "silu_mul", "slot_at", "split_heads", "stood_up", "take", "tile_argmax",
    "tile_mass", "tree_attention", "zero_at",
]  # fmt: skip
