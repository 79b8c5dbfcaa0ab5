"""Compiled and eager runners agree, share nothing they should not, and end in order."""

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import BLOCKS, TABLE, VERIFY_2, VERIFY_3, VOCABULARY, binding, feed, parts_of

from codegen.artifact import load_artifact
from codegen.backend_cpp import CppBackend
from codegen.compile import CompileOptions
from codegen.plan import Space
from codegen.save import compile_artifact
from ir.errors import KeyNotServed
from ir.key import DECODE, GraphKey, Mode
from runners.base import swap_draft
from runners.buffers import anonymous
from runners.eager import EagerRunner
from runners.errors import InputMismatch, OutOfMemory, PoolInUse, RunnerClosed, RunnerInUse
from runners.native import BadThreads, LibraryUnusable, NativeRunner, Team, TeamClosed

IDS = [5, 96, 0, 17, 3, 44, 61, 8, 29, 90, 11, 12, 5, 5, 71, 33, 2, 54, 81, 19]


def near(seen, wanted):
    """Asserts that f32 sums differ by no more than their rounding, on
    the scale of the largest value.
    """
    np.testing.assert_allclose(seen, wanted, rtol=0, atol=4e-6 * np.abs(wanted).max())


@pytest.fixture(scope="module")
def part(tmp_path_factory, kernel_folder):
    folder = tmp_path_factory.mktemp("runners")
    out = compile_artifact(
        folder / "art", {"draft": (binding(), binding().keys)}, CppBackend(),
        CompileOptions(store=kernel_folder),
        recorded={}, extras={},
    )  # fmt: skip
    return load_artifact(out).part("draft")


@pytest.fixture(scope="module")
def native(part):
    with NativeRunner(part) as runner:
        yield runner


@pytest.fixture(scope="module")
def oracle():
    with EagerRunner(binding(), double=True) as runner:
        yield runner


@settings(max_examples=25, deadline=None)
@given(
    ids=st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=40),
    widths=st.lists(st.integers(1, 3), min_size=40, max_size=40),
)
def test_compiled_agrees_with_the_oracle_and_rows_do_not_depend_on_width(
    native, oracle, ids, widths
):
    with native.pool.lease() as one, native.pool.lease() as many, oracle.pool.lease() as true:
        singly = [feed(native, one, [i]) for i in ids]
        parts = [feed(native, many, part) for part in parts_of(ids, widths)]
        exact = [feed(oracle, true, [i]) for i in ids]
        for name in ("hidden", "logits", "tokens"):
            joined, alone, want = (
                np.concatenate([o[name] for o in outputs]) for outputs in (parts, singly, exact)
            )
            assert joined.tobytes() == alone.tobytes()
            if name != "tokens":
                near(alone, want)
        assert one.read("layers.0.kv").tobytes() == many.read("layers.0.kv").tobytes()
        near(one.read("layers.0.kv"), true.read("layers.0.kv"))


def test_the_number_of_threads_changes_no_byte(part):
    outputs = []
    for threads in (1, 2, 3):
        with NativeRunner(part, threads=threads) as runner, runner.pool.lease() as lease:
            outputs.append([feed(runner, lease, [i])["logits"].tobytes() for i in IDS])
    assert outputs[0] == outputs[1] == outputs[2]


def test_two_sequences_do_not_see_each_other(native):
    with native.pool.lease() as alone:
        expected = [feed(native, alone, [i])["logits"].tobytes() for i in IDS]
    with native.pool.lease() as one, native.pool.lease() as two:
        for want, i in zip(expected, IDS):
            assert feed(native, one, [i])["logits"].tobytes() == want
            feed(native, two, [i ^ 1])


def test_padding_rows_change_nothing(native):
    with native.pool.lease() as one, native.pool.lease() as two:
        for i in IDS:
            want = feed(native, one, [i])
            at = two.append(1)
            indices = np.array([at, -1, -1], np.int32)
            out = native.step(
                VERIFY_3, ids=np.array([i, 7, 7], np.int32), indices=indices,
                tables=two.table(TABLE)[None], row_sequence=np.zeros(3, np.int32),
            )  # fmt: skip
            assert out["logits"][0].tobytes() == want["logits"][0].tobytes()
        assert one.read("layers.0.kv").tobytes() == two.read("layers.0.kv").tobytes()


