"""Block formats as Triton kernels read them: all quants of a weight,
then all scales, then all minima.
"""

from __future__ import annotations

import numpy as np

from ir.format import BLOCK, Format
from ir.tensor import PackedTensor

SPLIT = "split"
"""Layout: quants by rows (Q4: element 2j in the low half of byte j),
scales f16 by rows, minima f16 by rows.
"""


def pack_split(value: PackedTensor) -> np.ndarray:
    """The blocks of `value` in the layout `split`, uint8 of the same size."""
    raw = value.data.reshape(-1, value.data.numel() // (np.prod(value.shape) // BLOCK))
    raw = raw.cpu().numpy()
    scales = raw[:, :2]
    if value.format is Format.Q8_0:
        return np.concatenate([raw[:, 2:].reshape(-1), scales.reshape(-1)])
    start = 4 if value.format is Format.Q4_1 else 2
    quants = np.concatenate([raw[:, start:] & 15, raw[:, start:] >> 4], axis=1)
    bytes_ = quants[:, 0::2] | (quants[:, 1::2] << 4)
    parts = [bytes_.reshape(-1), scales.reshape(-1)]
    if value.format is Format.Q4_1:
        parts.append(raw[:, 2:4].reshape(-1))
    return np.concatenate(parts)
