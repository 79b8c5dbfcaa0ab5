"""Index maps and index arithmetic."""

import torch

from ir.op import pointwise, view


@pointwise("a[m,n] b[m,p] -> [m,n+p]")
def concat(a, b):
    """Columns of `a`, then columns of `b`."""
    return torch.cat([a, b], dim=-1)


@pointwise("index[m] -> [m]", identity=lambda by: by == 0)
def advance(index, *, by=1):
    """`index + by` where an index is valid (>= 0); a padding row (-1) stays padding."""
    return torch.where(index >= 0, index + by, index)


@view("x[m,n] -> [m,heads,n//heads]")
def split_heads(x, *, heads=1):
    """`x` with its columns grouped in heads."""
    return x.unflatten(-1, (heads, -1))


@view("x[m,h,d] -> [m,h*d]")
def merge_heads(x):
    """`x` with its heads side by side."""
    return x.flatten(-2)


@view("x[...,n] -> [...,stop-start]")
def columns(x, *, start=0, stop=1):
    """Columns `start` to `stop` of `x`."""
    return x[..., start:stop]


@view("x[m,n] -> [m]")
def column(x, *, index=0):
    """Column `index` of `x`, a number for each row."""
    return x[..., index]


@view("x[m] -> [m,1]")
def stood_up(x):
    """`x` as one column."""
    return x[:, None]


@view("x[m,n] -> [m,n//of]")
def lane(x, *, index=0, of=2, width=16):
    """Every `of`-th group of `width` columns from group `index` on: one of interleaved values."""
    return x.unflatten(-1, (-1, of, width))[..., index, :].flatten(-2)
