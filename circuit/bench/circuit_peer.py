"""The contender `circuit`: the compiled programs of an artifact,
each continuing a text of 64 tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from circuit.bench.rounds import Contender
from circuit.feed import Feed, Row, feed, in_order
from circuit.loaded import Loaded
from circuit.recipe import TARGET
from ir.key import GraphKey, Mode
from runners.base import Runner
from runners.kv import Lease

CIRCUIT = "circuit"
HELD = 64  # rows of the text that every step continues; half a context that is shorter than two
PROMPT = 512  # tokens of a timed prompt
DRAFT = "draft "  # stands before the keys of a head


@dataclass(frozen=True)
class Step:
    """A timed unit: the feeds of the program runs it is made of, and the rows that they compute."""

    key: GraphKey
    label: str
    rows: int
    feeds: tuple[Feed, ...]


def random_ids(vocab: int, count: int) -> np.ndarray:
    """Ids that stand for a text; their values do not change what a step costs."""
    return np.random.default_rng(0).integers(0, vocab, count)


def label_of(part: str, key: GraphKey) -> str:
    """A program's name in the rows of the table."""
    name = "PREFILL" if key.mode is Mode.PREFILL else str(key)
    return name if part == TARGET else DRAFT + name


def circuit_contenders(
    loaded: Loaded, runners: Mapping[str, Runner], keys: frozenset[GraphKey] | None
) -> list[Contender]:
    """A contender per program of every part, or per program that `keys` names."""
    made = []
    for part, runner in runners.items():
        for step in steps_of(loaded, part, runner, keys):
            made.append(
                Contender(
                    CIRCUIT, loaded.recipe.choices.weights, step.label, step.rows,
                    caller(runner, step),
                )
            )  # fmt: skip
    return made


def caller(runner: Runner, step: Step) -> Callable[[], None]:
    """A call that runs the step; what it stores is overwritten by the next."""

    def call() -> None:
        for given in step.feeds:
            runner.step(step.key, **given)

    return call


def steps_of(
    loaded: Loaded, part: str, runner: Runner, keys: frozenset[GraphKey] | None
) -> list[Step]:
    """The steps of a part in the order of their keys, over one lease that the runner keeps."""
    wanted = in_order(k for k in runner.keys if keys is None or k in keys)
    if not wanted:
        return []
    lease = runner.pool.lease()
    lease.append(min(HELD + PROMPT, runner.pool.context))
    try:
        return [s for key in wanted if (s := _step(loaded, part, runner, key, lease)) is not None]
    finally:
        lease.close()


def _step(loaded: Loaded, part: str, runner: Runner, key: GraphKey, lease: Lease) -> Step | None:
    types = runner.inputs(key)
    table = lease.table(types["tables"].shape[1])
    held = min(HELD, lease.rows // 2)
    ids = random_ids(loaded.recipe.config.vocab_size, HELD + PROMPT)
    width = types["hidden"].shape[1] if "hidden" in types else 0
    hidden = np.random.default_rng(1).standard_normal(width, np.float32) if width else None

    def rows(first: int, count: int) -> list[Row]:
        return [Row(int(ids[at]), at, hidden) for at in range(first, first + count)]

    if key.mode is Mode.PREFILL:
        if lease.rows < PROMPT or PROMPT % key.rows:
            return None
        starts = range(0, PROMPT, key.rows)
        feeds = tuple(feed(key, types, rows(first, key.rows), [table]) for first in starts)
        return Step(key, label_of(part, key), PROMPT, feeds)
    if key.mode is Mode.BATCH:
        given = [Row(int(ids[i]), held, hidden) for i in range(key.rows)]
        return Step(
            key, label_of(part, key), key.rows, (feed(key, types, given, [table] * key.rows),)
        )
    live = 1 if key.goes_on else key.rows
    given = feed(key, types, rows(held, live), [table])
    return Step(key, label_of(part, key), key.rows, (given,))
