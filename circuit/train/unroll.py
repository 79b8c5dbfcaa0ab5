"""Drafts of every row of a batch of texts, step after step, as they are made at run time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Protocol

import torch

from circuit.train.readings import TextRows, training_readings
from circuit.train.texts import Written
from ir.binding import DraftBinding
from ir.graph import Graph
from ir.interpret import interpret
from ir.key import DECODE, Mode
from ir.tensor import unpacked
from proposers.mtp_program import CACHE, DRAFT_IDS, HEAD


@dataclass(frozen=True)
class Batch:
    """Texts side by side: `ids` [s, l], hiddens [s, l - 1, h],
    lengths and starts of answers [s].
    """

    ids: torch.Tensor
    hidden: torch.Tensor
    lengths: torch.Tensor
    starts: torch.Tensor

    @staticmethod
    def of(texts: Sequence[Written]) -> Batch:
        """The batch of `texts`, padded to the longest."""
        longest = max(len(t.ids) for t in texts)
        ids = torch.zeros(len(texts), longest, dtype=torch.int32)
        hidden = torch.zeros(len(texts), longest - 1, texts[0].hidden.shape[-1])
        for row, text in enumerate(texts):
            ids[row, : len(text.ids)] = text.ids
            hidden[row, : len(text.ids) - 1] = text.hidden.float()
        return Batch(
            ids, hidden, torch.tensor([len(t.ids) for t in texts]),
            torch.tensor([t.start for t in texts]),
        )  # fmt: skip


@dataclass(frozen=True)
class Drafted:
    """Step `number` (from 0) over the chains that live: pair key `key`
    + `number` of `text`, for each.

    `logits` [m, v], drafted `tokens` [m] and the text's own next ones `wanted` [m].
    """

    number: int
    text: torch.Tensor
    key: torch.Tensor
    logits: torch.Tensor
    tokens: torch.Tensor
    wanted: torch.Tensor

    @property
    def right(self) -> torch.Tensor:
        """Which drafts a check would accept."""
        return self.tokens == self.wanted


class Visitor(Protocol):
    """What is done with each step; the mask [m] it returns names the chains that go on."""

    def __call__(self, step: Drafted) -> torch.Tensor: ...


class Unroller:
    """Runs a head's own graphs over batches. The row of pair key p holds token p + 1 and hidden p.

    Prompt rows only store keys and values. Each row of the answer begins a chain: its first step
    reads true rows alone, and step j reads true rows up to where its chain began and the rows of
    the chain itself.
    """

    def __init__(self, binding: DraftBinding, dtype: torch.dtype | None = None) -> None:
        chunk = next(key for key in binding.keys if key.mode is Mode.PREFILL)
        self._store, self._step = binding.graph(chunk), binding.graph(DECODE)
        self._fixed = {
            n: unpacked(w) for n, w in binding.weights.items() if not n.startswith("mtp.")
        }
        self._read_in(dtype)

    def _read_in(self, dtype: torch.dtype | None) -> None:
        """Computes matrix products in `dtype` from now on (None: as the ops do)."""
        self._scores = self._fixed[HEAD] if dtype is None else self._fixed[HEAD].to(dtype)
        self._readings = training_readings(dtype)

    def exact(self) -> Unroller:
        """The same graphs, read in the precision of the ops."""
        other = copy(self)
        other._read_in(None)
        return other

    def run(
        self, learned: Mapping[str, torch.Tensor], batch: Batch, steps: int, visit: Visitor,
        columns: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """Visits up to `steps` steps of the batch under the head's weights `learned`.

        `columns` are the scored ids that take part (None: all), by their place in the head's id
        map.
        """
        weights = {**self._fixed, HEAD: self._scores, **learned}
        if columns is not None:
            weights |= {name: weights[name][columns] for name in (HEAD, DRAFT_IDS)}
        rows = TextRows(*batch.hidden.shape[:2])
        places = torch.arange(batch.hidden.shape[1])[None]
        held = places < (batch.lengths - 1)[:, None]
        scored = (
            held & (places >= (batch.starts - 1)[:, None]) & (places + 2 < batch.lengths[:, None])
        )
        text, key = (held & ~scored).nonzero(as_tuple=True)
        if len(text):
            self._call(self._store, weights, rows, batch, text, key, batch.hidden[text, key])
        text, key = scored.nonzero(as_tuple=True)
        hidden = batch.hidden[text, key]
        for number in range(steps):
            at = key + number
            out = self._call(self._step, weights, rows, batch, text, at, hidden)
            wanted = batch.ids[text, at + 2]
            going = visit(Drafted(number, text, key, out["logits"], out["tokens"], wanted))
            kept = (going & (at + 3 < batch.lengths[text])).nonzero()[:, 0]
            if not len(kept) or number + 1 == steps:
                return
            text, key, hidden = text[kept], key[kept], out["hidden"][kept]
            rows.branch()
            rows.keep(kept)

    def _call(
        self, graph: Graph, weights: Mapping[str, torch.Tensor], rows: TextRows, batch: Batch,
        text: torch.Tensor, key: torch.Tensor, hidden: torch.Tensor,
    ) -> dict[str, torch.Tensor]:  # fmt: skip
        """One run of `graph` over the rows of pair keys `key` of `text`."""
        inputs = {
            "ids": batch.ids[text, key + 1], "hidden": hidden, "tables": rows.tables,
            "positions": (key + 1).int(), "row_sequence": text.int(), "indices": key.int(),
        }  # fmt: skip
        return interpret(graph, inputs, weights, {CACHE: rows}, readings=self._readings)
