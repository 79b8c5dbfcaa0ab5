"""bf16 on the host, where numpy has no such type: values as their upper 16 bits."""

from __future__ import annotations

import numpy as np


def bf16_bits(values: np.ndarray) -> np.ndarray:
    """The nearest bf16 of f32 values, ties to even, as uint16; NaN stays NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + (((bits >> 16) & 1) + 0x7FFF)) >> 16
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return np.where(nan, (bits >> 16) | 0x40, rounded).astype(np.uint16)


def bf16_values(bits: np.ndarray) -> np.ndarray:
    """The f32 values of bf16 bits."""
    return (np.ascontiguousarray(bits).astype(np.uint32) << 16).view(np.float32)
