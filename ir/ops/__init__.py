"""The closed set of ops that heads and targets are written in."""

from ir.ops.act import add, add_bias, sigmoid_gate, silu_mul
from ir.ops.attention import attention, kv_write, slot_at
from ir.ops.choose import argmax, finish_argmax, mask_ids, mask_logits, take, tile_argmax
from ir.ops.embed import embed, select_rows, zero_at
from ir.ops.linear import linear
from ir.ops.norm import inverse_rms, norm_scale, rms_norm
from ir.ops.rope import rope
from ir.ops.shape import advance, columns, concat, lane, merge_heads, split_heads

__all__ = [
    "add", "add_bias", "advance", "argmax", "attention", "columns", "concat", "embed",
    "finish_argmax", "inverse_rms", "kv_write", "lane", "linear", "mask_ids", "mask_logits",
    "merge_heads", "norm_scale", "rms_norm", "rope", "select_rows", "sigmoid_gate", "silu_mul",
    "slot_at", "split_heads", "take", "tile_argmax", "zero_at",
]  # fmt: skip
