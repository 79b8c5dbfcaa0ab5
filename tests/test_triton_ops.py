"""Every op through the Triton backend against its body: interpreted on
the host, compiled where CUDA is.
"""

from __future__ import annotations

import math

import pytest
import torch
from triton_case import Case

from codegen.backend_triton import TritonBackend
from codegen.triton_schedule import TritonSchedule
from ir.format import Format
from ir.graph import DECODE, GraphKey, Mode
from ir.ops import (
    add,
    add_bias,
    advance,
    argmax,
    attention,
    columns,
    concat,
    embed,
    kv_write,
    lane,
    linear,
    mask_logits,
    merge_heads,
    rms_norm,
    rope,
    select_rows,
    sigmoid_gate,
    silu_mul,
    slot_at,
    split_heads,
    take,
    tree_attention,
)  # fmt: skip
from ir.ops.attention import lineage
from ir.ops.choose import finish_argmax, tile_argmax
from ir.tensor import PackedTensor, unpacked

BF16, F32 = Format.BF16, Format.F32


def close(got: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor, factor: float = 2.0) -> None:
    """Passes if `got` is no further from `exact` than `factor` times
    what eager is, plus one rounding.
    """
    wide = exact.double()
    scale = wide.abs().max().clamp(min=1e-30)
    unit = 2**-8 if got.dtype is torch.bfloat16 else 2**-22
    allowed = factor * (eager.double() - wide).abs().max() + unit * scale
    error = (got.double() - wide).abs().max()
    assert not got.isnan().any() and error <= allowed, f"error {error:.3g}, allowed {allowed:.3g}"


def packed(format: Format, n: int, k: int, seed: int = 0) -> PackedTensor:
    """Random blocks with scales near 0.01."""
    generator = torch.Generator().manual_seed(seed)
    count = n * k // 32
    nbytes = format.nbytes((n, k)) // count
    data = torch.randint(0, 256, (count, nbytes), generator=generator, dtype=torch.uint8)
    scales = torch.rand(count, 2, generator=generator).mul(0.01).add(0.005).to(torch.float16)
    data[:, :2] = scales[:, :1].contiguous().view(torch.uint8)
    if format is Format.Q4_1:
        data[:, 2:4] = scales[:, 1:].neg().contiguous().view(torch.uint8)
    return PackedTensor(format, (n, k), data.reshape(n, -1))


def stored(format: Format, n: int, k: int):
    """A random weight of `format`."""
    if format.is_block:
        return packed(format, n, k)
    return (torch.randn(n, k, generator=torch.Generator().manual_seed(1)) / math.sqrt(k)).to(
        format.dtype
    )


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("m", [1, 3, 8, 17])
@pytest.mark.parametrize(
    ("weight", "working", "n", "k"),
    [
        (F32, F32, 97, 65), (BF16, BF16, 97, 33), (BF16, BF16, 32, 300), (Format.F16, BF16, 5, 64),
        (Format.Q8_0, BF16, 97, 96), (Format.Q8_0, BF16, 33, 512), (Format.Q4_0, BF16, 33, 256),
        (Format.Q4_1, BF16, 97, 32), (Format.Q4_1, F32, 33, 512), (Format.Q4_0, F32, 33, 96),
    ],
)  # fmt: skip
def test_linear(weight: Format, working: Format, n: int, k: int, m: int) -> None:
    case = Case(
        lambda s: s.output(
            "y", linear(s.input("x", m, k, format=working), s.weight("w"))
        ),
        {"w": stored(weight, n, k)},
    )  # fmt: skip
    x = randn(m, k, dtype=working.dtype)
    exact = x.double() @ unpacked(case.weights["w"]).double().T
    close(case.triton({"x": x})["y"], case.eager({"x": x})["y"], exact)


@pytest.mark.parametrize("m", [1, 2, 17])
def test_norm_linear_residual(m: int) -> None:
    def program(s) -> None:
        x, r = s.input("x", m, 65, format=BF16), s.input("r", m, 97, format=BF16)
        s.output(
            "y",
            add(linear(rms_norm(x, s.weight("g"), eps=1e-6, offset=1.0), s.weight("w")), r),
        )

    case = Case(program, {"w": stored(BF16, 97, 65), "g": randn(65, dtype=torch.float32)})
    inputs = {"x": randn(m, 65), "r": randn(m, 97, seed=3)}
    got, eager = case.triton(inputs)["y"], case.eager(inputs)["y"]
    close(got, eager, eager)


