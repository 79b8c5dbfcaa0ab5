"""Checks and times the Triton backend on a CUDA device: numerics, capture,
steps beside torch.compile and the memory.

Every number is of one run on one device. Bytes are those that a step must move once: weights,
values, ids. The floor of a step is its bytes over the bandwidth of a large copy (bytes read and
written), measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_models import DECODE, VERIFY_4, Subject, demo, head, runner_of

from circuit.bench.torch_peer import INDEX_INPUTS, torch_module
from circuit.compare import no_worse_than_eager
from circuit.feed import Row, feed
from codegen.backend_triton import TritonBackend
from codegen.compile import CompileOptions, compile_binding
from codegen.interpreted import round_as_hardware
from codegen.store import KernelStore
from ir.graph import GraphKey, Mode, Role
from ir.interpret import interpret
from ir.ops import linear
from ir.tensor import unpacked
from runners.launcher import TritonRunner, usable_device

SECONDS = 225.0  # what the whole run may take
PEER_SECONDS = {
    True: 45.0,
    False: 70.0,
}  # what a peer's program is expected to take: a head, a whole target
HELD = 1000  # rows of context that a timed step continues


class Clock:
    """Seconds since the start, and what is left of the run."""

    def __init__(self, seconds: float) -> None:
        self.began, self.seconds = time.monotonic(), seconds

    def left(self) -> float:
        """Seconds that remain."""
        return self.seconds - (time.monotonic() - self.began)

    def say(self, text: str) -> None:
        """Prints progress."""
        print(f"[{time.monotonic() - self.began:6.1f} s] {text}", flush=True)


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


def inputs(
    subject: Subject, runner: TritonRunner, key: GraphKey, held: int
) -> dict[str, np.ndarray]:
    """A step of `key` after `held` rows of each sequence, random ids and hiddens."""
    random = np.random.default_rng(key.rows)
    types, many = runner.inputs(key), key.mode is Mode.BATCH
    live = 1 if key.mode is Mode.CHAIN else key.rows
    first = 0 if key.mode is Mode.PREFILL else held
    vocab = 97 if held < HELD else 40000
    rows = [
        Row(
            int(random.integers(0, vocab)), first + (0 if many else i),
            random.standard_normal(subject.hidden, np.float32) if subject.hidden else None,
            1 if subject.hidden else 0,
        )
        for i in range(live)
    ]  # fmt: skip
    width = types["tables"].shape[1]
    per = min(width, (runner.pool.blocks - 1) // (key.rows if many else 1))
    tables = [1 + np.arange(i * per, (i + 1) * per) for i in range(key.rows if many else 1)]
    return feed(key, types, rows, tables)


def eager(
    subject: Subject, runner: TritonRunner, key: GraphKey, given: dict, double: bool
) -> tuple[dict[str, np.ndarray], dict[str, torch.Tensor]]:  # fmt: skip
    """Outputs, and states on the device, of the interpreted graph from the runner's own states."""
    device, types = runner.device, runner.inputs(key)
    tensors = {n: torch.as_tensor(v).to(device, types[n].format.dtype) for n, v in given.items()}
    states = {
        n: (s.tensor.double() if double else s.tensor.clone())
        for n, s in runner.pool.arrays.items()
    }
    with torch.inference_mode():
        graph = subject.binding.graph(key)
        out = interpret(graph, tensors, subject.binding.weights, states, double=double)
    return {n: v.double().cpu().numpy() for n, v in out.items()}, states


def check(subject: Subject, runner: TritonRunner, key: GraphKey, held: int) -> dict[str, Any]:
    """Compares one step with eager and with float64; a problem is a sentence."""
    given = inputs(subject, runner, key, held)
    plain, oracle = (eager(subject, runner, key, given, double) for double in (False, True))
    kept = {n: s.tensor.clone() for n, s in runner.pool.arrays.items()}
    out = {n: runner.read(v).astype(np.float64) for n, v in runner.step(key, **given).items()}
    triples = {
        n: (v, plain[0][n], oracle[0][n]) for n, v in out.items() if not n.startswith("tokens")
    }
    for name, before in kept.items():
        after = runner.pool.arrays[name].tensor
        touched = (oracle[1][name] != before.double()).flatten(1).any(1)
        touched |= (after != before).flatten(1).any(1)
        touched[0] = False  # the scratch block
        values = (after, plain[1][name], oracle[1][name])
        triples[name] = tuple(v[touched].double().cpu().numpy() for v in values)
        after.copy_(before)
    problems = [
        f"{name} is {np.abs(seen - truth).max():.3g} from float64, eager "
        f"{np.abs(base - truth).max():.3g}"
        for name, (seen, base, truth) in triples.items()
        if not no_worse_than_eager(seen, base, truth)
    ]
    return {
        "key": str(key), "compared": sum(t[0].size for t in triples.values()), "problems": problems,
    }  # fmt: skip


def same_rows(subject: Subject, runner: TritonRunner, held: int) -> list[str]:
    """Sentences on rows of VERIFY_4 that are not the bytes of DECODE; empty if all are."""
    given = inputs(subject, runner, VERIFY_4, held)
    together = {n: runner.read(v).copy() for n, v in runner.step(VERIFY_4, **given).items()}
    problems = []
    for row in range(4):
        one = {n: v[row : row + 1] if n != "tables" else v for n, v in given.items()}
        alone = {n: runner.read(v) for n, v in runner.step(DECODE, **one).items()}
        problems += [
            f"row {row} of VERIFY_4: {n} differs from DECODE"
            for n, v in alone.items()
            if not np.array_equal(v[0], together[n][row])
        ]
    return problems


