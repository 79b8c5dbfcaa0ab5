"""Rotary position embedding, half-split form, with tables that hold every scaling rule."""

import torch

from ir.op import pointwise


@pointwise("x[m,h,d] positions[m] cos[p,r] sin[p,r] -> [m,h,d]", gathers="x")
def rope(x, positions, cos, sin):
    """`x` with 2r columns of each head turned by its row's position (Su et al., arXiv 2104.09864).

    `cos` and `sin` are f32 tables over positions (row p: position p; positions outside are
    clamped); column j turns the pair (j, j + r). Columns from 2r on pass unchanged (partial
    rotary).
    """
    half = cos.shape[-1]
    at = positions.clamp(0, cos.shape[0] - 1)
    c = torch.nn.functional.embedding(at, cos)[:, None]
    s = torch.nn.functional.embedding(at, sin)[:, None]
    left, right = x[..., :half], x[..., half : 2 * half]
    turned = [(left * c - right * s).to(x.dtype), (right * c + left * s).to(x.dtype)]
    return torch.cat([*turned, x[..., 2 * half :]], dim=-1)
