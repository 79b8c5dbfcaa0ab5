"""Passes keep the meaning of programs, and a pass that does not
is caught by name, line and diff.
"""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from circuit.models.config import Family
from ir import ops
from ir.graph import DECODE, GraphKey, Mode
from ir.op import Kind
from ir.passes.facts import Facts
from ir.passes.fuel import Fuel
from ir.passes.manager import (
    PIPELINE,
    meaning,
    run_pipeline,
    same_values,
)
from ir.region import critical_path, region_graph, regions_of
from ir.sample import sample
from ir.tensor import Format, TensorType
from ir.tracing import trace
from proposers.config import StreamPoint
from tests.programs import CPU, PLAIN, QWEN35, head_graph, target_graph
from tests.strategies import Recipe, Step, facts, recipes

POST_NORM = replace(QWEN35, recycle=StreamPoint.POST_NORM)
KEYS = ["DECODE", "VERIFY_2", "VERIFY_3", "VERIFY_4", "BATCH_4", "PREFILL_24"]


@settings(max_examples=60)
@given(recipes, facts, st.integers(0, 99))
def test_every_pass_keeps_the_meaning_of_random_programs(recipe, facts, seed):
    run_pipeline(recipe.graph(), facts, check_meaning=seed)


@settings(max_examples=30)
@given(recipes, st.integers(0, 40), st.integers(0, 99))
def test_fuel_stops_anywhere_without_harm(recipe, limit, seed):
    fuel = Fuel(limit)
    run_pipeline(recipe.graph(), CPU, fuel=fuel, check_meaning=seed)
    assert len(fuel.spent) <= limit
    assert [r.number for r in fuel.spent] == list(range(1, len(fuel.spent) + 1))


@settings(max_examples=30)
@given(recipes, st.integers(0, 99))
def test_the_whole_pipeline_keeps_values_in_double(recipe, seed):
    graph = recipe.graph()
    values = sample(graph, seed)
    whole = run_pipeline(graph, PLAIN)
    before, after = (meaning(g, values, double=True) for g in (graph, whole))
    assert all(same_values(before[n], after[n], close=True) for n in before)


# -- programs of targets and heads -----------------------------------------------------------------

LAYER = [
    "inverse_rms + norm_scale + linear", "rope + kv_write", "rope + attention", "linear + add",
    "inverse_rms + norm_scale + linear + silu_mul", "linear + add",
]  # fmt: skip
TAIL = ["inverse_rms + norm_scale + linear + tile_argmax", "finish_argmax"]


def labels(graph):
    return [r.label for r in regions_of(graph)]


def test_a_llama_layer_is_six_launches():
    whole = run_pipeline(target_graph(DECODE), CPU)
    first = ["embed + " + LAYER[0], "slot_at + " + LAYER[1], *LAYER[2:3], "embed + " + LAYER[3]]
    second = [LAYER[0], "slot_at + " + LAYER[1], *LAYER[2:]]
    got = [sorted(label.split(" + ")) for label in labels(whole)]
    assert got == [sorted(label.split(" + ")) for label in [*first, *LAYER[4:], *second, *TAIL]]


@pytest.mark.parametrize("format", [Format.F32, Format.BF16, Format.Q4_1])
@pytest.mark.parametrize("key", KEYS)
def test_targets_keep_their_meaning_and_count(key, format):
    whole = run_pipeline(target_graph(GraphKey.parse(key), format), CPU, check_meaning=5)
    assert len(regions_of(whole)) == 2 * 6 + 2


@pytest.mark.parametrize("contract", [None, QWEN35, POST_NORM], ids=["plain", "qwen35", "post"])
@pytest.mark.parametrize("key", [*KEYS, "CHAIN_1", "CHAIN_3"])
def test_a_draft_step_is_nine_launches(key, contract):
    key = GraphKey.parse(key)
    whole = run_pipeline(head_graph(key, Format.Q8_0, contract), CPU, check_meaning=5)
    steps = key.rows if key.mode is Mode.CHAIN else 1
    assert len(regions_of(whole)) == (3 if key.mode is Mode.PREFILL else 9 * steps)


@pytest.mark.parametrize("changes", [
    {"qkv_bias": True, "family": Family.QWEN2}, {"qk_norm": True, "family": Family.QWEN3},
    {"tie_word_embeddings": True}, {"num_key_value_heads": 4}, {"intermediate_size": 88},
], ids=["bias", "qk_norm", "tied", "mha", "odd ffn"])  # fmt: skip
def test_families_keep_their_meaning_and_count(changes):
    whole = run_pipeline(target_graph(DECODE, **changes), CPU, check_meaning=5)
    assert len(regions_of(whole)) == 2 * 6 + 2


def test_merged_weights_say_how_their_rows_stand():
    whole = run_pipeline(target_graph(DECODE, Format.Q8_0, num_hidden_layers=1), CPU)
    merged = {s.name: s for s in whole.slots.values() if s.merged}
    qkv = merged["model.layers.0.self_attn.{q_proj,k_proj,v_proj}.weight"]
    assert (qkv.merged.width, qkv.type) == (0, TensorType((128, 64), Format.Q8_0))
    ffn = merged["model.layers.0.mlp.{gate_proj,up_proj}.weight"]
    assert (ffn.merged.width, ffn.type) == (16, TensorType((192, 64), Format.Q8_0))
    assert len(merged) == 2


def test_gate_and_up_of_odd_width_stand_side_by_side():
    whole = run_pipeline(target_graph(DECODE, intermediate_size=88, num_hidden_layers=1), CPU)
    assert {s.merged.width for s in whole.slots.values() if s.merged} == {0}
    assert "silu_mul + linear + add" in labels(whole)