def fault_is_seen(subject: Subject, runner: TritonRunner, held: int) -> bool:
    """True if the check fails while one weight of DECODE is wrong."""
    plan = runner.plan(DECODE)
    number = next(
        i
        for i, b in enumerate(plan.buffers)
        if b.space.value == "weight" and len(b.type.shape) == 1
    )
    changed = runner._memory[f"weight.{plan.buffers[number].name}"].cpu().numpy().copy()
    changed[3::4] ^= 0x40
    with runner.substituted(DECODE, number, changed):
        return bool(check(subject, runner, DECODE, held)["problems"])


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


def save(record: dict, out: Path) -> None:
    """Writes what was found until now."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "gpu.json").write_text(json.dumps(record, indent=1, default=float))
    (out / "gpu.txt").write_text(table(record) + "\n")


def measure(subject: Subject, record: dict, clock: Clock, tiny: bool, out: Path) -> None:
    """Everything about one model, noted in `record` and in `out` as it is found."""
    held = 20 if tiny else HELD
    with tempfile.TemporaryDirectory() as folder:
        clock.say(f"{subject.name}: compile")
        backend, store = TritonBackend(), KernelStore(Path(folder))
        made = compile_binding(
            subject.binding, subject.binding.keys, backend, CompileOptions(), store
        )
        with runner_of(made) as runner:
            for state in runner.pool.arrays.values():
                state.tensor.normal_()
            for key in subject.binding.keys:
                clock.say(f"{subject.name}: {key}")
                record["checks"].append(
                    {"model": subject.name, **check(subject, runner, key, held)}
                )
                row = time_circuit(subject, runner, key, record["copy_gbs"], held)
                record["rows"].append(row)
                save(record, out)
                if clock.left() < 20:
                    record["notes"].append(f"{subject.name}: no time was left after {key}")
                    break
            rows = same_rows(subject, runner, held)
            seen = fault_is_seen(subject, runner, held)
            record["checks"].append(
                {"model": subject.name, "key": "rows", "compared": 4, "problems": rows}
            )
            if not seen:
                record["checks"][-1]["problems"].append("a planted fault was not seen")
            peers(subject, runner, record, clock, held, tiny)


def peers(
    subject: Subject, runner: TritonRunner, record: dict, clock: Clock, held: int, tiny: bool
) -> None:
    """Times the peers of a model, as far as the time allows."""
    for compiled in (False, True):
        for key in subject.peers:
            wanted = PEER_SECONDS[bool(subject.hidden)] if compiled else 2
            if compiled and (tiny or clock.left() < wanted):
                why = "on the host" if tiny else f"with {clock.left():.0f} s left"
                record["notes"].append(f"{subject.name}: torch.compile of {key} is left out {why}")
                continue
            clock.say(f"{subject.name}: {'torch.compile' if compiled else 'torch eager'} {key}")
            record["rows"].append(time_peer(subject, runner, key, held, compiled))


def table(record: dict) -> str:
    """The record as text."""
    lines = [
        f"{record['device']}, torch {torch.__version__}; a copy moves {record['copy_gbs']:.0f} "
        f"GB/s",
        f"{'model':14} {'peer':14} {'key':12} {'launches':>8} {'ms':>9} {'min':>9} {'max':>9} "
        f"{'step ms':>9} "
        f"{'MB':>8} {'floor ms':>9} {'of floor':>8}",
    ]  # fmt: skip
    for r in record["rows"]:
        cells = [r.get("launches", ""), *(f"{r[c]:.4f}" for c in ("ms_median", "ms_min", "ms_max"))]
        cells.append(f"{r['step_ms']:.4f}" if "step_ms" in r else "")
        if "bytes" in r:
            cells += [f"{r['bytes'] / 1e6:.1f}", f"{r['floor_ms']:.4f}", f"{r['of_floor']:.2f}"]
        widths = (8, 9, 9, 9, 9, 8, 9, 8)
        text = " ".join(f"{c:>{w}}" for c, w in zip(cells, widths))
        lines.append(f"{r['model']:14} {r['peer']:14} {r['key']:12} {text}")
    compared = sum(c["compared"] for c in record["checks"])
    problems = [f"{c['model']} {c['key']}: {p}" for c in record["checks"] for p in c["problems"]]
    lines += [f"{compared} numbers compared; {len(problems)} problems", *problems, *record["notes"]]
    return "\n".join(lines)


def main() -> int:
    """Measures both models; 1 if a check failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/gpu"))
    parser.add_argument(
        "--dry-run", action="store_true", help="tiny shapes on the host, interpreted"
    )
    given = parser.parse_args()
    clock = Clock(float("inf") if given.dry_run else SECONDS)
    if given.dry_run:
        round_as_hardware()
    device = usable_device("bench/gpu.py")
    torch.manual_seed(0)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "the host, interpreting"
    record: dict[str, Any] = {"device": name, "rows": [], "checks": [], "notes": []}
    record["copy_gbs"] = copy_bandwidth(device, given.dry_run)
    try:
        for make in (head, demo):
            measure(make(device, given.dry_run), record, clock, given.dry_run, given.out)
            if device.type == "cuda":
                with suppress(RuntimeError):
                    torch.cuda.empty_cache()
    finally:
        record["seconds"] = time.monotonic() - clock.began
        save(record, given.out)
        print(table(record), flush=True)
    return int(any(c["problems"] for c in record["checks"]))


if __name__ == "__main__":
    raise SystemExit(main())
