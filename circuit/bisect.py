"""Where a wrong program goes wrong: the first rewrite of the passes that changes its meaning."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from circuit.backends import BACKENDS
from circuit.report import Screen
from ir.key import DECODE
from ir.passes import pack
from ir.passes.manager import bisect, meaning, same_values
from ir.sample import sample

if TYPE_CHECKING:
    from circuit.bindings import Bound
    from ir.binding import Binding
    from ir.graph import Graph
    from ir.passes.facts import Facts

SEED = 0
BLOCKS = 8  # cache blocks that a sampled step can reach
INNOCENT = "every rewrite keeps the meaning of the program, so the fault is in its kernels"


def first_bad_rewrites(bound: Bound, screen: Screen) -> dict[str, str]:
    """Part -> the first rewrite of its DECODE after which it means
    something else, or that none does.

    The graph is interpreted in float64 on seeded inputs, without the rounding of activations,
    before any rewrite and after each number of them that the bisection asks for.
    """
    facts = BACKENDS[bound.backend](()).pass_facts()
    found = {}
    with screen.progress("bisect") as report:
        for done, (name, binding) in enumerate(bound.bindings.items()):
            report(name, done, len(bound.bindings))
            found[name] = first_bad_rewrite(binding, facts)
    for name, sentence in found.items():
        screen.say(f"{name} {DECODE}: {sentence}")
    return found


def first_bad_rewrite(binding: Binding, facts: Facts) -> str:
    """The first rewrite that changes what DECODE of `binding` means, or `INNOCENT`."""
    states = {n: replace(t, shape=(BLOCKS, *t.shape[1:])) for n, t in binding.states.items()}
    graph = replace(binding, states=states).graph(DECODE)
    values = sample(graph, SEED, binding.weights)
    wanted = meaning(graph, values, double=True)

    def is_bad(rewritten: Graph) -> bool:
        now = meaning(pack.unrounded(rewritten), values, double=True)
        return not all(same_values(wanted[n], now[n], close=True) for n in wanted)

    rewrite = bisect(graph, facts, is_bad)
    return INNOCENT if rewrite is None else str(rewrite)
