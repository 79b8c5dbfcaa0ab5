"""From GGUF metadata to a `TargetConfig`; every key is classified."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from circuit.models.config import Family, RopeKind, RopeSpec, TargetConfig, config_problems
from circuit.models.errors import ConfigRefused, UnknownArchitecture
from circuit.models.gguf_file import GgufHeader
from circuit.models.gguf_keys import MODEL_RULES, NEEDED, OTHER_RULES
from circuit.models.keys import classify

FAMILIES = {"llama": Family.LLAMA, "qwen2": Family.QWEN2, "qwen3": Family.QWEN3}


def config_from_gguf(header: GgufHeader) -> TargetConfig:
    """The target that a GGUF header describes.

    Biases, tying and the vocabulary follow from which tensors are stored, since GGUF has no key for
    them. Raises UnknownArchitecture or one ConfigRefused with all problems.
    """
    path, found = header.path, header.metadata
    arch = found.get("general.architecture")
    if arch not in FAMILIES:
        raise UnknownArchitecture(path=path, found=arch, known=", ".join(FAMILIES))
    model = {
        key[len(arch) + 1 :]: value for key, value in found.items() if key.startswith(arch + ".")
    }
    rest = {key: value for key, value in found.items() if not key.startswith(arch + ".")}
    problems = classify(model, MODEL_RULES, prefix=arch + ".") + classify(rest, OTHER_RULES)
    problems += [f"{arch}.{key} is missing" for key in NEEDED if key not in model]
    if problems:
        raise ConfigRefused(path=path, problems=problems)
    return _build(path, arch, model, header)


def _build(path: Path, arch: str, model: Mapping[str, object], header: GgufHeader) -> TargetConfig:
    """The configuration from metadata whose keys are all known and typed."""
    found, tensors, family = header.metadata, header.tensors, FAMILIES[arch]
    heads = model["attention.head_count"]
    if heads < 1 or (model["embedding_length"] % heads and "attention.key_length" not in model):
        raise ConfigRefused(
            path=path,
            problems=[
                f"{arch}.attention.head_count is {heads}, which does "
                f"not divide {model['embedding_length']}"
            ],
        )
    head_dim = model.get("attention.key_length", model["embedding_length"] // heads)
    embedding = tensors.get("token_embd.weight")
    vocab = embedding.shape[0] if embedding else model.get("vocab_size", 0)
    config = TargetConfig(
        family=family,
        hidden_size=model["embedding_length"],
        head_dim=head_dim,
        vocab_size=vocab,
        intermediate_size=model["feed_forward_length"],
        num_hidden_layers=model["block_count"],
        num_attention_heads=heads,
        num_key_value_heads=model.get("attention.head_count_kv", heads),
        rms_norm_eps=decimal(model["attention.layer_norm_rms_epsilon"]),
        rope=_rope(model, header),
        max_position_embeddings=model["context_length"],
        tie_word_embeddings="output.weight" not in tensors,
        qkv_bias=family is Family.QWEN2 or "blk.0.attn_q.bias" in tensors,
        o_bias="blk.0.attn_output.bias" in tensors,
        qk_norm=family is Family.QWEN3,
        bos_token_id=found.get("tokenizer.ggml.bos_token_id"),
        pad_token_id=found.get("tokenizer.ggml.padding_token_id"),
        eos_token_ids=_ends(found),
        chat_template=found.get("tokenizer.chat_template"),
    )
    problems = _contradictions(arch, model, found, config) + config_problems(config)
    if problems:
        raise ConfigRefused(path=path, problems=problems)
    return config


def _contradictions(arch: str, model: Mapping, found: Mapping, config: TargetConfig) -> list[str]:
    """Where two keys, or a key and a tensor, say different things, and what is not modelled."""
    problems, dim = [], config.head_dim
    for key, wanted in (
        ("rope.dimension_count", dim),
        ("attention.value_length", dim),
        ("vocab_size", config.vocab_size),
    ):
        if model.get(key, wanted) != wanted:
            problems.append(f"{arch}.{key} is {model[key]}; allowed: {wanted}")
    window = model.get("attention.sliding_window", 0)
    if 0 < window < config.max_position_embeddings:
        problems.append(
            f"{arch}.attention.sliding_window is {window}; allowed: 0, or at least "
            f"the context length ({config.max_position_embeddings})"
        )
    scale = model.get("attention.scale", dim**-0.5)
    if not math.isclose(scale, dim**-0.5, rel_tol=1e-6):
        problems.append(f"{arch}.attention.scale is {scale}; allowed: 1/sqrt({dim})")
    tokens = found.get("tokenizer.ggml.tokens")
    if tokens is not None and len(tokens) > config.vocab_size:
        problems.append(
            f"the tokenizer has {len(tokens)} tokens and the embedding {config.vocab_size} rows"
        )
    return problems


def _rope(model: Mapping[str, object], header: GgufHeader) -> RopeSpec:
    """The rotary embedding; a stored `rope_freqs.weight` gives a divisor for each frequency."""
    theta = decimal(model.get("rope.freq_base", 10000.0))
    factor = decimal(model.get("rope.scaling.factor", model.get("rope.scale_linear", 0.0))) or 1.0
    kind = model.get("rope.scaling.type", "linear" if factor != 1.0 else "none")
    divisors = header.tensors.get("rope_freqs.weight")
    if divisors is not None and divisors.format is not None and divisors.format.name == "f32":
        values = header.file.array(divisors).view(np.float32)
        if kind == "none":
            return RopeSpec(theta, RopeKind.FACTORS, freq_factors=tuple(map(float, values)))
        raise ConfigRefused(
            path=header.path,
            problems=[
                f"rope_freqs.weight and rope scaling {kind} are both given; allowed: one of them"
            ],
        )
    if kind == "linear" and factor != 1.0:
        return RopeSpec(theta, RopeKind.LINEAR, factor=factor)
    if kind != "yarn":
        return RopeSpec(theta)
    extra = model.get("rope.scaling.yarn_attn_factor", model.get("rope.scaling.attn_factor", 1.0))
    attention = decimal(extra) * (0.1 * math.log(max(factor, 1.0)) + 1.0) if extra != 1.0 else None
    return RopeSpec(
        theta,
        RopeKind.YARN,
        factor=factor,
        attention_factor=attention,
        original_context=model.get("rope.scaling.original_context_length", model["context_length"]),
        beta_fast=decimal(model.get("rope.scaling.yarn_beta_fast", 32.0)),
        beta_slow=decimal(model.get("rope.scaling.yarn_beta_slow", 1.0)),
    )


def _ends(found: Mapping[str, object]) -> tuple[int, ...]:
    """The ids that end a generation: end of text, of turn, of message; each once."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = [found[f"tokenizer.ggml.{key}"] for key in keys if f"tokenizer.ggml.{key}" in found]
    return tuple(dict.fromkeys(ids))


def decimal(value: float) -> float:
    """The shortest decimal that a stored f32 stands for: 9.99999974e-06 becomes 1e-05."""
    return float(str(np.float32(value)))
