"""From a binding to everything that an artifact of it holds:
graphs, plans, kernels, packed weights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from codegen.backend import ROWS, Backend, Report, silent
from codegen.kernel import Kernel
from codegen.lower import Lowered, lower
from codegen.plan import Plan, Space
from codegen.planning import make_plan, weight_name
from codegen.schedules import ScheduleBook, region_text
from codegen.store import KernelStore, digest_of, scratch
from ir.binding import Binding
from ir.errors import Unmodelled
from ir.format import Format, TensorType
from ir.graph import Graph, GraphKey, Role, Slot
from ir.interpret import merged_rows
from ir.op import Value
from ir.passes.manager import run_pipeline
from ir.show import text
from ir.tensor import PackedTensor

CHECK_BLOCKS = 9  # of the cache on which passes are checked


@dataclass(frozen=True)
class CompileOptions:
    """Choices of a build. `store` keeps built kernels for later builds (None: nothing is kept).

    `check_meaning` is a seed for interpreting each graph before and after each pass (None: not
    checked). `fuel` bounds the rewrites of each graph (None: all are made).
    """

    book: ScheduleBook = field(default_factory=ScheduleBook)
    store: Path | None = None
    check_meaning: int | None = None
    fuel: int | None = None


@dataclass(frozen=True)
class WeightUse:
    """A weight (or several merged ones) as programs read it."""

    name: str
    layout: str
    slot: Slot

    @property
    def id(self) -> str:
        """`name@layout`."""
        return f"{self.name}@{self.layout}"


@dataclass(frozen=True, eq=False)
class Compiled:
    """One binding, compiled. `sources` and `built` map file names to
    text and to files in the store.
    """

    binding: Binding
    backend: str
    facts: Mapping[str, str]
    plans: Mapping[GraphKey, Plan]
    graphs: Mapping[GraphKey, str]
    sources: Mapping[str, str]
    built: Mapping[str, Path]
    weights: tuple[WeightUse, ...]
    packer: Backend

    @property
    def context(self) -> int:
        """The most rows that one sequence may hold: 16 for each entry
        of the programs' block tables.
        """
        tables = [p.named(Space.INPUT).get("tables") for p in self.plans.values()]
        return max((t.type.shape[-1] * 16 for t in tables if t), default=0)

    @property
    def source(self) -> str:
        """SHA-256 of the checkpoint's weights: names, types and bytes."""
        return weights_digest(self.binding.weights)

    def memory(self) -> dict[str, int]:
        """Bytes of the arena and of each static buffer that the largest program wants."""
        wanted: dict[str, int] = {}
        for plan in self.plans.values():
            sizes = [(Space.ARENA.value, plan.arena_bytes)]
            sizes += [
                (f"{b.space.value}.{b.name}", b.type.nbytes)
                for b in plan.buffers
                if b.space in (Space.INPUT, Space.OUTPUT)
            ]
            for name, nbytes in sizes:
                wanted[name] = max(wanted.get(name, 0), nbytes)
        return wanted

    def packed_bytes(self, use: WeightUse) -> int:
        """Bytes of a packed weight."""
        if use.layout == ROWS:
            return use.slot.type.nbytes
        return self.packer.packed_bytes(use.slot.type, use.layout)

    def packed(self, use: WeightUse) -> np.ndarray:
        """A weight in its layout, uint8."""
        weights, merged = self.binding.weights, use.slot.merged
        value = merged_rows(merged, weights) if merged else weights[use.slot.name]
        if use.layout == ROWS:
            return np.frombuffer(weight_bytes(value), np.uint8)
        data = self.packer.pack(value, use.layout)
        expected = self.packed_bytes(use)
        assert data.dtype == np.uint8 and data.shape == (expected,), (
            f"{use.id}: packed {data.dtype}{data.shape}, announced {expected} bytes"
        )
        return np.ascontiguousarray(data)


def weight_bytes(value: Value) -> memoryview:
    """The bytes of a weight as the checkpoint has it."""
    data = value.data if isinstance(value, PackedTensor) else value
    return memoryview(data.contiguous().reshape(-1).view(torch.uint8).numpy())


def weights_digest(weights: Mapping[str, Value]) -> str:
    """SHA-256 over names, types and bytes of weights, in the order of their names."""
    sha = hashlib.sha256()
    for name in sorted(weights):
        sha.update(f"{name} {TensorType.of(weights[name])}\n".encode())
        sha.update(weight_bytes(weights[name]))
    return sha.hexdigest()


@contextmanager
def kernel_store(path: Path | None, beside: Path) -> Iterator[KernelStore]:
    """The store at `path`, or one that lives in `beside` for the block only."""
    if path is not None:
        yield KernelStore(path)
        return
    with scratch(beside) as folder:
        yield KernelStore(folder)


