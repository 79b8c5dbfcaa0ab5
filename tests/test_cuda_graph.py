"""Captured graphs on a CUDA device: equal to single launches, over static
memory, without a word to the host.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_triton_programs import bindings, compiled, script

from circuit.scenario import walk
from ir.format import Format
from ir.graph import DECODE, GraphKey, Mode
from runners.base import swap_draft
from runners.cuda_graph import CudaGraphRunner
from runners.errors import PoolInUse
from runners.launcher import TritonRunner
from runners.rows import Lane, index_inputs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
BATCH_4 = GraphKey(Mode.BATCH, 4)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory):
    """A tiny target and head in bf16."""
    target, head = bindings(Format.BF16, Format.BF16)
    folder = tmp_path_factory.mktemp("graphs")
    return compiled(folder, Format.BF16, {"target": target, "draft": head})


def one_row(runner, lease, token: int = 5) -> dict[str, np.ndarray]:
    """The inputs of DECODE for the next row of a lease."""
    first = lease.append(1)
    inputs = index_inputs(runner, DECODE, [Lane(lease, first, first)])
    return {"ids": np.array([token], np.int32), **inputs}


@pytest.mark.parametrize("part", ["target", "draft"])
def test_replays_give_the_bytes_of_single_launches(artifact, part: str) -> None:
    text = script(artifact, 64 if part == "draft" else 0)
    chosen = artifact.part(part)
    with CudaGraphRunner(chosen) as graphs, TritonRunner(chosen) as singly:
        for seen, expected in zip(walk(graphs, text, chosen.keys), walk(singly, text, chosen.keys)):
            for name, values in expected.outputs.items():
                assert np.array_equal(seen.outputs[name], values), f"{seen.key} {name}"
            for name, rows in expected.stored.items():
                assert np.array_equal(seen.stored[name], rows), f"{seen.key} {name}"
        assert set(graphs.captured) == set(chosen.keys)


def test_a_graph_is_captured_at_the_first_step_of_its_key_and_dropped_on_demand(artifact) -> None:
    with CudaGraphRunner(artifact.part("target")) as runner:
        assert not runner.captured
        with runner.pool.lease() as lease:
            first = runner.read(runner.step(DECODE, **one_row(runner, lease))["logits"])
            assert set(runner.captured) == {DECODE}
            graph = runner.captured[DECODE]
            lease.trim(0)
            runner.step(DECODE, **one_row(runner, lease))
            assert runner.captured[DECODE] is graph
            runner.drop_captured()
            assert not runner.captured
            lease.trim(0)
            again = runner.read(runner.step(DECODE, **one_row(runner, lease))["logits"])
        assert np.array_equal(first, again)


def test_capture_and_padding_rows_leave_live_rows_alone(artifact) -> None:
    with CudaGraphRunner(artifact.part("target")) as runner:
        for state in runner.pool.arrays.values():
            state.tensor.fill_(7.0)
        runner.capture()
        with runner.pool.lease() as lease:
            lanes = [Lane(lease, lease.append(1), 0)]
            inputs = index_inputs(runner, BATCH_4, lanes)
            ids = np.array(
                [5, 2**30, -3, 400], np.int32
            )  # what stands in padding rows is never used
            inputs["positions"][1:] = 2**30
            runner.step(BATCH_4, ids=ids, **inputs)
            held = lease.blocks[0]
        for state in runner.pool.arrays.values():
            kept = torch.ones(state.tensor.shape[0], dtype=torch.bool, device=state.tensor.device)
            kept[[0, held]] = False
            assert bool((state.tensor[kept] == 7.0).all())
            assert bool((state.tensor[held, :, :, 1:] == 7.0).all())


def test_a_step_does_not_wait_for_the_device(artifact) -> None:
    with CudaGraphRunner(artifact.part("target")) as runner, runner.pool.lease() as lease:
        runner.step(DECODE, **one_row(runner, lease))
        inputs = one_row(runner, lease)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            out = runner.step(DECODE, **inputs)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert runner.read(out["tokens"]).shape == (1,)


def test_a_hidden_on_the_device_is_taken_from_there(artifact) -> None:
    part = artifact.part("draft")
    with CudaGraphRunner(part) as runner, runner.pool.lease() as lease:
        hidden = torch.randn(1, 64, device="cuda", dtype=torch.bfloat16)
        inputs = one_row(runner, lease)
        there = runner.read(runner.step(DECODE, hidden=hidden, **inputs)["logits"])
        host = runner.read(hidden)
        assert np.array_equal(
            runner.read(runner.step(DECODE, hidden=host, **inputs)["logits"]), there
        )


def test_a_runner_with_live_rows_is_not_freed_and_a_swap_replaces_it(artifact) -> None:
    part = artifact.part("draft")

    class Holder:
        circuit_draft = None

        def set_circuit_draft(self, runner) -> None:
            if self.circuit_draft is not None:
                self.circuit_draft.release(self)
            if runner is not None:
                runner.hold(self)
            self.circuit_draft = runner

    holder = Holder()
    old = swap_draft(holder, lambda: CudaGraphRunner(part))
    lease = old.pool.lease()
    lease.append(1)
    with pytest.raises(PoolInUse):
        swap_draft(holder, lambda: CudaGraphRunner(part))
    assert holder.circuit_draft is old
    lease.close()
    new = swap_draft(holder, lambda: CudaGraphRunner(part))
    assert holder.circuit_draft is new and old.closed and not old.captured
    holder.set_circuit_draft(None)
    new.close()
