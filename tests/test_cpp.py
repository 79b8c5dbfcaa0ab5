"""Kernels of the C++ backend against the op bodies in float64, and the
bytes of a row whatever its company.
"""

from __future__ import annotations

import pytest
import torch

from codegen.backend_cpp import CppBackend, CppSchedule, UnknownExtension, chosen_extensions
from codegen.lower import lower
from ir.format import Format
from ir.interpret import interpret
from ir.ops import (
    add_bias,
    argmax,
    embed,
    inverse_rms,
    lane,
    linear,
    norm_scale,
    silu_mul,
    take,
)  # fmt: skip
from ir.ops.choose import finish_argmax, tile_argmax
from ir.quantize import stored_as
from tests.compiled import batch, randn, regroup, run, typed

FAMILIES = (None, "avx2", "plain")


def assert_no_worse(got, graph, inputs, weights, name: str, factor: float = 4.0) -> None:
    """`got` is no further from the float64 oracle than the eager graph is, times a factor."""
    exact = interpret(graph, inputs, weights, {}, double=True)[name]
    eager = interpret(graph, inputs, weights, {})[name]
    assert torch.isfinite(got).all()
    bound = (eager - exact).abs().max() * factor + 1e-6 * exact.abs().max()
    assert (got - exact).abs().max() <= bound


# -- products --------------------------------------------------------------------------------------

PLAIN = [(1, 33, 97), (3, 65, 33), (5, 64, 130), (2, 576, 192)]  # rows, k, n
WHOLE = [(1, 32, 97), (3, 96, 33), (5, 64, 130), (2, 576, 192)]
GROUPS = {
    "plain": [(f, PLAIN) for f in (Format.F32, Format.BF16)],
    "blocks": [(f, WHOLE) for f in (Format.Q8_0, Format.Q4_0, Format.Q4_1)],
}
OPS = ["inverse_rms", "norm_scale", "linear", "add_bias"], ["linear"]


def products(cases):
    """Normed and plain products of every (format, rows, k, n), as one graph with what it reads."""
    weights, inputs, names = {}, {}, []
    for seed, (format, rows, k, n) in enumerate(cases):
        name = f"{format.value}_{rows}_{k}_{n}"
        names.append((name, format, rows, k))
        weights[f"w_{name}"] = stored_as(randn(n, k, seed=seed), format)
        weights[f"norm_{name}"] = randn(k, seed=seed + 100)
        weights[f"bias_{name}"] = randn(n, seed=seed + 200)
        inputs[f"x_{name}"] = randn(rows, k, seed=seed + 300)

    def program(scope) -> None:
        for name, format, rows, k in names:
            x, w = scope.input(f"x_{name}", rows, k, format=Format.F32), scope.weight(f"w_{name}")
            activation = CppBackend().activation_format(format)
            normed = norm_scale(x, inverse_rms(x, eps=1e-5), scope.weight(f"norm_{name}"))
            y = linear(normed, w, activation=activation)
            scope.output(f"normed_{name}", add_bias(y, scope.weight(f"bias_{name}")))
            scope.output(f"plain_{name}", linear(x, w, activation=activation))

    graph = regroup(typed(program, batch(1), weights, {}), OPS * len(names))
    return graph, inputs, weights


@pytest.mark.parametrize("family", [None, "avx2"])
@pytest.mark.parametrize("group", GROUPS)
def test_products_are_no_worse_than_eager(store, family, group):
    cases = [(format, *size) for format, sizes in GROUPS[group] for size in sizes]
    graph, inputs, weights = products(cases)
    out = run(graph, CppBackend(extensions=family), store, inputs, weights)
    for name, value in out.items():
        assert_no_worse(value, graph, inputs, weights, name)


def test_families_agree_on_every_format(store):
    """Plain C++, AVX2 and AVX-512 take the same roundings; only bf16
    pairs may sum in another order.
    """
    cases = [
        (f, 3, 64, 33) for f in (Format.F32, Format.BF16, Format.Q8_0, Format.Q4_0, Format.Q4_1)
    ]
    graph, inputs, weights = products(cases)
    first, *others = (
        run(graph, CppBackend(extensions=family), store, inputs, weights) for family in FAMILIES
    )
    for other in others:
        for name, value in first.items():
            exact = torch.equal(value, other[name])
            assert exact or (
                "bf16" in name and torch.allclose(value, other[name], rtol=1e-4, atol=1e-4)
            )


def test_a_row_has_the_same_bytes_in_any_company(store):
    for format, k in ((Format.F32, 65), (Format.BF16, 65), (Format.Q8_0, 64), (Format.Q4_1, 64)):
        widest = 19
        graphs = {m: products([(format, m, k, 130)]) for m in (1, 2, 3, 4, 6, 8, widest)}
        weights = graphs[1][2]
        x = randn(widest, k, seed=9)
        rows = {}
        for m, (graph, inputs, _) in graphs.items():
            name = next(iter(inputs))
            same = {w: weights[w.replace(f"_{m}_{k}", f"_1_{k}")] for w in graphs[m][2]}
            out = run(graph, CppBackend(), store, {name: x[:m].contiguous()}, same)
            rows[m] = sorted(out.items())
        for values in rows.values():
            for (name, value), (_, wide) in zip(values, rows[widest]):
                assert torch.equal(value, wide[: len(value)]), name


