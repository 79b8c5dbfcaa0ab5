"""Attention of the C++ backend against float64; what dead rows and unseen slots cannot reach."""

from __future__ import annotations

import pytest
import torch

from codegen.backend_cpp import CppBackend
from ir.format import Format
from ir.interpret import interpret
from ir.ops import attention, columns, kv_write, rope, slot_at, split_heads
from tests.compiled import batch, randn, run, typed


def cached_attention(rows: int, heads: int, groups: int, dim: int, half: int, sequences: int = 1):
    """A program that rotates, stores keys and values, and attends."""

    def program(scope) -> None:
        qkv = scope.input("qkv", rows, (heads + 2 * groups) * dim, format=Format.F32)
        positions, indices = scope.input("positions", rows), scope.input("indices", rows)
        tables, owner = scope.input("tables", sequences, 8), scope.input("row_sequence", rows)
        cos, sin = scope.weight("cos"), scope.weight("sin")
        ends = [0, heads * dim, (heads + groups) * dim, (heads + 2 * groups) * dim]
        q, k, v = (
            split_heads(columns(qkv, start=a, stop=b), heads=n)
            for a, b, n in zip(ends, ends[1:], (heads, groups, groups))
        )
        slots = slot_at(tables, owner, indices)
        cache = kv_write(scope.state("kv"), rope(k, positions, cos, sin), v, slots)
        q = rope(q, positions, cos, sin)
        scope.output("out", attention(q, cache, tables, owner, indices, scale=dim**-0.5))

    return program


ATTENTION = [
    ["columns", "split_heads"] * 3 + ["slot_at", "rope", "kv_write"],
    ["rope", "attention"],
]


def attention_case(rows, heads, groups, dim, half, format, past, sequences=1):
    weights = {"cos": randn(128, half).cos(), "sin": randn(128, half).sin()}
    cache = randn(1 + 8 * sequences, 2, groups, 16, dim, seed=3).to(format.dtype)
    per = rows // sequences
    inputs = {
        "qkv": randn(rows, (heads + 2 * groups) * dim, seed=4),
        "positions": torch.tensor([past + i % per for i in range(rows)], dtype=torch.int32),
        "indices": torch.tensor([past + i % per for i in range(rows)], dtype=torch.int32),
        "tables": (torch.randperm(8 * sequences, generator=torch.Generator().manual_seed(1)) + 1)
        .reshape(sequences, 8).to(torch.int32),
        "row_sequence": torch.arange(rows, dtype=torch.int32) // per,
    }  # fmt: skip
    program = cached_attention(rows, heads, groups, dim, half, sequences)
    graph = typed(program, batch(rows), weights, {"kv": cache})
    # rope of q stands before kv_write in the program's order of regions
    nodes = {n.name: n for n in graph.computed()}
    first = {"columns", "split_heads", "slot_at", "kv_write"}
    for node in graph.computed():
        name = node.target.name
        is_q = name == "rope" and "attention" in {u.target.name for u in node.users}
        q_view = name in ("columns", "split_heads") and node.args and _feeds_q(node)
        node.meta["region"] = 1 if is_q or q_view or name == "attention" else 0
    assert nodes and first
    return graph, inputs, weights, cache


def _feeds_q(node) -> bool:
    users = list(node.users)
    while users and users[0].target.name in ("split_heads", "columns"):
        users = list(users[0].users)
    return users[0].target.name == "rope" and "attention" in {u.target.name for u in users[0].users}


@pytest.mark.parametrize(
    ("rows", "heads", "groups", "dim", "half", "format", "past", "sequences"),
    [
        (3, 9, 3, 64, 32, Format.F16, 70, 1),
        (4, 4, 4, 24, 8, Format.BF16, 15, 1),
        (6, 5, 1, 40, 20, Format.F32, 0, 3),
        (2, 4, 2, 8, 4, Format.F32, 100, 2),
    ],
)
def test_attention_over_a_paged_cache(
    store, rows, heads, groups, dim, half, format, past, sequences
):
    graph, inputs, weights, cache = attention_case(
        rows, heads, groups, dim, half, format, past, sequences
    )
    wide = {"kv": cache.double()}
    exact = interpret(graph, inputs, weights, wide, double=True)["out"]
    eager_state = {"kv": cache.clone()}
    eager = interpret(graph, inputs, weights, eager_state)["out"]
    compiled = {"kv": cache.clone()}
    out = run(graph, CppBackend(), store, inputs, weights, compiled)["out"]
    assert torch.equal(compiled["kv"], eager_state["kv"])
    bound = 4 * (eager - exact).abs().max() + 1e-5
    assert (out - exact).abs().max() <= bound


def test_attention_of_a_row_has_the_same_bytes_in_any_company(store):
    widest = 20
    results = {}
    for rows in (1, 2, 4, widest):
        _, inputs, weights, cache = attention_case(widest, 9, 3, 64, 32, Format.F16, 60)
        narrow, _, _, _ = attention_case(rows, 9, 3, 64, 32, Format.F16, 60)
        cut = {n: v if n == "tables" else v[:rows].contiguous() for n, v in inputs.items()}
        state = {"kv": cache.clone()}
        results[rows] = run(narrow, CppBackend(), store, cut, weights, state)["out"]
    for rows, value in results.items():
        assert torch.equal(value, results[widest][:rows])


def test_dead_rows_and_unseen_slots_reach_nothing(store):
    graph, inputs, weights, cache = attention_case(4, 4, 2, 16, 8, Format.F32, 20)
    clean = run(graph, CppBackend(), store, inputs, weights, {"kv": cache.clone()})["out"]
    poisoned = cache.clone()
    used = inputs["tables"][0, :2].long()
    keep = torch.zeros(cache.shape[0], 16, dtype=torch.bool)
    keep[used[0]], keep[used[1], :8] = True, True
    poisoned.permute(0, 3, 1, 2, 4)[~keep] = float("nan")
    padded = {**inputs, "indices": inputs["indices"].clone(), "qkv": inputs["qkv"].clone()}
    padded["indices"][3], padded["qkv"][3] = -1, float("nan")
    out = run(graph, CppBackend(), store, padded, weights, {"kv": poisoned})["out"]
    assert torch.equal(out[:3], clean[:3])
    assert torch.equal(out[3], torch.zeros_like(out[3]))