def test_outputs_are_views_and_read_copies_them(native):
    with native.pool.lease() as lease:
        first = native.step(DECODE, **step_inputs(lease, [3]))
        kept = native.read(first["logits"])
        second = native.step(DECODE, **step_inputs(lease, [9]))
        assert first["logits"].ctypes.data == second["logits"].ctypes.data
        assert kept.tobytes() != second["logits"].tobytes()


def step_inputs(lease, ids):
    first = lease.append(len(ids))
    return {
        "ids": np.array(ids, np.int32), "tables": lease.table(TABLE)[None],
        "indices": np.arange(first, first + len(ids), dtype=np.int32),
        "row_sequence": np.zeros(len(ids), np.int32),
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["native", "eager"])
def test_wrong_inputs_are_all_named_and_change_nothing(native, oracle, kind):
    runner = native if kind == "native" else oracle
    with runner.pool.lease() as lease:
        inputs = step_inputs(lease, [3])
        bad = {**inputs, "ids": np.zeros(2, np.int32), "indices": np.zeros(1), "mask": 1}
        del bad["tables"]
        with pytest.raises(InputMismatch) as caught:
            runner.step(DECODE, **bad)
        for part in (
            "ids is int32[2]",
            "indices is float64[1]",
            "mask is not one",
            "tables is missing",
        ):
            assert part in caught.value.sentence
        runner.step(DECODE, **inputs)
    with pytest.raises(KeyNotServed, match="no program for TREE_8"):
        runner.step(GraphKey(Mode.TREE, 8))


def test_keys_by_mode(native):
    assert native.serves(VERIFY_2) and not native.serves(GraphKey(Mode.VERIFY, 4))
    assert native.rows(Mode.VERIFY) == (2, 3) and native.widest(Mode.BATCH) == 0
    assert native.fitting(Mode.VERIFY, 1) == VERIFY_2 and native.fitting(Mode.VERIFY, 4) is None
    assert {n: str(t) for n, t in native.inputs(VERIFY_2).items()} == {
        "ids": "i32[2]", "tables": f"i32[1,{TABLE}]", "indices": "i32[2]", "row_sequence": "i32[2]",
    }  # fmt: skip


def test_every_launch_has_a_time(native):
    with native.pool.lease() as lease:
        clock = native.timed(DECODE, **step_inputs(lease, [3]))
    assert (
        clock.shape == (len(native.plan(DECODE).launches),) and (clock >= 0).all() and clock.any()
    )


def test_a_substituted_weight_is_read_until_the_block_ends(native):
    plan = native.plan(DECODE)
    number = next(i for i, b in enumerate(plan.buffers) if b.name == "norm")
    other = np.zeros(plan.buffers[number].type.nbytes, np.uint8)
    with native.pool.lease() as lease:
        before = feed(native, lease, [3])["hidden"].tobytes()
        lease.trim(0)
        with native.substituted(DECODE, number, other):
            assert feed(native, lease, [3])["hidden"].tobytes() != before
        lease.trim(0)
        assert feed(native, lease, [3])["hidden"].tobytes() == before


