"""Runs the passes in their order and checks the graph after each one."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import torch
import torch.fx

from ir.errors import CircuitError
from ir.graph import Graph, Level, Role, kind_of
from ir.interpret import interpret
from ir.op import Kind
from ir.passes import drop_noops, fuse, infer, merge, order, pack, split
from ir.passes.facts import Facts
from ir.passes.fuel import Fuel, Rewrite
from ir.sample import Sample, Value, sample
from ir.show import text
from ir.verify import broken


class PassFailed(CircuitError):
    """A pass left a graph that breaks a rule: a fault of the pass, or of the program given."""

    says = "pass {pass_name} fails at node {node} ({origin}): {rule}"
    hint = "what the pass changed:\n{diff}"


class Keeps(Enum):
    """How the meaning check compares a graph with the one before the pass."""

    BYTES = "bytes"  # the same bytes from the interpreter
    SUMS = "sums"  # the same sums, perhaps in another order: f64 agrees to 1e-9
    ROUNDS = "rounds"  # the same bytes once the activations that the pass rounds are read plain


@dataclass(frozen=True)
class Pass:
    """A pass: what it runs, the level of the graph it gives, what it keeps of the meaning."""

    name: str
    run: Callable[[Graph, Facts, Fuel], Graph]
    level: Level
    keeps: Keeps = Keeps.BYTES


PIPELINE: tuple[Pass, ...] = (
    Pass("drop_noops", drop_noops.run, Level.TRACED),
    Pass("infer", infer.run, Level.TYPED),
    Pass("pack", pack.run, Level.TYPED, Keeps.ROUNDS),
    Pass("merge", merge.run, Level.TYPED, Keeps.SUMS),
    Pass("split", split.run, Level.TYPED, Keeps.SUMS),
    Pass("fuse", fuse.run, Level.FUSED),
    Pass("order", order.run, Level.ORDERED),
)

Observer = Callable[[str, Graph], None]
Meanings = dict[bool, dict[str, torch.Tensor]]  # by precision, True for f64


def run_pipeline(
    graph: Graph, facts: Facts, *, check_meaning: int | None = None,
    weights: Mapping[str, Value] | None = None, fuel: Fuel | int | None = None,
    observers: Sequence[Observer] = (), passes: tuple[Pass, ...] = PIPELINE,
) -> Graph:  # fmt: skip
    """The ORDERED graph of a TRACED one; `graph` stays as it is.

    `check_meaning` is a seed: the graph is interpreted before and after each pass on the values
    drawn from it (and on `weights`, where given) and compared. `fuel` bounds the rewrites. Each
    observer is called with a pass's name and the graph after it, `trace` first. Raises PassFailed.
    """
    fuel = fuel if isinstance(fuel, Fuel) else Fuel(fuel)
    values = None if check_meaning is None else sample(graph, check_meaning, weights)
    known: Meanings = {}
    for observe in observers:
        observe("trace", graph)
    for step in passes:
        after = _applied(step, graph, facts, fuel)
        _check(step, graph, after)
        if values is not None:
            known = _check_meaning(step, graph, after, values, known)
        for observe in observers:
            observe(step.name, after)
        graph = after
    return graph


def _size(graph: Graph) -> int:
    return sum(1 for _ in graph.computed())


def _applied(step: Pass, graph: Graph, facts: Facts, fuel: Fuel) -> Graph:
    """The graph after the pass, with the pass and the node counts in its history."""
    fuel.pass_name = step.name
    after = step.run(graph.clone(), facts, fuel)
    after.level = step.level
    after.history = (*graph.history, f"{step.name}, {_size(graph)} -> {_size(after)} nodes")
    return after


def _fail(step: Pass, rule: str, node: torch.fx.Node, before: Graph, after: Graph) -> PassFailed:
    lines = difflib.unified_diff(
        text(before).splitlines(), text(after).splitlines(), "before", f"after {step.name}",
        lineterm="", n=2,
    )  # fmt: skip
    origin = node.meta.get("origin", "?")
    diff = "\n".join(lines) or "nothing"
    return PassFailed(pass_name=step.name, node=node.name, origin=origin, rule=rule, diff=diff)


def _check(step: Pass, before: Graph, after: Graph) -> None:
    """Raises PassFailed if fx, a rule of the level or the program's interface is broken."""
    try:
        after.fx.lint()
    except RuntimeError as error:
        raise _fail(
            step, f"fx lint: {str(error).splitlines()[0]}", after.output_node, before, after
        ) from error
    found = broken(after)
    if found is not None:
        rule, node = found
        sentence = " ".join((rule.__doc__ or rule.__name__).split("\n\n")[0].split())
        raise _fail(step, sentence, node, before, after)
    lost = _interface(before).symmetric_difference(_interface(after))
    if lost:
        what = ", ".join(sorted(" ".join(map(str, item)) for item in lost))
        sentence = f"a pass keeps inputs, states, outputs and state writes: {what}"
        raise _fail(step, sentence, after.output_node, before, after)


