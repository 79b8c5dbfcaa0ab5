"""The weights of a checkpoint as tensors over mapped files, made when first asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from circuit.models.stored import MappedFile, StoredTensor
from ir.tensor import Format, PackedTensor

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


class Weights(Mapping):
    """Tensor by name: `torch.Tensor` for float formats, `PackedTensor` for block formats.

    Bytes stay in the mapped file. `interleaved` gives, for a name whose rows are stored in the
    order of interleaved rotary embedding, its number of heads; such rows come back in half-split
    order, as a copy. Names that share a storage give the same object.
    """

    def __init__(
        self,
        stored: Mapping[str, StoredTensor],
        files: Mapping[Path, MappedFile],
        interleaved: Mapping[str, int],
    ):
        self._stored, self._files, self._interleaved = dict(stored), files, interleaved
        self._made: dict[tuple[Path, int], torch.Tensor | PackedTensor] = {}

    def __getitem__(self, name: str) -> torch.Tensor | PackedTensor:
        stored = self._stored[name]
        place = (stored.path, stored.offset)
        if place not in self._made:
            self._made[place] = self._make(name, stored)
        return self._made[place]

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)

    @property
    def nbytes(self) -> int:
        """The bytes of all weights in the file, a tied pair counted once."""
        return sum({(t.path, t.offset): t.nbytes for t in self._stored.values()}.values())

    def _make(self, name: str, stored: StoredTensor) -> torch.Tensor | PackedTensor:
        rows = stored.shape[0]
        raw = torch.from_numpy(self._files[stored.path].array(stored)).view(rows, -1)
        if name in self._interleaved:
            raw = half_split_rows(raw, self._interleaved[name])
        if stored.format.block > 1:
            return PackedTensor(Format(stored.format.name), stored.shape, raw.contiguous())
        dtype = DTYPES[stored.format.name]
        if raw.data_ptr() % dtype.itemsize:
            raw = raw.clone()
        return raw.reshape(-1).view(dtype).view(stored.shape)


def half_split_rows(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """`rows` [heads * d, ...] from pair order 0, d/2, 1, d/2 + 1, ... of each head to 0, 1, 2, ...

    llama-family GGUF files interleave the rows of q and k so that a rotary pair is adjacent.
    """
    width = rows.shape[0] // heads
    return rows.view(heads, width // 2, 2, -1).transpose(1, 2).reshape(rows.shape)
