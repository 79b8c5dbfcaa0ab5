"""Rows of a tree: each is the row that DECODE computes at the end of its path, byte for byte."""

import checkpoints
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native import native_runners
from test_target import loaded

from circuit.engine.target import Target
from circuit.models.convert import WeightOption, converted
from circuit.models.target import target_binding, target_keys
from ir.key import GraphKey, Mode
from ir.ops import attention, tree_attention
from ir.ops.attention import lineage
from runners.eager import EagerRunner
from runners.errors import BadTree
from runners.rows import depths, tree_inputs

CONTEXT = 160
KEYS = target_keys(batches=(), chunk=32, trees=(4, 8))
TREES = st.integers(2, 8).flatmap(
    lambda rows: st.tuples(*(st.integers(0, max(0, row - 1)) for row in range(rows)))
)


def bound(option=None):
    """A tiny target; with an option, its weights are stored so."""
    model = checkpoints.make_model("llama", seed=3, intermediate_size=64, num_hidden_layers=2)
    config, tensors = loaded(model)
    tensors = tensors if option is None else converted(tensors, option)
    return target_binding(config, tensors, CONTEXT, KEYS, sequences=2)


@pytest.fixture(scope="module", params=[WeightOption.F32, WeightOption.Q8_0])
def native(request, tmp_path_factory, kernel_folder):
    """The target compiled by the C++ backend."""
    folder = tmp_path_factory.mktemp("tree")
    made = native_runners(folder, kernel_folder, {"target": bound(request.param)}, blocks=21)
    yield Target(made["target"])
    made["target"].close()


@pytest.fixture(scope="module")
def exact():
    """The target interpreted in float64."""
    return Target(EagerRunner(bound(), double=True, blocks=21, context=CONTEXT))


def text(count, seed):
    return np.random.default_rng(seed).integers(3, 97, count).tolist()


def along(target, lease, ids, path):
    """Logits and hiddens of the rows of a path, one by one, and their cache rows; then cut."""
    first, found = lease.rows, []
    for row in path:
        scored = target.rows(lease, [ids[row]])
        found.append((np.array(scored.logits[0]), np.array(scored.hidden[0])))
    stored = {n: lease.read(n)[:, :, first:] for n in target.runner.pool.types}
    lease.trim(first)
    return found[-1], stored


def check(target, past, parents, seed, same):
    """Holds every row of a tree after `past` rows to DECODE along its path."""
    ids = text(len(parents), seed)
    with target.runner.pool.lease() as lease:
        target.prompt(lease, text(past, 1), keep_hidden=False)
        scored = target.tree(lease, ids, parents)
        assert lease.rows == past + len(parents)
        logits = np.array(scored.logits[: len(ids)])
        hidden = np.array(scored.hidden[: len(ids)])
        tree = {n: lease.read(n)[:, :, past:] for n in target.runner.pool.types}
        lease.trim(past)
        for row in range(len(ids)):
            path = lineage(torch.tensor(parents), row)
            (alone, alone_hidden), stored = along(target, lease, ids, path)
            same(logits[row], alone)
            same(hidden[row], alone_hidden)
            for name, rows in tree.items():
                same(rows[:, :, row], stored[name][:, :, -1])


def same_bytes(a, b):
    assert a.tobytes() == b.tobytes()


@settings(max_examples=15)
@given(TREES, st.integers(1, CONTEXT - 8), st.integers(0, 99))
def test_a_row_of_a_tree_has_the_bytes_of_decode_along_its_path(native, parents, past, seed):
    check(native, past, parents, seed, same_bytes)


@pytest.mark.parametrize("past", [61, 64, 127, CONTEXT - 8])
@pytest.mark.parametrize("parents", [(0, 0, 1, 2, 3, 4, 5, 6), (0, 0, 1, 2, 3, 0, 1, 2)])
def test_paths_over_the_edge_of_a_chunk(native, past, parents):
    check(native, past, parents, 5, same_bytes)


@settings(max_examples=8)
@given(TREES, st.integers(1, 40), st.integers(0, 99))
def test_the_oracle_says_the_same_of_a_tree(exact, parents, past, seed):
    check(exact, past, parents, seed, lambda a, b: np.testing.assert_allclose(a, b, atol=1e-11))


