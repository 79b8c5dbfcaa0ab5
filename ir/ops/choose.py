"""From logits to a token: masks, the first maximum, and maps between vocabularies."""

import torch
from torch.nn.functional import embedding

from ir.op import Split, column_index, pointwise, row, wide


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


@pointwise("logits[m,v] bitmask[m,w] ids[v] -> [m,v]")
def mask_ids(logits, bitmask, ids):
    """Logits with -inf where bit `id % 32` of word `id // 32` of the column's id is clear or the
    word is missing.

    `bitmask` is i32 [m, w], bit set = allowed; bits beyond the vocabulary have no effect.
    """
    word = torch.take_along_dim(
        bitmask, (ids // 32).clamp(max=bitmask.shape[-1] - 1).long()[None, :], dim=-1
    )
    allowed = ((word >> (ids % 32)) & 1 == 1) & (ids // 32 < bitmask.shape[-1])
    return torch.where(allowed, logits, -torch.inf)


@pointwise("logits[m,v] bitmask[m,w] -> [m,v]")
def mask_logits(logits, bitmask):
    """Logits with -inf where the bit of the column is clear: `mask_ids` of columns that are ids."""
    return mask_ids.body(logits, bitmask, column_index(logits))


def _below(x, index, edge, last):
    """True where `x` at column `index` comes after column `last`, whose value is `edge`, in falling
    order, equal ones by column.
    """
    return torch.where(x == edge, index > last, x < edge)


def _with_next(logits, above, places):
    """`above` and a further column: the first largest of the columns `places` ([m, p] each) that
    come after the last of `above` in falling order; v where that is v or nothing follows.
    """
    count, last = logits.shape[-1], above[:, above.shape[-1] - 1][:, None]
    edge = torch.take_along_dim(logits, last.clamp(max=count - 1).long(), dim=-1)
    shares, best = [], None
    for place in places:
        held = torch.take_along_dim(logits, place.clamp(max=count - 1).long(), dim=-1)
        follows = (place < count) & (last < count) & _below(held, place, edge, last)
        top = torch.where(follows, held, -torch.inf).amax(-1, keepdim=True)
        best = top if best is None else torch.maximum(best, top)
        shares.append((place, held, follows))
    first = None
    for place, held, follows in shares:
        found = torch.where(follows & (held == best), place, count).amin(-1, keepdim=True)
        first = found if first is None else torch.minimum(first, found)
    return torch.cat([above, first.to(torch.int32)], dim=-1)


@row("logits[m,v] candidates[m,c] above[m,r] -> [m,r+1]")
def finish_ranks(logits, candidates, above, *, width=128):
    """The ranks `above` and the column (i32) after them in falling order: `next_rank`, from the
    candidates of `tile_argmax` with tiles of `width`.

    What is not the best of its tile ranks behind the best, so beside the candidates only the tiles
    of the ranks above are looked through again.
    """
    tile = column_index(logits[..., :width])[None, :]
    starts = [above[:, r] // width * width for r in range(above.shape[-1])]
    return _with_next(logits, above, [candidates, *(s[:, None] + tile for s in starts)])


@row("logits[m,v] above[m,r] -> [m,r+1]", split=Split(tile_argmax, finish_ranks))
def next_rank(logits, above):
    """The ranks `above`, columns of the largest logits of each row in falling order, and the one
    after them (i32), the first on ties; v after all columns, and after v.
    """
    return _with_next(logits, above, [column_index(logits)[None, :]])


@row("logits[m,v] -> [m,(v+width-1)//width]", tile="width")
def tile_mass(logits, *, width=128):
    """The logarithm of the sum of the exponentials inside each `width` columns, -inf for none."""
    x = wide(logits)
    tiles = torch.nn.functional.pad(x, (0, -x.shape[-1] % width), value=-torch.inf)
    tiles = tiles.unflatten(-1, (-1, width))
    top = tiles.amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).min)
    return top[..., 0] + torch.log(torch.exp(tiles - top).sum(-1))


def _log_sum(x):
    """The logarithm of the sum of the exponentials of each row."""
    x = wide(x)
    top = x.amax(-1, keepdim=True)
    return top[..., 0] + torch.log(torch.exp(x - top).sum(-1))


@row("logits[m,v] masses[m,c] -> [m]")
def finish_mass(logits, masses):
    """The log-mass of each row from those of its tiles: after `tile_mass` this is `log_mass`."""
    return _log_sum(masses)


@row("logits[m,v] -> [m]", split=Split(tile_mass, finish_mass, exact=False))
def log_mass(logits):
    """The logarithm of the sum of the exponentials of each row."""
    return _log_sum(logits)


@pointwise("logits[m,v] ranks[m,k] mass[m] -> [m,k]")
def log_share(logits, ranks, mass):
    """The log-probability of columns `ranks` under rows of log-mass `mass`; -inf for column v."""
    count = logits.shape[-1]
    held = torch.take_along_dim(wide(logits), ranks.clamp(max=count - 1).long(), dim=-1)
    return torch.where(ranks < count, held - mass[:, None], -torch.inf)


@pointwise("logits[m,v] index[m] mass[m] -> [m]")
def log_chance(logits, index, mass):
    """The log-probability of column `index` under rows of log-mass `mass`; -inf for column v."""
    return log_share.body(logits, index[:, None], mass)[:, 0]


@pointwise("index[...] table[v] -> [...]")
def take(index, table):
    """Entries `index` of an i32 table (clamped to it): draft ids to target ids."""
    return embedding(index.clamp(0, table.shape[0] - 1), table[:, None])[..., 0]
