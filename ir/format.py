"""Element formats and tensor types, without torch: a compiled plan loads without it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

BLOCK = 32


class Format(Enum):
    """How elements are stored; block formats hold 32 elements with f16 scales (GGUF)."""

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
        import torch

        return getattr(torch, "float32" if self.is_block else _ELEMENTS[self][0])

    @property
    def storage(self) -> str:
        """The numpy dtype that holds one element; bf16 is held as its 16 bits, blocks as bytes."""
        return "uint8" if self.is_block else _ELEMENTS[self][2]

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of a tensor of `shape`; the last dimension in blocks is a multiple of 32."""
        count = math.prod(shape)
        if self.is_block:
            return count // BLOCK * _BLOCK_BYTES[self]
        return count * _ELEMENTS[self][1]

    @staticmethod
    def of(dtype: Any) -> Format:
        """The format that stores elements of `dtype`, a torch or a numpy dtype."""
        return _FORMATS[str(dtype).removeprefix("torch.")]


_BLOCK_BYTES = {Format.Q8_0: 34, Format.Q4_0: 18, Format.Q4_1: 20}
_ELEMENTS = {  # name of the torch dtype, bytes, numpy dtype
    Format.F32: ("float32", 4, "float32"),
    Format.F16: ("float16", 2, "float16"),
    Format.BF16: ("bfloat16", 2, "uint16"),
    Format.F64: ("float64", 8, "float64"),
    Format.I32: ("int32", 4, "int32"),
    Format.I64: ("int64", 8, "int64"),
    Format.U8: ("uint8", 1, "uint8"),
    Format.BOOL: ("bool", 1, "bool"),
}
_FORMATS = {name: fmt for fmt, (name, _, _) in _ELEMENTS.items()}


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
    def parse(text: str) -> TensorType:
        """The type printed as `text`: `f32[1,576]`."""
        name, _, dims = text.rstrip("]").partition("[")
        return TensorType(tuple(int(d) for d in dims.split(",") if d), Format(name))

    @staticmethod
    def of(value: Any) -> TensorType:
        """The type of a tensor: torch, numpy, or packed in blocks (which names its format)."""
        packed = getattr(value, "format", None)
        return TensorType(tuple(value.shape), packed if packed else Format.of(value.dtype))
