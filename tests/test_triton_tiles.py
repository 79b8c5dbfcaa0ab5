"""Attention of many rows of one sequence in tiles: right values, rows that do not know each other,
and the kernels that it is offered as.
"""

from __future__ import annotations

import pytest
import torch
from triton_case import Case

from codegen.backend_triton import TritonBackend
from codegen.lower import Lowered
from codegen.triton_tiles import in_tiles, parts_of
from ir.format import Format
from ir.interpret import interpret
from ir.ops import attention, merge_heads, rms_norm, rope, sigmoid_gate, split_heads

BF16, F16, F32 = Format.BF16, Format.F16, Format.F32


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def prefill(
    m: int, heads: int, groups: int, dim: int, width: int, working=BF16, cache=BF16, sequences=1
) -> Case:
    """`m` rows of attention over a context of `width` blocks, and a cache of random rows."""

    def program(s) -> None:
        y = attention(
            s.input("q", m, heads, dim, format=working), s.state("kv"),
            s.input("tables", sequences, width), s.input("row_sequence", m), s.input("indices", m),
            scale=dim**-0.5,
        )  # fmt: skip
        s.output("y", y)

    blocks = 1 + sequences * width
    return Case(program, states={"kv": randn(blocks, 2, groups, 16, dim, dtype=cache.dtype)})


def given(case: Case, indices: list[int], seed: int = 4) -> dict[str, torch.Tensor]:
    """Inputs of a case whose rows stand at `indices`, over blocks in a random order."""
    types = {s.name: s.type.shape for s in case.graph.slots.values()}
    working = next(s.type.format for s in case.graph.slots.values() if s.name == "q")
    width = types["tables"][1]
    order = 1 + torch.randperm(width, generator=torch.Generator().manual_seed(seed))
    return {
        "q": randn(*types["q"], seed=seed, dtype=working.dtype),
        "tables": order.to(torch.int32)[None],
        "row_sequence": torch.zeros(len(indices), dtype=torch.int32),
        "indices": torch.tensor(indices, dtype=torch.int32),
    }


