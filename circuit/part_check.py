"""The check of one part: its programs on three runners, its rows
byte for byte, its planted faults.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from circuit.compare import Distance, clear_rows, distance, pooled, share_used
from circuit.faults import FAULTS, seen
from circuit.report import Report
from circuit.scenario import PARENTS, PREFIX, Observed, Script, by_paths, one_by_one, walk
from ir.key import DECODE, GraphKey, Mode

if TYPE_CHECKING:
    from circuit.bindings import Bound
    from runners.base import Runner
    from runners.eager import EagerRunner

LEAST_TOKENS = 8  # tokens of a part that must have been compared exactly for a run to count


@dataclass
class Compared:
    """What was compared of one program: how much, and the worst share
    of the allowance that it used.
    """

    part: str
    key: GraphKey
    rows: int = 0
    numbers: int = 0
    tokens: int = 0
    near_ties: int = 0
    worst: float = 0.0
    problems: list[str] = field(default_factory=list)

    def plain(self) -> dict[str, object]:
        """The record as JSON values."""
        return {
            "part": self.part, "key": str(self.key), "rows": self.rows, "numbers": self.numbers,
            "tokens": self.tokens, "near_ties": self.near_ties, "worst": round(self.worst, 4),
            "problems": self.problems,
        }  # fmt: skip


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
        if not self.faults:
            found.append(f"{part}: no fault was planted, so nothing shows that one would be seen")
        if tokens < LEAST_TOKENS:
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
    """Walks through the programs of a part on all three runners, compares, and plants faults."""
    eager, oracle = eager_pair(bound, name, runner.pool.context)
    kept: dict[GraphKey, tuple[Observed, Observed, Observed]] = {}
    for trio in zip(*(walk(r, script, keys) for r in (runner, eager, oracle)), strict=True):
        report(f"{name} programs", len(kept), max(len(keys), 1))
        kept[trio[0].key] = trio
    report(f"{name} programs", 1, 1)
    sizes = eager_distances([(plain, exact) for _, plain, exact in kept.values()])
    check = PartCheck([compare(name, first, last, sizes) for first, _, last in kept.values()])
    same_rows(name, check, runner, script, [first for first, _, _ in kept.values()])
    if DECODE in kept:

        def is_wrong() -> bool:
            broken = next(o for o in walk(runner, script, {DECODE}) if o.key == DECODE)
            return bool(compare(name, broken, kept[DECODE][2], sizes).problems)

        check.faults = {fault.name: seen(runner, fault, is_wrong) for fault in FAULTS}
    eager.close()
    oracle.close()
    return check


def numbers_of(observed: Observed) -> dict[str, np.ndarray]:
    """Everything that a program gave and stored which is a real number."""
    outputs = {n: a for n, a in observed.outputs.items() if not n.startswith("tokens")}
    return outputs | {f"stored {n}": a for n, a in observed.stored.items()}


def drafted_alike(one: Observed, other: Observed) -> bool:
    """True unless two runs of a chain went on with different drafts: then
    their numbers are of other texts.
    """
    names = [n for n in one.outputs if n.startswith("tokens.")]
    return all(np.array_equal(one.outputs[n], other.outputs[n]) for n in names)


def eager_distances(pairs: Sequence[tuple[Observed, Observed]]) -> dict[str, Distance]:
    """By name of an output or a state: how far eager is from the
    oracle, over all programs of a part.
    """
    found: dict[str, list[Distance]] = {}
    for plain, exact in pairs:
        if drafted_alike(plain, exact):
            known = numbers_of(exact)
            for name, array in numbers_of(plain).items():
                found.setdefault(name, []).append(distance(array, known[name]))
    return {name: pooled(distances) for name, distances in found.items()}


def compare(
    part: str, compiled: Observed, oracle: Observed, eager: Mapping[str, Distance]
) -> Compared:
    """The comparison of one program's outputs and stored rows, each held to the contract."""
    found = Compared(part, compiled.key, compiled.rows)
    if compiled.key.goes_on:
        _compare_chain(found, compiled, oracle)
    if drafted_alike(compiled, oracle):
        known = numbers_of(oracle)
        for name, array in numbers_of(compiled).items():
            _compare_numbers(found, name, array, eager[name], known[name])
    if "logits" in compiled.outputs:
        clear = clear_rows(oracle.outputs["logits"], compiled.outputs["logits"])
        equal = compiled.outputs["tokens"] == oracle.outputs["tokens"]
        found.tokens += int(clear.sum())
        found.near_ties += int((~clear).sum())
        if not equal[clear].all():
            found.problems.append(f"{int((~equal[clear]).sum())} tokens differ from the oracle's")
    return found


def _compare_chain(found: Compared, compiled: Observed, oracle: Observed) -> None:
    """Counts the chain's tokens up to the first that differs: a near tie,
    which DECODE judges by its logits.
    """
    for step in range(compiled.key.rows):
        pair = [observed.outputs[f"tokens.{step}"] for observed in (compiled, oracle)]
        if not np.array_equal(*pair):
            found.near_ties += 1
            return
        found.tokens += 1


def _compare_numbers(
    found: Compared, name: str, compiled: np.ndarray, eager: Distance, oracle: np.ndarray
) -> None:
    if compiled.shape != oracle.shape:
        found.problems.append(f"{name} is {list(compiled.shape)}, not {list(oracle.shape)}")
        return
    share = share_used(compiled, eager, oracle)
    found.numbers += compiled.size
    found.worst = max(found.worst, share)
    if not share <= 1:
        found.problems.append(f"{name} is {share:.1f} times as far from the oracle as it may be")


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