@pytest.mark.parametrize("m", [1, 3, 17])
def test_gate_up_in_turns(m: int) -> None:
    def program(s) -> None:
        both = linear(s.input("x", m, 33, format=BF16), s.weight("w"))
        s.output("y", silu_mul(lane(both, index=0), lane(both, index=1)))

    case = Case(program, {"w": stored(BF16, 96, 33)})
    inputs = {"x": randn(m, 33)}
    got, eager = case.triton(inputs)["y"], case.eager(inputs)["y"]
    close(got, eager, eager)


@pytest.mark.parametrize(("m", "n"), [(1, 33), (2, 64), (17, 48)])
def test_concat_of_norms_in_front(m: int, n: int) -> None:
    def program(s) -> None:
        e = embed(s.input("ids", m), s.weight("table"), working=BF16)
        h = s.input("hidden", m, n, format=BF16)
        x = concat(rms_norm(e, s.weight("a"), eps=1e-5), rms_norm(h, s.weight("b"), eps=1e-5))
        s.output("y", linear(x, s.weight("w")))

    weights = {
        "table": randn(97, n, seed=5), "a": randn(n, seed=6), "b": randn(n, seed=7),
        "w": stored(BF16, 40, 2 * n),
    }  # fmt: skip
    case = Case(program, weights)
    ids = torch.randint(-5, 120, (m,), dtype=torch.int32)
    inputs = {"ids": ids, "hidden": randn(m, n, seed=8)}
    got, eager = case.triton(inputs)["y"], case.eager(inputs)["y"]
    close(got, eager, eager)


def _choice(m: int, v: int, k: int, width: int = 32) -> Case:
    def program(s) -> None:
        logits = linear(s.input("x", m, k, format=F32), s.weight("w"))
        s.output("logits", logits)
        s.output("tokens", finish_argmax(logits, tile_argmax(logits, width=width)))

    return Case(program, {"w": torch.eye(v, k)}, region_of=lambda i: int(i == 2))


@pytest.mark.parametrize("m", [1, 2, 17])
def test_choice_in_the_tile_takes_the_first_maximum(m: int) -> None:
    v = 97
    case = _choice(m, v, v)
    x = torch.zeros(m, v)
    x[:, 70] = x[:, 7] = x[:, 96] = 2.0
    x[m - 1] = -torch.inf
    x[m - 1, 64:] = -3.0
    x[m - 1, [95, 96]] = 1.0
    x = x.nan_to_num(neginf=-1e30)
    expected = x.argmax(-1).to(torch.int32)
    assert case.eager({"x": x})["tokens"].equal(expected)
    assert case.triton({"x": x})["tokens"].equal(expected)


def test_choice_of_a_row_with_nan_is_no_token() -> None:
    case = _choice(2, 97, 97)
    x = torch.zeros(2, 97)
    x[0, 40] = torch.nan
    x[1, 5] = 1.0
    got, eager = case.triton({"x": x})["tokens"], case.eager({"x": x})["tokens"]
    assert got.tolist() == eager.tolist() and got.tolist()[0] == 97


