"""Random programs in ops, drawn by Hypothesis as recipes that print and shrink well."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from ir import ops
from ir.graph import DECODE, Graph, GraphKey, Mode
from ir.passes.facts import Facts
from ir.tensor import Format, TensorType
from ir.tracing import Scope, trace

WIDTH, HEADS, CONTEXT, VOCAB = 32, 2, 48, 150
STATES = ("first", "second")


@dataclass(frozen=True)
class Step:
    """One line of a random program: what is done, to which earlier values, with which weight."""

    what: str
    a: int
    b: int
    weight: int


@dataclass(frozen=True)
class Recipe:
    """A random program: its rows, its steps and which values it returns."""

    rows: int
    format: Format
    steps: tuple[Step, ...]
    outputs: tuple[int, ...]

    def graph(self) -> Graph:
        """The TRACED graph of the recipe."""
        key = DECODE if self.rows == 1 else GraphKey(Mode.VERIFY, self.rows)
        state = TensorType((1 + CONTEXT // 16, 2, 1, 16, WIDTH // HEADS), Format.F32)
        return trace(self.program, key, self.weights(), dict.fromkeys(STATES, state), "recipe")

    def weights(self) -> dict[str, TensorType]:
        """Types of all weights that a step may name."""
        vector, table = TensorType((WIDTH,), Format.F32), TensorType((CONTEXT, 4), Format.F32)
        types = {"cos": table, "sin": table, "ids": TensorType((VOCAB,), Format.I32)}
        for i in range(4):
            types[f"norm.{i}"] = types[f"bias.{i}"] = vector
            types[f"square.{i}"] = TensorType((WIDTH, WIDTH), self.format)
            types[f"kv.{i}"] = TensorType((WIDTH // HEADS, WIDTH), self.format)
            types[f"double.{i}"] = TensorType((WIDTH, 2 * WIDTH), self.format)
            types[f"head.{i}"] = TensorType((VOCAB, WIDTH), self.format)
        return types

    def program(self, scope: Scope) -> None:
        """Writes the recipe in ops."""
        line = _Line(scope, self.rows)
        values = [ops.embed(scope.input("ids", self.rows), scope.weight("head.0"))]
        for step in self.steps:
            a, b = values[step.a % len(values)], values[step.b % len(values)]
            values.append(STEPS[step.what](line, a, b, str(step.weight)))
        chosen = dict.fromkeys(o % len(values) for o in self.outputs)
        for number in chosen:
            scope.output(f"value.{number}", values[number])


class _Line:
    """What one step of a recipe may ask of the scope."""

    def __init__(self, scope: Scope, rows: int) -> None:
        self.scope, self.rows, self.w = scope, rows, scope.weight

    def index(self, name: str) -> Any:
        shape = (1, CONTEXT // 16) if name == "tables" else (self.rows,)
        return self.scope.input(name, *shape)

    def rotated(self, x: Any, heads: int) -> Any:
        split = ops.split_heads(x, heads=heads)
        return ops.rope(split, self.index("positions"), self.w("cos"), self.w("sin"))


def _attend(line: _Line, a: Any, b: Any, w: str) -> Any:
    """A write to a state and a read of what was written; `attend old` reads what was there."""
    name = STATES[int(w) % 2]
    k, v = (ops.linear(x, line.w(f"kv.{(int(w) + i) % 4}")) for i, x in enumerate((a, b)))
    slots = ops.slot_at(*map(line.index, ("tables", "row_sequence", "indices")))
    written = ops.kv_write(
        line.scope.state(name), line.rotated(k, 1), ops.split_heads(v, heads=1), slots
    )
    line.scope.update(name, written)
    return _read(line, a, b, w)


def _read(line: _Line, a: Any, b: Any, w: str) -> Any:
    seen = ops.attention(
        line.rotated(a, HEADS), line.scope.state(STATES[int(w) % 2]),
        *map(line.index, ("tables", "row_sequence", "indices")), scale=0.3,
    )  # fmt: skip
    return ops.merge_heads(ops.sigmoid_gate(seen, ops.split_heads(b, heads=HEADS)))


def _chosen(line: _Line, a: Any, b: Any, w: str) -> Any:
    """The embedding of the token that a scored row chooses."""
    token = ops.argmax(ops.linear(a, line.w(f"head.{w}")))
    return ops.embed(ops.take(token, line.w("ids")), line.w(f"head.{w}"))


def _halves(line: _Line, a: Any, b: Any, w: str) -> Any:
    half = WIDTH // 2
    return ops.concat(ops.columns(a, start=half, stop=WIDTH), ops.columns(b, start=0, stop=half))


def _swiglu(line: _Line, a: Any, b: Any, w: str) -> Any:
    other = f"square.{(int(w) + 1) % 4}"
    return ops.silu_mul(ops.linear(a, line.w(f"square.{w}")), ops.linear(a, line.w(other)))


STEPS: dict[str, Callable[[_Line, Any, Any, str], Any]] = {
    "linear": lambda line, a, b, w: ops.linear(a, line.w(f"square.{w}")),
    "norm": lambda line, a, b, w: ops.rms_norm(a, line.w(f"norm.{w}"), eps=1e-5),
    "add": lambda line, a, b, w: ops.add(a, b),
    "bias": lambda line, a, b, w: ops.add_bias(a, line.w(f"bias.{w}")),
    "gate": lambda line, a, b, w: ops.sigmoid_gate(a, b),
    "zero": lambda line, a, b, w: ops.zero_at(a, line.index("positions"), at=int(w)),
    "pair": lambda line, a, b, w: ops.linear(ops.concat(a, b), line.w(f"double.{w}")),
    "whole": lambda line, a, b, w: ops.columns(a, start=0, stop=WIDTH),
    "folded": lambda line, a, b, w: ops.merge_heads(ops.split_heads(a, heads=HEADS)),
    "halves": _halves, "swiglu": _swiglu, "attend": _attend, "read": _read, "chosen": _chosen,
}  # fmt: skip

_step = st.builds(
    Step, st.sampled_from(sorted(STEPS)), st.integers(0, 9), st.integers(0, 9), st.integers(0, 3)
)
recipes = st.builds(
    Recipe,
    rows=st.integers(1, 3),
    format=st.sampled_from([Format.F32, Format.BF16, Format.Q8_0, Format.Q4_1]),
    steps=st.lists(_step, min_size=1, max_size=9).map(tuple),
    outputs=st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple),
)
facts = st.builds(
    Facts,
    activation=st.sampled_from([{}, {f: Format.Q8_0 for f in Format if f.is_block}]),
    interleave=st.sampled_from([None, 8, 16]),
    argmax_tile=st.sampled_from([None, 64, 128]),
    recompute=st.booleans(),
    fuse=st.sampled_from([True, True, True, False]),
)
