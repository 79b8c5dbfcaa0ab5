"""The matrix product with a stored weight, and the rounding of its activations."""

import torch

from ir.op import anchor, wide
from ir.tensor import BLOCK, Format


def round_activations(x: torch.Tensor, to: Format) -> torch.Tensor:
    """`x` as a kernel of activation format `to` reads it, in the dtype of `x`.

    BF16 rounds to nearest even. Q8_0 holds each 32 columns as int8 (nearest even) times an f32
    scale of absmax / 127, so that products with block-format weights are exact integers inside a
    block.
    """
    if to is Format.BF16:
        return x.to(torch.bfloat16).to(x.dtype)
    assert to is Format.Q8_0
    blocks = x.unflatten(-1, (-1, BLOCK))
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    inverse = torch.where(scale > 0, 1 / scale, torch.zeros_like(scale))
    return ((blocks * inverse).round() * scale).flatten(-2)


@anchor("x[m,k] weight[n,k] -> [m,n]", flops=lambda m, n, k: 2 * m * n * k)
def linear(x, weight, *, activation=None):
    """Rows of `x` against rows of `weight`; accumulates in f32.

    `activation` names the format that `x` is rounded to first (None: not at all); it is set when
    weights are packed and is part of the numerics of the program.
    """
    rounded = wide(x) if activation is None else round_activations(wide(x), activation)
    return torch.nn.functional.linear(rounded, wide(weight).to(rounded.dtype)).to(x.dtype)
