"""Rotary frequencies of a target: one pure function of its configuration."""

from __future__ import annotations

import math

import torch

from circuit.models.config import RopeKind, RopeSpec, TargetConfig


def inverse_frequencies(config: TargetConfig) -> tuple[torch.Tensor, float]:
    """The float32 angle per position of each pair `[head_dim / 2]`, and the factor on cos and sin.

    Every step rounds to float32 where the models' own training code does, so that the angles agree
    with it to the bit. Linear: position interpolation (arXiv 2306.15595). YaRN: arXiv 2309.00071.
    """
    rope, dim = config.rope, config.head_dim
    steps = torch.arange(0, dim, 2, dtype=torch.int64).to(torch.float32) / dim
    wavenumbers = rope.theta**steps
    if rope.kind is RopeKind.YARN:
        return _yarn(rope, dim, wavenumbers), _yarn_attention(rope)
    plain = 1.0 / wavenumbers
    if rope.kind is RopeKind.LINEAR:
        return plain / rope.factor, 1.0
    if rope.kind is RopeKind.LLAMA3:
        return _llama3(rope, plain), 1.0
    if rope.kind is RopeKind.FACTORS:
        return plain / torch.tensor(rope.freq_factors, dtype=torch.float32), 1.0
    return plain, 1.0


def _llama3(rope: RopeSpec, plain: torch.Tensor) -> torch.Tensor:
    """`plain` with long waves slowed by `factor`, short ones kept, and a ramp between."""
    longest = rope.original_context / rope.low_freq_factor
    shortest = rope.original_context / rope.high_freq_factor
    wavelength = 2 * math.pi / plain
    scaled = torch.where(wavelength > longest, plain / rope.factor, plain)
    share = (rope.original_context / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    ramp = (1 - share) * scaled / rope.factor + share * scaled
    between = ~(wavelength < shortest) & ~(wavelength > longest)
    return torch.where(between, ramp, scaled)


def _yarn(rope: RopeSpec, dim: int, wavenumbers: torch.Tensor) -> torch.Tensor:
    """Interpolated frequencies for slow pairs, extrapolated ones for fast pairs, a ramp between."""
    low = _pair_turning(rope.beta_fast, rope, dim)
    high = _pair_turning(rope.beta_slow, rope, dim)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low if high != low else 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    keep = 1 - ramp
    return 1.0 / (rope.factor * wavenumbers) * (1 - keep) + 1.0 / wavenumbers * keep


def _pair_turning(turns: float, rope: RopeSpec, dim: int) -> float:
    """The index of the pair that turns `turns` times within the original context."""
    return (
        dim * math.log(rope.original_context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))
    )


def _yarn_attention(rope: RopeSpec) -> float:
    """The factor on cos and sin: as declared, or 0.1 ln(factor) + 1, or a ratio of two such."""
    if rope.attention_factor is not None:
        return rope.attention_factor

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.mscale and rope.mscale_all_dim:
        return magnitude(rope.mscale) / magnitude(rope.mscale_all_dim)
    return magnitude(1.0)