def test_a_tied_embedding_is_one_weight_for_both_uses():
    whole = run_pipeline(target_graph(DECODE, tie_word_embeddings=True), CPU)
    tied = [n for n, s in whole.slots.items() if s.name == "model.embed_tokens.weight"]
    readers = {u.target.name for n in whole.fx.nodes if n.name in tied for u in n.users}
    assert len(tied) == 1 and readers == {"embed", "linear"}


def test_every_step_of_a_chain_reads_the_same_merged_weights():
    whole = run_pipeline(head_graph(GraphKey.parse("CHAIN_3")), CPU)
    assert len([s for s in whole.slots.values() if s.merged]) == 2
    steps = [f"{name}.{index}" for index in range(3) for name in ("tokens", "logprobs")]
    assert list(whole.outputs) == [*steps, "hidden"]


def test_anchors_and_state_writes_are_never_computed_twice():
    for key in ("DECODE", "CHAIN_4"):
        graph = head_graph(GraphKey.parse(key), Format.Q8_0, QWEN35)
        count = Counter(n.target.name for n in graph.computed())
        whole = Counter(n.target.name for n in run_pipeline(graph, CPU).computed())
        steps = graph.key.rows
        assert whole["attention"] == count["attention"] == whole["kv_write"] == steps
        assert whole["linear"] == count["linear"] - 3 * steps  # q, k, v are one; gate, up are one
        assert whole["finish_argmax"] == count["argmax"]


def test_without_fusion_each_node_is_a_launch_and_means_the_same():
    graph = target_graph(DECODE, Format.Q8_0, num_hidden_layers=1)
    alone = run_pipeline(graph, replace(CPU, fuse=False), check_meaning=1)
    for region in regions_of(alone):
        assert len([n for n in region.nodes if n.target.kind is not Kind.VIEW]) == 1


def test_without_recomputation_nothing_is_duplicated():
    graph = target_graph(DECODE, Format.Q8_0)
    alone = run_pipeline(graph, replace(CPU, recompute=False), check_meaning=1)
    names = Counter(n.target.name for n in alone.computed())
    assert names["embed"] == 1 and names["slot_at"] == 1


# -- B67: other users, other orders ----------------------------------------------------------------


def normed_twice(scope):
    """A residual sum that is returned too, and a normed value that feeds two products."""
    x = scope.input("x", 2, 64, format=Format.BF16)
    y = scope.input("y", 2, 64, format=Format.BF16)
    total = ops.add(x, y)
    normed = ops.rms_norm(total, scope.weight("norm"), eps=1e-5)
    scope.output("total", total)
    scope.output("normed", normed)
    scope.output("a", ops.linear(normed, scope.weight("a")))
    scope.output("b", ops.linear(normed, scope.weight("b")))


def test_a_sum_and_a_normed_value_with_other_readers_are_still_returned():
    types = {
        "norm": TensorType((64,), Format.F32), "a": TensorType((32, 64), Format.BF16),
        "b": TensorType((32, 64), Format.F32),
    }  # fmt: skip
    graph = trace(normed_twice, GraphKey(Mode.VERIFY, 2), types, {})
    values = sample(graph, 0)
    values.weights["norm"].fill_(1.0078125)  # one bf16 step over 1: the order of rounding shows
    want = meaning(graph, values)
    whole = run_pipeline(graph, Facts(), check_meaning=0)
    got = meaning(whole, values)
    assert all(torch.equal(want[n], got[n]) for n in want) and len(want) == 4
    assert sorted(labels(whole)) == sorted(
        ["add + inverse_rms + norm_scale + linear"] * 2 + ["add + add + inverse_rms + norm_scale"]
    )


def test_a_reader_of_the_old_handle_runs_before_the_write():
    recipe = Recipe(2, Format.F32, (Step("read", 0, 0, 0), Step("attend", 1, 0, 0)), (1, 2))
    whole = run_pipeline(recipe.graph(), CPU, check_meaning=2)
    order = [r.anchor.target.name for r in regions_of(whole) if r.anchor is not None]
    assert order.index("attention") < order.index("kv_write")
    (write,) = [n for n in whole.computed() if n.target.name == "kv_write"]
    late = region_graph(whole).predecessors(write.meta["region"])
    assert any(r.number in set(late) for r in regions_of(whole) if "attention" in r.label)


def test_noops_go_and_repeats_are_one_node():
    def program(scope):
        index = scope.input("indices", 2)
        at = ops.advance(index, by=0)
        x = ops.embed(at, scope.weight("table"))
        same = ops.merge_heads(ops.split_heads(ops.embed(index, scope.weight("table")), heads=4))
        ops.add(same, same)
        scope.output("y", ops.add(x, ops.columns(same, start=0, stop=8)))

    types = {"table": TensorType((10, 8), Format.F32)}
    whole = run_pipeline(trace(program, DECODE, types, {}), CPU)
    assert [n.target.name for n in whole.computed()] == ["embed", "add"]


def test_the_critical_path_is_the_dearest_chain():
    whole = run_pipeline(target_graph(DECODE, num_hidden_layers=1), CPU)
    regions = regions_of(whole)
    path, cost = critical_path(whole, lambda r: 1.0)
    assert path == [0, 1, 2, 3, 4, 5, 6, 7] and cost == 8.0
    assert critical_path(whole)[1] == sum(r.bytes for r in regions)


def test_the_history_names_each_pass_and_what_it_did():
    whole = run_pipeline(target_graph(DECODE, num_hidden_layers=1), CPU)
    assert [h.split(",")[0] for h in whole.history] == ["trace", *(p.name for p in PIPELINE)]
    assert whole.history[-2].startswith("fuse, ")
