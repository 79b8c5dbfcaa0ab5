"""Checks and times the Triton backend on a CUDA device: numerics, capture,
steps beside torch.compile and the memory.

Every number is of one run on one device. Bytes are those that a step must move once: weights,
values, ids. The floor of a step is its bytes over the bandwidth of a large copy (bytes read and
written), measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from gpu_checks import HELD, check, fault_is_seen, same_rows
from gpu_models import Subject, demo, head, runner_of
from gpu_timing import copy_bandwidth, time_circuit, time_peer

from codegen.backend_triton import TritonBackend
from codegen.compile import CompileOptions, compile_binding
from codegen.interpreted import round_as_hardware
from codegen.store import KernelStore
from runners.launcher import TritonRunner, usable_device

SECONDS = 225.0  # what the whole run may take
PEER_SECONDS = {
    True: 45.0,
    False: 70.0,
}  # what a peer's program is expected to take: a head, a whole target


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