def _interface(graph: Graph) -> set[tuple[object, ...]]:
    """What the outside of a program sees."""
    slots = {("slot", s.name, s.type) for s in graph.slots.values() if s.role is not Role.WEIGHT}
    writes = sum(1 for n in graph.computed() if kind_of(n) is Kind.STATE)
    return slots | {("output", name) for name in graph.outputs} | {("writes", writes)}


def _check_meaning(
    step: Pass, before: Graph, after: Graph, values: Sample, known: Meanings
) -> Meanings:
    """What `after` gives on `values`; PassFailed if `before` gives other outputs or states.

    `known` is what `before` gives, as far as it has been computed.
    """
    compared = pack.unrounded(after) if step.keeps is Keeps.ROUNDS else after
    double = step.keeps is Keeps.SUMS
    old = known[double] if double in known else meaning(before, values, double=double)
    new = meaning(compared, values, double=double)
    for name, want in old.items():
        if not same_values(want, new[name], close=double):
            node = after.outputs.get(name, after.output_node)
            sentence = f"a pass keeps the meaning of a program: `{name}` has other values"
            raise _fail(step, sentence, node, before, after)
    return {double: new} if compared is after else {}


def meaning(graph: Graph, values: Sample, *, double: bool = False) -> dict[str, torch.Tensor]:
    """Outputs by name and, as `state NAME`, the states after one step on `values`."""
    states = values.fresh_states(double=double)
    outputs = interpret(graph, values.inputs, values.weights, states, double=double)
    return {**outputs, **{f"state {n}": s for n, s in states.items()}}


def same_values(a: torch.Tensor, b: torch.Tensor, *, close: bool = False) -> bool:
    """True if `a` and `b` hold the same values (NaN is NaN); `close` allows 1e-9 of their size."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not close or not a.is_floating_point():
        return torch.equal(torch.nan_to_num(a, nan=7.25), torch.nan_to_num(b, nan=7.25)) and (
            torch.equal(a.isnan(), b.isnan())
        )
    size = float(a[a.isfinite()].abs().max()) if a.isfinite().any() else 0.0
    return torch.allclose(a, b, rtol=1e-9, atol=1e-9 * size, equal_nan=True)


def bisect(
    graph: Graph, facts: Facts, bad: Callable[[Graph], bool], *,
    passes: tuple[Pass, ...] = PIPELINE,
) -> Rewrite | None:  # fmt: skip
    """The first rewrite after which `bad` is true of the ORDERED graph; None if it never is.

    A rewrite that makes a pass fail is bad too. Number 0 stands for the graph before any rewrite.
    """
    whole = Fuel()

    def is_bad(fuel: Fuel | int) -> bool:
        try:
            return bad(run_pipeline(graph, facts, fuel=fuel, passes=passes))
        except PassFailed:
            return True

    if not is_bad(whole):
        return None
    number = first_bad(is_bad, len(whole.spent))
    return whole.spent[number - 1] if number else Rewrite(0, "trace", "", "?", "is bad before")


def first_bad(is_bad: Callable[[int], bool], total: int) -> int:
    """The least number of rewrites, up to `total`, with which a program is bad.

    It is taken to be bad with all of them, and to stay bad once it is.
    """
    low, high = -1, total
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_bad(middle) else (middle, high)
    return high