def exact(case: Case, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """The output of the graph in float64."""
    states = {n: s.double() for n, s in case.states.items()}
    return interpret(case.graph, inputs, case.weights, states, double=True)["y"]


def no_worse(got: torch.Tensor, case: Case, inputs: dict[str, torch.Tensor]) -> None:
    """Passes if `got` is as near to float64 as eager is, within a factor of two."""
    oracle, eager = exact(case, inputs), case.eager(inputs)["y"]
    assert got.isfinite().all()
    scale = oracle.abs().max()
    for norm in (torch.max, lambda gap: gap.square().mean().sqrt()):
        error, base = (norm((y.double() - oracle).abs()) for y in (got, eager))
        assert error <= 2 * base + 2**-20 * scale, f"error {error:.3g}, eager {base:.3g}"


def lowered(case: Case) -> Lowered:
    (low,) = case.lowered()
    return low


@pytest.mark.parametrize(
    ("heads", "groups", "dim", "first", "rows", "working", "cache"),
    [
        (2, 2, 64, 0, 20, BF16, BF16), (3, 1, 64, 55, 30, BF16, F16),
        (4, 1, 128, 60, 9, BF16, BF16), (4, 1, 128, 24, 40, BF16, F16),
        (6, 2, 80, 0, 70, BF16, BF16), (4, 1, 96, 120, 17, BF16, F16), (1, 1, 64, 127, 9, F16, F16),
        (3, 1, 96, 63, 12, F16, F16), (4, 2, 80, 31, 16, BF16, F16), (2, 1, 33, 15, 10, BF16, BF16),
    ],
)  # fmt: skip
def test_rows_of_one_sequence_are_as_near_to_float64_as_eager(
    heads: int, groups: int, dim: int, first: int, rows: int, working: Format, cache: Format
) -> None:
    case = prefill(rows, heads, groups, dim, 10, working, cache)
    inputs = given(case, list(range(first, first + rows)))
    assert in_tiles(lowered(case))
    no_worse(case.triton(inputs)["y"], case, inputs)


@pytest.mark.parametrize("end", [15, 16, 17, 63, 64, 65, 127, 128, 129])
def test_contexts_that_end_about_a_block_and_a_step(end: int) -> None:
    """The last row sees `end` rows; the program's rows are padded to sixteen."""
    case = prefill(16, 3, 1, 64, 10, BF16, F16)
    live = min(end, 12)
    inputs = given(case, list(range(end - live, end)) + [-1] * (16 - live))
    for name, last in (("k", 0), ("v", 1)):  # what nobody sees may hold anything
        for at in range(end, 160):
            block = int(inputs["tables"][0, at // 16])
            case.states["kv"][block, last, :, at % 16] = float("nan" if name == "k" else "inf")
    got = case.triton(inputs)["y"]
    assert not got[live:].any()
    no_worse(got, case, inputs)


def test_a_row_has_the_same_bytes_in_any_company_place_and_count() -> None:
    """Rows alone among padding, in reversed order, in larger programs
    and under each schedule.
    """
    rows, first = 40, 50
    case = prefill(rows, 3, 1, 64, 8, BF16, F16)
    inputs = given(case, list(range(first, first + rows)))
    together = case.triton(inputs)["y"]
    turned = {n: v if n == "tables" else v.flip(0) for n, v in inputs.items()}
    assert case.triton(turned)["y"].flip(0).equal(together)
    for at in (0, 13, 21, 39):
        alone = dict(inputs, indices=torch.full((rows,), -1, dtype=torch.int32))
        alone["indices"][at] = first + at
        alone["q"] = randn(rows, 3, 64, seed=9) * 100
        alone["q"][at] = inputs["q"][at]
        assert case.triton(alone)["y"][at].equal(together[at])
    few = prefill(9, 3, 1, 64, 8, BF16, F16)
    some = {n: v if n == "tables" else v[20:29] for n, v in inputs.items()}
    assert few.triton(some)["y"].equal(together[20:29])
    for schedule in TritonBackend().schedules(lowered(case)):
        assert case.triton(inputs, schedule)["y"].equal(together), schedule


@pytest.mark.parametrize("cache", [BF16, F16])
def test_what_is_no_number_reaches_the_rows_that_see_it_alone(cache: Format) -> None:
    case = prefill(24, 4, 1, 80, 6, BF16, cache)
    inputs = given(case, list(range(40, 64)))
    clean = case.triton(inputs)["y"]
    block = int(inputs["tables"][0, 50 // 16])
    case.states["kv"][block, 1, 0, 50 % 16, 7] = torch.nan
    got = case.triton(inputs)["y"]
    assert got[:10].equal(clean[:10]) and got[10:, :, 7].isnan().all()
    others = torch.arange(80) != 7
    assert got[10:, :, others].equal(clean[10:, :, others])
    case.states["kv"][block, 0, 0, 50 % 16, 3] = torch.nan
    got = case.triton(inputs)["y"]
    assert got[:10].equal(clean[:10]) and got[10:].isnan().all()


def test_a_query_of_any_size_meets_a_cache_of_f16() -> None:
    """bf16 reaches further than f16 either way: no score overflows or is lost."""
    case = prefill(12, 3, 1, 64, 4, BF16, F16)
    for size in (1e-30, 1e-6, 1e6):
        inputs = given(case, list(range(30, 42)))
        case.states["kv"][:, 0] = randn(5, 1, 16, 64, seed=3).half() * (1e-4 if size > 1 else 1)
        inputs["q"] = inputs["q"] * size
        no_worse(case.triton(inputs)["y"], case, inputs)


def test_a_norm_and_turns_before_it_and_a_gate_behind_it_are_in_the_same_kernel() -> None:
    m, heads, dim = 20, 4, 80

    def program(s) -> None:
        x = split_heads(s.input("q", m, heads * dim, format=BF16), heads=heads)
        x = rms_norm(x, s.weight("norm"), eps=1e-6)
        x = rope(x, s.input("positions", m), s.weight("cos"), s.weight("sin"))
        y = attention(
            x, s.state("kv"), s.input("tables", 1, 6), s.input("row_sequence", m),
            s.input("indices", m), scale=dim**-0.5,
        )  # fmt: skip
        gate = s.input("gate", m, heads * dim, format=BF16)
        s.output("y", sigmoid_gate(gate, merge_heads(y)))

    angles = torch.rand(96, 20, generator=torch.Generator().manual_seed(9))
    weights = {"cos": angles.cos(), "sin": angles.sin(), "norm": randn(dim, dtype=torch.float32)}
    case = Case(program, weights, {"kv": randn(7, 2, 2, 16, dim, seed=11)})
    inputs = given(case, list(range(70, 70 + m)))
    inputs |= {"positions": inputs["indices"], "gate": randn(m, heads * dim, seed=5)}
    no_worse(case.triton(inputs)["y"], case, inputs)


def test_few_rows_several_sequences_wide_heads_and_f32_keep_the_kernel_of_single_rows() -> None:
    tiles = prefill(9, 2, 1, 64, 2)
    assert in_tiles(lowered(tiles))
    spaces = [
        prefill(8, 2, 1, 64, 2), prefill(9, 2, 1, 64, 2, sequences=2), prefill(9, 2, 1, 256, 2),
        prefill(9, 2, 1, 64, 2, F32, F32), prefill(9, 2, 1, 64, 2, F32, BF16),
    ]  # fmt: skip
    backend = TritonBackend()
    for case in spaces:
        assert not in_tiles(lowered(case))
        assert [s.rows for s in backend.schedules(lowered(case))] == [0]
    space = list(backend.schedules(lowered(tiles)))
    assert len(space) == 6 and {s.rows // s.warps for s in space} == {16}
    assert all(backend.cost(lowered(tiles), s) > 0 for s in space)


def test_programs_with_many_heads_are_given_taller_tiles_where_they_fill_the_device() -> None:
    backend = TritonBackend()

    def chosen(m: int) -> int:
        low = lowered(prefill(m, 32, 8, 128, 64))
        return min(backend.schedules(low), key=lambda s: backend.cost(low, s)).rows

    assert (chosen(16), chosen(256), chosen(2048)) == (64, 64, 128)


def test_parts_of_a_head_cover_its_columns_once() -> None:
    assert parts_of(64) == [(0, 64)] and parts_of(128) == [(0, 64), (64, 64)]
    assert parts_of(80) == [(0, 64), (64, 16)] and parts_of(96) == [(0, 64), (64, 32)]
    for width in range(1, 129):
        parts = parts_of(width)
        ends = [first + size for first, size in parts]
        assert [first for first, _ in parts] == [0, *ends[:-1]]
        assert ends[-1] - 16 < width <= ends[-1]
        assert all(size in (16, 32, 64) for _, size in parts)
