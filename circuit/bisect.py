"""The search for the rewrite of a graph that makes a compiled program wrong."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from circuit import options
from circuit.part_check import compare, eager_pair
from circuit.report import Screen
from circuit.scenario import Observed, Script, one_by_one
from ir.key import DECODE

if TYPE_CHECKING:
    from circuit.bindings import Bound
    from codegen.backend import Backend

ROWS = 4  # rows of DECODE that a build is judged by


def first_bad_rewrites(
    bound: Bound, scripts: Mapping[str, Script], screen: Screen, threads: int | None = None
) -> dict[str, str]:
    """Part name -> the first rewrite with which its DECODE program is wrong, in words.

    DECODE of each part is built again and again, with fewer or more rewrites, and held to the same
    oracle as the check.
    """
    found: dict[str, str] = {}
    with screen.progress("bisect") as report:
        for done, (name, script) in enumerate(scripts.items()):
            report(f"{name} rewrites", done, len(scripts))
            found[name] = first_bad_rewrite(bound, name, script, threads)
    for name, words in found.items():
        screen.say(f"{name}: {words}")
    return found


def first_bad_rewrite(bound: Bound, name: str, script: Script, threads: int | None) -> str:
    """The first rewrite with which DECODE of one part is wrong, in words."""
    from circuit.backends import BACKENDS
    from ir.passes.fuel import Fuel
    from ir.passes.manager import first_bad, run_pipeline

    backend, fuel = BACKENDS[bound.backend](()), Fuel()
    graph = bound.bindings[name].graph(DECODE)
    run_pipeline(graph, backend.pass_facts(), fuel=fuel)
    tables = next(s.type for s in graph.slots.values() if s.name == "tables")
    references = eager_pair(bound, name, 16 * tables.shape[-1])
    wanted = list(zip(*(one_by_one(runner, script, 0, ROWS) for runner in references)))
    for runner in references:
        runner.close()

    def is_bad(limit: int) -> bool:
        rows = compiled_rows(bound, name, script, backend, limit, threads)
        return any(compare(name, row, *pair).problems for row, pair in zip(rows, wanted))

    if not is_bad(len(fuel.spent)):
        return f"{DECODE} is right with all of its {len(fuel.spent)} rewrites"
    number = first_bad(is_bad, len(fuel.spent))
    if number == 0:
        return f"{DECODE} is wrong before any rewrite: a kernel is at fault, not a pass"
    return str(fuel.spent[number - 1])


def compiled_rows(
    bound: Bound, name: str, script: Script, backend: Backend, limit: int, threads: int | None
) -> list[Observed]:
    """What DECODE of one part gives for the first rows of `script`, built with `limit` rewrites."""
    from circuit.backends import RUNNERS
    from codegen.artifact import load_artifact
    from codegen.compile import CompileOptions
    from codegen.save import compile_artifact

    with tempfile.TemporaryDirectory() as folder:
        out = compile_artifact(
            Path(folder) / "build", {name: (bound.bindings[name], (DECODE,))}, backend,
            CompileOptions(store=options.kernel_dir(), fuel=limit), recorded={}, extras={},
        )  # fmt: skip
        part = load_artifact(out).part(name)
        runners, free_shared = RUNNERS[bound.backend](
            {name: part}, threads, {name: 1 + 2 * -(-part.context // 16)}
        )
        try:
            return one_by_one(runners[name], script, 0, ROWS)
        finally:
            runners[name].close()
            free_shared()
