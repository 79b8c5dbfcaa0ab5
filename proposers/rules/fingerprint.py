"""A hash of a hidden row, to follow it through ring and feed when a mapping is in doubt."""

from __future__ import annotations

from enum import Enum

import numpy as np

OFFSET = 0xCBF29CE484222325
_MASK = (1 << 64) - 1


class Multiplier(Enum):
    """The factor of each byte: older engines have one zero too many in theirs."""

    OLDER = 0x1000000001B3  # 2^44 + 0x1b3: what their logs were written with
    FNV_64 = 0x100000001B3  # 2^40 + 0x1b3: the prime of the published hash


def hidden_fingerprint(hidden: np.ndarray, multiplier: Multiplier = Multiplier.OLDER) -> int:
    """The 64-bit hash of the bytes of a row: FNV-1a but for the multiplier."""
    value = OFFSET
    for byte in np.ascontiguousarray(hidden).tobytes():
        value = ((value ^ byte) * multiplier.value) & _MASK
    return value
