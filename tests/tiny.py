"""A one-layer program with random weights: small enough to compile in a
test, with all that a target has.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from ir import ops
from ir.binding import DraftBinding
from ir.format import Format, TensorType
from ir.key import DECODE, GraphKey, Mode
from ir.tracing import Scope
from runners.base import Runner
from runners.kv import Lease

VOCABULARY, WIDTH, HEADS, HEAD, BLOCKS, TABLE = 97, 64, 2, 32, 9, 4
VERIFY_2, VERIFY_3 = GraphKey(Mode.VERIFY, 2), GraphKey(Mode.VERIFY, 3)


def program(scope: Scope) -> None:
    """Embedding, attention over the paged cache, a gated layer, logits and their argmax."""
    rows = scope.key.rows
    ids, indices = scope.input("ids", rows), scope.input("indices", rows)
    tables, owner = scope.input("tables", 1, TABLE), scope.input("row_sequence", rows)
    x = ops.embed(ids, scope.weight("embed"))
    h = ops.rms_norm(x, scope.weight("norm"), eps=1e-5)
    q, k, v = (ops.linear(h, scope.weight(name)) for name in ("q", "k", "v"))
    k, v = ops.split_heads(k, heads=1), ops.split_heads(v, heads=1)
    slots = ops.slot_at(tables, owner, indices)
    cache = ops.kv_write(scope.state("layers.0.kv"), k, v, slots)
    scope.update("layers.0.kv", cache)
    q = ops.split_heads(q, heads=HEADS)
    mixed = ops.attention(q, cache, tables, owner, indices, scale=HEAD**-0.5)
    x = ops.add(x, ops.linear(ops.merge_heads(mixed), scope.weight("o")))
    scope.output("hidden", x)
    logits = ops.linear(x, scope.weight("embed"))
    scope.output("logits", logits)
    scope.output("tokens", ops.argmax(logits))


def binding(seed: int = 0, name: str = "tiny") -> DraftBinding:
    """The program with weights drawn from `seed`, for one row and for
    two or three rows of a sequence.
    """
    draw = torch.Generator().manual_seed(seed)
    shapes = {
        "embed": (VOCABULARY, WIDTH), "q": (HEADS * HEAD, WIDTH), "k": (HEAD, WIDTH),
        "v": (HEAD, WIDTH), "o": (WIDTH, HEADS * HEAD),
    }  # fmt: skip
    weights = {n: torch.randn(s, generator=draw) * 0.3 for n, s in shapes.items()}
    weights["norm"] = torch.rand(WIDTH, generator=draw) + 0.5
    states = {"layers.0.kv": TensorType((BLOCKS, 2, 1, 16, HEAD), Format.F32)}
    keys = (DECODE, VERIFY_2, VERIFY_3)
    return DraftBinding(name, program, weights, states, keys, vocab=VOCABULARY, hidden=WIDTH)


def without(known: DraftBinding, *reasons: str) -> DraftBinding:
    """The binding with things that it cannot model."""
    return replace(known, unmodelled=reasons)


def feed(runner: Runner, lease: Lease, ids: list[int]) -> dict[str, np.ndarray]:
    """Appends `ids` to the sequence in one step; copies of the outputs."""
    count = len(ids)
    first = lease.append(count)
    indices = np.arange(first, first + count, dtype=np.int32)
    outputs = runner.step(
        DECODE if count == 1 else GraphKey(Mode.VERIFY, count), ids=np.array(ids, np.int32),
        indices=indices, tables=lease.table(TABLE)[None], row_sequence=np.zeros(count, np.int32),
    )  # fmt: skip
    return {name: runner.read(value) for name, value in outputs.items()}


def parts_of(ids: list[int], widths: list[int]) -> Iterator[list[int]]:
    """`ids` cut into pieces of `widths`, the last one cut short."""
    at = 0
    for width in widths:
        if ids[at : at + width]:
            yield ids[at : at + width]
        at += width