def test_steps_from_several_threads_take_turns(native):
    def run(seed, lease):
        for i in IDS:
            native.step(DECODE, **step_inputs(lease, [(i + seed) % VOCABULARY]))

    leases = [native.pool.lease() for _ in range(4)]
    for seed in (0, 1):
        run(seed, leases[seed])
    threads = [threading.Thread(target=run, args=(seed, leases[2 + seed])) for seed in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rows = [lease.read("layers.0.kv").tobytes() for lease in leases]
    assert rows[:2] == rows[2:] and rows[0] != rows[1]
    for lease in leases:
        lease.close()


def test_arena_values_lie_inside_the_shared_arena(native):
    for key in native.keys:
        plan = native.plan(key)
        for buffer in plan.buffers:
            if buffer.space is Space.ARENA:
                assert buffer.offset + buffer.type.nbytes <= plan.arena_bytes
        assert plan.arena_bytes <= native.part.memory["arena"]


def test_a_closed_runner_refuses_and_a_second_close_does_nothing(part):
    runner = NativeRunner(part, blocks=3)
    assert runner.pool.blocks == 3
    lease = runner.pool.lease(16)
    with pytest.raises(PoolInUse):
        runner.close()
    feed(runner, lease, [1])
    lease.close()
    runner.close()
    runner.close()
    with pytest.raises(RunnerClosed):
        runner.step(DECODE)
    with pytest.raises(RunnerClosed):
        runner.hold(object())


def test_runners_share_a_team(part):
    team = Team(part, 2)
    one, two = NativeRunner(part, team=team), NativeRunner(part, team=team)
    with one.pool.lease() as lease:
        want = feed(one, lease, [3])["logits"].tobytes()
    one.close()
    with two.pool.lease() as lease:
        assert feed(two, lease, [3])["logits"].tobytes() == want
    team.close()
    team.close()
    with two.pool.lease() as lease, pytest.raises(TeamClosed, match="threads that run tiny"):
        feed(two, lease, [3])
    two.close()
    with pytest.raises(BadThreads):
        Team(part, 0)


def test_a_library_that_is_none_is_refused(part, tmp_path):
    class Elsewhere:
        def built(self, name):
            path = tmp_path / name
            path.write_bytes(b"not a library")
            return path

    with pytest.raises(LibraryUnusable, match=r"team.so cannot be loaded"):
        Team(Elsewhere(), 1)


def test_memory_that_cannot_be_had_is_one_sentence():
    with pytest.raises(OutOfMemory, match="bytes of memory cannot be had"):
        anonymous(1 << 62)


class Holder:
    """What a proposer is to a swap."""

    def __init__(self):
        self.installed = None
        self.log = []

    def set_circuit_draft(self, runner):
        self.log.append(runner)
        if runner is not None:
            runner.hold(self)
        if self.installed is not None:
            self.installed.release(self)
        self.installed = runner


def test_a_swap_frees_the_old_runner_before_the_new_one_is_installed(part):
    holder = Holder()
    first = swap_draft(holder, lambda: NativeRunner(part))
    second = swap_draft(holder, lambda: NativeRunner(part))
    assert holder.log == [first, None, second] and first.closed and not second.closed
    holder.set_circuit_draft(None)
    second.close()


def test_a_failed_build_changes_nothing(part):
    holder = Holder()
    first = swap_draft(holder, lambda: NativeRunner(part))

    def fail():
        raise ValueError("no build")

    with pytest.raises(ValueError, match="no build"):
        swap_draft(holder, fail)
    assert holder.installed is first and not first.closed
    holder.set_circuit_draft(None)
    first.close()


def test_a_runner_that_is_still_used_is_not_freed(part):
    holder, other, made = Holder(), Holder(), []

    def build():
        made.append(NativeRunner(part))
        return made[-1]

    first = swap_draft(holder, build)
    other.set_circuit_draft(first)
    with pytest.raises(RunnerInUse, match=r"1 user\(s\) still refer to it: Holder"):
        swap_draft(holder, build)
    assert holder.installed is first and made[1].closed and not first.closed
    other.set_circuit_draft(None)
    with first.pool.lease(1), pytest.raises(PoolInUse):
        swap_draft(holder, build)
    assert holder.installed is first and made[2].closed
    swap_draft(holder, build)
    assert first.closed and holder.installed is made[3]
    holder.set_circuit_draft(None)
    made[3].close()


def test_a_sequence_moves_between_eager_and_native(native):
    with EagerRunner(binding()) as eager, native.pool.lease() as whole:
        want = [feed(native, whole, [i])["tokens"][0] for i in IDS]
        lease = eager.pool.lease()
        seen = [feed(eager, lease, [i])["tokens"][0] for i in IDS[:10]]
        lease = lease.move(native.pool)
        seen += [feed(native, lease, [i])["tokens"][0] for i in IDS[10:]]
        lease.close()
        assert seen == want and eager.pool.free == BLOCKS - 1


def test_an_eager_runner_may_run_over_the_rows_of_a_native_one(native):
    eager = EagerRunner(binding(), pool=native.pool)
    with native.pool.lease() as lease:
        for i in IDS[:5]:
            feed(native, lease, [i])
        one = feed(eager, lease, [IDS[5]])["logits"]
        lease.trim(5)
        two = feed(native, lease, [IDS[5]])["logits"]
        near(one, two)
        eager.close()
    assert not native.closed and native.pool.arrays
