"""The CUDA graph runner: each program is captured once over static
memory, and a step is one replay.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ir.key import GraphKey
from runners.launcher import NoCudaDevice, Resolved, TritonRunner, interpreting


class CudaGraphRunner(TritonRunner):
    """Replays one captured graph per key.

    A graph is captured at the first step of its key, over padding rows only: what it writes while
    it warms up goes to the scratch block. Graphs share one memory pool, since one step runs at a
    time, and hold pointers to buffers that live as long as the runner; `drop_captured` forgets
    them, and the next step captures anew.
    """

    kind = "cuda graph"
    WARM_UPS = 2

    def __init__(self, part, *, blocks: int | None = None, keys: Iterable[GraphKey] | None = None):
        if interpreting():
            raise NoCudaDevice(name=part.binding)
        super().__init__(part, blocks=blocks, keys=keys)
        self._pool_handle = torch.cuda.graph_pool_handle()

    def capture(self, keys: Iterable[GraphKey] | None = None) -> None:
        """Captures programs before their first step; every served one when `keys` is None."""
        with self._lock:
            for key in sorted(self.keys if keys is None else keys, key=str):
                self._ready(key, self.resolve(key))

    def _ready(self, key: GraphKey, program: Resolved) -> None:
        """Captures the program of `key` unless it is captured."""
        if key in self.captured:
            return
        with torch.cuda.device(self.device):
            program.inputs.pad()
            self._warm_up(program)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool_handle, capture_error_mode="thread_local"):
                program.launch()
        self.captured[key] = graph

    def _warm_up(self, program: Resolved) -> None:
        """Runs the launches outside of a capture, so that every kernel is compiled and loaded."""
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            for _ in range(self.WARM_UPS):
                program.launch()
        torch.cuda.current_stream(self.device).wait_stream(side)
        torch.cuda.synchronize(self.device)

    def _launch(self, key: GraphKey, program: Resolved) -> None:
        self.captured[key].replay()

    def drop_captured(self) -> None:
        """Forgets every captured graph once the device has finished with them."""
        if self.captured:
            torch.cuda.synchronize(self.device)
            for graph in self.captured.values():
                graph.reset()
        super().drop_captured()

    def _free(self) -> None:
        super()._free()
        torch.cuda.empty_cache()
