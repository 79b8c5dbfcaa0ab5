"""Grammar masks of a request: which target ids each draft may be."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from proposers.levers import MaskScope

Mask = np.ndarray  # i32 [words]: bit `id % 32` of word `id // 32` set = allowed


def words_of(vocabulary: int) -> int:
    """Words of a mask over `vocabulary` ids."""
    return -(-vocabulary // 32)


def masks_of(bitmask: np.ndarray | None, drafts: int, scope: MaskScope) -> list[Mask | None]:
    """The mask of each of `drafts` drafts; None: all ids are allowed.

    One mask [words] is for the next token: it limits the first draft, or every one if `scope` says
    so. Masks [n, words] limit one draft each, and there are no more drafts than masks.
    """
    if bitmask is None:
        return [None] * drafts
    if bitmask.ndim == 2:
        return list(bitmask[:drafts])
    repeats = drafts if scope is MaskScope.EVERY else min(drafts, 1)
    return [bitmask] * repeats + [None] * (drafts - repeats)


def allowed_columns(mask: Mask, ids: np.ndarray) -> np.ndarray:
    """Which of the scored columns, of target ids `ids`, the mask allows.

    Words are signed: bit 31 is a bit like any other. An id past the mask is not allowed.
    """
    words = mask.view(np.uint32)
    inside = ids < 32 * len(words)
    bits = words[np.where(inside, ids // 32, 0)] >> (ids % 32).astype(np.uint32) & 1
    return inside & (bits == 1)


def reachable(masks: Sequence[Mask | None], ids: np.ndarray) -> int:
    """Drafts before the first whose mask allows no id that is scored."""
    empty = (
        at for at, m in enumerate(masks) if m is not None and not allowed_columns(m, ids).any()
    )
    return next(empty, len(masks))


def best_allowed(logits: np.ndarray, mask: Mask, ids: np.ndarray) -> int:
    """The target id of the first largest logit whose bit is set; some bit must be."""
    return int(ids[np.where(allowed_columns(mask, ids), logits, -np.inf).argmax()])
