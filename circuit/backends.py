"""The backends by name: what makes kernels, what runs them, what values between them are stored in.

The command line's choice is the only place that names one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from circuit import options
from ir.format import Format

if TYPE_CHECKING:
    from codegen.artifact import Part
    from codegen.backend import Backend
    from runners.base import Runner


Opened = tuple[dict[str, "Runner"], Callable[[], None]]


def _cpp(archs: Sequence[int]) -> Backend:
    from codegen.backend_cpp import CppBackend

    if archs:
        raise options.BadOption(
            name="--archs", given=",".join(map(str, archs)), problem="C++ kernels run on no GPU",
            advice="Leave it out, or give --backend triton.",
        )  # fmt: skip
    return CppBackend(options.compiler())


def _triton(archs: Sequence[int]) -> Backend:
    from codegen.backend_triton import TritonBackend

    return TritonBackend(archs=archs)


BACKENDS: dict[str, Callable[[Sequence[int]], Backend]] = {"cpp": _cpp, "triton": _triton}
"""Backend name -> what makes its kernels; compute capabilities are
compiled for ahead of time where given.
"""


def working_format(backend: str, weights: str) -> Format:
    """What values between kernels are stored in, for a backend and a choice of weights."""
    return Format.BF16 if backend == "triton" and weights != "f32" else Format.F32


def _native(parts: Mapping[str, Part], threads: int | None, blocks: Mapping[str, int]) -> Opened:
    from runners.native import NativeRunner, Team

    team = Team(next(iter(parts.values())), options.threads(threads))
    made = {n: NativeRunner(p, team=team, blocks=blocks[n]) for n, p in parts.items()}
    return made, team.close


def _graphs(parts: Mapping[str, Part], threads: int | None, blocks: Mapping[str, int]) -> Opened:
    from runners.cuda_graph import CudaGraphRunner
    from runners.launcher import TritonRunner, interpreting

    kind = TritonRunner if interpreting() else CudaGraphRunner
    return {n: kind(p, blocks=blocks[n]) for n, p in parts.items()}, lambda: None


RUNNERS: dict[str, Callable[..., Opened]] = {"cpp": _native, "triton": _graphs}
"""Backend name -> runners of parts, given threads and blocks of each, and
the call that frees what they share.
"""
