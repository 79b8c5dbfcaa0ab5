"""Drawings of graphs hold what the graph holds: each launch, each
output, no two arcs in one place.
"""

import re
import xml.dom.minidom

import pytest

from ir.graph import DECODE
from ir.passes.manager import run_pipeline
from ir.picture import _lanes, cards, flows, folded, svg
from ir.region import regions_of
from ir.tensor import Format
from tests.programs import CPU, QWEN35, head_graph, target_graph


def levels(graph):
    seen = {"trace": graph}
    run_pipeline(graph, CPU, observers=[lambda name, after: seen.update({name: after})])
    return seen


@pytest.mark.parametrize("name", ["trace", "split", "fuse", "order"])
def test_every_level_is_drawn_as_svg(name):
    graph = levels(head_graph(DECODE, Format.Q8_0, QWEN35))[name]
    drawn = svg(graph)
    xml.dom.minidom.parseString(drawn)
    assert drawn.count("<title>") == sum(1 for _ in graph.computed())
    assert all(f"→ {output}" in drawn for output in graph.outputs)


def test_layers_that_repeat_are_drawn_once():
    whole = run_pipeline(target_graph(DECODE, num_hidden_layers=6), CPU)
    column, stands = folded(cards(whole))
    assert len(column) == 6 + 6 + 2 and sum(c.times for c in column) == len(regions_of(whole))
    assert {c.times for c in column} == {1, 5}
    assert set(stands) == set(range(38)) and set(stands.values()) == {c.number for c in column}
    assert ">× 5<" in svg(whole) and "→ hidden" in svg(whole)


def test_a_graph_without_repetition_is_drawn_whole():
    whole = run_pipeline(head_graph(DECODE), CPU)
    column, stands = folded(cards(whole))
    assert len(column) == 9 and all(k == v for k, v in stands.items())


def test_arcs_in_one_lane_do_not_overlap():
    graph = levels(target_graph(DECODE, num_hidden_layers=3))["split"]
    column, stands = folded(cards(graph))
    place = {c.number: i for i, c in enumerate(column)}
    around = [f for f in flows(graph, stands) if place[f.end] > place[f.start] + 1]
    lanes = _lanes(around, place)
    assert len(lanes) == len(around) > 10
    for a in around:
        for b in around:
            apart = place[a.end] <= place[b.start] or place[b.end] <= place[a.start]
            assert a is b or lanes[a] != lanes[b] or apart


def test_the_drawing_sums_what_all_launches_move():
    whole = run_pipeline(target_graph(DECODE, num_hidden_layers=5), CPU)
    total = sum(r.bytes for r in regions_of(whole))
    ((told, unit),) = re.findall(r"moves ([\d.]+) ([kM])B", svg(whole))
    assert abs(float(told) * {"k": 1e3, "M": 1e6}[unit] - total) < 0.01 * total
