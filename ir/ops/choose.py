"""From logits to a token: masks, the first maximum, and maps between vocabularies."""

import torch
from torch.nn.functional import embedding

from ir.op import column_index, pointwise, row


@row("logits[m,v] -> [m]")
def argmax(logits):
    """Index (i32) of the largest logit of each row, the first on ties; v when a row holds no maximum (NaN)."""
    count = logits.shape[-1]
    best = logits.amax(-1, keepdim=True)
    index = column_index(logits)
    return torch.where(logits == best, index, count).amin(-1).to(torch.int32)


@pointwise("logits[m,v] bitmask[m,w] -> [m,v]")
def mask_logits(logits, bitmask):
    """Logits with -inf where bit `id % 32` of word `id // 32` is clear; ids past the last word are masked.

    `bitmask` is i32 [m, w], bit set = allowed; bits beyond the vocabulary have no effect.
    """
    index = column_index(logits)
    word = torch.take_along_dim(
        bitmask, (index // 32).clamp(max=bitmask.shape[-1] - 1).long()[None, :], dim=-1
    )
    allowed = ((word >> (index % 32)) & 1 == 1) & (index // 32 < bitmask.shape[-1])
    return torch.where(allowed, logits, -torch.inf)


@pointwise("index[m] table[v] -> [m]")
def take(index, table):
    """Entries `index` of an i32 table (clamped to it): draft ids to target ids."""
    return embedding(index.clamp(0, table.shape[0] - 1), table[:, None])[..., 0]
