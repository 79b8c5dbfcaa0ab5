"""Compares the Triton backend on a device with eager and float64, its rows with each other, and
sees to it that a planted fault is found.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gpu_models import DECODE, VERIFY_4, Subject

from circuit.compare import no_worse_than_eager
from circuit.feed import Row, feed
from ir.graph import GraphKey, Mode
from ir.interpret import interpret
from runners.launcher import TritonRunner

HELD = 1000  # rows of context that a timed step continues


def inputs(
    subject: Subject, runner: TritonRunner, key: GraphKey, held: int
) -> dict[str, np.ndarray]:
    """A step of `key` after `held` rows of each sequence, random ids and hiddens."""
    random = np.random.default_rng(key.rows)
    types, many = runner.inputs(key), key.mode is Mode.BATCH
    live = 1 if key.goes_on else key.rows
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
