"""Weights in panels of 16 rows, the layout that templates/cpp/products.h and blocks.h read."""

from __future__ import annotations

import numpy as np
import torch

from ir.format import BLOCK, Format, TensorType
from ir.op import Value
from ir.tensor import PackedTensor

LANES = 16
LINE = 64


def panel_bytes(type_: TensorType) -> int:
    """Bytes of one panel of a weight [n, k]."""
    k, format = type_.shape[1], type_.format
    if format is Format.F32:
        return k * 64
    if format is Format.BF16:
        return (k + 1) // 2 * 64
    return _head_bytes(format, k) + k * LANES // (1 if format is Format.Q8_0 else 2)


def _head_bytes(format: Format, k: int) -> int:
    """Bytes of the scales (and minima) of a panel, padded to a cache line."""
    per_block = 2 * LANES * (2 if format is Format.Q4_1 else 1)
    return -(-(k // BLOCK * per_block) // LINE) * LINE


def panels_bytes(type_: TensorType) -> int:
    """Bytes of the weight in panels; the last panel is padded with zeros."""
    return -(-type_.shape[0] // LANES) * panel_bytes(type_)


def to_panels(value: Value) -> np.ndarray:
    """The weight in panels, uint8 [panels_bytes]."""
    type_ = TensorType.of(value)
    n, _ = type_.shape
    count = -(-n // LANES)
    if isinstance(value, PackedTensor):
        raw = np.ascontiguousarray(value.data.numpy()).reshape(n, -1)
        packed = _blocks(_padded(raw, count), type_)
    elif type_.format is Format.BF16:
        bits = value.contiguous().view(torch.int16).numpy()
        bits = np.pad(_padded(bits, count), ((0, 0), (0, bits.shape[1] % 2)))
        packed = bits.reshape(count, LANES, -1, 2).transpose(0, 2, 1, 3)
    else:
        rows = _padded(value.contiguous().numpy(), count)
        packed = rows.reshape(count, LANES, -1).transpose(0, 2, 1)
    data = np.ascontiguousarray(packed).reshape(-1).view(np.uint8)
    assert data.size == panels_bytes(type_)
    return data


def _padded(rows: np.ndarray, count: int) -> np.ndarray:
    return np.pad(rows, ((0, count * LANES - rows.shape[0]), (0, 0)))


def _blocks(raw: np.ndarray, type_: TensorType) -> np.ndarray:
    """Panels [count, bytes] of a block format; `raw` holds whole rows
    of blocks, a multiple of 16 rows.
    """
    format, k = type_.format, type_.shape[1]
    blocks = raw.reshape(-1, LANES, k // BLOCK, raw.shape[1] // (k // BLOCK))
    count = blocks.shape[0]
    minima = format is Format.Q4_1
    scales = blocks[..., : 4 if minima else 2].reshape(count, LANES, k // BLOCK, -1, 2)
    head = scales.transpose(0, 2, 3, 1, 4).reshape(count, -1)
    head = np.pad(head, ((0, 0), (0, _head_bytes(format, k) - head.shape[1])))
    body = blocks[..., 4 if minima else 2 :]
    if format is Format.Q8_0:
        body = body ^ np.uint8(0x80)
    groups = body.reshape(count, LANES, k // BLOCK, -1, 4).transpose(0, 2, 3, 1, 4)
    return np.concatenate([head, groups.reshape(count, -1)], axis=1)
