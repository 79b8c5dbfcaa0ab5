"""From logits to a token: masks, the first maximum, and maps between vocabularies."""

import torch
from torch.nn.functional import embedding

from ir.op import Split, column_index, pointwise, row


@row("logits[m,v] -> [m,(v+width-1)//width]", tile="width")
def tile_argmax(logits, *, width=128):
    """Index (i32) of the first largest logit inside each `width` columns; v where they hold NaN."""
    count = logits.shape[-1]
    padded = torch.nn.functional.pad(logits, (0, -count % width), value=-torch.inf)
    tiles = padded.unflatten(-1, (-1, width))
    best = tiles.amax(-1, keepdim=True)
    index = column_index(padded).unflatten(-1, (-1, width))
    return torch.where(tiles == best, index, count).amin(-1).to(torch.int32)


@row("logits[m,v] candidates[m,c] -> [m]")
def finish_argmax(logits, candidates):
    """The candidate (i32) with the largest logit, the first on ties; v if any candidate is v.

    Candidates are column numbers in rising order, one a tile: after `tile_argmax` this is `argmax`.
    """
    count = logits.shape[-1]
    held = torch.take_along_dim(logits, candidates.clamp(max=count - 1).long(), dim=-1)
    known = candidates.amax(-1, keepdim=True) < count
    best = held.amax(-1, keepdim=True)
    return torch.where(known & (held == best), candidates, count).amin(-1).to(torch.int32)


@row("logits[m,v] -> [m]", split=Split(tile_argmax, finish_argmax))
def argmax(logits):
    """Index (i32) of the largest logit of each row, the first on ties; v when a row holds NaN."""
    count = logits.shape[-1]
    best = logits.amax(-1, keepdim=True)
    index = column_index(logits)
    return torch.where(logits == best, index, count).amin(-1).to(torch.int32)


@pointwise("logits[m,v] bitmask[m,w] -> [m,v]")
def mask_logits(logits, bitmask):
    """Logits with -inf where bit `id % 32` of word `id // 32` is clear or the word is missing.

    `bitmask` is i32 [m, w], bit set = allowed; bits beyond the vocabulary have no effect.
    """
    index = column_index(logits)
    word = torch.take_along_dim(
        bitmask, (index // 32).clamp(max=bitmask.shape[-1] - 1).long()[None, :], dim=-1
    )
    allowed = ((word >> (index % 32)) & 1 == 1) & (index // 32 < bitmask.shape[-1])
    return torch.where(allowed, logits, -torch.inf)


@pointwise("logits[m,v] bitmask[m,w] ids[v] -> [m,v]")
def mask_ids(logits, bitmask, ids):
    """Logits with -inf where the bit of the column's id is clear: `mask_logits` for columns that
    stand for `ids`.
    """
    word = torch.take_along_dim(
        bitmask, (ids // 32).clamp(max=bitmask.shape[-1] - 1).long()[None, :], dim=-1
    )
    allowed = ((word >> (ids % 32)) & 1 == 1) & (ids // 32 < bitmask.shape[-1])
    return torch.where(allowed, logits, -torch.inf)


@pointwise("index[m] table[v] -> [m]")
def take(index, table):
    """Entries `index` of an i32 table (clamped to it): draft ids to target ids."""
    return embedding(index.clamp(0, table.shape[0] - 1), table[:, None])[..., 0]
