"""A pass that breaks a rule is caught by name, line and difference;
a bad rewrite is found by search.
"""

import pytest
import torch

from ir import ops
from ir.errors import Mistyped
from ir.graph import DECODE, Level
from ir.passes.edit import insert, prune
from ir.passes.manager import (
    PIPELINE,
    Keeps,
    Pass,
    PassFailed,
    bisect,
    meaning,
    run_pipeline,
    same_values,
)
from ir.sample import sample
from ir.tensor import Format, TensorType
from ir.tracing import trace
from tests.programs import CPU, target_graph


def planted(name, change, level=Level.TYPED, keeps=Keeps.BYTES):
    """The pipeline with one more pass, right after the first that reaches `level`."""

    def run(graph, facts, fuel):
        change(graph)
        return graph

    at = next(i for i, p in enumerate(PIPELINE) if p.level is level) + 1
    return (*PIPELINE[:at], Pass(name, run, level, keeps), *PIPELINE[at:])


def find(graph, name, number=0):
    return [n for n in graph.computed() if n.target.name == name][number]


def wrong_eps(graph):
    find(graph, "inverse_rms").kwargs = {"eps": 0.5}


def wrong_type(graph):
    find(graph, "add").meta["type"] = TensorType((1, 64), Format.BF16)


def lost_write(graph):
    node = find(graph, "kv_write")
    node.replace_all_uses_with(node.args[0])
    graph.fx.erase_node(node)
    prune(graph)


def late_reader(graph):
    find(graph, "attention").replace_input_with(
        find(graph, "kv_write"), find(graph, "kv_write").args[0]
    )


def dead_node(graph):
    insert(graph, find(graph, "add"), ops.add, find(graph, "add").args, {}, find(graph, "add"))


def backwards(graph):
    find(graph, "add").append(find(graph, "embed"))


def lost_slot(graph):
    graph.slots.pop("ids")


def foreign_call(graph):
    find(graph, "add").target = torch.add


def one_region(graph):
    for node in graph.computed():
        node.meta["region"] = 0


def no_region(graph):
    del find(graph, "silu_mul").meta["region"]


def circular(graph):
    find(graph, "add", -1).meta["region"] = find(graph, "linear").meta["region"]


def outside_view(graph):
    find(graph, "merge_heads").meta["region"] = find(graph, "attention").meta["region"]


def gathered(graph):
    rope = next(n for n in graph.computed() if n.target.name == "rope" and "region" in n.meta)
    number = find(graph, "linear").meta["region"]
    for node in (rope.args[0], rope.args[0].args[0], rope):
        node.meta["region"] = number


def shuffled(graph):
    for node in graph.computed():
        node.meta["region"] += 1


FAULTS = [
    (wrong_eps, Level.TYPED, "keeps the meaning"),
    (wrong_type, Level.TYPED, "the type that its op infers"),
    (lost_write, Level.TYPED, "state writes"),
    (late_reader, Level.TYPED, "after every other reader"),
    (dead_node, Level.TYPED, "Every computed value is read"),
    (backwards, Level.TYPED, "fx lint"),
    (lost_slot, Level.TYPED, "Every placeholder has a slot"),
    (foreign_call, Level.TYPED, "a call of a declared op"),
    (one_region, Level.FUSED, "one anchor or state write"),
    (no_region, Level.FUSED, "belongs to a region"),
    (circular, Level.FUSED, "none waits"),
    (outside_view, Level.FUSED, "A view is read in its own region"),
    (gathered, Level.FUSED, "at its own index only"),
    (shuffled, Level.ORDERED, "numbered as they stand"),
]


@pytest.mark.parametrize(
    ("fault", "level", "sentence"), FAULTS, ids=[f[0].__name__ for f in FAULTS]
)
def test_a_pass_that_breaks_a_rule_is_named_with_its_line(fault, level, sentence):
    graph = target_graph(DECODE, num_hidden_layers=1)
    passes = planted("broken", fault, level)
    with pytest.raises(PassFailed, match=sentence) as caught:
        run_pipeline(graph, CPU, passes=passes, check_meaning=1)
    assert caught.value.facts["pass_name"] == "broken"
    assert "broken" in str(caught.value) and "--- before" in str(caught.value)


def test_the_failure_shows_the_source_line_of_the_program():
    with pytest.raises(PassFailed) as caught:
        run_pipeline(target_graph(DECODE), CPU, passes=planted("broken", wrong_type))
    assert caught.value.facts["origin"].startswith("blocks/decoder.py:")


def test_bisection_finds_the_first_bad_rewrite():
    def run(graph, facts, fuel):
        for node in list(graph.computed()):
            if node.target.name == "add" and fuel.spend(node, "turns"):
                wrong = node.name == "add_2"
                node.args = (node.args[1], node.args[1] if wrong else node.args[0])
        return graph

    graph = target_graph(DECODE)
    values, passes = sample(graph, 3), [*PIPELINE]
    passes.insert(2, Pass("turn", run, Level.TYPED))
    want = meaning(graph, values, double=True)

    def bad(whole):
        got = meaning(whole, values, double=True)
        return not all(same_values(want[n], got[n], close=True) for n in want)

    found = bisect(graph, CPU, bad, passes=tuple(passes))
    assert (found.pass_name, found.node) == ("turn", "add_2")
    assert bisect(graph, CPU, bad) is None


def test_shapes_that_disagree_name_the_line_that_wrote_them():
    def program(scope):
        x = ops.embed(scope.input("ids", 1), scope.weight("table"))
        scope.output("y", ops.linear(x, scope.weight("w")))

    types = {"table": TensorType((9, 8), Format.F32), "w": TensorType((9, 7), Format.F32)}
    with pytest.raises(Mistyped, match="dimension k is 7 in `weight` but 8 in `x`") as caught:
        run_pipeline(trace(program, DECODE, types, {}), CPU)
    assert "test_pass_faults.py" in str(caught.value)
