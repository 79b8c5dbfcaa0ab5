"""Root-mean-square normalisation: a statistic of the row, and its use."""

import torch

from ir.op import pointwise, row, wide


@row("x[...,n] -> [...]")
def inverse_rms(x, *, eps=1e-6):
    """One over the root-mean-square of each row, in f32 (Zhang and Sennrich, arXiv 1910.07467)."""
    return torch.rsqrt(wide(x).square().mean(-1) + eps)


@pointwise("x[...,n] inverse[...] weight[n] -> [...,n]")
def norm_scale(x, inverse, weight, *, offset=0.0):
    """`x` times its row's statistic times `weight + offset`, in f32, rounded once to its dtype.

    `offset` is 1 for families that store the weight around zero (Qwen3-Next, Qwen3.5, Step-3.5).
    """
    return (wide(x) * inverse[..., None] * (weight + offset)).to(x.dtype)


def rms_norm(x, weight, *, eps, offset=0.0):
    """RMSNorm of each row of `x` as the pair of ops above."""
    return norm_scale(x, inverse_rms(x, eps=eps), weight, offset=offset)
