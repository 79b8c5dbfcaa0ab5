"""How far values are from an oracle, and the rule that compiled programs are held to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ir.format import Format

LARGEST_FACTOR = 4.0
MEAN_FACTOR = 3.0
EPSILON = 4e-6


@dataclass(frozen=True)
class Distance:
    """The largest and the root-mean-square difference from the
    oracle; infinite where there is a NaN.
    """

    largest: float
    mean: float


def distance(values: np.ndarray, oracle: np.ndarray) -> Distance:
    """How far `values` are from `oracle`, an array of the same shape."""
    gap = np.abs(values.astype(np.float64) - oracle.astype(np.float64))
    if gap.size == 0:
        return Distance(0.0, 0.0)
    if not np.isfinite(gap).all():
        return Distance(np.inf, np.inf)
    return Distance(float(gap.max()), float(np.sqrt(np.square(gap).mean())))


def allowance(eager: Distance, oracle: np.ndarray) -> Distance:
    """The distance at which values still count as no worse than eager's.

    Four times eager's largest and three times its mean difference (both are draws of the same
    roundings), plus four millionths of the oracle's own size, which a reduction in another order
    costs even where eager is exact.
    """
    size = np.abs(oracle.astype(np.float64))
    largest, mean = (
        (float(size.max()), float(np.sqrt(np.square(size).mean()))) if size.size else (0, 0)
    )
    return Distance(
        LARGEST_FACTOR * eager.largest + EPSILON * largest,
        MEAN_FACTOR * eager.mean + EPSILON * mean,
    )


def pooled(distances: Iterable[Distance]) -> Distance:
    """The largest of several distances: one row is a single draw of its
    roundings, many show their size.
    """
    found = list(distances)
    return Distance(max(d.largest for d in found), max(d.mean for d in found))


def share_used(compiled: np.ndarray, eager: Distance, oracle: np.ndarray) -> float:
    """The share of the allowance that `compiled` uses up; above 1 it is
    worse than eager, which is `eager` off.
    """
    seen, allowed = distance(compiled, oracle), allowance(eager, oracle)
    shares = [
        s / a if a else (0.0 if s == 0 else np.inf)
        for s, a in ((seen.largest, allowed.largest), (seen.mean, allowed.mean))
    ]
    return float(max(shares))


def no_worse_than_eager(compiled: np.ndarray, eager: np.ndarray, oracle: np.ndarray) -> bool:
    """True if `compiled` is as near to `oracle` as `eager` is, within the stated allowance."""
    return share_used(compiled, distance(eager, oracle), oracle) <= 1


def clear_rows(oracle: np.ndarray, compiled: np.ndarray) -> np.ndarray:
    """Which rows of logits [m, v] have a first place that the error
    between the two cannot overturn.
    """
    if oracle.shape[-1] < 2:
        return np.ones(len(oracle), bool)
    top = np.partition(oracle, -2, axis=-1)[:, -2:]
    error = np.abs(compiled.astype(np.float64) - oracle).max(-1)
    return np.abs(top[:, 1] - top[:, 0]) > 2 * error


def as_numbers(array: np.ndarray, format: Format) -> np.ndarray:
    """An array of a state as real numbers (bf16 is held as its 16 bits)."""
    if format is Format.BF16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array
