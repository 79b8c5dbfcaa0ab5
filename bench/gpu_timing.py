"""Times launches and whole steps of the Triton backend, and of torch on the same graph."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from gpu_checks import inputs
from gpu_models import Subject

from circuit.bench.torch_peer import INDEX_INPUTS, torch_module
from ir.graph import GraphKey, Role
from ir.ops import linear
from ir.tensor import unpacked
from runners.launcher import TritonRunner


def median_ms(call: Callable[[], Any], device: torch.device, runs: int = 30) -> list[float]:
    """Median, least and largest milliseconds of a call: device events
    around it, or the host's clock.
    """
    spans = []
    if device.type != "cuda":
        began = time.perf_counter()
        call()
        spans.append((time.perf_counter() - began) * 1e3)
    else:
        for _ in range(3):
            call()
        marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(runs)]
        for start, stop in marks:  # enqueued without waiting, so that gaps of the host stay outside
            start.record()
            call()
            stop.record()
        torch.cuda.synchronize()
        spans = [start.elapsed_time(stop) for start, stop in marks]
    return [statistics.median(spans), min(spans), max(spans)]


def copy_bandwidth(device: torch.device, tiny: bool) -> float:
    """Gigabytes a second of a large copy on the device, bytes read and written."""
    size = 1 << (20 if tiny else 31)
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    ms = median_ms(lambda: target.copy_(source), device, 10)[0]
    return 2 * size / ms / 1e6


def replayed(runner: TritonRunner, key: GraphKey) -> Callable[[], None]:
    """A call that enqueues the launches of `key` and nothing else."""
    graph = runner.captured.get(key)
    return graph.replay if graph is not None else runner.resolve(key).launch


def time_circuit(
    subject: Subject, runner: TritonRunner, key: GraphKey, rate: float, held: int
) -> dict[str, Any]:
    """A row of the table: launches alone, and a whole step with its
    inputs and the read of its tokens.
    """
    given = inputs(subject, runner, key, held)
    began = time.perf_counter()
    out = runner.step(key, **given)
    capture = time.perf_counter() - began
    tokens = next((n for n in out if n.startswith("tokens")), None)

    def step() -> None:
        made = runner.step(key, **given)
        if tokens is not None:
            runner.read(made[tokens])

    moved = sum(n.bytes for n in runner.plan(key).launches)
    ms = median_ms(replayed(runner, key), runner.device)
    whole = median_ms(step, runner.device)
    return {
        "model": subject.name, "peer": "circuit", "key": str(key), "rows": key.rows,
        "launches": len(runner.plan(key).launches), "bytes": moved, "ms_median": ms[0],
        "ms_min": ms[1],
        "ms_max": ms[2], "step_ms": whole[0], "first_s": capture, "floor_ms": moved / rate / 1e6,
        "of_floor": moved / rate / 1e6 / ms[0],
    }  # fmt: skip


def torch_linear(x: torch.Tensor, weight: torch.Tensor, *, activation: Any = None) -> torch.Tensor:
    """What a torch user writes for a product in bf16."""
    return torch.nn.functional.linear(x, weight)


def time_peer(
    subject: Subject, runner: TritonRunner, key: GraphKey, held: int, compiled: bool
) -> dict[str, Any]:
    """A row of the table: the same graph over bf16 weights and a
    contiguous cache, by torch.compile.
    """
    device, types = runner.device, runner.inputs(key)
    weights = {}
    for name, value in subject.binding.weights.items():
        plain = unpacked(value)
        keep = plain.is_floating_point() and not name.startswith("rope")
        whole = plain if plain.is_floating_point() else plain.long()
        weights[name] = plain.to(torch.bfloat16) if keep else whole
    graph = subject.binding.graph(key)
    names = [s.name for s in graph.slots.values() if s.role is Role.INPUT]
    module = torch_module(
        graph, weights, runner.pool.context, cache=torch.bfloat16, device=device,
        instead={linear: torch_linear},
    ).eval()  # fmt: skip
    given = inputs(subject, runner, key, held)
    tensors = [
        torch.as_tensor(given[n]).to(
            device, torch.int64 if n in INDEX_INPUTS else types[n].format.dtype
        )
        for n in names
    ]
    call = torch.compile(module, mode="max-autotune", fullgraph=True) if compiled else module
    began = time.perf_counter()
    with torch.inference_mode():
        ms = median_ms(lambda: call(*tensors), device)
    return {
        "model": subject.name, "peer": "torch.compile" if compiled else "torch eager",
        "key": str(key),
        "rows": key.rows, "ms_median": ms[0], "ms_min": ms[1], "ms_max": ms[2],
        "first_s": time.perf_counter() - began,
    }  # fmt: skip
