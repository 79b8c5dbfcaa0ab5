"""Reading rows by index."""

import torch
from torch.nn.functional import embedding

from ir.op import pointwise
from ir.tensor import Format


@pointwise("ids[m] table[v,n] -> [m,n]")
def embed(ids, table, *, working=Format.F32):
    """Rows `ids` of the table in the working format; an id outside it reads its nearest row."""
    rows = embedding(ids.clamp(0, table.shape[0] - 1), table)
    return rows.to(working.dtype) if rows.dtype.itemsize < 8 else rows


@pointwise("x[m,n] index[r] -> [r,n]")
def select_rows(x, index):
    """Rows `index` of `x`: the rows whose logits are wanted."""
    return embedding(index, x)


@pointwise("x[m,n] positions[m] -> [m,n]")
def zero_at(x, positions, *, at=0):
    """`x` with the rows of position `at` set to zero: the first token's embedding, hidden."""
    return torch.where(positions[:, None] == at, 0.0, x)