@settings(max_examples=12)
@given(TREES, st.integers(1, CONTEXT - 16), st.integers(0, 99), st.data())
def test_a_kept_path_is_the_sequence_that_was_decoded(native, parents, past, seed, data):
    """After `keep` the cache holds the rows of plain decoding, and the next step its bytes."""
    ids, row = text(len(parents), seed), data.draw(st.integers(0, len(parents) - 1))
    path = lineage(torch.tensor(parents), row)
    with native.runner.pool.lease() as lease, native.runner.pool.lease() as plain:
        for where in (lease, plain):
            native.prompt(where, text(past, 1), keep_hidden=False)
        native.tree(lease, ids, parents)
        lease.keep(past, path)
        for at in path:
            native.rows(plain, [ids[at]])
        assert lease.rows == plain.rows == past + len(path)
        for name in native.runner.pool.types:
            same_bytes(lease.read(name), plain.read(name))
        after = [np.array(native.rows(where, [7]).logits) for where in (lease, plain)]
        same_bytes(*after)
    assert native.runner.pool.owners == 0


def test_a_chain_is_a_tree_whose_rows_have_the_bytes_of_verify(native):
    ids = text(4, 8)
    with native.runner.pool.lease() as lease:
        native.prompt(lease, text(20, 1), keep_hidden=False)
        chain = np.array(native.tree(lease, ids, (0, 0, 1, 2)).logits)
        lease.trim(20)
        same_bytes(chain, np.array(native.rows(lease, ids).logits))


def test_a_padding_row_writes_and_moves_nothing(native):
    """Five rows in the program of eight: the blocks of another sequence stay as they are."""
    pool = native.runner.pool
    with pool.lease() as lease, pool.lease() as other:
        native.prompt(other, text(30, 2), keep_hidden=False)
        before = {n: other.read(n) for n in pool.types}
        native.prompt(lease, text(14, 1), keep_hidden=False)
        scored = native.tree(lease, text(5, 3), (0, 0, 0, 1, 1))
        assert len(scored.tokens) == 8 and lease.rows == 19
        assert np.isfinite(scored.logits[:5]).all()
        for name, rows in before.items():
            same_bytes(other.read(name), rows)


@pytest.mark.parametrize(
    ("parents", "said"),
    [
        ((0, 1), "row 1 continues row 1"), ((0, 0, 3, 0), "row 2 continues row 3"),
        ((0, -1), "row 1 continues row -1"), ((1, 0), "row 0 is not its own parent"),
        ((), "row 0 is not its own parent"), ((0,) * 9, "9 rows, and programs for up to 8"),
    ],
)  # fmt: skip
def test_what_is_no_tree_is_refused_and_holds_no_row(exact, parents, said):
    with exact.runner.pool.lease() as lease:
        with pytest.raises(BadTree, match=said):
            exact.tree(lease, [5] * len(parents), parents)
        assert lease.rows == 0 and not lease.blocks


def test_positions_of_a_tree_are_depths(exact):
    assert depths((0, 0, 1, 1, 0, 4)) == [0, 1, 2, 2, 1, 2]
    with exact.runner.pool.lease() as lease:
        lease.append(15)
        key = GraphKey(Mode.TREE, 8)
        inputs = tree_inputs(exact.runner, key, lease, 10, (0, 0, 1, 1, 0))
    assert inputs["positions"][:5].tolist() == [10, 11, 12, 12, 11]
    assert inputs["indices"].tolist() == [10, 11, 12, 13, 14, -1, -1, -1]
    assert inputs["parents"].tolist() == [0, 0, 1, 1, 0, 5, 6, 7]


@given(TREES, st.integers(0, 20), st.integers(0, 99))
def test_the_op_sees_a_path_as_if_it_were_stored_alone(parents, past, seed):
    draw, rows = torch.Generator().manual_seed(seed), len(parents)
    q = torch.randn(rows, 4, 8, generator=draw, dtype=torch.float64)
    cache = torch.randn(4, 2, 2, 16, 8, generator=draw, dtype=torch.float64)
    table = torch.tensor([[2, 1, 3]], dtype=torch.int32)
    owner = torch.zeros(rows, dtype=torch.int32)
    indices = past + torch.arange(rows, dtype=torch.int32)
    seen = tree_attention(q, cache, table, owner, indices, torch.tensor(parents), scale=0.3)
    for row in range(rows):
        path = lineage(torch.tensor(parents), row)
        alone = cache.clone()
        for place, at in enumerate(path):
            old, new = past + at, past + place
            alone[table[0, new // 16], :, :, new % 16] = cache[table[0, old // 16], :, :, old % 16]
        last = torch.tensor([past + len(path) - 1], dtype=torch.int32)
        wanted = attention(q[row : row + 1], alone, table, owner[:1], last, scale=0.3)
        assert torch.allclose(seen[row : row + 1], wanted, atol=1e-12)