@pytest.mark.parametrize("v", [1, 33, 97, 5000])
def test_argmax_of_a_buffer(v: int) -> None:
    case = Case(lambda s: s.output("t", argmax(s.input("x", 3, v, format=BF16))))
    x = randn(3, v)
    x[1] = x[1, 0]
    x[2, v // 2] = torch.nan
    got = case.triton({"x": x})["t"]
    assert got.tolist() == [int(x[0].argmax()), 0, v] == case.eager({"x": x})["t"].tolist()


def _cache(blocks: int, groups: int, dim: int, dtype=torch.bfloat16) -> torch.Tensor:
    return randn(blocks, 2, groups, 16, dim, seed=11, dtype=dtype)


def _attention(
    m: int, heads: int, groups: int, dim: int, width: int, sequences: int = 1, dtype=BF16
):
    def program(s) -> None:
        q = s.input("q", m, heads, dim, format=BF16)
        y = attention(
            q, s.state("kv"), s.input("tables", sequences, width), s.input("row_sequence", m),
            s.input("indices", m), scale=dim**-0.5,
        )  # fmt: skip
        s.output("y", y)

    blocks = 1 + sequences * width
    return Case(program, states={"kv": _cache(blocks, groups, dim, dtype.dtype)})


@pytest.mark.parametrize(
    ("heads", "groups", "dim", "indices", "dtype"),
    [
        (3, 1, 64, [0, 15, 16], BF16), (4, 4, 33, [5, -1, 47], Format.F16),
        (6, 2, 16, [31, 32, 33], F32), (2, 1, 8, [-1], BF16),
    ],
)  # fmt: skip
def test_attention(heads: int, groups: int, dim: int, indices: list[int], dtype: Format) -> None:
    m = len(indices)
    case = _attention(m, heads, groups, dim, 3, dtype=dtype)
    case.states["kv"][0] = torch.nan  # the scratch block and rows past the last one are never read
    last = max(indices)
    if last % 16 < 15:
        case.states["kv"][max(last, 0) // 16 + 1, :, :, last % 16 + 1 :] = torch.nan
    inputs = {
        "q": randn(m, heads, dim, seed=4), "tables": torch.tensor([[1, 2, 3]], dtype=torch.int32),
        "row_sequence": torch.zeros(m, dtype=torch.int32),
        "indices": torch.tensor(indices, dtype=torch.int32),
    }  # fmt: skip
    got, eager = case.triton(inputs)["y"], case.eager(inputs)["y"]
    close(got, eager, eager)
    for i, index in enumerate(indices):
        assert index >= 0 or got[i].abs().max() == 0


def test_attention_over_many_spans_and_sequences() -> None:
    lengths = [600, 1, 300, 0, 256, 257]
    case = _attention(6, 2, 1, 16, 40, sequences=6)
    tables = 1 + torch.randperm(240, generator=torch.Generator().manual_seed(2)).reshape(6, 40)
    inputs = {
        "q": randn(6, 2, 16, seed=4), "tables": tables.to(torch.int32),
        "row_sequence": torch.arange(6, dtype=torch.int32),
        "indices": torch.tensor(lengths, dtype=torch.int32) - 1,
    }  # fmt: skip
    got, eager = case.triton(inputs)["y"], case.eager(inputs)["y"]
    close(got, eager, eager)
    alone = _attention(1, 2, 1, 16, 40, sequences=6)
    alone.states = case.states
    for i in range(6):
        one = {n: v[i : i + 1] for n, v in inputs.items() if n != "tables"}
        assert alone.triton({**one, "tables": inputs["tables"]})["y"][0].equal(got[i])


@pytest.mark.parametrize(("past", "width"), [(14, 3), (0, 2), (127, 12)])
def test_a_row_of_a_tree_has_the_bytes_of_its_path_stored_alone(past: int, width: int) -> None:
    parents, dim = [0, 0, 1, 1, 2, 0], 16
    m = len(parents)

    def program(s) -> None:
        q = s.input("q", m, 4, dim, format=BF16)
        seen = tree_attention(
            q, s.state("kv"), s.input("tables", 1, width), s.input("row_sequence", m),
            s.input("indices", m), s.input("parents", m), scale=dim**-0.5,
        )  # fmt: skip
        s.output("y", seen)

    tree = Case(program, states={"kv": _cache(1 + width, 2, dim)})
    tables = torch.arange(1, width + 1, dtype=torch.int32)[None]
    inputs = {
        "q": randn(m, 4, dim, seed=4), "tables": tables,
        "row_sequence": torch.zeros(m, dtype=torch.int32),
        "indices": past + torch.arange(m, dtype=torch.int32),
        "parents": torch.tensor(parents, dtype=torch.int32),
    }  # fmt: skip
    inputs["indices"][5] = -1  # a padding row
    got, eager = tree.triton(inputs)["y"], tree.eager(inputs)["y"]
    close(got, eager, eager)
    assert not got[5].any()
    alone = _attention(1, 4, 2, dim, width)
    for row in range(5):
        path = lineage(inputs["parents"], row)
        cache = tree.states["kv"].clone()
        for place, at in enumerate(path):
            old, new = past + at, past + place
            cache[1 + new // 16, :, :, new % 16] = tree.states["kv"][1 + old // 16, :, :, old % 16]
        alone.states = {"kv": cache}
        one = {n: inputs[n][row : row + 1] for n in ("q", "row_sequence")}
        last = torch.tensor([past + len(path) - 1], dtype=torch.int32)
        assert alone.triton({**one, "tables": tables, "indices": last})["y"][0].equal(got[row])


@pytest.mark.parametrize("key", [DECODE, GraphKey(Mode.VERIFY, 3)])
def test_rope_and_the_write_to_the_cache(key: GraphKey) -> None:
    m, groups, dim = key.rows, 2, 20

    def program(s) -> None:
        x = s.input("x", m, groups * dim, format=BF16)
        k = rope(
            split_heads(x, heads=groups), s.input("positions", m), s.weight("cos"), s.weight("sin")
        )
        v = split_heads(x, heads=groups)
        slots = slot_at(s.input("tables", 1, 3), s.input("row_sequence", m), s.input("indices", m))
        kv = kv_write(s.state("kv"), k, v, slots)
        q = s.input("q", m, groups, dim, format=BF16)
        s.output("y", attention(q, kv, s.input("tables", 1, 3), s.input("row_sequence", m),
                                s.input("indices", m)))  # fmt: skip

    angles = torch.rand(64, 8, generator=torch.Generator().manual_seed(9))
    case = Case(
        program, {"cos": angles.cos(), "sin": angles.sin()}, {"kv": _cache(4, groups, dim)}, key,
        region_of=lambda i: int(i == 5),
    )  # fmt: skip
    inputs = {
        "x": randn(m, groups * dim), "positions": torch.tensor([20, 21, 22][:m], dtype=torch.int32),
        "tables": torch.tensor([[3, 1, 2]], dtype=torch.int32), "q": randn(m, groups, dim, seed=2),
        "row_sequence": torch.zeros(m, dtype=torch.int32),
        "indices": torch.tensor([16, 17, -1][:m], dtype=torch.int32),
    }  # fmt: skip
    got, eager = case.triton(inputs), case.eager(inputs)
    assert got["state kv"][1:].equal(eager["state kv"][1:])  # block 0 is scratch
    assert not got["state kv"].equal(case.states["kv"])
    close(got["y"], eager["y"], eager["y"])


POINTWISE = {
    "silu": lambda s: silu_mul(s.input("a", 3, 33, format=BF16), s.input("b", 3, 33, format=BF16)),
    "gate": lambda s: sigmoid_gate(*(s.input(n, 3, 33, format=BF16) for n in "ab")),
    "add": lambda s: add(s.input("a", 3, 33, format=BF16), s.input("b", 3, 33, format=BF16)),
    "bias": lambda s: add_bias(s.input("a", 3, 33, format=BF16), s.weight("bias")),
    "rows": lambda s: select_rows(s.input("a", 3, 33, format=BF16), s.input("i", 2)),
    "mask": lambda s: mask_logits(s.input("a", 3, 33, format=BF16), s.input("bits", 3, 2)),
    "narrow mask": lambda s: mask_logits(s.input("a", 3, 33, format=BF16), s.input("word", 3, 1)),
    "take": lambda s: take(s.input("i", 2), s.weight("map")),
    "advance": lambda s: advance(s.input("i", 2), by=3),
    "heads": lambda s: merge_heads(add(
        split_heads(s.input("a", 3, 33, format=BF16), heads=3),
        split_heads(s.input("b", 3, 33, format=BF16), heads=3))),
    "columns": lambda s: add(columns(s.input("a", 3, 33, format=BF16), start=3, stop=20),
                             columns(s.input("b", 3, 33, format=BF16), start=16, stop=33)),
    "norm": lambda s: rms_norm(s.input("a", 3, 33, format=BF16), s.weight("bias"), eps=1e-6),
    "embed": lambda s: embed(s.input("i", 2), s.weight("table"), working=BF16),
    "embed q8": lambda s: embed(s.input("i", 2), s.weight("q8"), working=F32),
    "embed q4": lambda s: embed(s.input("i", 2), s.weight("q4"), working=F32),
    "embed q41": lambda s: embed(s.input("i", 2), s.weight("q41"), working=F32),
}  # fmt: skip


@pytest.mark.parametrize("name", POINTWISE)
def test_regions_printed_from_bodies(name: str) -> None:
    weights = {
        "bias": randn(33, seed=1), "map": torch.arange(90, 0, -1, dtype=torch.int32),
        "table": randn(97, 65, seed=2), "q8": packed(Format.Q8_0, 97, 64),
        "q4": packed(Format.Q4_0, 97, 64), "q41": packed(Format.Q4_1, 97, 64),
    }  # fmt: skip
    case = Case(lambda s: s.output("y", POINTWISE[name](s)), weights)
    a = randn(3, 33)
    a[0, :4] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf])
    inputs = {
        "a": a, "b": randn(3, 33, seed=1), "i": torch.tensor([2, -1], dtype=torch.int32),
        "bits": torch.randint(-(2**31), 2**31 - 1, (3, 2)).to(torch.int32),
        "word": torch.randint(-(2**31), 2**31 - 1, (3, 1)).to(torch.int32),
    }  # fmt: skip
    if name == "rows":
        inputs["i"] = torch.tensor([2, 0], dtype=torch.int32)
    got, eager = case.triton(inputs)["y"], case.eager(inputs)["y"]
    if name in ("norm", "silu", "gate"):  # exp and sums are not the same to the last bit
        same = (got == eager) | (got.isnan() & eager.isnan())
        off = (got.double() - eager.double()).abs() <= 2**-7 * eager.double().abs()
        assert bool((same | off).all()) and same.double().mean() > 0.9
    else:
        assert got.equal(eager) or bool(((got == eager) | (got.isnan() & eager.isnan())).all())


def test_offsets_are_taken_in_64_bits() -> None:
    rows, vocabulary = 14136, 151936
    table = torch.empty(1, 1, dtype=torch.bfloat16).expand(rows, vocabulary)
    case = Case(
        lambda s: s.output("y", embed(s.input("i", 1), s.weight("t"), working=BF16)), {"t": table}
    )
    (low,) = case.lowered()
    backend = TritonBackend()
    source = backend.emit(low, TritonSchedule(warps=4), {}).source
    assert f".to(tl.int64) * {vocabulary}" in source
    assert rows * vocabulary > 2**31


def test_a_few_rows_are_the_bytes_of_each_row_alone() -> None:
    def program(m: int):
        def write(s) -> None:
            x = s.input("x", m, 300, format=BF16)
            both = linear(rms_norm(x, s.weight("g"), eps=1e-6), s.weight("w"))
            s.output("y", silu_mul(lane(both, index=0), lane(both, index=1)))

        return write

    weights = {"w": stored(BF16, 64, 300), "g": randn(300, seed=3)}
    x = randn(8, 300)
    alone = [Case(program(1), weights).triton({"x": x[i : i + 1]})["y"] for i in range(8)]
    for m in (2, 4, 8):
        together = Case(program(m), weights).triton({"x": x[:m]})["y"]
        assert together.equal(torch.cat(alone[:m]))


@pytest.mark.parametrize("format", [F32, BF16, Format.F16, Format.Q8_0, Format.Q4_0, Format.Q4_1])
@pytest.mark.parametrize("working", [BF16, F32])
def test_many_rows_meet_weights_of_every_format_in_tiles(format: Format, working: Format) -> None:
    """Each schedule gives the same bytes, of rows and columns that fill no tile."""
    m, n, k = 70, 97, 96

    def program(s) -> None:
        s.output("y", linear(s.input("x", m, k, format=working), s.weight("w")))

    case = Case(program, {"w": stored(format, n, k)})
    (low,) = case.lowered()
    space = list(case.backend.schedules(low))
    assert {s.rows for s in space} == ({64, 128} if working is BF16 else {64})
    assert all("tl.dot(" in case.backend.emit(low, s, {}).source for s in space)
    x = randn(m, k, dtype=working.dtype)
    got = [case.triton({"x": x}, s)["y"] for s in space if s.stages == 3]
    assert len(got) >= 2 and all(y.equal(got[0]) for y in got)
    exact = x.double() @ unpacked(case.weights["w"]).double().T
    close(got[0], case.eager({"x": x})["y"], exact)
