"""The C++ backend: what the processor can do, which kernels there are, how they are built."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path

import numpy as np

from codegen.backend import Backend, Report, silent
from codegen.cpp_dialect import PANELS
from codegen.cpp_emit import emit_kernel
from codegen.cpp_pack import panel_bytes, panels_bytes, to_panels
from codegen.cpp_source import FOLDER, CppSchedule, templates
from codegen.device import machine_facts
from codegen.kernel import Kernel
from codegen.lower import Lowered, Operand
from codegen.plan import Plan
from codegen.store import KernelStore
from codegen.toolchain import Compiler, compile_objects, find_compiler, link_library
from ir.errors import CircuitError
from ir.format import BLOCK, Format, TensorType
from ir.graph import Role
from ir.op import Value

_LEVELS = (  # (extension that the system reports, compiler flag), from the base upward
    ("avx2", "-mavx2"), ("fma", "-mfma"), ("f16c", "-mf16c"), ("bmi2", "-mbmi2"),
    ("avx512f", "-mavx512f"), ("avx512bw", "-mavx512bw"), ("avx512vl", "-mavx512vl"),
    ("avx512dq", "-mavx512dq"), ("avx512_vnni", "-mavx512vnni"), ("avx512_bf16", "-mavx512bf16"),
)  # fmt: skip
_AVX2, _AVX512 = 4, 8  # how many of these a processor must have for each family
_FLAGS = (
    "-std=c++17", "-O3", "-fPIC", "-fvisibility=default", "-ffp-contract=off", "-fno-math-errno",
    "-fno-trapping-math", "-pthread",
)  # fmt: skip
_ATTENTION = ("attention", "tree_attention")
HEADERS = ("program.h", "simd.h", "lanes.h", "team.h", "keys.h", "products.h", "blocks.h")


class UnknownExtension(CircuitError):
    says = "instruction-set extension {name} is not one of {known}"
    hint = "leave it out to use what the processor has"


def chosen_extensions(reported: Iterable[str], limit: str | None = None) -> tuple[str, ...]:
    """The extensions to compile for, out of those that the system reports.

    `limit` names a family to stay within: `avx2` or `plain`. None uses all that the templates know.
    """
    if limit not in (None, "avx2", "avx512", "plain"):
        raise UnknownExtension(name=limit, known="avx512, avx2, plain")
    names = [name for name, _ in _LEVELS]
    has = set(reported)
    wide = has.issuperset(names[:_AVX512]) and limit in (None, "avx512")
    if limit == "plain" or not has.issuperset(names[:_AVX2]):
        return ()
    return tuple(n for n in names if n in has) if wide else tuple(names[:_AVX2])


class CppBackend(Backend):
    """Emits C++17 and builds it with the compiler of the machine."""

    name = "cpp"
    working = Format.F32

    def __init__(self, cxx: str | None = None, extensions: str | None = None) -> None:
        """`cxx`: the compiler's command (None: the first that is found);
        `extensions`: a family's limit.
        """
        self._cxx = cxx
        self.extensions = chosen_extensions(machine_facts()["isa"].split(), extensions)

    @cached_property
    def compiler(self) -> Compiler:
        """The compiler, looked for at the first use."""
        return find_compiler(self._cxx)

    # -- formats -----------------------------------------------------------------------------------

    def supports(self, weight: Format) -> bool:
        """f32, bf16 and the block formats are read in place."""
        return weight in (Format.F32, Format.BF16) or weight.is_block

    def activation_format(self, weight: Format) -> Format | None:
        """bf16 beside bf16, int8 blocks beside block formats, nothing beside f32."""
        if weight.is_block:
            return Format.Q8_0
        return Format.BF16 if weight is Format.BF16 else None

    def state_format(self, weight: Format) -> Format:
        """f32 beside f32, bf16 beside bf16, f16 beside block formats."""
        return Format.F16 if weight.is_block else weight

    def problems(self, lowered: Lowered) -> list[str]:
        """Anchors without a template, and weights that no kernel reads."""
        if lowered.anchor is None:
            return []
        name = lowered.anchor.target.name
        if not (FOLDER / f"{name}.j2").exists():
            return [f"op {name} has no C++ template"]
        if name != "linear":
            return []
        found, weight = [], lowered.direct.get("weight")
        if weight is None:
            return ["a weight of `linear` is computed, not stored"]
        format = weight.type.format
        if not self.supports(format):
            found.append(f"weights in {format.value} are not read in place")
        if format.is_block and weight.type.shape[1] % BLOCK:
            found.append(f"rows of {weight.type.shape[1]} columns are not whole blocks of {BLOCK}")
        if lowered.attributes["activation"] is not self.activation_format(format):
            found.append(f"activations must be rounded for weights in {format.value}")
        return found

    # -- schedules ---------------------------------------------------------------------------------

    def schedules(self, lowered: Lowered) -> Iterable[CppSchedule]:
        """Tiles of up to 8 rows by 4 panels for products; tiles of rows for attention."""
        name = lowered.anchor.target.name if lowered.anchor is not None else ""
        rows = lowered.dims.get("m", 1)
        if name in _ATTENTION:
            return [CppSchedule(rows=r) for r in (1, 2, 4, 8, 16) if r <= rows]
        if name != "linear":
            return [CppSchedule()]
        tiles = [(r, p) for r in (1, 2, 3, 4, 6, 8) for p in (1, 2, 3, 4) if r <= rows]
        return [
            CppSchedule(r, p, chunk, shared)
            for r, p in tiles for chunk in (1, 2, 4, 8) for shared in (False, True)
        ]  # fmt: skip

    def cost(self, lowered: Lowered, schedule: CppSchedule) -> float:
        """Seconds by a simple model: bytes against arithmetic, plus what a poor cut adds."""
        name = lowered.anchor.target.name if lowered.anchor is not None else ""
        m = lowered.dims.get("m", 1)
        if name in _ATTENTION:
            best = 1 if m == 1 else 2 if m <= 4 else 4 if m <= 8 else 8
            return abs(schedule.rows - best)
        if name != "linear":
            return 0.0
        weight = lowered.direct["weight"].type
        unit = schedule.panels * panel_bytes(weight)
        units = -(-weight.shape[0] // (16 * schedule.panels))
        wanted = max(1, min(1 << 16, weight.nbytes // 10) // unit)
        rows = _tile_rows(m)
        return (
            10 * abs(schedule.rows - rows)
            + 5 * (4 - schedule.panels)
            + 100 * _idle(units)
            + abs(schedule.chunk - min(wanted, max(1, units // 6)))
            + (schedule.shared != (m >= 4))
        )

    # -- layouts -----------------------------------------------------------------------------------

    def layout(self, lowered: Lowered, operand: Operand) -> str | None:
        """Panels for the weight of a product and for every block format; any layout elsewhere."""
        if operand.role is not Role.WEIGHT or len(operand.type.shape) != 2:
            return None
        product = operand is lowered.direct.get("weight")
        return PANELS if product or operand.type.format.is_block else None

    def packed_bytes(self, type: TensorType, layout: str) -> int:
        """Bytes of a weight in panels."""
        assert layout == PANELS
        return panels_bytes(type)

    def pack(self, value: Value, layout: str) -> np.ndarray:
        """The weight in panels."""
        assert layout == PANELS
        return to_panels(value)

    # -- code --------------------------------------------------------------------------------------

    def emit(self, lowered: Lowered, schedule: CppSchedule, layouts: Mapping[str, str]) -> Kernel:
        """The kernel of the region."""
        return emit_kernel(lowered, schedule, layouts)

    def unit(self, plan: Plan, kernels: Sequence[Kernel], declared: Sequence[Kernel]) -> str:
        """The translation unit of a plan."""
        counts = [len(launch.arguments) for launch in plan.launches]
        firsts = [0, *accumulate(counts)]
        return templates().get_template("unit.j2").render(
            plan=plan, kernels=kernels, declared=declared, most=max(counts, default=1),
            launches=list(zip(plan.launches, firsts)),
        )  # fmt: skip

    def build(
        self, units: Mapping[str, str], store: KernelStore, report: Report = silent
    ) -> dict[str, Path]:
        """`program.so` of all units, and `team.so`, the threads that programs share."""
        headers = {name: (FOLDER / name).read_text() for name in HEADERS}
        flags = (*_FLAGS, *self._machine_flags())
        team = {"team": (FOLDER / "team.cpp").read_text()}
        objects = compile_objects(self.compiler, {**team, **units}, flags, headers, store, report)
        link = ("-pthread",)
        shared = {"team": objects.pop("team")}
        return {
            "program.so": link_library(self.compiler, "program.so", objects, link, store),
            "team.so": link_library(self.compiler, "team.so", shared, link, store),
        }

    def sources(self, units: Mapping[str, str]) -> dict[str, str]:
        """The units, the headers they include and the team."""
        files = {name: (FOLDER / name).read_text() for name in (*HEADERS, "team.cpp")}
        return {**files, **{f"{name}.cpp": text for name, text in units.items()}}

    def _machine_flags(self) -> tuple[str, ...]:
        return tuple(flag for name, flag in _LEVELS if name in self.extensions)

    def facts(self) -> dict[str, str]:
        """The machine with the extensions that kernels use, and the compiler."""
        return {
            **machine_facts(),
            "isa": " ".join(self.extensions),
            "abi": "circuit-1",
            "compiler": self.compiler.version,
            "flags": " ".join((*_FLAGS, *self._machine_flags())),
        }


def _idle(units: int) -> float:
    """The share of time that lanes wait when `units` equal units go
    to teams of 2 and of 4: the mean.
    """
    return sum(-(-units // lanes) * lanes / units - 1 for lanes in (2, 4)) / 2


def _tile_rows(m: int) -> int:
    """Rows of a tile: as few passes over the panels as tiles of up to 4 rows allow."""
    return m if m <= 4 else 4 if m % 4 == 0 or m > 8 else 3


__all__ = ["CppBackend", "CppSchedule", "chosen_extensions"]
