"""Leases never share a block, never lose one, and every row stays where it was written."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    rule,
)

from ir.format import Format, TensorType
from runners.buffers import host_array
from runners.errors import CacheFull, ContextFull, LeaseClosed, PoolInUse, StatesDiffer
from runners.kv import BLOCK_ROWS, KvPool, blocks_of
from runners.turned import TurnedCache

STATES = {
    name: TensorType((9, 2, 2, BLOCK_ROWS, 4), Format.F32)
    for name in ("layers.0.kv", "layers.1.kv")
}
CONTEXT = 6 * BLOCK_ROWS


def write_rows(lease, first, count, stamp):
    """Stores `stamp + row` in every element of rows `first` to
    `first + count`, as a kernel would.
    """
    table = lease.table(blocks_of(CONTEXT))
    for row in range(first, first + count):
        for array in lease.pool.arrays.values():
            array[table[row // BLOCK_ROWS], :, :, row % BLOCK_ROWS] = stamp + row


class Leasing(RuleBasedStateMachine):
    """Sequences come, grow, shrink, are put aside and end, against a
    model that is a list of stamps.
    """

    leases = Bundle("leases")
    aside = Bundle("aside")

    def __init__(self):
        super().__init__()
        self.pool = KvPool(STATES, CONTEXT)
        self.model = {}  # id of a lease or of detached rows -> (object, expected row values)
        self.stamps = 0

    @rule(target=leases, budget=st.integers(0, CONTEXT))
    def lease(self, budget):
        free = self.pool.free
        if blocks_of(budget) > free:
            with pytest.raises(CacheFull):
                self.pool.lease(budget)
            assert self.pool.free == free
            return multiple()
        lease = self.pool.lease(budget)
        self.model[id(lease)] = (lease, [])
        return lease

    @rule(lease=leases, count=st.integers(1, 40))
    def append(self, lease, count):
        _, expected = self.model[id(lease)]
        wanted = len(expected) + count
        before = (self.pool.free, list(lease.blocks), lease.rows)
        if wanted > CONTEXT:
            with pytest.raises(ContextFull):
                lease.append(count)
        elif blocks_of(wanted) - len(lease.blocks) > self.pool.free:
            with pytest.raises(CacheFull):
                lease.append(count)
        else:
            self.stamps += 1000
            assert lease.append(count) == len(expected)
            write_rows(lease, len(expected), count, self.stamps)
            expected += [self.stamps + row for row in range(len(expected), wanted)]
            return
        assert before == (self.pool.free, list(lease.blocks), lease.rows)

    @rule(lease=leases, data=st.data())
    def trim(self, lease, data):
        _, expected = self.model[id(lease)]
        keep = data.draw(st.integers(0, len(expected)))
        lease.trim(keep)
        del expected[keep:]
        assert len(lease.blocks) == max(blocks_of(keep), lease.floor)

    @rule(target=aside, lease=consumes(leases))
    def detach(self, lease):
        _, expected = self.model.pop(id(lease))
        rows = lease.detach()
        assert rows.rows == len(expected)
        self.model[id(rows)] = (rows, expected)
        with pytest.raises(LeaseClosed):
            lease.append(1)
        lease.close()
        return rows

    @rule(target=leases, rows=consumes(aside))
    def attach(self, rows):
        _, expected = self.model.pop(id(rows))
        lease = self.pool.attach(rows)
        self.model[id(lease)] = (lease, expected)
        with pytest.raises(LeaseClosed):
            self.pool.attach(rows)
        return lease

    @rule(held=st.one_of(consumes(leases), consumes(aside)))
    def close(self, held):
        self.model.pop(id(held))
        held.close()
        held.close()

    @rule()
    def padding_row(self):
        for array in self.pool.arrays.values():
            array[0] = np.nan

    @invariant()
    def every_block_has_one_owner(self):
        held = [
            b
            for o, _ in self.model.values()
            for b in getattr(o, "blocks", None) or o.__dict__.get("_blocks", [])
        ]
        assert len(held) == len(set(held)) and 0 not in held
        assert len(held) + self.pool.free == self.pool.blocks - 1
        assert self.pool.owners == sum(
            bool(getattr(o, "blocks", None) or o.__dict__.get("_blocks"))
            for o, _ in self.model.values()
        )

    @invariant()
    def rows_are_where_they_were_written(self):
        for held, expected in self.model.values():
            if hasattr(held, "table"):
                for name in STATES:
                    want = np.broadcast_to(
                        np.array(expected, np.float32)[:, None], (2, 2, len(expected), 4)
                    )
                    np.testing.assert_array_equal(held.read(name), want)

    def teardown(self):
        if any(o.rows or getattr(o, "blocks", None) for o, _ in self.model.values()):
            with pytest.raises(PoolInUse):
                self.pool.close()
        for held, _ in self.model.values():
            held.close()
        assert self.pool.free == self.pool.blocks - 1
        self.pool.close()


TestLeasing = Leasing.TestCase
TestLeasing.settings = settings(
    max_examples=40, stateful_step_count=25, deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)  # fmt: skip


def test_rows_move_to_another_pool_and_leave_the_old_one_empty():
    one, two = KvPool(STATES, CONTEXT), KvPool(STATES, CONTEXT)
    other = two.lease()
    other.append(20)
    lease = one.lease(budget=33)
    lease.append(37)
    write_rows(lease, 0, 37, 500)
    before = {name: lease.read(name) for name in STATES}
    moved = lease.move(two)
    assert one.free == one.blocks - 1 and moved.rows == 37 and moved.floor == 3
    assert not set(moved.blocks) & set(other.blocks)
    for name in STATES:
        np.testing.assert_array_equal(moved.read(name), before[name])


@pytest.mark.parametrize("allocate", [host_array, TurnedCache])
def test_a_sequence_begins_with_copies_of_the_rows_of_another(allocate):
    pool = KvPool(STATES, CONTEXT, allocate)
    first, second = pool.lease(), pool.lease()
    first.append(37)
    write_rows(first, 0, 37, 500)
    second.begin_with(first, 20)
    assert second.rows == 20 and not set(first.blocks) & set(second.blocks)
    write_rows(first, 0, 37, 900)
    for name in STATES:
        expected = np.broadcast_to(np.arange(500, 520)[:, None], (2, 2, 20, 4))
        np.testing.assert_array_equal(second.read(name), expected)


def test_rows_do_not_move_between_formats():
    half = {n: TensorType(t.shape, Format.F16) for n, t in STATES.items()}
    lease = KvPool(STATES, CONTEXT).lease(16)
    with pytest.raises(StatesDiffer):
        lease.move(KvPool(half, CONTEXT))
    assert not lease.closed


def test_memory_is_touched_only_where_rows_are_written():
    huge = {
        "kv": TensorType((1 + (1 << 17), 2, 4, BLOCK_ROWS, 64), Format.F32)
    }  # 4 GiB of addresses
    pool = KvPool(huge)
    lease = pool.lease()
    lease.append(1)
    pool.arrays["kv"][lease.blocks[0], :, :, 0] = 1.0
    assert pool.arrays["kv"].ctypes.data % 4096 == 0
    assert float(lease.read("kv").sum()) == 2 * 4 * 64


def test_an_exhausted_pool_says_what_is_free_and_what_is_wanted():
    pool = KvPool(STATES, CONTEXT)
    held = pool.lease(80)
    with pytest.raises(CacheFull, match=r"3 of its 8 blocks .* but 4 more are needed"):
        pool.lease(64)
    held.close()
    with pool.lease(64) as lease:
        assert len(lease.blocks) == 4
    assert pool.free == 8


BLOCKS = st.lists(st.integers(0, 4), min_size=1, max_size=4, unique=True)


@given(BLOCKS, st.integers(0, 15), st.integers(0, 4), st.integers(0, 2**32 - 1))
def test_a_turned_cache_is_the_plain_one_under_every_index(blocks, line, block, seed):
    """What is written and read by whole blocks, by lines of blocks and by moves is the same; only
    the memory differs, where a block holds a head's keys as [head_dim, 16].
    """
    type_ = TensorType((5, 2, 3, 16, 8), Format.F32)
    drawn = np.random.default_rng(seed)
    plain, turned = host_array(type_), TurnedCache(type_)
    plain[...] = drawn.random(plain.shape)
    turned[...] = plain
    for index in (blocks, (blocks, slice(None), slice(None), line), block, (block, 1)):
        np.testing.assert_array_equal(turned[index], plain[index])
        plain[index] = turned[index] = drawn.random(plain[index].shape)
        np.testing.assert_array_equal(turned, plain)
    turned.move_row((blocks[0], line), (block, 3))
    plain[block, :, :, 3] = plain[blocks[0], :, :, line]
    np.testing.assert_array_equal(turned, plain)
    np.testing.assert_array_equal(turned.memory[4, 0, 2].reshape(8, 16).T, plain[4, 0, 2])
    np.testing.assert_array_equal(turned.memory[4, 1], plain[4, 1])
