"""Kernels of the C++ backend against the op bodies in float64, and the bytes of a row whatever its company."""

from __future__ import annotations

import gguf
import pytest
import torch

from codegen.backend_cpp import CppBackend, chosen_extensions
from codegen.store import KernelStore
from ir.format import Format
from ir.graph import GraphKey, Mode
from ir.interpret import interpret
from ir.ops import (
    add, add_bias, argmax, attention, columns, embed, inverse_rms, kv_write, lane, linear,
    norm_scale, rope, silu_mul, slot_at, split_heads, take,
)  # fmt: skip
from ir.ops.choose import finish_argmax, tile_argmax
from ir.tensor import PackedTensor
from tests.compiled import regroup, run, typed

BLOCKS = {Format.Q8_0: "Q8_0", Format.Q4_0: "Q4_0", Format.Q4_1: "Q4_1"}
FAMILIES = (None, "avx2", "plain")


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> KernelStore:
    return KernelStore(tmp_path_factory.mktemp("kernels"))


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def stored(rows: torch.Tensor, format: Format):
    """`rows` in a weight format; blocks by the gguf package's own quantisation."""
    if not format.is_block:
        return rows.to(format.dtype)
    data = gguf.quants.quantize(rows.numpy(), gguf.GGMLQuantizationType[BLOCKS[format]])
    return PackedTensor(format, tuple(rows.shape), torch.from_numpy(data))


def batch(rows: int) -> GraphKey:
    return GraphKey(Mode.BATCH, rows)


def assert_no_worse(got, graph, inputs, weights, name: str, factor: float = 4.0) -> None:
    """`got` is no further from the float64 oracle than the eager graph is, times a factor."""
    exact = interpret(graph, inputs, weights, {}, double=True)[name]
    eager = interpret(graph, inputs, weights, {})[name]
    assert torch.isfinite(got).all()
    bound = (eager - exact).abs().max() * factor + 1e-6 * exact.abs().max()
    assert (got - exact).abs().max() <= bound


# -- products --------------------------------------------------------------------------------------

SIZES = [(1, 33, 97), (3, 65, 33), (5, 64, 130), (2, 576, 960)]
BLOCK_SIZES = [(1, 32, 97), (3, 96, 33), (5, 64, 130), (2, 576, 960)]


def products(rows: int, n: int, k: int, format: Format):
    """A program with a normed product and a plain one, and what it reads."""
    weights = {"w": stored(randn(n, k, seed=1), format), "norm": randn(k, seed=2)}
    weights["bias"] = randn(n, seed=3)
    activation = CppBackend().activation_format(format)

    def program(scope) -> None:
        x = scope.input("x", rows, k, format=Format.F32)
        normed = norm_scale(x, inverse_rms(x, eps=1e-5), scope.weight("norm"))
        y = linear(normed, scope.weight("w"), activation=activation)
        scope.output("normed", add_bias(y, scope.weight("bias")))
        scope.output("plain", linear(x, scope.weight("w"), activation=activation))

    graph = typed(program, batch(rows), weights, {})
    regroup(graph, [["inverse_rms", "norm_scale", "linear", "add_bias"], ["linear"]])
    return graph, {"x": randn(rows, k, seed=4)}, weights


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("format", [Format.F32, Format.BF16, *BLOCKS])
def test_products_are_no_worse_than_eager(store, family, format):
    for rows, k, n in BLOCK_SIZES if format.is_block else SIZES:
        graph, inputs, weights = products(rows, n, k, format)
        out = run(graph, CppBackend(extensions=family), store, inputs, weights)
        assert_no_worse(out["normed"], graph, inputs, weights, "normed")
        assert_no_worse(out["plain"], graph, inputs, weights, "plain")
