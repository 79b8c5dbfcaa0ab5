"""From `config.json` to a `TargetConfig`; every key is classified."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from circuit.models.config import Family, RopeKind, RopeSpec, TargetConfig, config_problems
from circuit.models.errors import ConfigRefused, UnknownArchitecture
from circuit.models.hf_keys import NEEDED, ROPE_RULES, RULES
from circuit.models.keys import classify

ARCHITECTURES = {
    Family.LLAMA: "LlamaForCausalLM",
    Family.MISTRAL: "MistralForCausalLM",
    Family.QWEN2: "Qwen2ForCausalLM",
    Family.QWEN3: "Qwen3ForCausalLM",
}
ROPE_KINDS = {
    "default": RopeKind.NONE,
    "linear": RopeKind.LINEAR,
    "llama3": RopeKind.LLAMA3,
    "yarn": RopeKind.YARN,
}
ROPE_KEYS = {
    RopeKind.NONE: (),
    RopeKind.LINEAR: ("factor",),
    RopeKind.LLAMA3: (
        "factor",
        "original_max_position_embeddings",
        "low_freq_factor",
        "high_freq_factor",
    ),
    RopeKind.YARN: (
        "factor",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "attention_factor",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
}
ROPE_NEEDED = {
    RopeKind.NONE: (),
    RopeKind.LINEAR: ("factor",),
    RopeKind.YARN: ("factor",),
    RopeKind.LLAMA3: ("factor", "low_freq_factor", "high_freq_factor"),
}


def config_from_json(
    path: Path,
    found: Mapping[str, object],
    *,
    generation: Mapping[str, object],
    chat_template: str | None = None,
) -> TargetConfig:
    """The target that `found`, the parsed `config.json` at `path`, describes.

    `generation` is the parsed `generation_config.json` (or empty): its end, begin and padding ids
    go before those of `config.json`, as in the checkpoints' own library. Raises UnknownArchitecture
    or one ConfigRefused with all problems.
    """
    family = _family(path, found)
    problems = classify(found, RULES)
    problems += [f"{key} is missing" for key in NEEDED if key not in found]
    if problems:
        raise ConfigRefused(path=path, problems=problems)
    problems += _family_problems(family, found)
    rope = _rope(found, problems)
    if problems:
        raise ConfigRefused(path=path, problems=problems)
    biased = family is Family.QWEN2 or found.get("attention_bias", False)
    config = TargetConfig(
        family=family,
        rope=rope,
        tie_word_embeddings=found.get("tie_word_embeddings", False),
        qkv_bias=biased,
        o_bias=biased and family is not Family.QWEN2,
        qk_norm=family is Family.QWEN3,
        chat_template=chat_template,
        **_sizes(found),
        **_special_ids(found, generation),
    )
    problems = config_problems(config)
    if problems:
        raise ConfigRefused(path=path, problems=problems)
    return config


def _sizes(found: Mapping[str, object]) -> dict:
    """The numbers that shape the model; absent key/value heads are as many as query heads."""
    same = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "vocab_size", "max_position_embeddings")  # fmt: skip
    heads, kv_heads = found["num_attention_heads"], found.get("num_key_value_heads")
    head_dim = found.get("head_dim")
    return {
        **{name: found[name] for name in same},
        "num_key_value_heads": heads if kv_heads is None else kv_heads,
        "head_dim": found["hidden_size"] // max(1, heads) if head_dim is None else head_dim,
        "rms_norm_eps": float(found["rms_norm_eps"]),
    }


def _family(path: Path, found: Mapping[str, object]) -> Family:
    """The family that `model_type` names; `architectures`, if given, must agree with it."""
    known = ", ".join(family.value for family in Family)
    try:
        family = Family(found.get("model_type"))
    except ValueError:
        raise UnknownArchitecture(path=path, found=found.get("model_type"), known=known) from None
    named = found.get("architectures")
    if isinstance(named, list) and named != [ARCHITECTURES[family]]:
        raise UnknownArchitecture(
            path=path,
            found=", ".join(map(str, named)),
            known=f"{ARCHITECTURES[family]} (model_type {family.value})",
        )
    return family


def _family_problems(family: Family, found: Mapping[str, object]) -> list[str]:
    """What one family refuses and another does not: windows, implied sizes, biases."""
    problems = []
    context = found["max_position_embeddings"]
    if family in (Family.QWEN2, Family.QWEN3):
        if found.get("use_sliding_window", False):
            problems.append("use_sliding_window is True; allowed: False")
    else:
        window = found.get("sliding_window", 4096 if family is Family.MISTRAL else None)
        if window is not None and window < context:
            problems.append(
                f"sliding_window is {window}{'' if 'sliding_window' in found else ' by default'}"
                f"; allowed: null, or at least max_position_embeddings ({context})"
            )
    kinds = set(map(str, found.get("layer_types") or ["full_attention"]))
    if kinds != {"full_attention"}:
        problems.append(f"layer_types holds {', '.join(sorted(kinds))}; allowed: full_attention")
    if family is not Family.LLAMA and found.get("num_key_value_heads") is None:
        problems.append(
            "num_key_value_heads is missing; this family's default is not its usual value"
        )
    if family is Family.QWEN3 and found.get("head_dim") is None:
        problems.append("head_dim is missing; this family's default is not hidden_size / heads")
    if family in (Family.QWEN2, Family.MISTRAL) and found.get("attention_bias", False):
        problems.append("attention_bias is True; the biases of this family are fixed")
    if found.get("head_dim") is None and found["hidden_size"] % max(
        1, found["num_attention_heads"]
    ):
        problems.append(
            "hidden_size is not a multiple of num_attention_heads and head_dim is missing"
        )
    return problems


def _rope(found: Mapping[str, object], problems: list[str]) -> RopeSpec:
    """The rotary embedding under its old or new spelling; adds to `problems` what is refused."""
    old, new = found.get("rope_scaling"), found.get("rope_parameters")
    if old and new:
        problems.append("rope_scaling and rope_parameters are both given; allowed: one of them")
    name = "rope_parameters" if new else "rope_scaling"
    given = dict(new or old or {})
    found_problems = classify(given, ROPE_RULES, prefix=f"{name}.")
    if found_problems:
        problems += found_problems
        return RopeSpec(theta=10000.0)
    theta = given.pop("rope_theta", found.get("rope_theta", 10000.0))
    spelled = given.pop("rope_type", None) or given.pop("type", None) or "default"
    given.pop("type", None)
    given.pop("partial_rotary_factor", None)
    kind = ROPE_KINDS.get(spelled)
    if kind is None:
        problems.append(f"{name}.rope_type is {spelled!r}; allowed: {', '.join(ROPE_KINDS)}")
        return RopeSpec(theta=float(theta))
    problems += [
        f"{name}.{key} means nothing for rope type {spelled}"
        for key in given
        if key not in ROPE_KEYS[kind]
    ]
    missing = [key for key in ROPE_NEEDED[kind] if key not in given]
    problems += [f"{name}.{key} is missing, which rope type {spelled} needs" for key in missing]
    if kind in (RopeKind.LLAMA3, RopeKind.YARN):
        given.setdefault("original_max_position_embeddings", found["max_position_embeddings"])
    fields = {
        "original_context" if k == "original_max_position_embeddings" else k: v
        for k, v in given.items()
        if v is not None and k in ROPE_KEYS[kind]
    }
    return RopeSpec(theta=float(theta), kind=kind, **fields)


def _special_ids(found: Mapping[str, object], generation: Mapping[str, object]) -> dict:
    """The begin, end and padding ids; those of `generation` go first."""

    def pick(key: str) -> object:
        value = generation.get(key)
        return found.get(key) if value is None else value

    ends = pick("eos_token_id")
    ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
    pad = pick("pad_token_id")
    return {
        "bos_token_id": pick("bos_token_id"),
        "eos_token_ids": tuple(ends),
        "pad_token_id": None if pad == -1 else pad,
    }