def test_every_schedule_gives_the_same_bytes(store):
    graph, inputs, weights = products([(Format.F32, 7, 65, 130), (Format.Q4_1, 7, 64, 130)])
    results = []
    for rows, panels, chunk, shared in ((1, 1, 1, False), (4, 2, 2, True), (3, 4, 8, False)):
        wanted = CppSchedule(rows, panels, chunk, shared)

        def choose(options, wanted=wanted):
            return wanted if wanted in options else options[0]

        results.append(run(graph, CppBackend(), store, inputs, weights, schedule=choose))
    for other in results[1:]:
        assert all(torch.equal(results[0][name], other[name]) for name in other)


def test_gate_and_up_meet_in_one_tile(store):
    weights = {"w": stored_as(randn(2 * 96, 64), Format.Q8_0)}

    def program(scope) -> None:
        x = scope.input("x", 3, 64, format=Format.F32)
        y = linear(x, scope.weight("w"), activation=Format.Q8_0)
        scope.output("y", silu_mul(lane(y, index=0), lane(y, index=1)))

    graph = regroup(typed(program, batch(3), weights, {}), [["linear", "lane", "lane", "silu_mul"]])
    inputs = {"x": randn(3, 64, seed=5)}
    out = run(graph, CppBackend(), store, inputs, weights)
    assert_no_worse(out["y"], graph, inputs, weights, "y")


# -- tokens ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocabulary", [97, 300, 1024])
def test_tokens_are_the_first_maximum(store, vocabulary):
    table = stored_as(randn(vocabulary, 64), Format.Q8_0)
    ids = torch.tensor([5, 96, 0], dtype=torch.int32)

    def program(scope) -> None:
        x = embed(scope.input("ids", 3), scope.weight("table"))
        scope.output("x", x)
        logits = linear(x, scope.weight("table"), activation=Format.Q8_0)
        best = tile_argmax(logits)
        scope.output("logits", logits)
        token = finish_argmax(logits, best)
        scope.output("token", token)
        scope.output("taken", take(token, scope.weight("map")))
        scope.output("whole", argmax(logits))

    weights = {"table": table, "map": torch.arange(vocabulary, dtype=torch.int32) * 3}
    graph = typed(program, batch(3), weights, {})
    regroup(graph, [["embed"], ["linear", "tile_argmax"], ["finish_argmax", "take"], ["argmax"]])
    out = run(graph, CppBackend(), store, {"ids": ids}, weights)
    assert torch.equal(out["x"], table.dequantize()[ids.long()])
    assert torch.equal(out["token"], out["logits"].argmax(-1).to(torch.int32))
    assert torch.equal(out["whole"], out["token"])
    assert torch.equal(out["taken"], out["token"] * 3)


def test_ties_nan_and_infinities_in_argmax(store):
    inf = float("inf")
    logits = torch.zeros(4, 150)
    logits[0, [17, 140]] = 3.0
    logits[1, 149] = float("nan")
    logits[2] = -inf
    logits[3, [20, 21]] = inf

    def program(scope) -> None:
        x = scope.input("logits", 4, 150, format=Format.F32)
        scope.output("token", argmax(x))
        scope.output("split", finish_argmax(x, tile_argmax(x, width=32)))

    graph = typed(program, batch(4), {}, {})
    out = run(graph, CppBackend(), store, {"logits": logits}, {})
    assert out["token"].tolist() == out["split"].tolist() == [17, 150, 0, 20]


# -- the machine -----------------------------------------------------------------------------------


def test_extensions_stay_within_a_family():
    some = ["avx2", "fma", "f16c", "bmi2", "avx512f", "avx512bw", "avx512vl", "avx512dq"]
    assert chosen_extensions(some)[-1] == "avx512dq"
    assert chosen_extensions([*some, "avx512_vnni"])[-1] == "avx512_vnni"
    assert chosen_extensions(some[:7]) == tuple(some[:4])
    assert chosen_extensions(some, "avx2") == tuple(some[:4])
    assert chosen_extensions(some[:3]) == chosen_extensions(some, "plain") == ()


def test_an_unknown_family_is_refused():
    with pytest.raises(UnknownExtension, match="sse9"):
        chosen_extensions([], "sse9")


def test_a_block_weight_of_broken_rows_is_refused_in_words():
    def program(scope) -> None:
        x = scope.input("x", 1, 64, format=Format.F32)
        scope.output("y", linear(x, scope.weight("w")))

    graph = typed(program, batch(1), {"w": stored_as(randn(8, 64), Format.Q8_0)}, {})
    problems = CppBackend().problems(lower(graph, 0))
    assert problems == ["activations must be rounded for weights in q8_0"]
