"""One walk through every program of a part, the same for each runner:
what it outputs and what it stores.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from circuit.compare import as_numbers
from circuit.feed import Row, feed, in_order
from ir.key import DECODE, GraphKey, Mode
from runners.base import Runner
from runners.kv import BLOCK_ROWS, Lease
from runners.rows import depths

PREFIX = 2 * BLOCK_ROWS  # rows held before the programs that continue a text; whole blocks
AHEAD = 16  # further tokens that a walk needs
PARENTS = (0, 0, 1, 0, 1, 2, 4, 5)
"""The tree of a walk: a spine with hedges, some of which go on."""


@dataclass(frozen=True)
class Script:
    """The text of a walk: ids, and for heads the target's hidden before each of them, [rows, n].

    `offset` is the rotary position of row 0: a head's first row stands for the second token.
    """

    ids: np.ndarray
    hiddens: np.ndarray | None = None
    offset: int = 0

    def row(self, token: int, index: int) -> Row:
        """Row `index` of a sequence with the token of place `token` in the text."""
        hidden = None if self.hiddens is None else self.hiddens[token]
        return Row(int(self.ids[token]), index, hidden, self.offset)


@dataclass
class Observed:
    """What a program gave for its live rows: outputs by name, and the
    stored keys and values by state.
    """

    key: GraphKey
    rows: int
    outputs: dict[str, np.ndarray] = field(default_factory=dict)
    stored: dict[str, np.ndarray] = field(default_factory=dict)


def walk(runner: Runner, script: Script, keys: Collection[GraphKey]) -> Iterator[Observed]:
    """What each program of `keys` gives: a prompt, then every way to go on from it.

    PREFILL takes in the prefix. Each other program continues it from the same place; its rows are
    cut again.
    """
    with runner.pool.lease() as lease:
        prefill = runner.fitting(Mode.PREFILL, PREFIX)
        assert prefill is not None, "every part has a program for prompts"
        yield _rows(runner, script, prefill, lease, range(PREFIX))
        for key in in_order(keys):
            if key.mode is Mode.BATCH:
                yield batch(runner, script, key, lease)
            elif key.mode is not Mode.PREFILL:
                parents = PARENTS[: key.rows] if key.mode is Mode.TREE else ()
                ahead = range(PREFIX, PREFIX + key.rows)
                yield _rows(runner, script, key, lease, ahead, parents)
                lease.trim(PREFIX)


def one_by_one(runner: Runner, script: Script, start: int, count: int) -> list[Observed]:
    """What DECODE gives for `count` rows from `start` on, one after the
    other, after DECODE for those before.
    """
    with runner.pool.lease() as lease:
        found = [
            _rows(runner, script, DECODE, lease, range(at, at + 1)) for at in range(start + count)
        ]
    return found[start:]


def follow(runner: Runner, script: Script, drafts: Sequence[int]) -> Observed:
    """What DECODE gives along a chain of `drafts` after the prefix: `logits` of each step, the last
    `hidden`, and the rows stored.

    Each step takes the draft of the step before and the hidden that this runner itself recycled.
    """
    types, logits = runner.inputs(DECODE), []
    with runner.pool.lease() as lease:
        _rows(runner, script, runner.fitting(Mode.PREFILL, PREFIX), lease, range(PREFIX))
        row = script.row(PREFIX, PREFIX)
        for draft in drafts:
            lease.append(1)
            table = lease.table(types["tables"].shape[1])
            out = runner.step(DECODE, **feed(DECODE, types, [row], [table]))
            logits.append(runner.read(out["logits"])[0])
            hidden = runner.read(out["hidden"])
            row = replace(row, token=int(draft), index=row.index + 1, hidden=hidden[0])
        stored = {n: lease.read(n)[:, :, PREFIX:] for n in runner.pool.arrays}
        given = {"logits": np.stack(logits), "hidden": hidden}
        return Observed(DECODE, len(drafts), given, _as_numbers(runner, stored))


def by_paths(runner: Runner, script: Script, parents: Sequence[int]) -> list[Observed]:
    """What DECODE gives for each row of the walk's tree, after the rows of its path."""
    found = []
    with runner.pool.lease() as lease:
        for at in range(PREFIX):
            _rows(runner, script, DECODE, lease, range(at, at + 1))
        for row in range(len(parents)):
            path = [row]
            while path[0]:
                path.insert(0, parents[path[0]])
            steps = [_rows(runner, script, DECODE, lease, [PREFIX + at]) for at in path]
            found.append(steps[-1])
            lease.trim(PREFIX)
    return found


def _rows(
    runner: Runner, script: Script, key: GraphKey, lease: Lease, places: Sequence[int],
    parents: Sequence[int] = (),
) -> Observed:  # fmt: skip
    """The program over the next rows of one sequence, with the tokens of `places` in the text; a
    chain is given its first row only.
    """
    first = lease.append(len(places))
    live = places[:1] if key.goes_on else places
    types = runner.inputs(key)
    rows = [script.row(place, first + at) for at, place in enumerate(live)]
    if parents:
        branches = zip(rows, depths(parents), parents, strict=True)
        rows = [
            replace(row, offset=row.offset + deep - at, parent=parent)
            for at, (row, deep, parent) in enumerate(branches)
        ]
    out = runner.step(key, **feed(key, types, rows, [lease.table(types["tables"].shape[1])]))
    stored = {n: lease.read(n)[:, :, first:] for n in runner.pool.arrays}
    return _observed(runner, key, len(places), len(live), out, stored)


def batch(runner: Runner, script: Script, key: GraphKey, prefix: Lease) -> Observed:
    """The program over one row each of several sequences that share
    the prefix and go on differently.
    """
    count = min(key.rows, AHEAD)
    leases = [runner.pool.lease(1) for _ in range(count)]
    try:
        types = runner.inputs(key)
        width = types["tables"].shape[1]
        shared = prefix.blocks[: PREFIX // BLOCK_ROWS]
        tables = []
        for lease in leases:
            table = np.zeros(width, np.int32)
            table[: len(shared) + 1] = [*shared, lease.blocks[0]]
            tables.append(table)
        rows = [script.row(PREFIX + i, PREFIX) for i in range(count)]
        out = runner.step(key, **feed(key, types, rows, tables))
        own = [lease.blocks[0] for lease in leases]
        stored = {
            n: np.moveaxis(np.asarray(a)[own, :, :, 0], 0, 2) for n, a in runner.pool.arrays.items()
        }
        return _observed(runner, key, count, count, out, stored)
    finally:
        for lease in leases:
            lease.close()


def _observed(
    runner: Runner, key: GraphKey, rows: int, live: int, out: dict, stored: dict[str, np.ndarray]
) -> Observed:
    """Copies of outputs (live rows only) and of stored rows as numbers."""
    outputs = {}
    for name, value in out.items():
        array = runner.read(value)
        whole = key.goes_on or len(array) == 1  # one row for the program as a whole
        name = name.replace("ranks.", "tokens.")  # ids, the draft among them
        outputs[name] = array if whole else array[:live]
    return Observed(key, rows, outputs, _as_numbers(runner, stored))


def _as_numbers(runner: Runner, stored: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Copies of stored rows as real numbers."""
    types = runner.pool.types
    return {n: as_numbers(a, types[n].format).copy() for n, a in stored.items()}
