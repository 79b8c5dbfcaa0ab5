"""The text of emitted kernels, packed layouts, ahead-of-time records,
and refusals of the Triton backend.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from test_triton_ops import packed
from triton_case import Case

from codegen.aot import Interpreting, compile_kernel, load_unit
from codegen.backend_triton import TritonBackend
from codegen.expr import const, var
from codegen.lower import lower
from codegen.schedules import ScheduleBook
from codegen.triton_holes import unflattened
from codegen.triton_pack import pack_split
from ir.format import Format
from ir.graph import GraphKey, Mode
from ir.ops import add, linear, rms_norm
from ir.ops.choose import tile_argmax
from ir.passes.manager import run_pipeline
from ir.tensor import TensorType
from ir.tracing import trace
from runners.cuda_graph import CudaGraphRunner
from runners.launcher import NoCudaDevice, interpreting, usable_device

GOLDEN = Path(__file__).parent / "golden" / "triton_norm_linear_add.txt"


def kernel_source() -> str:
    """The kernel of a norm, a product of two rows and a residual sum."""

    def program(s) -> None:
        x, r = s.input("x", 2, 64, format=Format.BF16), s.input("r", 2, 96, format=Format.BF16)
        y = linear(rms_norm(x, s.weight("norm"), eps=1e-6), s.weight("w"))
        s.output("y", add(y, r))

    weights = {"norm": torch.ones(64), "w": torch.ones(96, 64, dtype=torch.bfloat16)}
    (low,) = Case(program, weights).lowered()
    backend = TritonBackend()
    return backend.emit(low, ScheduleBook().choose(low, backend), {}).source


def test_golden_text_of_a_kernel() -> None:
    """Write the text anew with CIRCUIT_GOLDEN=1 after a change that is meant."""
    source = kernel_source()
    if os.environ.get("CIRCUIT_GOLDEN"):
        GOLDEN.write_text(source)
    assert source == GOLDEN.read_text()


@pytest.mark.parametrize("format", [Format.Q8_0, Format.Q4_0, Format.Q4_1])
def test_split_layout_holds_the_same_numbers(format: Format) -> None:
    value = packed(format, 5, 64)
    split = pack_split(value)
    assert split.nbytes == value.data.numel()
    per = 64 if format is Format.Q8_0 else 32
    quants = split[: 5 * per].reshape(5, per)
    if format is Format.Q8_0:
        numbers = quants.view(np.int8).astype(np.float32)
    else:
        numbers = np.stack([quants & 15, quants >> 4], -1).reshape(5, 64).astype(np.float32)
    halves = split[5 * per :].view(np.float16).astype(np.float32)
    scales = halves[:10].reshape(5, 2).repeat(32, 1)
    if format is Format.Q4_1:
        numbers = numbers * scales + halves[10:].reshape(5, 2).repeat(32, 1)
    else:
        numbers = (numbers - 8 * (format is Format.Q4_0)) * scales
    assert np.array_equal(numbers, value.dequantize().numpy())


def test_flat_index_is_taken_apart_and_simplified() -> None:
    head, dim = var("head", 6), var("dim", 16)
    row, column = unflattened(dim, (1, 16))
    assert row is const(0) and column is dim
    assert unflattened(head, (6,)) == [head]


def test_a_reduction_over_no_power_of_two_is_refused() -> None:
    def program(s) -> None:
        y = linear(s.input("x", 1, 32, format=Format.F32), s.weight("w"))
        s.output("logits", y)
        s.output("best", tile_argmax(y, width=24))

    (low,) = Case(program, {"w": torch.ones(96, 32)}).lowered()
    assert "24 columns" in TritonBackend().problems(low)[0]


def test_row_order_is_never_a_choice_of_a_schedule() -> None:
    """The search space of a product holds no choice that the sum over k depends on."""

    def program(s) -> None:
        s.output("y", linear(s.input("x", 4, 4096, format=Format.BF16), s.weight("w")))

    weights = {"w": TensorType((4096, 4096), Format.BF16)}
    backend = TritonBackend()
    graph = run_pipeline(
        trace(program, GraphKey(Mode.VERIFY, 4), weights, {}), backend.pass_facts()
    )
    low = lower(graph, next(iter(graph.regions())))
    space = list(backend.schedules(low))
    assert len(space) > 4
    for schedule in space:
        source = backend.emit(low, schedule, {}).source
        assert f"tl.zeros(({schedule.columns}, 256), tl.float32)" in source
        assert "tl.range(0, 4096, 256" in source and "tl.dot" not in source
        assert ", 1, 1, 0,\n" in source  # one warp, one stage, no counters


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_one_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    assert interpreting() and usable_device("target").type == "cpu"
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    with pytest.raises(NoCudaDevice, match="CUDA device"):
        usable_device("target")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_graphs_are_not_captured_under_the_interpreter() -> None:
    class Part:
        binding = "target"

    with pytest.raises(NoCudaDevice, match="target"):
        CudaGraphRunner(Part())


@pytest.mark.skipif(not interpreting(), reason="Triton compiles in this process")
def test_an_interpreted_kernel_is_not_compiled_ahead_of_time(tmp_path: Path) -> None:
    path = tmp_path / "unit.py"
    path.write_text(
        "import triton\nimport triton.language as tl\n\nKERNELS = {}\n\n\n" + kernel_source()
    )
    (record,) = load_unit(path).KERNELS.values()
    with pytest.raises(Interpreting):
        compile_kernel(record, 90)
