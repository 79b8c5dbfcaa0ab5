"""The kernels of regions without an anchor, printed from the bodies of their ops alone."""

from __future__ import annotations

import math

from codegen.expr import Expr, idiv, imod, imul, var
from codegen.lower import Lowered, Store
from codegen.tiles import Axis, power
from codegen.triton_holes import Draft, Holes, unflattened
from codegen.triton_schedule import TritonSchedule


def body(lowered: Lowered, schedule: TritonSchedule) -> Draft:
    """The kernel of a region without an anchor: every store is a range of programs."""
    w = Holes(lowered, 1024 * schedule.warps)
    parts, first = [], 0
    for store in lowered.stores:
        with w.hole() as lines, w.scope():
            programs = _part(w, store, first, 128 * schedule.warps)
        parts.append({"first": first, "last": first + programs, "body": lines})
        first += programs
    return Draft("body", {"parts": parts}, (first,), schedule.warps)


def _part(w: Holes, store: Store, first: int, widest: int) -> int:
    """Writes one store for the programs from `first` on; how many programs those are."""
    shape = store.operand.type.shape or (1,)
    probe = store.value.at(*(var(f"probe{i}", n) for i, n in enumerate(store.value.shape)))
    row_wise = _reduces(probe, f"probe{len(store.value.shape) - 1}")
    lead = shape if row_wise else shape[:-1]
    size = 1 if row_wise else min(power(shape[-1]), widest)
    blocks = 1 if row_wise else -(-shape[-1] // size)
    programs = math.prod(lead) * blocks
    here = w.fresh("here")
    w.line(f"{here} = program - {first}")
    w.axes["at"] = Axis(here)
    at = var("at", programs)
    index = unflattened(idiv(at, blocks), lead) if lead else []
    if not row_wise:
        column, cut = w.fresh("c"), shape[-1] % size
        start = w.value(imul(imod(at, blocks), size))
        w.line(f"{column} = {start} + tl.arange(0, {size})[None, :]")
        w.axes["last"] = Axis(column, 1, size, f"{column} < {shape[-1]}" if cut else "")
        index.append(var("last", shape[-1]))
    value = store.value.at(*index[: len(store.value.shape)])
    w.expect([value])
    tile = "tl.zeros((1, 1), tl.int32)" if row_wise else ""
    w.store(store, index[: len(store.operand.type.shape)], w.value(value), tile)
    return programs


def _reduces(value: Expr, last: str) -> bool:
    """True if an element reduces a row that its last index chooses: then
    each element is a program's work.
    """

    def reads(node: Expr) -> bool:
        return any(n.op == "var" and n.payload[0] == last for n in node.walk())

    return any(n.op == "reduce" or (n.op == "stat" and reads(n)) for n in value.walk())
