"""Kernels of generated modules compiled ahead of time, without a
device, and what they use of one.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from codegen.backend import Report, silent
from codegen.store import KernelStore, digest_of
from ir.errors import CircuitError

_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
_BLOCKED = re.compile(
    r"(#blocked\d*) = #ttg\.blocked<\{sizePerThread = \[\d+, (\d+)\], "
    r"threadsPerWarp = \[\d+, (\d+)\], "
    r"warpsPerCTA = \[\d+, (\d+)\]"
)
_REDUCED = re.compile(
    r"<\{axis = 1 : i32\}>.*?\}\) : \(tensor<\d+x(\d+)xf32, (#blocked\d*)>\)", re.DOTALL
)
LANES = 255
"""Registers that a lane of a one-warp kernel may take: left to itself, the
assembler spills to fit more warps.
"""


class Interpreting(CircuitError):
    says = "kernels cannot be compiled while Triton interprets them"
    hint = "unset TRITON_INTERPRET"


class NoDisassembler(CircuitError):
    says = "the installed triton carries no cuobjdump, so the registers of a kernel cannot be read"
    hint = "install a Triton wheel for Linux on x86-64 or aarch64, version 3.6 to 3.9"


@dataclass(frozen=True)
class Usage:
    """What one kernel uses of a device: registers a thread, bytes of
    stack, of shared and of local memory.

    `shared` is what the cubin reserves, `asked` what a launch asks for besides.
    """

    kernel: str
    arch: int
    registers: int
    stack: int
    shared: int
    local: int
    asked: int

    @property
    def spills(self) -> bool:
        """True if values live in memory that ought to live in registers."""
        return self.stack > 0 or self.local > 0


def load_unit(path: Path) -> ModuleType:
    """The generated module at `path`, under a name of its own."""
    name = "circuit_unit_" + hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def launch_options(warps: int, stages: int) -> dict[str, Any]:
    """The options of a kernel's compilation.

    Products and sums are joined only where a kernel says so, whatever the default of Triton's
    version is.
    """
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": False}
    return options | ({"maxnreg": LANES} if warps == 1 else {})


def compile_kernel(record: tuple[Any, ...], arch: int) -> Any:
    """The kernel of a module's record compiled for a compute capability.

    Buffers start at multiples of 16 bytes or more.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function, _, warps, stages, _, parameters = record
    if not hasattr(function, "cache_key"):
        raise Interpreting()
    names = function.arg_names
    source = ASTSource(
        fn=function,
        signature={n: f"*{type_}" for n, (_, _, type_) in zip(names, parameters, strict=True)},
        constexprs={},
        attrs={
            (i,): [["tt.divisibility", 16]]
            for i, (_, offset, _) in enumerate(parameters)
            if offset % 16 == 0
        },
    )
    target = GPUTarget("cuda", arch, 32)
    return triton.compile(source, target=target, options=launch_options(warps, stages))


def sums_along_k(compiled: Any) -> list[str]:
    """How each float reduction along dimension 1 is spread: its extent, then
    elements, lanes and warps along it.

    Two kernels with the same entries add up a row in the same order.
    """
    text = compiled.asm["ttgir"]
    layouts = {
        name: (size, lanes, warps) for name, size, lanes, warps in _BLOCKED.findall(text)
    }  # fmt: skip
    found = []
    for extent, layout in _REDUCED.findall(text):
        size, lanes, warps = layouts[layout]
        found.append(f"{extent} as {size} x {lanes} x {warps}")
    return sorted(set(found))


def usage(compiled: Any, kernel: str, arch: int) -> Usage:
    """The resource usage that `cuobjdump` of Triton's package reads
    from a compiled kernel's cubin.
    """
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.exists():
        raise NoDisassembler()
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = _USAGE.search(text)
    assert found is not None, f"cuobjdump says nothing of {kernel}: {text}"
    return Usage(kernel, arch, *map(int, found.groups()), compiled.metadata.shared)


def compile_units(
    units: Mapping[str, Path], archs: Iterable[int], store: KernelStore, report: Report = silent
) -> dict[str, Path]:
    """File name -> built file: a cubin per kernel and arch, and
    `usage.json`, the resource usage of all.
    """
    records = {}
    for path in units.values():
        records |= load_unit(path).KERNELS
    jobs = [(name, arch) for arch in archs for name in records]
    built, used = {}, []
    for done, (name, arch) in enumerate(jobs):
        report(f"compile for sm_{arch}", done, len(jobs))
        compiled = compile_kernel(records[name], arch)
        used.append(asdict(usage(compiled, name, arch)))
        cubin = compiled.asm["cubin"]
        digest = digest_of("cubin", name, str(arch), cubin)
        built[f"{name}.sm_{arch}.cubin"] = store.put(digest, ".cubin", cubin)
    report("compile ahead of time", len(jobs), len(jobs))
    data = json.dumps(used, indent=1, sort_keys=True).encode()
    built["usage.json"] = store.put(digest_of("usage", data), ".json", data)
    return built