def compile_binding(
    binding: Binding, keys: Iterable[GraphKey], backend: Backend, options: CompileOptions,
    store: KernelStore, report: Report = silent,
) -> Compiled:  # fmt: skip
    """The programs `keys` of a binding, built. One refusal names
    everything that cannot be compiled.
    """
    keys = list(dict.fromkeys(keys))
    refuse(binding, [*binding.unmodelled, *_mismatches(binding, keys, backend)])
    graphs: dict[GraphKey, Graph] = {}
    lowered: dict[GraphKey, list[Lowered]] = {}
    for done, key in enumerate(keys):
        report(f"{binding.name}: trace and fuse", done, len(keys))
        if options.check_meaning is not None:
            check_passes(binding, key, backend, options.check_meaning)
        facts = backend.pass_facts()
        graphs[key] = run_pipeline(binding.graph(key), facts, fuel=options.fuel)
        lowered[key] = [lower(graphs[key], region) for region in graphs[key].regions()]
    report(f"{binding.name}: trace and fuse", len(keys), len(keys))
    emission = _Emission(backend, options.book)
    refuse(binding, emission.problems(lowered))
    uses = weight_uses(lowered, backend)
    layouts = {use.name: use.layout for use in uses}
    included = sorted(backend.sources({}).items())  # what kernels call is part of what they compute
    dialect = f"{backend.name}/{digest_of(*(text for _, text in included))[:16]}"
    plans, units = {}, {}
    defined: dict[str, Kernel] = {}
    for key in keys:
        regions = [(low, emission.kernel(low, layouts)) for low in lowered[key]]
        plans[key] = make_plan(graphs[key], regions, layouts, dialect)
        wanted = {kernel.name: kernel for _, kernel in regions}
        new = [k for n, k in wanted.items() if n not in defined]
        known = [k for n, k in wanted.items() if n in defined]
        defined |= wanted
        units[str(key)] = backend.unit(plans[key], new, known)
    built = backend.build(units, store, report)
    return Compiled(
        binding, backend.name, backend.facts(), plans, {k: text(g) for k, g in graphs.items()},
        backend.sources(units), built, uses, backend,
    )  # fmt: skip


def check_passes(binding: Binding, key: GraphKey, backend: Backend, seed: int) -> None:
    """Interprets the graph of `key` before and after each pass, and
    raises PassFailed on a difference.

    The cache has few blocks: no meaning depends on how many there are, but the time of a check
    does.
    """
    few = {
        n: replace(t, shape=(min(CHECK_BLOCKS, t.shape[0]), *t.shape[1:]))
        for n, t in binding.states.items()
    }
    graph = replace(binding, states=few).graph(key)
    run_pipeline(graph, backend.pass_facts(), check_meaning=seed, weights=binding.weights)


def refuse(binding: Binding, reasons: Iterable[str]) -> None:
    """Raises the one error that lists `reasons`, each once; nothing when there are none."""
    listed = list(dict.fromkeys(reasons))
    if listed:
        raise Unmodelled(binding=binding.name, count=len(listed), reasons="; ".join(listed))


def _mismatches(binding: Binding, keys: list[GraphKey], backend: Backend) -> list[str]:
    """Keys that the binding does not offer, and weights whose format the backend does not read."""
    reasons = [f"it has no program for {key}" for key in keys if key not in binding.keys]
    formats: dict[Format, list[str]] = {}
    for name, value in binding.weights.items():
        formats.setdefault(TensorType.of(value).format, []).append(name)
    return reasons + [
        f"the {backend.name} backend does not read {format.value} weights ({len(names)}, such "
        f"as {names[0]})"
        for format, names in formats.items()
        if format.is_float and not backend.supports(format)
    ]


class _Emission:
    """Kernels by what their regions say: a region that every layer repeats is emitted once."""

    def __init__(self, backend: Backend, book: ScheduleBook) -> None:
        self.backend = backend
        self.book = book
        self.texts: dict[int, str] = {}
        self.kernels: dict[tuple[str, tuple[tuple[str, str], ...]], Kernel] = {}

    def text(self, lowered: Lowered) -> str:
        """The region's text, computed once."""
        return self.texts.setdefault(id(lowered), region_text(lowered))

    def problems(self, programs: Mapping[GraphKey, list[Lowered]]) -> list[str]:
        """What the backend cannot do of any region, with the line of
        the program that asks for it.
        """
        found: list[str] = []
        seen: set[str] = set()
        for regions in programs.values():
            for lowered in regions:
                if self.text(lowered) in seen:
                    continue
                seen.add(self.text(lowered))
                origin = lowered.nodes[0].meta.get("origin", "?")
                found += [f"{p} ({origin})" for p in self.backend.problems(lowered)]
        return found

    def kernel(self, lowered: Lowered, layouts: Mapping[str, str]) -> Kernel:
        """The kernel of a region under its chosen schedule."""
        own = {o.name: layouts[weight_name(o.slot)] for o in lowered.reads if o.role is Role.WEIGHT}
        key = (self.text(lowered), tuple(sorted(own.items())))
        if key not in self.kernels:
            schedule = self.book.choose(lowered, self.backend)
            self.kernels[key] = self.backend.emit(lowered, schedule, own)
        return self.kernels[key]


def weight_uses(
    programs: Mapping[GraphKey, list[Lowered]], backend: Backend
) -> tuple[WeightUse, ...]:
    """Each weight once, in the layout that its readers want, in the order of first use."""
    wanted: dict[str, dict[str, str]] = {}  # weight -> layout -> the first region that wants it
    slots: dict[str, Slot] = {}
    for regions in programs.values():
        for lowered in regions:
            for operand in lowered.reads:
                if operand.role is Role.WEIGHT:
                    name = weight_name(operand.slot)
                    known = slots.setdefault(name, operand.slot)
                    assert known.merged == operand.slot.merged, f"{name} is merged in two ways"
                    layout = backend.layout(lowered, operand)
                    readers = wanted.setdefault(name, {})
                    if layout is not None:
                        readers.setdefault(layout, lowered.label)
    for name, readers in wanted.items():
        assert len(readers) <= 1, f"{name} is wanted in several layouts: {readers}"
    return tuple(WeightUse(n, next(iter(r), ROWS), slots[n]) for n, r in wanted.items())
