"""From float tensors to stored formats: round to bf16, or pack in GGUF blocks."""

from __future__ import annotations

import torch

from ir.format import BLOCK, Format
from ir.tensor import PackedTensor, unpacked


def stored_as(value: torch.Tensor | PackedTensor, format: Format) -> torch.Tensor | PackedTensor:
    """`value` in `format`; a value that is stored so already is returned itself.

    Block formats need a last dimension that is a multiple of 32.
    """
    have = value.format if isinstance(value, PackedTensor) else Format.of(value.dtype)
    if have is format:
        return value
    plain = unpacked(value)
    return quantized(plain, format) if format.is_block else plain.to(format.dtype)


def quantized(values: torch.Tensor, format: Format) -> PackedTensor:
    """`values` [..., k] packed in blocks of 32, each with f16 scales, as GGUF files hold them.

    Q8_0: int8 of nearest value (halves away from zero) under absmax / 127. Q4_0: 4 bits around 8
    under the value of largest magnitude over -8. Q4_1: 4 bits from the minimum, under (max - min) /
    15.
    """
    blocks = values.float().reshape(-1, BLOCK)
    pack = {Format.Q8_0: _q8_0, Format.Q4_0: _q4_0, Format.Q4_1: _q4_1}[format]
    data = torch.cat(pack(blocks), dim=1).reshape(*values.shape[:-1], -1)
    return PackedTensor(format, tuple(values.shape), data)


def _half_bytes(x: torch.Tensor) -> torch.Tensor:
    """f16 bytes [blocks, 2] of one number per block."""
    return x.reshape(-1, 1).half().view(torch.uint8)


def _inverse(scale: torch.Tensor) -> torch.Tensor:
    """One over the scale, 0 for a block of zeros."""
    return torch.where(scale == 0, 0.0, 1 / scale)


def _nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Bytes [blocks, 16]: code j in the low half, code j + 16 in the high half."""
    codes = codes.to(torch.uint8)
    return codes[:, : BLOCK // 2] | (codes[:, BLOCK // 2 :] << 4)


def _q8_0(blocks: torch.Tensor) -> list[torch.Tensor]:
    scale = blocks.abs().amax(1, keepdim=True) / 127
    scaled = blocks * _inverse(scale)
    codes = torch.trunc(scaled + torch.copysign(torch.full_like(scaled, 0.5), scaled))
    return [_half_bytes(scale), codes.to(torch.int8).view(torch.uint8)]


def _q4_0(blocks: torch.Tensor) -> list[torch.Tensor]:
    peak = blocks.gather(1, blocks.abs().argmax(1, keepdim=True))
    scale = peak / -8
    codes = torch.trunc(blocks * _inverse(scale) + 8.5).clamp(0, 15)
    return [_half_bytes(scale), _nibbles(codes)]


def _q4_1(blocks: torch.Tensor) -> list[torch.Tensor]:
    low, high = blocks.amin(1, keepdim=True), blocks.amax(1, keepdim=True)
    scale = (high - low) / 15
    codes = torch.trunc((blocks - low) * _inverse(scale) + 0.5).clamp(0, 15)
    return [_half_bytes(scale), _half_bytes(low), _nibbles(codes)]
