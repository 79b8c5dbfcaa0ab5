"""The check of one part: its programs on three runners, its rows
byte for byte, its planted faults.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from circuit.faults import FAULTS, seen
from circuit.feed import in_order
from circuit.program_check import (
    Columns,
    Compared,
    along,
    compare,
    compare_chain,
    drafts_of,
    eager_distances,
)
from circuit.report import Report
from circuit.scenario import PARENTS, PREFIX, Observed, Script, by_paths, follow, one_by_one, walk
from ir.key import DECODE, GraphKey, Mode

if TYPE_CHECKING:
    from circuit.bindings import Bound
    from ir.binding import Binding
    from runners.base import Runner
    from runners.eager import EagerRunner

LEAST_TOKENS = 8
"""Tokens of a part that must have been compared exactly for a run to count; half of all where a
part with few programs has fewer rows.
"""


@dataclass
class PartCheck:
    """The check of one part: its programs, the rows that agree byte for
    byte, the faults that were seen.
    """

    programs: list[Compared]
    equal_rows: int = 0
    unequal: list[str] = field(default_factory=list)
    faults: dict[str, bool] = field(default_factory=dict)

    def problems(self, complete: bool) -> list[str]:
        """Why this part does not pass, as sentences; empty if it does."""
        found = [f"{c.part} {c.key}: {p}" for c in self.programs for p in c.problems]
        found += self.unequal
        part = self.programs[0].part
        found += [
            f"{part}: a planted fault was not seen ({n})" for n, ok in self.faults.items() if not ok
        ]
        tokens = sum(c.tokens for c in self.programs)
        near = sum(c.near_ties for c in self.programs)
        least = min(LEAST_TOKENS, (tokens + near) // 2) if complete else LEAST_TOKENS
        if not self.faults:
            found.append(f"{part}: no fault was planted, so nothing shows that one would be seen")
        if tokens < max(least, 1):
            found.append(
                f"{part}: only {tokens} tokens could be compared, which is too thin to pass"
            )
        if not complete:
            found.append(
                f"{part}: some programs were left out, so the run does not pass as a whole"
            )
        return found


def eager_pair(bound: Bound, name: str, context: int) -> tuple[EagerRunner, EagerRunner]:
    """Eager runners of the graph that the kernels compute: in the
    working format, and in float64.
    """
    from circuit.backends import BACKENDS
    from ir.passes.manager import run_pipeline
    from runners.eager import EagerRunner

    facts = BACKENDS[bound.backend](()).pass_facts()
    plain, oracle = (
        EagerRunner(
            bound.bindings[name], prepare=lambda graph: run_pipeline(graph, facts),
            double=double, blocks=1 + 2 * -(-context // 16), context=context,
        )
        for double in (False, True)
    )  # fmt: skip
    return plain, oracle


def check_part(
    name: str,
    bound: Bound,
    runner: Runner,
    script: Script,
    keys: Collection[GraphKey],
    report: Report,
) -> PartCheck:
    """Walks through the programs of a part on all three runners, compares, and plants faults.

    Chains are followed step by step, along the drafts that the compiled program made.
    """
    references = eager_pair(bound, name, runner.pool.context)
    columns = columns_of(bound.bindings[name])
    progress = partial(report, f"{name} programs")
    found = _observed(runner, references, script, keys, columns, progress)
    pairs = [
        tuple(along(c, r, columns) if c.key.goes_on else r for r in pair)
        for c, *pair in found if None not in pair
    ]  # fmt: skip
    sizes = eager_distances(pairs)

    def judged(compiled: Observed, exact: Observed | None) -> Compared:
        if compiled.key.goes_on:
            return compare_chain(name, compiled, exact, sizes, columns)
        return compare(name, compiled, exact, sizes)

    check = PartCheck([judged(compiled, exact) for compiled, _, exact in found])
    same_rows(name, check, runner, script, [compiled for compiled, _, _ in found])
    known = {compiled.key: exact for compiled, _, exact in found}
    for key in planted_keys(known):

        def is_wrong(key: GraphKey = key) -> bool:
            broken = next(o for o in walk(runner, script, {key}) if o.key == key)
            exact = known[key]
            if key.goes_on:  # along the drafts that the broken program makes
                _, exact = _followed((broken, None), references[1:], script, columns)
            return bool(judged(broken, exact).problems)

        check.faults |= {f"{f.name}, {key}": seen(runner, f, is_wrong, key) for f in FAULTS}
    for reference in references:
        reference.close()
    return check


def _observed(
    runner: Runner, references: Sequence[EagerRunner], script: Script, keys: Collection[GraphKey],
    columns: Columns | None, report: Callable[[int, int], None],
) -> list[tuple[Observed | None, ...]]:  # fmt: skip
    """What each program gave, and what the references did in its place: the same program, or
    single steps along the drafts of a chain (None where it drafts no ids of the head's).
    """
    plainly = [key for key in keys if not key.goes_on]
    walks = [walk(reference, script, plainly) for reference in references]
    kept: list[tuple[Observed | None, ...]] = []
    for compiled in walk(runner, script, keys):
        report(len(kept), len(keys) + 1)
        chain = compiled.key.goes_on
        kept.append((compiled, *(None if chain else next(found) for found in walks)))
    for found in walks:
        found.close()
    report(1, 1)
    return [_followed(found, references, script, columns) for found in kept]


def columns_of(binding: Binding) -> Columns | None:
    """The target ids of the columns that a head scores; None of a target, which drafts nothing."""
    from ir.binding import DraftBinding
    from proposers.mtp_program import DRAFT_IDS

    if not isinstance(binding, DraftBinding):
        return None
    mapped = binding.weights.get(DRAFT_IDS)
    return Columns(np.arange(binding.vocab) if mapped is None else mapped.numpy())


def planted_keys(keys: Collection[GraphKey]) -> list[GraphKey]:
    """The programs that faults are planted in: DECODE, and the longest chain of each mode."""
    longest = {key.mode: key for key in in_order(keys) if key.goes_on}
    return [*([DECODE] if DECODE in keys else []), *longest.values()]


def _followed(
    found: tuple[Observed | None, ...], references: Sequence[EagerRunner], script: Script,
    columns: Columns | None,
) -> tuple[Observed | None, ...]:  # fmt: skip
    """What was found, with the references' single steps where the compiled program is a chain."""
    compiled = found[0]
    drafts = drafts_of(compiled, columns) if compiled.key.goes_on else None
    if drafts is None:
        return found
    return compiled, *(follow(reference, script, drafts) for reference in references)


def same_rows(
    part: str, check: PartCheck, runner: Runner, script: Script, seen: Sequence[Observed]
) -> None:
    """Compares rows of wider programs with rows computed one by one, byte for byte."""
    single = one_by_one(runner, script, 0, PREFIX + 4)
    for wide in seen:
        start = 0 if wide.key.mode is Mode.PREFILL else PREFIX
        count = 1 if wide.key.mode is Mode.BATCH else min(wide.rows, 4 if start else PREFIX)
        if wide.key == DECODE or wide.key.goes_on:
            continue
        singles = single[start:]
        if wide.key.mode is Mode.TREE:
            count, singles = wide.rows, by_paths(runner, script, PARENTS[: wide.rows])
        names = [n for n in ("hidden", "logits") if len(wide.outputs.get(n, ())) >= count]
        for row in range(count):
            alone = singles[row]
            pairs = [(wide.outputs[n][row], alone.outputs[n][0]) for n in names]
            pairs += [(wide.stored[n][:, :, row], alone.stored[n][:, :, 0]) for n in wide.stored]
            if all(a.tobytes() == b.tobytes() for a, b in pairs):
                check.equal_rows += 1
            else:
                check.unequal.append(
                    f"{part} {wide.key}: row {row} differs from the same row by DECODE"
                )
