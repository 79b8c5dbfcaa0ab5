"""How fast this machine reads memory: the floor under every step that reads its weights once."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np

from circuit import options
from codegen.backend import silent
from codegen.store import KernelStore
from codegen.toolchain import compile_objects, find_compiler, link_library

BYTES = 256 << 20  # far more than any cache holds
AHEAD = (0, 1024, 4096)
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fPIC", "-pthread")


class Reader:
    """A block of memory and the compiled loop that reads it with a number of threads."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._data = np.ones(BYTES // 8, np.uint64)
        compiler, store = find_compiler(options.compiler()), KernelStore(options.kernel_dir())
        source = (Path(__file__).parent / "read.cpp").read_text()
        objects = compile_objects(compiler, {"read": source}, FLAGS, {}, store, silent)
        path = link_library(compiler, "read.so", objects, ("-pthread",), store)
        self._read = ctypes.CDLL(str(path)).circuit_read
        self._read.restype = ctypes.c_double
        self._read.argtypes = [
            ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_size_t, ctypes.c_int,
        ]  # fmt: skip

    def gigabytes_per_second(self, passes: int = 3) -> float:
        """The best rate of `passes` passes at each prefetch distance, in 1e9 bytes per second."""
        best = min(
            self._read(self._data.ctypes.data, BYTES, self._threads, ahead, passes)
            for ahead in AHEAD
        )
        return BYTES / best / 1e9
