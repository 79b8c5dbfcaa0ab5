"""How a head's graph is read while it is trained: rows of many texts
at once, and states with gradients.

The graph is the one that is compiled. Few ops have another body here: the two that touch the
cache, because a training step needs the gradient through what it writes; `linear` and `argmax`, for
speed; and log-probabilities are left out, since no lesson asks for them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import linear as product

from circuit.train.seen import seen
from ir.interpret import Readings
from ir.ops import argmax, attention, kv_write, linear, log_chance, log_mass
from ir.ops.attention import BLOCK_ROWS


class TextRows:
    """Keys and values of a batch of texts [s, l, g, d], and those of
    the chains that drafts grow from.

    Rows written before `branch` are true rows, of which each text has one per index. After it every
    row given is the next one of its own chain: it is seen by that chain only, and `depth` counts
    them.
    """

    def __init__(self, texts: int, length: int) -> None:
        self.texts = texts
        self.length = -(-length // BLOCK_ROWS) * BLOCK_ROWS
        self._keys: torch.Tensor | None = None
        self._values: torch.Tensor | None = None
        self._own: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._branched = False

    @property
    def tables(self) -> torch.Tensor:
        """Block numbers [s, t] under which the slots of text s are those of its own rows."""
        blocks = self.length // BLOCK_ROWS
        return torch.arange(self.texts * blocks, dtype=torch.int32).view(self.texts, blocks)

    @property
    def depth(self) -> int:
        """Rows of its own that each chain has."""
        return len(self._own)

    def branch(self) -> None:
        """Rows that come from now on belong to chains."""
        self._branched = True

    def keep(self, chains: torch.Tensor) -> None:
        """Goes on with chains number `chains` only."""
        self._own = [(k[chains], v[chains]) for k, v in self._own]

    def write(self, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> TextRows:
        """Takes keys and values [m, g, d] in."""
        if self._branched:
            self._own.append((k, v))
            return self
        at = slots.long()
        if self._keys is None:
            shape = (self.texts * self.length, *k.shape[1:])
            self._keys, self._values = k.new_zeros(shape), v.new_zeros(shape)
        self._keys = self._keys.index_put((at,), k)
        self._values = self._values.index_put((at,), v)
        return self

    def attend(
        self, q: torch.Tensor, text: torch.Tensor, index: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Attention [m, h, d] of rows `index` of `text` over the true rows
        before their chain, and over it.
        """
        at = (text.long(), (index - self.depth).long())
        shape = (self.texts, self.length, *self._keys.shape[1:])
        keys, values = self._keys.view(shape), self._values.view(shape)
        return seen(q, keys, values, at, scale, self._own)


def training_readings(dtype: torch.dtype | None) -> Readings:
    """Bodies over `TextRows`; matrix products in `dtype` (None: in that of the rows).

    Logits, the product with a matrix that is not learned, are left in `dtype`: they are the largest
    by far.
    """

    def write(cache: TextRows, k, v, slots):
        return cache.write(k, v, slots)

    def attend(q, cache: TextRows, tables, row_sequence, indices, *, scale):
        return cache.attend(q, row_sequence, indices, scale)

    def multiply(x, weight, *, activation=None):
        wanted = dtype or x.dtype
        y = product(x.to(wanted), weight.to(wanted))
        return y.to(x.dtype) if weight.requires_grad else y

    def first_largest(logits):
        return logits.argmax(-1).to(torch.int32)

    def left_out(*values):
        return None

    bodies: dict[object, Callable] = {
        kv_write: write, attention: attend, linear: multiply, argmax: first_largest,
        log_mass: left_out, log_chance: left_out,
    }  # fmt: skip
    return bodies
