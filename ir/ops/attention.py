"""Attention over a paged cache, and the writes to it.

A cache is one state per layer, [blocks, 2, kv_heads, 16, head_dim]: keys, then values, 16 rows a
block. Block 0 is scratch: padding rows write there and nothing reads it. A sequence is a row of
`tables` (block numbers in order); its row number j lives in slot `tables[j // 16] * 16 + j % 16`.
"""

import torch

from ir.op import anchor, pointwise, state, wide

BLOCK_ROWS = 16


@pointwise("tables[s,t] row_sequence[m] indices[m] -> [m]")
def slot_at(tables, row_sequence, indices):
    """Slot (i32) of KV row `indices[i]` of sequence `row_sequence[i]`; in block 0 for -1."""
    live = indices.clamp(min=0)
    flat = row_sequence * tables.shape[1] + live // BLOCK_ROWS
    block = torch.nn.functional.embedding(flat, tables.reshape(-1, 1))[..., 0]
    return torch.where(indices >= 0, block * BLOCK_ROWS + live % BLOCK_ROWS, 0)


@state("cache[b,2,g,16,d] k[m,g,d] v[m,g,d] slots[m] -> [b,2,g,16,d]")
def kv_write(cache, k, v, slots):
    """The cache with key and value of row i stored in `slots[i]`, rounded to its format."""
    if not cache.is_meta:
        block, line = (slots // BLOCK_ROWS).long(), (slots % BLOCK_ROWS).long()
        cache[block, 0, :, line] = k.to(cache.dtype)
        cache[block, 1, :, line] = v.to(cache.dtype)
    return cache


def _attend(q, keys, values, live, scale):
    """Softmax attention of q [m, h, d] over keys and values [g, l, d] where `live` [m, l]."""
    rows, heads, dim = q.shape
    grouped = q.reshape(rows, keys.shape[0], -1, dim)
    scores = torch.einsum("mgrd,gld->mgrl", grouped, keys) * scale
    scores = scores.masked_fill(~live[:, None, None], -torch.inf)
    return torch.einsum("mgrl,gld->mgrd", scores.softmax(-1), values).reshape(rows, heads, dim)


@anchor(
    "q[m,h,d] cache[b,2,g,16,d] tables[s,t] row_sequence[m] indices[m] -> [m,h,d]",
    flops=lambda m, h, d, t: 4 * m * h * d * t * BLOCK_ROWS,
)
def attention(q, cache, tables, row_sequence, indices, *, scale=1.0):
    """Each row's attention over rows 0..indices[i] of its sequence; zero for a padding row (-1).

    Query head j reads key-value head j // (h // g). Scores, softmax and sums are f32. Slots past a
    row's last visible one are never read into its result, whatever they hold.
    """
    out = torch.zeros_like(q)
    if q.is_meta:
        return out
    for sequence in row_sequence[indices >= 0].unique().tolist():
        rows = ((row_sequence == sequence) & (indices >= 0)).nonzero()[:, 0]
        length = int(indices[rows].max()) + 1
        blocks = tables[sequence, : -(-length // BLOCK_ROWS)].long()
        keys, values = (
            wide(cache[blocks, i]).transpose(0, 1).flatten(1, 2)[:, :length] for i in (0, 1)
        )
        finite = bool(keys.isfinite().all() and values.isfinite().all())
        for part in [rows] if finite else rows.split(1):
            seen = int(indices[part].max()) + 1
            live = torch.arange(seen, device=q.device) <= indices[part][:, None]
            out[part] = _attend(wide(q[part]), keys[:, :seen], values[:, :seen], live, scale).to(
                q.dtype
            )
    return out


def lineage(parents: torch.Tensor, row: int) -> list[int]:
    """The rows from the root of `row` down to it; a row whose parent does not stand before it is
    a root.
    """
    path = [row]
    while 0 <= (parent := int(parents[path[0]])) < path[0]:
        path.insert(0, parent)
    return path


@anchor(
    "q[m,h,d] cache[b,2,g,16,d] tables[s,t] row_sequence[m] indices[m] parents[m] -> [m,h,d]",
    flops=lambda m, h, d, t: 4 * m * h * d * t * BLOCK_ROWS,
)
def tree_attention(q, cache, tables, row_sequence, indices, parents, *, scale=1.0):
    """Each row's attention over the rows before its root, its ancestors and itself, in that order.

    Row i continues row `parents[i]` < i of the program and a root continues what the sequence
    holds: it is its own parent, and stands at `indices` of its own. So a row attends to what
    `attention` would see if its path were stored alone. A padding row (-1) gives zero.
    """
    out = torch.zeros_like(q)
    if q.is_meta:
        return out
    for row in (indices >= 0).nonzero()[:, 0].tolist():
        path = indices[lineage(parents, row)]
        seen = torch.cat([torch.arange(int(path[0]), device=q.device), path]).long()
        block, line = tables[row_sequence[row], seen // BLOCK_ROWS].long(), seen % BLOCK_ROWS
        keys, values = (wide(cache[block, i, :, line]).transpose(0, 1) for i in (0, 1))
        live = torch.ones(1, len(seen), dtype=torch.bool, device=q.device)
        mixed = _attend(wide(q[row : row + 1]), keys, values, live, scale)
        out[row : row + 1] = mixed.to(q.dtype)
    return out
