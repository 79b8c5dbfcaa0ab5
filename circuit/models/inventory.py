"""Which tensors a configuration calls for, and whether the stored ones are those."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from circuit.models.config import TargetConfig
from circuit.models.errors import (
    MisshapenTensor,
    MissingTensor,
    NotFinite,
    TensorsUnfit,
    TiedHeadDiffers,
    UnexpectedTensor,
    UnknownFormat,
)
from circuit.models.stored import MappedFile, StoredTensor, not_finite

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
RECOMPUTED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


def expected_shapes(config: TargetConfig) -> dict[str, tuple[int, ...]]:
    """The name and shape of every tensor of the model; a tied head is listed under both names."""
    hidden, vocab = config.hidden_size, config.vocab_size
    shapes = {EMBEDDING: (vocab, hidden)}
    for index in range(config.num_hidden_layers):
        prefix = f"model.layers.{index}."
        shapes.update((prefix + name, shape) for name, shape in _layer_shapes(config))
    shapes["model.norm.weight"] = (hidden,)
    shapes[HEAD] = (vocab, hidden)
    return shapes


def _layer_shapes(config: TargetConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of each tensor of one block."""
    hidden, ffn = config.hidden_size, config.intermediate_size
    yield "input_layernorm.weight", (hidden,)
    for part, width in (("q", config.q_size), ("k", config.kv_size), ("v", config.kv_size)):
        yield f"self_attn.{part}_proj.weight", (width, hidden)
        if config.qkv_bias:
            yield f"self_attn.{part}_proj.bias", (width,)
    if config.qk_norm:
        yield "self_attn.q_norm.weight", (config.head_dim,)
        yield "self_attn.k_norm.weight", (config.head_dim,)
    yield "self_attn.o_proj.weight", (hidden, config.q_size)
    if config.o_bias:
        yield "self_attn.o_proj.bias", (hidden,)
    yield "post_attention_layernorm.weight", (hidden,)
    yield "mlp.gate_proj.weight", (ffn, hidden)
    yield "mlp.up_proj.weight", (ffn, hidden)
    yield "mlp.down_proj.weight", (hidden, ffn)


def fit(
    path: Path, config: TargetConfig, found: Mapping[str, StoredTensor]
) -> dict[str, StoredTensor]:
    """The tensors of `found` that the model uses, in the model's order;
    a tied pair has one entry twice.

    Raises MissingTensor, UnexpectedTensor, MisshapenTensor or UnknownFormat, each with every case,
    or TensorsUnfit when there are several kinds of them.
    """
    wanted = expected_shapes(config)
    used = {name: tensor for name, tensor in found.items() if not RECOMPUTED.fullmatch(name)}
    if config.tie_word_embeddings:
        stored = used.get(EMBEDDING) or used.get(HEAD)
        if stored is not None:
            used.setdefault(EMBEDDING, stored)
            used.setdefault(HEAD, stored)
    kinds: dict[type[TensorsUnfit], list[str]] = {}
    for name, shape in wanted.items():
        if name not in used:
            kinds.setdefault(MissingTensor, []).append(f"{name} {list(shape)} is missing")
        elif used[name].format is None:
            kinds.setdefault(UnknownFormat, []).append(f"{name} is stored as {used[name].spelled}")
        elif used[name].shape != shape:
            kinds.setdefault(MisshapenTensor, []).append(
                f"{name} is {list(used[name].shape)}; the configuration gives {list(shape)}"
            )
    for name in used:
        if name not in wanted:
            kinds.setdefault(UnexpectedTensor, []).append(f"{name} has no place in this model")
    if kinds:
        kind = next(iter(kinds)) if len(kinds) == 1 else TensorsUnfit
        raise kind(path=path, problems=[sentence for group in kinds.values() for sentence in group])
    return {name: used[name] for name in wanted}


def check_values(
    path: Path, tensors: Mapping[str, StoredTensor], files: Mapping[Path, MappedFile], progress=None
) -> None:
    """Reads every weight once; raises NotFinite at the first tensor with a NaN or an infinity.

    `progress(done, total)` is told the bytes read so far and altogether.
    """
    unique = {(t.path, t.offset): (name, t) for name, t in tensors.items()}
    total, done = sum(t.nbytes for _, t in unique.values()), 0
    for name, stored in unique.values():
        bad = not_finite(stored, files[stored.path].array(stored))
        if bad is not None:
            raise NotFinite(path=path, tensor=name, count=bad[0], what=bad[1])
        done += stored.nbytes
        if progress is not None:
            progress(done, total)


def join_tied(
    path: Path,
    config: TargetConfig,
    tensors: dict[str, StoredTensor],
    files: Mapping[Path, MappedFile],
) -> dict[str, StoredTensor]:
    """`tensors` with one storage for a tied pair; raises TiedHeadDiffers when two differ."""
    first, second = tensors[EMBEDDING], tensors[HEAD]
    if not config.tie_word_embeddings or first == second:
        return tensors
    one, other = files[first.path].array(first), files[second.path].array(second)
    if first.format != second.format or memoryview(one) != memoryview(other):
        raise TiedHeadDiffers(path=path, embedding=EMBEDDING, head=HEAD)
    return {**tensors, HEAD: first}
