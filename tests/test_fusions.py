"""Numerics classes are tested, not believed: an `exact` fusion
gives the bytes of the unfused chain.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from codegen.backend_cpp import CppBackend
from codegen.store import KernelStore
from ir.graph import DECODE, GraphKey, Numerics
from ir.passes.manager import bisect, meaning, run_pipeline
from ir.sample import sample
from ir.tensor import Format
from tests.compiled import run
from tests.programs import CPU, QWEN35, head_graph, target_graph
from tests.strategies import Recipe, Step, recipes

FORMATS = [Format.F32, Format.BF16, Format.Q8_0, Format.Q4_1]


@pytest.fixture(scope="module")
def backend() -> CppBackend:
    return CppBackend()


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> KernelStore:
    return KernelStore(tmp_path_factory.mktemp("kernels"))


def compiled(whole, values, backend, store) -> dict[str, torch.Tensor]:
    """Outputs and states of an ORDERED graph after one compiled step on `values`."""
    states = values.fresh_states()
    outputs = run(whole, backend, store, values.inputs, values.weights, states)
    return {**outputs, **{f"state {n}": s for n, s in states.items()}}


def different(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    """Names of the values that differ in any byte."""
    assert a.keys() == b.keys()
    return [n for n in a if not torch.equal(*(x[n].contiguous().view(torch.uint8) for x in (a, b)))]


def assert_fusions_are_exact(graph, backend, store, seed=0) -> None:
    """The fused program has the bytes of the chain; otherwise the
    rewrite that changed them is named.
    """
    facts, values = backend.pass_facts(), sample(graph, seed)
    chain = run_pipeline(graph, replace(facts, fuse=False))
    want = compiled(chain, values, backend, store)
    found = different(want, compiled(run_pipeline(graph, facts), values, backend, store))
    if found:
        first = bisect(
            graph, facts, lambda g: bool(different(want, compiled(g, values, backend, store)))
        )
        raise AssertionError(f"{found} differ; the first bad one is {first}")


@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.value)
def test_a_target_has_the_bytes_of_its_chain(format, backend, store):
    graph = target_graph(GraphKey.parse("VERIFY_3"), format, num_hidden_layers=1)
    assert_fusions_are_exact(graph, backend, store)


@pytest.mark.parametrize("contract", [None, QWEN35], ids=["plain", "qwen35"])
def test_a_chain_of_drafts_has_the_bytes_of_its_chain_of_nodes(contract, backend, store):
    graph = head_graph(GraphKey.parse("CHAIN_2"), Format.Q8_0, contract)
    assert_fusions_are_exact(graph, backend, store)


@settings(max_examples=5)
@given(recipes, st.integers(0, 99))
def test_random_fusions_have_the_bytes_of_their_chains(backend, store, recipe, seed):
    assert_fusions_are_exact(recipe.graph(), backend, store, seed)


def test_an_epilogue_that_reads_a_row_statistic_has_the_bytes_of_its_chain(backend, store):
    steps = (Step("norm", 0, 0, 0), Step("add", 0, 0, 0), Step("attend", 0, 1, 0))
    recipe = Recipe(rows=1, format=Format.F32, steps=steps, outputs=(3,))
    assert_fusions_are_exact(recipe.graph(), backend, store)


def test_one_byte_is_seen():
    a = {"x": torch.zeros(3), "y": torch.tensor([1.0, -0.0])}
    b = {"x": torch.zeros(3), "y": torch.tensor([1.0, 0.0])}
    assert different(a, b) == ["y"] and different(a, a) == []


def test_the_classes_of_a_program_say_what_was_done():
    whole = run_pipeline(target_graph(DECODE, Format.Q4_1, num_hidden_layers=1), CPU)
    classes = {
        n.name: (n.target.name, n.meta["numerics"])
        for n in whole.computed()
        if n.meta.get("numerics")
    }
    assert {c for op, c in classes.values() if op == "linear"} == {Numerics.DIFFERS}
    assert {c for op, c in classes.values() if op in ("attention", "kv_write")} == {
        Numerics.REFERENCE
    }
    rest = {c for op, c in classes.values() if op not in ("linear", "attention", "kv_write")}
    assert rest == {Numerics.EXACT}


def test_a_rounding_that_is_called_different_is_different():
    graph = target_graph(DECODE, Format.Q8_0, num_hidden_layers=1)
    values = sample(graph, 1)
    plain, packed = (run_pipeline(graph, replace(CPU, activation=a)) for a in ({}, CPU.activation))
    assert "logits" in different(meaning(plain, values), meaning(packed, values))
