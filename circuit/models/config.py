"""The frozen description of a target, whatever file it came from."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Family(enum.Enum):
    """The architecture; it fixes which biases and norms a block has."""

    LLAMA = "llama"
    MISTRAL = "mistral"
    QWEN2 = "qwen2"
    QWEN3 = "qwen3"


class RopeKind(enum.Enum):
    """How the rotary frequencies are rescaled for long contexts."""

    NONE = "none"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    YARN = "yarn"
    FACTORS = "factors"


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding of a target; fields beyond `theta` belong to some kinds only.

    LINEAR uses `factor`. LLAMA3 uses `factor`, `low_freq_factor`, `high_freq_factor` and
    `original_context`. YARN uses `factor`, `original_context`, `beta_fast`, `beta_slow`, `truncate`
    and, for the factor on cos and sin, `attention_factor` or `mscale` with `mscale_all_dim`.
    FACTORS divides frequency i by `freq_factors[i]`.
    """

    theta: float
    kind: RopeKind = RopeKind.NONE
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    freq_factors: tuple[float, ...] = ()


@dataclass(frozen=True)
class TargetConfig:
    """Everything about a target that decides its graph, its tokens, or its limits."""

    family: Family
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope: RopeSpec
    max_position_embeddings: int
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    chat_template: str | None = None

    @property
    def q_size(self) -> int:
        """Width of all query heads together."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key (or value) heads together."""
        return self.num_key_value_heads * self.head_dim


def config_problems(config: TargetConfig) -> list[str]:
    """The contradictions between the fields of `config`, as sentences; empty if there is none."""
    problems = []
    for field in (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "vocab_size",
        "max_position_embeddings",
    ):
        if getattr(config, field) < 1:
            problems.append(f"{field} is {getattr(config, field)}, which is not positive")
    if not 0.0 < config.rms_norm_eps < 1.0:
        problems.append(f"rms_norm_eps is {config.rms_norm_eps}, which is not between 0 and 1")
    if not config.rope.theta > 1.0:
        problems.append(f"the rope base is {config.rope.theta}, which is not above 1")
    if problems:
        return problems
    if config.num_attention_heads % config.num_key_value_heads:
        problems.append(
            f"{config.num_attention_heads} query heads cannot share "
            f"{config.num_key_value_heads} key/value heads evenly"
        )
    if config.head_dim % 2:
        problems.append(
            f"head_dim is {config.head_dim}; rotary embedding turns pairs of dimensions"
        )
    return problems + _id_problems(config) + _rope_problems(config)


def _id_problems(config: TargetConfig) -> list[str]:
    """The special ids that lie outside the vocabulary, as sentences."""
    ids = [("bos_token_id", config.bos_token_id), ("pad_token_id", config.pad_token_id)]
    ids += [("eos_token_id", token) for token in config.eos_token_ids]
    return [
        f"{name} is {token}, outside the vocabulary of {config.vocab_size}"
        for name, token in ids
        if token is not None and (type(token) is not int or not 0 <= token < config.vocab_size)
    ]


def _rope_problems(config: TargetConfig) -> list[str]:
    """What is wrong with the rope scaling, as sentences."""
    rope, problems = config.rope, []
    if not 1.0 <= rope.factor < float("inf"):
        problems.append(f"the rope scaling factor is {rope.factor}, which is not 1 or more")
    if rope.kind in (RopeKind.LLAMA3, RopeKind.YARN) and rope.original_context < 1:
        problems.append(f"rope kind {rope.kind.value} needs original_max_position_embeddings")
    if rope.kind is RopeKind.LLAMA3 and rope.high_freq_factor <= rope.low_freq_factor:
        problems.append("high_freq_factor is not above low_freq_factor")
    if rope.kind is RopeKind.FACTORS and len(rope.freq_factors) != config.head_dim // 2:
        problems.append(
            f"{len(rope.freq_factors)} rope frequency factors for "
            f"{config.head_dim // 2} pairs of dimensions"
        )
    if any(not 0.0 < f < float("inf") for f in rope.freq_factors):
        problems.append("a rope frequency factor is not a positive number")
    return problems
