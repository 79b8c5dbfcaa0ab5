"""The backends by name; the command line's choice is the only place that names one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from circuit import options

if TYPE_CHECKING:
    from codegen.backend import Backend


def _cpp() -> Backend:
    from codegen.backend_cpp import CppBackend

    return CppBackend(options.compiler())


def _triton() -> Backend:
    from codegen.backend_triton import TritonBackend

    return TritonBackend()


BACKENDS: dict[str, Callable[[], Backend]] = {"cpp": _cpp, "triton": _triton}
