"""Activations, gates and sums: pointwise arithmetic on hidden rows."""

import torch

from ir.op import pointwise


@pointwise("a[...,n] b[...,n] -> [...,n]")
def add(a, b):
    """Sum of two values of the same shape: the residual connection."""
    return a + b


@pointwise("x[m,n] bias[n] -> [m,n]")
def add_bias(x, bias):
    """Each row of `x` plus `bias`."""
    return x + bias


@pointwise("gate[...,n] up[...,n] -> [...,n]")
def silu_mul(gate, up):
    """SwiGLU gate: `gate * sigmoid(gate) * up` (Shazeer, arXiv 2002.05202)."""
    return gate * torch.sigmoid(gate) * up


@pointwise("x[...,n] gate[...,n] -> [...,n]")
def sigmoid_gate(x, gate):
    """`x` scaled by the sigmoid of its gate: gated attention of the Qwen3-Next family."""
    return x * torch.sigmoid(gate)
