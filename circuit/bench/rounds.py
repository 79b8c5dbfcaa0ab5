"""Timed rounds: every contender once per round, in turns, so that a slow moment hits all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from codegen.backend import Report

WARM_UP = 3
LONG = 0.2  # seconds
SETTLE = 0.02  # seconds in which threads of the contender before, which may spin, go to sleep


@dataclass(frozen=True)
class Contender:
    """A call to time: who runs it, on weights in which format, which program over how many rows."""

    peer: str
    weights: str
    key: str
    rows: int
    call: Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """Milliseconds of a contender over its runs."""

    peer: str
    weights: str
    key: str
    rows: int
    ms_median: float
    ms_min: float
    ms_max: float
    runs: int


def timed(
    contenders: Sequence[Contender], runs: int, report: Report,
    each_round: Callable[[], object] = lambda: None,
) -> list[Timing]:  # fmt: skip
    """The timing of each contender, in the order given.

    Each is called `WARM_UP` times first, outside the clock. A round calls every contender twice in
    a row and times the second call, so that each starts from its own caches; what takes longer than
    `LONG` brings its own and is called once. Odd rounds go backwards. `each_round` is called at the
    beginning of each, for what is measured beside the contenders.
    """
    long: set[int] = set()
    for done, contender in enumerate(contenders):
        report("warm up", done, len(contenders))
        for _ in range(WARM_UP):
            start = time.perf_counter()
            contender.call()
            if time.perf_counter() - start > LONG:
                long.add(done)
                break
    report("warm up", len(contenders), len(contenders))
    taken: dict[int, list[float]] = {index: [] for index in range(len(contenders))}
    order = list(taken)
    for done in range(runs):
        report("rounds", done, runs)
        each_round()
        for index in order if done % 2 == 0 else reversed(order):
            time.sleep(SETTLE)
            if index not in long:
                contenders[index].call()
            start = time.perf_counter()
            contenders[index].call()
            taken[index].append((time.perf_counter() - start) * 1e3)
    report("rounds", runs, runs)
    return [_timing(c, taken[index]) for index, c in enumerate(contenders)]


def _timing(contender: Contender, taken: list[float]) -> Timing:
    return Timing(
        contender.peer, contender.weights, contender.key, contender.rows,
        round(statistics.median(taken), 4), round(min(taken), 4), round(max(taken), 4), len(taken),
    )  # fmt: skip
