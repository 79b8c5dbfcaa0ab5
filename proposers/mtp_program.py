"""The multi-token-prediction head written in ops: one decoder layer over a token and a hidden row.

Row of pair key p: the embedding of token p + 1 and the hidden of position p, each normed, side by
side, through `mtp.fc` into one decoder layer (Gloeckle et al., arXiv 2404.19737; DeepSeek-V3, arXiv
2412.19437).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ir.key import Mode
from ir.ops import (
    argmax,
    column,
    concat,
    embed,
    linear,
    log_chance,
    log_mass,
    log_share,
    mask_ids,
    mask_logits,
    next_rank,
    rms_norm,
    stood_up,
    take,
    zero_at,
)
from ir.tensor import Format
from ir.tracing import Scope
from proposers.blocks.attention import AttentionShape, write_keys
from proposers.blocks.decoder import decoder_layer, layer_input
from proposers.blocks.rows import Rows, row_count
from proposers.config import ConcatOrder, Contract, HeadConfig, StreamPoint
from proposers.masks import words_of
from proposers.rules.tree_shape import MAX_RANK

RANKS = MAX_RANK
EMBEDDING, HEAD, DRAFT_IDS = "embed_tokens.weight", "lm_head.weight", "draft_ids"
LAYER, CACHE = "mtp.layers.0", "layers.0.kv"


def attention_shape(contract: Contract, config: HeadConfig) -> AttentionShape:
    """The attention of the head's layer."""
    return AttentionShape(
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        eps=config.rms_norm_eps,
        gated=contract.gated_attention,
        qk_norm=contract.qk_norm,
        norm_offset=contract.norm_form.offset,
    )


def mtp_program(
    contract: Contract, config: HeadConfig, max_context: int, *,
    mapped: bool, tied: bool = False, working: Format = Format.F32,
) -> Callable[[Scope], None]:  # fmt: skip
    """The forward of a head: outputs `logits` [m, vocab], `tokens` [m] (target ids), their
    `logprobs` [m] and `hidden` [m, n].

    `hidden` is what the next draft step takes. PREFILL stores keys and values and has no output;
    CHAIN_k makes k steps from one row and outputs `tokens.0` .. `tokens.{k-1}` [1], `logprobs.0` ..
    [1] and the last `hidden`; SPINE_k gives in their place `ranks.0` .. [1, RANKS], the best target
    ids of each step, which goes on with the first, and their `logprobs.0` .. [1, RANKS]. MASKED is
    DECODE whose token is the best that `bitmask` [1, words] allows; logits and log-probabilities
    are those without the mask. `mapped`: the scored ids are positions in `draft_ids`. `tied`: the
    embedding scores as well.
    """
    shape = attention_shape(contract, config)
    offset, eps = contract.norm_form.offset, config.rms_norm_eps

    def normed(scope: Scope, x: Any, name: str) -> Any:
        return rms_norm(x, scope.weight(name), eps=eps, offset=offset)

    def joined(scope: Scope, ids: Any, hidden: Any, rows: Rows) -> Any:
        """The residual stream that enters the layer."""
        e = embed(ids, scope.weight(EMBEDDING), working=working)
        if contract.pos0_mask:
            e = zero_at(e, rows.positions, at=contract.rope_offset)
        e = normed(scope, e, "mtp.pre_fc_norm_embedding.weight")
        h = normed(scope, hidden, "mtp.pre_fc_norm_hidden.weight")
        pair = (e, h) if contract.concat_order is ConcatOrder.EMBED_HIDDEN else (h, e)
        return linear(concat(*pair), scope.weight("mtp.fc.weight"))

    def target_ids(scope: Scope, scored: Any) -> Any:
        """The target ids of scored columns."""
        return take(scored, scope.weight(DRAFT_IDS)) if mapped else scored

    def scored(scope: Scope, ids: Any, hidden: Any, rows: Rows) -> tuple[Any, Any]:
        """Logits and recycled hidden of one step over the rows."""
        x = decoder_layer(scope, shape, LAYER, CACHE, joined(scope, ids, hidden, rows), rows)
        final = normed(scope, x, "mtp.norm.weight")
        logits = linear(
            final if contract.logits_norm else x, scope.weight(EMBEDDING if tied else HEAD)
        )
        return logits, x if contract.recycle is StreamPoint.PRE_NORM else final

    def allowed(scope: Scope, logits: Any) -> Any:
        """The logits that a token is chosen from: those that a MASKED step's `bitmask` allows."""
        if scope.key.mode is not Mode.MASKED:
            return logits
        bitmask = scope.input("bitmask", 1, words_of(config.target_vocab_size))
        if mapped:
            return mask_ids(logits, bitmask, scope.weight(DRAFT_IDS))
        return mask_logits(logits, bitmask)

    def best(scope: Scope, logits: Any) -> tuple[Any, Any]:
        """The target id of the largest logit of each row, and its log-probability."""
        first = argmax(allowed(scope, logits))
        chance = log_chance(logits, first, log_mass(logits))
        return target_ids(scope, first), chance

    def chosen(scope: Scope, logits: Any, index: int) -> Any:
        """The token that step `index` of a chain goes on with, and what it outputs beside it."""
        if scope.key.mode is Mode.CHAIN:
            ids, logprobs = best(scope, logits)
            scope.output(f"tokens.{index}", ids)
            scope.output(f"logprobs.{index}", logprobs)
            return ids
        columns = stood_up(argmax(logits))
        for _ in range(RANKS - 1):
            columns = next_rank(logits, columns)
        ranks = target_ids(scope, columns)
        scope.output(f"ranks.{index}", ranks)
        scope.output(f"logprobs.{index}", log_share(logits, columns, log_mass(logits)))
        return column(ranks, index=0)

    def program(scope: Scope) -> None:
        m = row_count(scope.key)
        ids = scope.input("ids", m)
        hidden = scope.input("hidden", m, config.hidden_size, format=working)
        rows = Rows.read(scope, max_context)
        if scope.key.mode is Mode.PREFILL:
            x = layer_input(scope, shape, LAYER, joined(scope, ids, hidden, rows))
            write_keys(scope, shape, f"{LAYER}.self_attn", CACHE, x, rows)
        elif scope.key.goes_on:
            for index in range(scope.key.rows):
                at = rows.advanced(index) if index else rows
                logits, hidden = scored(scope, ids, hidden, at)
                ids = chosen(scope, logits, index)
            scope.output("hidden", hidden)
        else:
            logits, hidden = scored(scope, ids, hidden, rows)
            scope.output("logits", logits)
            tokens, logprobs = best(scope, logits)
            scope.output("tokens", tokens)
            scope.output("logprobs", logprobs)
            scope.output("hidden", hidden)

    return program
