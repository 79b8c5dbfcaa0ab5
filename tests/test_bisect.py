"""A bad rewrite is found by its name in compiled programs, and a good build is not blamed."""

import numpy as np
import torch

from circuit.backends import BACKENDS
from circuit.bindings import Bound
from circuit.bisect import first_bad_build, first_bad_meaning, first_bad_rewrites
from circuit.models.target import target_binding
from circuit.part_check import eager_pair
from circuit.report import Screen
from circuit.scenario import Script, one_by_one
from ir.graph import DECODE, Role
from ir.passes import merge
from ir.passes.manager import first_bad
from ir.sample import weight_like
from tests.programs import CONTEXT, target_config, target_graph

SCRIPT = Script(np.arange(20, dtype=np.int64) * 7 % 300)


def tiny() -> Bound:
    """A target of one layer with drawn weights, to be compiled in C++."""
    draw = torch.Generator().manual_seed(2)
    slots = target_graph(DECODE, num_hidden_layers=1).slots.values()
    weights = {s.name: weight_like(s, draw) for s in slots if s.role is Role.WEIGHT}
    config = target_config(num_hidden_layers=1)
    binding = target_binding(config, weights, CONTEXT, (DECODE,), sequences=2)
    return Bound({"target": binding}, None, (), None, "cpp")


def swapped_lanes(monkeypatch) -> None:
    """Plants a fault in the pass that merges: gate and up change places."""
    insert = merge.insert

    def swapped(graph, before, op, args, attributes, like):
        if op is merge.lane:
            attributes = {**attributes, "index": 1 - attributes["index"]}
        return insert(graph, before, op, args, attributes, like)

    monkeypatch.setattr(merge, "insert", swapped)


def test_a_good_build_is_not_blamed():
    found = first_bad_rewrites(tiny(), {"target": SCRIPT}, Screen(as_json=True), 1)
    assert found["target"].startswith("right in 4 rows with all of its ")


def test_a_rewrite_that_changes_the_meaning_is_named(monkeypatch):
    swapped_lanes(monkeypatch)
    facts = BACKENDS["cpp"](()).pass_facts()
    words = first_bad_meaning(tiny().bindings["target"], facts)
    assert "merge merges 2 products at" in words and "decoder.py" in words


def test_a_rewrite_that_makes_the_build_wrong_is_named(monkeypatch):
    bound = tiny()
    pair = eager_pair(bound, "target", CONTEXT)
    for runner in pair:  # the references trace their graphs before the fault is planted
        one_by_one(runner, SCRIPT, 0, 1)
    monkeypatch.setattr("circuit.bisect.eager_pair", lambda *_: pair)
    swapped_lanes(monkeypatch)
    words = first_bad_build(bound, "target", SCRIPT, 1)
    assert "merge merges 2 products at" in words and "decoder.py" in words


def test_the_search_finds_the_least_number():
    for total in range(9):
        for bad in range(total + 1):
            assert first_bad(lambda n, bad=bad: n >= bad, total) == bad
