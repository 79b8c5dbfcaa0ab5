"""Tensors whose elements are packed in blocks; formats and types stand in `ir/format.py`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ir.format import BLOCK, Format, TensorType

__all__ = ["BLOCK", "Format", "PackedTensor", "TensorType", "unpacked"]


@dataclass(frozen=True, eq=False)
class PackedTensor:
    """A tensor of raw GGUF blocks: `data` is uint8 [*shape[:-1], bytes per row]."""

    format: Format
    shape: tuple[int, ...]
    data: torch.Tensor

    def __post_init__(self) -> None:
        assert self.format.is_block and self.shape[-1] % BLOCK == 0
        assert self.data.dtype == torch.uint8 and self.data.numel() == self.format.nbytes(
            self.shape
        )

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def rows(self, index: torch.Tensor) -> PackedTensor:
        """The rows `index` (int64 [r]) of a two-dimensional packed tensor, still packed."""
        data = self.data.reshape(self.shape[0], -1)[index].contiguous()
        return PackedTensor(self.format, (len(index), *self.shape[1:]), data)

    def dequantize(self) -> torch.Tensor:
        """The elements as f32 `shape` (block layouts of the GGUF specification)."""
        blocks = self.data.reshape(-1, self.format.nbytes((BLOCK,)))
        scale = blocks[:, :2].clone().view(torch.float16).float()
        if self.format is Format.Q8_0:
            values = blocks[:, 2:].clone().view(torch.int8).float() * scale
        else:
            offset = 4 if self.format is Format.Q4_1 else 2
            nibbles = torch.cat([blocks[:, offset:] & 15, blocks[:, offset:] >> 4], dim=1).float()
            if self.format is Format.Q4_1:
                values = nibbles * scale + blocks[:, 2:4].clone().view(torch.float16).float()
            else:
                values = (nibbles - 8) * scale
        return values.reshape(self.shape)


def unpacked(value: torch.Tensor | PackedTensor) -> torch.Tensor:
    """`value` as a plain tensor; block formats become f32."""
    return value.dequantize() if isinstance(value, PackedTensor) else value
