"""Element formats, tensor types, and tensors whose elements are packed in blocks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

import torch


class Format(Enum):
    """How elements are stored. Block formats hold 32 elements with shared f16 scales (GGUF layouts)."""

    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
    F64 = "f64"
    I32 = "i32"
    I64 = "i64"
    U8 = "u8"
    BOOL = "bool"
    Q8_0 = "q8_0"
    Q4_0 = "q4_0"
    Q4_1 = "q4_1"

    @property
    def is_block(self) -> bool:
        """True for formats whose elements can only be read a block at a time."""
        return self in _BLOCK_BYTES

    @property
    def is_float(self) -> bool:
        """True for formats that hold real numbers, packed or not."""
        return self.is_block or self in (Format.F32, Format.F16, Format.BF16, Format.F64)

    @property
    def dtype(self) -> torch.dtype:
        """The torch dtype of one element; a block format reads as f32 once unpacked."""
        return torch.float32 if self.is_block else _DTYPES[self]

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of a tensor of `shape`; the last dimension of a block format is a multiple of 32."""
        count = math.prod(shape)
        if self.is_block:
            return count // BLOCK * _BLOCK_BYTES[self]
        return count * self.dtype.itemsize

    @staticmethod
    def of(dtype: torch.dtype) -> Format:
        """The format that stores elements of `dtype`."""
        return _FORMATS[dtype]


BLOCK = 32
_BLOCK_BYTES = {Format.Q8_0: 34, Format.Q4_0: 18, Format.Q4_1: 20}
_DTYPES = {
    Format.F32: torch.float32,
    Format.F16: torch.float16,
    Format.BF16: torch.bfloat16,
    Format.F64: torch.float64,
    Format.I32: torch.int32,
    Format.I64: torch.int64,
    Format.U8: torch.uint8,
    Format.BOOL: torch.bool,
}
_FORMATS = {dtype: fmt for fmt, dtype in _DTYPES.items()}


@dataclass(frozen=True)
class TensorType:
    """Shape (in elements) and format of a value."""

    shape: tuple[int, ...]
    format: Format

    @property
    def nbytes(self) -> int:
        """Bytes that the value occupies."""
        return self.format.nbytes(self.shape)

    def __str__(self) -> str:
        return f"{self.format.value}[{','.join(map(str, self.shape))}]"

    @staticmethod
    def of(value: torch.Tensor | PackedTensor) -> TensorType:
        """The type of a concrete tensor, packed or not."""
        if isinstance(value, PackedTensor):
            return TensorType(value.shape, value.format)
        return TensorType(tuple(value.shape), Format.of(value.dtype))


@dataclass(frozen=True, eq=False)
class PackedTensor:
    """A tensor in a block format: `data` holds raw GGUF blocks, uint8 [*shape[:-1], bytes per row]."""

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
        blocks = self.data.reshape(-1, _BLOCK_BYTES[self.format])
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
