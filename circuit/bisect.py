"""Where a wrong program goes wrong: the first rewrite of the passes that changes what it gives."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from circuit import options
from circuit.backends import BACKENDS, RUNNERS
from circuit.part_check import eager_pair
from circuit.program_check import compare, eager_distances
from circuit.report import Screen
from circuit.scenario import Observed, Script, one_by_one
from ir.key import DECODE

if TYPE_CHECKING:
    from circuit.bindings import Bound
    from codegen.backend import Backend
    from ir.binding import Binding
    from ir.graph import Graph
    from ir.passes.facts import Facts

SEED = 0
BLOCKS = 8  # cache blocks that a sampled step can reach
ROWS = 4  # rows of DECODE that a build is judged by


def first_bad_rewrites(
    bound: Bound, scripts: Mapping[str, Script], screen: Screen, threads: int | None = None
) -> dict[str, str]:
    """Part -> the first rewrite of its DECODE that changes what it gives, in words.

    The graph alone is tried first, interpreted. Where that is innocent, the program is built again
    and again with more or fewer rewrites, and held to the oracle of the check.
    """
    facts = BACKENDS[bound.backend](()).pass_facts()
    found = {}
    with screen.progress("bisect") as report:
        for done, (name, script) in enumerate(scripts.items()):
            report(name, done, len(scripts))
            found[name] = first_bad_meaning(bound.bindings[name], facts) or first_bad_build(
                bound, name, script, threads
            )
    for name, sentence in found.items():
        screen.say(f"{name} {DECODE}: {sentence}")
    return found


def first_bad_meaning(binding: Binding, facts: Facts) -> str | None:
    """The first rewrite that changes what the graph of DECODE means, in words; None if none does.

    It is interpreted in float64 on seeded inputs, without the rounding of activations.
    """
    from ir.passes import pack
    from ir.passes.manager import bisect, meaning, same_values
    from ir.sample import sample

    states = {n: replace(t, shape=(BLOCKS, *t.shape[1:])) for n, t in binding.states.items()}
    graph = replace(binding, states=states).graph(DECODE)
    values = sample(graph, SEED, binding.weights)
    wanted = meaning(graph, values, double=True)

    def is_bad(rewritten: Graph) -> bool:
        now = meaning(pack.unrounded(rewritten), values, double=True)
        return not all(same_values(wanted[n], now[n], close=True) for n in wanted)

    rewrite = bisect(graph, facts, is_bad)
    return None if rewrite is None else str(rewrite)


def first_bad_build(bound: Bound, name: str, script: Script, threads: int | None) -> str:
    """The first rewrite with which the compiled DECODE of one part is wrong, in words."""
    from ir.passes.fuel import Fuel
    from ir.passes.manager import first_bad, run_pipeline

    backend, fuel = BACKENDS[bound.backend](()), Fuel()
    graph = bound.bindings[name].graph(DECODE)
    run_pipeline(graph, backend.pass_facts(), fuel=fuel)
    tables = next(s.type for s in graph.slots.values() if s.name == "tables")
    references = eager_pair(bound, name, 16 * tables.shape[-1])
    eager, oracle = (one_by_one(runner, script, 0, ROWS) for runner in references)
    allowed = eager_distances(list(zip(eager, oracle)))
    for runner in references:
        runner.close()

    def is_bad(limit: int) -> bool:
        rows = compiled_rows(bound, name, script, backend, limit, threads)
        return any(compare(name, *pair, allowed).problems for pair in zip(rows, oracle))

    if not is_bad(len(fuel.spent)):
        return f"right in {ROWS} rows with all of its {len(fuel.spent)} rewrites"
    number = first_bad(is_bad, len(fuel.spent))
    if number == 0:
        return "wrong before any rewrite: a kernel is at fault, not a pass"
    return f"the kernels of {fuel.spent[number - 1]}"


def compiled_rows(
    bound: Bound, name: str, script: Script, backend: Backend, limit: int, threads: int | None
) -> list[Observed]:
    """What DECODE of one part gives for the first rows of `script`, built with `limit` rewrites."""
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
