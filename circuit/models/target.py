"""The target written in ops, and its binding: weights, rotary tables, cache states, programs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch

from circuit.models.config import TargetConfig
from circuit.models.rope import inverse_frequencies
from ir.binding import Binding
from ir.graph import DECODE, GraphKey, Mode
from ir.ops import argmax, embed, linear, rms_norm, select_rows
from ir.ops.attention import BLOCK_ROWS
from ir.tensor import Format, PackedTensor, TensorType
from ir.tracing import Scope
from proposers.blocks.attention import AttentionShape
from proposers.blocks.decoder import decoder_layer
from proposers.blocks.rows import Rows, blocks_for, row_count
from proposers.mtp_binding import TargetSide

EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


def target_keys(
    *, batches: Iterable[int] = (2, 4, 8, 16), chunk: int = 256, trees: Iterable[int] = ()
) -> tuple[GraphKey, ...]:
    """The programs of a target: decode, verify of 2 to 4 rows,
    `batches` of sequences, prompt chunks, trees of so many rows.
    """
    verify = tuple(GraphKey(Mode.VERIFY, rows) for rows in (2, 3, 4))
    batch = tuple(GraphKey(Mode.BATCH, rows) for rows in batches)
    tree = tuple(GraphKey(Mode.TREE, rows) for rows in trees)
    return (DECODE, *verify, *batch, GraphKey(Mode.PREFILL, chunk), *tree)


def attention_shape(config: TargetConfig) -> AttentionShape:
    """The attention of every layer of a target."""
    return AttentionShape(
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        eps=config.rms_norm_eps,
        qk_norm=config.qk_norm,
        qkv_bias=config.qkv_bias,
        o_bias=config.o_bias,
    )


def target_program(
    config: TargetConfig, max_context: int, working: Format = Format.F32, *,
    normed_hidden: bool = False,
) -> Callable[[Scope], None]:  # fmt: skip
    """The forward of a target: outputs `logits` [r, v], `tokens` [r] and `hidden` [m, n].

    `hidden` is the residual stream before the final norm; with `normed_hidden` the stream after it
    is bound to `hidden_normed` too, for heads whose contract asks for it. r is 1 for PREFILL, whose
    input `last_row` names the row that is scored, and m otherwise.
    """
    shape = attention_shape(config)
    head = EMBEDDING if config.tie_word_embeddings else HEAD

    def program(scope: Scope) -> None:
        ids = scope.input("ids", row_count(scope.key))
        rows = Rows.read(scope, max_context)
        x = embed(ids, scope.weight(EMBEDDING), working=working)
        for index in range(config.num_hidden_layers):
            x = decoder_layer(scope, shape, f"model.layers.{index}", f"layers.{index}.kv", x, rows)
        scope.output("hidden", x)
        norm = scope.weight(NORM)
        if normed_hidden:
            scope.output("hidden_normed", rms_norm(x, norm, eps=config.rms_norm_eps))
        if scope.key.mode is Mode.PREFILL:
            x = select_rows(x, scope.input("last_row", 1))
        logits = linear(rms_norm(x, norm, eps=config.rms_norm_eps), scope.weight(head))
        scope.output("logits", logits)
        scope.output("tokens", argmax(logits))

    return program


def rope_tables(config: TargetConfig, max_context: int) -> dict[str, torch.Tensor]:
    """`rope.cos` and `rope.sin`, f32 [max_context, r]: taken in f64
    and rounded once, factor included.
    """
    frequencies, factor = inverse_frequencies(config)
    angles = torch.outer(torch.arange(max_context, dtype=torch.float64), frequencies.double())
    return {
        "rope.cos": (angles.cos() * factor).float(),
        "rope.sin": (angles.sin() * factor).float(),
    }


def cache_format(weights: Mapping[str, torch.Tensor | PackedTensor]) -> Format:
    """The format of keys and values: f16 beside block weights, bf16 beside bf16, else f32."""
    formats = {TensorType.of(value).format for value in weights.values()}
    if any(f.is_block for f in formats) or Format.F16 in formats:
        return Format.F16
    return Format.BF16 if Format.BF16 in formats else Format.F32


def cache_states(
    layers: int, kv_heads: int, head_dim: int, format: Format, blocks: int
) -> dict[str, TensorType]:
    """One paged cache per layer, `blocks` blocks each (block 0 is the scratch block)."""
    type_ = TensorType((blocks, 2, kv_heads, BLOCK_ROWS, head_dim), format)
    return {f"layers.{index}.kv": type_ for index in range(layers)}


def target_binding(
    config: TargetConfig,
    tensors: Mapping[str, torch.Tensor | PackedTensor],
    max_context: int,
    keys: tuple[GraphKey, ...] | None = None,
    *,
    working: Format = Format.F32,
    sequences: int | None = None,
    normed_hidden: bool = False,
) -> Binding:
    """The target of a checkpoint, ready to be interpreted or compiled.

    The context is rounded up to whole cache blocks; `sequences` of that length fit the cache
    (default: the widest BATCH of `keys`). A tied head is bound once, under the embedding's name.
    """
    keys = target_keys() if keys is None else keys
    max_context = blocks_for(max_context) * BLOCK_ROWS
    if sequences is None:
        sequences = max((key.rows for key in keys if key.mode is Mode.BATCH), default=1)
    weights = {n: t for n, t in tensors.items() if not (config.tie_word_embeddings and n == HEAD)}
    states = cache_states(
        config.num_hidden_layers, config.num_key_value_heads, config.head_dim,
        cache_format(weights), 1 + sequences * blocks_for(max_context),
    )  # fmt: skip
    return Binding(
        name="target",
        program=target_program(config, max_context, working, normed_hidden=normed_hidden),
        weights=weights | rope_tables(config, max_context),
        states=states,
        keys=keys,
    )


def target_side(
    config: TargetConfig, tensors: Mapping[str, torch.Tensor | PackedTensor], max_context: int
) -> TargetSide:
    """What a draft head may borrow of the target: embedding, lm_head and rotary tables."""
    embedding = tensors[EMBEDDING]
    head = embedding if config.tie_word_embeddings else tensors[HEAD]
    return TargetSide(embedding, head, rope_tables(config, blocks_for(max_context) * BLOCK_ROWS))
