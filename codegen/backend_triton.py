"""The Triton backend: one generated Python module per plan, for CUDA devices."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from codegen.aot import compile_units
from codegen.backend import ROWS, Backend, Report, silent
from codegen.kernel import Kernel
from codegen.lower import Lowered, Operand
from codegen.plan import Plan
from codegen.schedules import Schedule
from codegen.store import KernelStore, digest_of
from codegen.triton_emit import EMITTERS, emit
from codegen.triton_holes import render
from codegen.triton_pack import SPLIT, pack_split
from codegen.triton_schedule import FEW_ROWS, TritonSchedule, linear_cost, linear_space, width_of
from codegen.triton_tiles import in_tiles, tile_cost, tile_space
from ir.errors import CircuitError
from ir.format import Format, TensorType
from ir.op import Value
from ir.tensor import PackedTensor

_READ = (Format.F32, Format.BF16, Format.F16, Format.Q8_0, Format.Q4_0, Format.Q4_1)


class TritonMissing(CircuitError):
    says = "the Triton backend needs the package triton, which is not installed"
    hint = "install it with `pip install 'circuit[triton]'`"


class TritonBackend(Backend):
    """Kernels for CUDA devices; `archs` (compute capabilities such as 90)
    are compiled ahead of time as well.

    Without `archs` a build holds source text only, and each kernel is compiled when a device first
    runs it.
    """

    name = "triton"
    argmax_tile = 32

    def __init__(self, working: Format = Format.BF16, archs: Sequence[int] = ()) -> None:
        self.working = working
        self.archs = tuple(archs)

    def supports(self, weight: Format) -> bool:
        """True for every float format but f64."""
        return weight in _READ

    def activation_format(self, weight: Format) -> Format | None:
        """None: activations are read in the working format, and
        weights are widened to meet them.
        """
        return None

    def state_format(self, weight: Format) -> Format:
        """f32 for f32 weights, f16 for block formats and f16, bf16 for bf16."""
        return weight if weight in (Format.F32, Format.BF16) else Format.F16

    def problems(self, lowered: Lowered) -> list[str]:
        """Anchors without a template, and reductions over tiles that no program holds whole."""
        if lowered.anchor is None:
            return []
        name = lowered.anchor.target.name
        if name not in EMITTERS:
            return [f"the triton backend has no template for {name}"]
        found = [
            f"{name} wants `{argument}` as a whole buffer, but it is computed inside the region"
            for argument in ("weight", "cache", "tables")
            if argument in lowered.arguments and argument not in lowered.direct
        ]
        width = width_of(lowered)
        if width and width & (width - 1):
            found.append(f"{name} is followed by a reduction over {width} columns, no power of two")
        if name == "linear" and lowered.attributes.get("activation") is not None:
            found.append("the triton backend does not round activations")
        return found

    def schedules(self, lowered: Lowered) -> Iterator[TritonSchedule]:
        """Tile sizes; the order of sums is fixed by the shapes alone and is not among them."""
        name = lowered.anchor.target.name if lowered.anchor is not None else None
        if name == "linear":
            yield from linear_space(lowered)
        elif in_tiles(lowered):
            yield from tile_space(lowered)
        else:
            yield TritonSchedule(warps=4)

    def cost(self, lowered: Lowered, schedule: Schedule) -> float:
        """Seconds of a product, or of attention in tiles; 0 where there is no choice."""
        if in_tiles(lowered):
            return tile_cost(lowered, schedule)
        linear = lowered.anchor is not None and lowered.anchor.target.name == "linear"
        return linear_cost(lowered, schedule) if linear else 0.0

    def layout(self, lowered: Lowered, operand: Operand) -> str:
        """Rows as they are; quants and scales apart for block formats."""
        return SPLIT if operand.type.format.is_block else ROWS

    def packed_bytes(self, type: TensorType, layout: str) -> int:
        """Bytes of a packed weight: those of its format."""
        return type.nbytes

    def pack(self, value: Value, layout: str) -> np.ndarray:
        """The weight in `layout`, uint8."""
        if isinstance(value, PackedTensor):
            return pack_split(value)
        import torch

        return value.contiguous().reshape(-1).view(torch.uint8).numpy()

    def emit(self, lowered: Lowered, schedule: Schedule, layouts: Mapping[str, str]) -> Kernel:
        """The kernel of the region."""
        return emit(lowered, schedule)

    def unit(self, plan: Plan, kernels: Sequence[Kernel], declared: Sequence[Kernel]) -> str:
        """A Python module with the new kernels and a function of the plan's launches."""
        return render(
            "unit", key=plan.key, digest=plan.digest, kernels=[k.source for k in kernels],
            symbol=plan.symbol, launches=plan.launches,
        )  # fmt: skip

    def build(
        self, units: Mapping[str, str], store: KernelStore, report: Report = silent
    ) -> dict[str, Path]:
        """The modules themselves, and for each of `archs` the cubins with their resource usage."""
        built = {}
        for name, text in self.sources(units).items():
            digest = digest_of("triton unit", text)
            built[name] = store.get(digest, ".py") or store.put(digest, ".py", text.encode())
        if self.archs:
            built |= compile_units(built, self.archs, store, report)
        return built

    def sources(self, units: Mapping[str, str]) -> dict[str, str]:
        """One module per plan."""
        return {f"{name}.py": text for name, text in units.items()}

    def facts(self) -> dict[str, str]:
        """The version of Triton, and the architectures compiled for."""
        try:
            version = importlib.metadata.version("triton")
        except importlib.metadata.PackageNotFoundError as problem:
            raise TritonMissing() from problem
        return {"triton": version, "archs": " ".join(f"sm_{a}" for a in self.archs) or "any"}


def rows_alike(rows: int) -> bool:
    """True if a program of so many rows computes each row as a program of one row does."""
    return rows <= FEW_ROWS
