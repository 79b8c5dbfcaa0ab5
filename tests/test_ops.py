"""What each op computes, against plain formulas in float64 written here a second time."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ir import ops
from ir.ops.linear import round_activations
from ir.tensor import Format, PackedTensor

EDGES = [0.0, -0.0, 1.0, -1.0, 1e-30, -1e30, 88.0, -104.0, math.inf, -math.inf, math.nan]
seeds = st.integers(0, 10_000)


def normal(*shape: int, seed: int = 0, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def i32(*values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def assert_close(got: torch.Tensor, want, ulps: float = 4.0) -> None:
    """`got` is within a few units in the last place of its dtype of the float64 `want`."""
    want = torch.as_tensor(np.asarray(want), dtype=torch.float64)
    eps = torch.finfo(got.dtype).eps * ulps
    assert got.shape == want.shape
    assert torch.allclose(got.double(), want, rtol=eps, atol=eps, equal_nan=True)


# -- pointwise -------------------------------------------------------------------------------------


def logistic(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore", invalid="ignore"):
        return 1.0 / (1.0 + np.exp(-x))


def test_gates_at_the_edges():
    x = torch.tensor(EDGES).repeat(len(EDGES), 1)
    gate, up = x, x.T.contiguous()
    g, u = gate.double().numpy(), up.double().numpy()
    with np.errstate(all="ignore"):
        want, gated = g * logistic(g) * u, u * logistic(g)
    got, finite = ops.silu_mul(gate, up), torch.as_tensor(np.abs(want) < 1e38)
    assert_close(got[finite], want[finite.numpy()])
    known = up.isfinite()  # f32 turns tiny * inf into NaN where f64 still has inf
    assert torch.equal(got.isnan()[known], torch.as_tensor(np.isnan(want))[known])
    assert_close(ops.sigmoid_gate(up, gate)[known], gated[known.numpy()])


@given(seeds)
def test_sums_and_biases_round_once(seed):
    a, b = normal(3, 5, seed=seed, dtype=torch.bfloat16), normal(3, 5, seed=seed + 1).bfloat16()
    exact = (a.double() + b.double()).bfloat16()
    assert torch.equal(ops.add(a, b), exact)
    assert torch.equal(ops.add_bias(a, b[0]), (a.double() + b[0].double()).bfloat16())


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("shape", [(1, 1), (2, 33), (3, 2, 65)])
def test_rms_norm_is_the_formula(shape, offset):
    x, w = normal(*shape, seed=4), normal(shape[-1], seed=5)
    plain = x.double().numpy()
    inverse = 1 / np.sqrt((plain**2).mean(-1) + 1e-6)
    want = plain * inverse[..., None] * (w.double().numpy() + offset)
    assert_close(ops.inverse_rms(x, eps=1e-6), inverse)
    assert_close(ops.rms_norm(x, w, eps=1e-6, offset=offset), want, ulps=8)


def test_rms_norm_of_extreme_rows():
    rows = torch.tensor([[0.0, 0.0], [3e38, 3e38], [math.inf, 1.0], [math.nan, 1.0], [1e-30, 0]])
    got = ops.rms_norm(rows, torch.ones(2), eps=1e-5)
    assert torch.equal(got[0], torch.zeros(2)) and torch.equal(got[1], torch.zeros(2))
    assert got[2, 0].isnan() and got[2, 1] == 0 and got[3].isnan().all()
    assert torch.allclose(got[4], rows[4] * 1e5**0.5)


def test_norm_scale_rounds_once_at_its_end():
    x, w = normal(2, 64, dtype=torch.bfloat16), torch.full((64,), 1.0078125)
    inverse = ops.inverse_rms(x, eps=1e-6)
    exact = x.double() * inverse.double()[:, None] * 1.0078125
    assert torch.equal(ops.norm_scale(x, inverse, w), exact.float().bfloat16())


@pytest.mark.parametrize("rotary", [2, 6, 8])
def test_rope_turns_pairs_and_leaves_the_rest(rotary):
    x = normal(3, 2, 8, seed=1)
    angles = np.outer(np.arange(9), 10.0 ** -np.arange(rotary // 2))
    cos, sin = (torch.tensor(f(angles), dtype=torch.float32) for f in (np.cos, np.sin))
    positions = i32(0, 8, 3)
    half = rotary // 2
    z = x[..., :half].double().numpy() + 1j * x[..., half:rotary].double().numpy()
    turned = z * np.exp(1j * angles[positions.numpy()])[:, None]
    want = np.concatenate([turned.real, turned.imag, x[..., rotary:].double().numpy()], -1)
    got = ops.rope(x, positions, cos, sin)
    assert_close(got, want, ulps=8)
    assert torch.equal(got[0], x[0]) and torch.equal(got[..., rotary:], x[..., rotary:])


# -- linear ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 33, 97), (4, 65, 3)])
def test_linear_is_the_product(shape):
    m, k, n = shape
    x, w = normal(m, k, seed=2), normal(n, k, seed=3)
    assert_close(ops.linear(x, w), x.double().numpy() @ w.double().numpy().T, ulps=4 * k)


@pytest.mark.parametrize("format", [Format.Q8_0, Format.Q4_0, Format.Q4_1])
def test_linear_over_blocks_is_the_product_of_their_elements(format):
    size = format.nbytes((32,))
    raw = torch.randint(0, 256, (5, 2 * size), dtype=torch.uint8)
    scales = torch.tensor([0.5, -0.25], dtype=torch.float16).view(torch.uint8).reshape(2, 2)
    for block in range(2):
        raw[:, block * size : block * size + 2] = scales[block]
        if format is Format.Q4_1:
            raw[:, block * size + 2 : block * size + 4] = scales[0]
    weight = PackedTensor(format, (5, 64), raw)
    want = np.zeros((5, 64))
    for row in range(5):
        for block, scale in enumerate((0.5, -0.25)):
            body = raw[row, block * size + (4 if format is Format.Q4_1 else 2) :][
                : size - 2
            ].numpy()
            for j in range(32):
                if format is Format.Q8_0:
                    value = int(body[j].astype(np.int8)) * scale
                else:
                    nibble = int(body[j % 16]) >> (4 if j >= 16 else 0) & 15
                    value = nibble * scale + 0.5 if format is Format.Q4_1 else (nibble - 8) * scale
                want[row, block * 32 + j] = value
    assert np.array_equal(weight.dequantize().numpy(), want)
    x = normal(2, 64)
    assert_close(ops.linear(x, weight), x.double().numpy() @ want.T, ulps=2048)


@given(seeds)
def test_q8_activations_are_whole_steps_of_a_127th_of_the_largest(seed):
    x = normal(2, 64, seed=seed) * 10.0 ** (seed % 7 - 3)
    x[0, :32] = 0
    got = round_activations(x, Format.Q8_0)
    step = x.unflatten(-1, (-1, 32)).abs().amax(-1) / 127
    steps = got.unflatten(-1, (-1, 32)) / step.clamp(min=1e-30)[..., None]
    assert torch.allclose(steps, steps.round(), atol=1e-3) and steps.abs().max() <= 127.001
    assert ((got - x).unflatten(-1, (-1, 32)).abs() <= 0.501 * step[..., None] + 1e-38).all()
    assert torch.equal(got[0, :32], torch.zeros(32))


def test_bf16_activations_round_to_nearest_even():
    x = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-7, -(1 + 2**-8)])
    want = torch.tensor([1.0, 1 + 2**-6, 1 + 2**-7, -1.0])
    assert torch.equal(round_activations(x, Format.BF16), want)


# -- choosing --------------------------------------------------------------------------------------


@given(st.lists(st.sampled_from([-math.inf, -2.0, 0.0, 1.0, math.inf]), min_size=1, max_size=9))
def test_argmax_takes_the_first_of_the_largest(row):
    assert ops.argmax(torch.tensor([row])).tolist() == [row.index(max(row))]


def test_argmax_of_a_row_with_nan_is_no_column():
    assert ops.argmax(torch.tensor([[1.0, math.nan, 2.0], [1, 2, 0]])).tolist() == [3, 1]


@pytest.mark.parametrize(("columns", "words"), [(97, 4), (97, 3), (64, 2), (31, 1)])
def test_masks_hide_what_is_not_allowed(columns, words):
    bits = torch.randint(-(2**31), 2**31, (2, words), generator=torch.Generator().manual_seed(1))
    got = ops.mask_logits(torch.zeros(2, columns), bits.int())
    for row in range(2):
        for i in range(columns):
            word = int(bits[row, i // 32]) if i // 32 < words else 0
            assert got[row, i] == (0.0 if word >> (i % 32) & 1 else -math.inf)


def test_reads_by_index_clamp_to_the_table():
    table = normal(5, 3)
    assert torch.equal(ops.embed(i32(-7, 0, 4, 9), table), table[[0, 0, 4, 4]])
    assert ops.take(i32(-1, 2, 300), i32(10, 20, 30)).tolist() == [10, 30, 30]
    assert torch.equal(ops.select_rows(table, i32(4, 4, 1)), table[[4, 4, 1]])
    assert ops.embed(i32(1), table, working=Format.BF16).dtype is torch.bfloat16


def test_index_arithmetic_keeps_padding():
    assert ops.advance(i32(-1, 0, 7), by=3).tolist() == [-1, 3, 10]
    tables = torch.tensor([[3, 1], [2, 4]], dtype=torch.int32)
    slots = ops.slot_at(tables, i32(0, 1, 1, 0), i32(17, 0, -1, 15))
    assert slots.tolist() == [17, 32, 0, 63]


# -- the cache and attention -----------------------------------------------------------------------


def naive_attention(q, cache, tables, row_sequence, indices, scale):
    """Softmax attention one row, one head and one key at a time, in float64."""
    m, heads, d = q.shape
    groups = cache.shape[2]
    out = np.zeros((m, heads, d))
    for row in range(m):
        for head in range(heads):
            group = head // (heads // groups)
            places = [
                (int(tables[row_sequence[row], j // 16]), j % 16)
                for j in range(int(indices[row]) + 1)
            ]
            if not places:
                continue
            keys = np.array([cache[b, 0, group, line].double().numpy() for b, line in places])
            values = np.array([cache[b, 1, group, line].double().numpy() for b, line in places])
            scores = keys @ q[row, head].double().numpy() * scale
            weights = np.exp(scores - scores.max())
            out[row, head] = weights / weights.sum() @ values
    return out


def a_cache(blocks: int, dtype=torch.float32) -> torch.Tensor:
    return normal(blocks, 2, 2, 16, 6, seed=8, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_attention_is_the_formula_and_never_reads_dead_rows(dtype):
    tables, row_sequence = i32([4, 2, 0], [1, 5, 3]), i32(0, 1, 1, 0, 1)
    indices = i32(0, 31, 32, -1, 15)
    live = a_cache(6, dtype)
    want = naive_attention(normal(5, 4, 6), live, tables, row_sequence, indices, 0.4)
    poisoned = torch.full_like(live, math.nan)
    for sequence, last in ((0, 0), (1, 32)):
        for j in range(last + 1):
            place = int(tables[sequence, j // 16]), slice(None), slice(None), j % 16
            poisoned[place] = live[place]
    for cache in (live, poisoned):
        got = ops.attention(normal(5, 4, 6), cache, tables, row_sequence, indices, scale=0.4)
        assert_close(got, want, ulps=64)
        assert torch.equal(got[3], torch.zeros(4, 6))


def test_attention_over_equal_and_very_negative_scores_is_the_mean():
    cache = a_cache(2)
    cache[1, 0] = -1.0
    q = torch.full((1, 2, 6), 1e5 / 6)
    got = ops.attention(q, cache, i32([1]), i32(0), i32(4), scale=1.0)
    assert torch.allclose(got[0], cache[1, 1, :, :5].mean(1), atol=1e-6)


def test_a_nan_that_is_visible_reaches_its_rows_only():
    cache = a_cache(2)
    cache[1, 1, :, 3] = math.nan
    q = normal(3, 2, 6)
    got = ops.attention(q, cache, i32([1]), i32(0, 0, 0), i32(2, 3, 5), scale=1.0)
    clean = ops.attention(q, a_cache(2), i32([1]), i32(0, 0, 0), i32(2, 3, 5), scale=1.0)
    assert torch.allclose(got[0], clean[0]) and got[1:].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_write_changes_its_slots_and_no_other(dtype):
    cache = torch.full((3, 2, 2, 16, 6), math.nan, dtype=dtype)
    k, v, slots = normal(3, 2, 6, seed=1), normal(3, 2, 6, seed=2), i32(16, 47, 0)
    got = ops.kv_write(cache, k, v, slots)
    assert got is cache
    for row, (block, line) in enumerate([(1, 0), (2, 15), (0, 0)]):
        assert torch.equal(cache[block, 0, :, line], k[row].to(dtype))
        assert torch.equal(cache[block, 1, :, line], v[row].to(dtype))
    assert int(cache.isfinite().sum()) == 2 * k.numel()


# -- views -----------------------------------------------------------------------------------------


def test_views_are_index_maps():
    x = torch.arange(2 * 24).reshape(2, 24)
    assert ops.split_heads(x, heads=4)[1, 2, 3] == x[1, 2 * 6 + 3]
    assert torch.equal(ops.merge_heads(ops.split_heads(x, heads=4)), x)
    assert torch.equal(ops.columns(x, start=5, stop=9), x[:, 5:9])
    lanes = [ops.lane(x, index=i, of=3, width=4) for i in range(3)]
    assert lanes[1][0].tolist() == [4, 5, 6, 7, 16, 17, 18, 19]
    turns = torch.stack([part.unflatten(-1, (-1, 4)) for part in lanes], dim=-2)
    assert torch.equal(turns.flatten(-3), x)
    assert torch.equal(ops.concat(x[:, :5], x[:, 5:]), x)


def test_the_first_embedding_is_hidden_where_a_contract_says_so():
    x = normal(3, 4)
    got = ops.zero_at(x, i32(1, 0, 2), at=1)
    assert torch.equal(got[0], torch.zeros(4)) and torch.equal(got[1:], x[1:])
