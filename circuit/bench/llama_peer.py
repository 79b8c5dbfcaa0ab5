"""The peer `llama.cpp`, through the llama-cpp-python package where it is installed."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Sequence
from pathlib import Path

from ir.errors import CircuitError

LLAMA = "llama.cpp"
CONTEXT = 1024


def is_installed() -> bool:
    """True if llama-cpp-python can be imported."""
    return importlib.util.find_spec("llama_cpp") is not None


class StepRefused(CircuitError):
    says = "llama.cpp refuses a step of {tokens} tokens with code {code}"
    hint = "leave it out with --peers"


class LlamaModel:
    """A GGUF file in llama.cpp: one step over given tokens, greedy
    texts, in sequence 0 of its cache.
    """

    def __init__(self, path: Path, threads: int, context: int = CONTEXT) -> None:
        import llama_cpp

        self._api = llama_cpp
        self._model = llama_cpp.Llama(
            str(path), n_ctx=context, n_threads=threads, n_threads_batch=threads,
            n_batch=512, n_ubatch=512, verbose=False,
        )  # fmt: skip
        self._context = self._model._ctx.ctx
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._vocabulary = self._model.n_vocab()
        self.held = 0  # rows in its cache

    def trim(self, rows: int) -> None:
        """Keeps the first `rows` rows of the sequence."""
        self.held = min(rows, self.held)
        if rows:
            self._api.llama_memory_seq_rm(self._memory, 0, rows, -1)
        else:
            self._api.llama_memory_clear(self._memory, True)

    def step(self, tokens: Sequence[int], first: int, every_row: bool) -> None:
        """Runs `tokens` at positions from `first` on; logits of every row, or of the last alone."""
        batch = self._api.llama_batch_init(len(tokens), 0, 1)
        try:
            batch.n_tokens = len(tokens)
            for at, token in enumerate(tokens):
                batch.token[at], batch.pos[at] = int(token), first + at
                batch.n_seq_id[at], batch.seq_id[at][0] = 1, 0
                batch.logits[at] = int(every_row or at == len(tokens) - 1)
            code = self._api.llama_decode(self._context, batch)
            self._api.llama_synchronize(self._context)
        finally:
            self._api.llama_batch_free(batch)
        if code != 0:
            raise StepRefused(code=code, tokens=len(tokens))
        self.held = first + len(tokens)

    def greedy(
        self, prompt: Sequence[int], count: int, ends: frozenset[int]
    ) -> tuple[list[int], float]:
        """The greedy continuation of `prompt`, up to `count` tokens or
        an end token, and its seconds.

        Seconds count from the first token (which the prompt gives) to the last.
        """
        import numpy as np

        self.trim(0)
        self.step(prompt, 0, every_row=False)
        made: list[int] = []
        start = time.perf_counter()
        while len(made) < count:
            row = self._api.llama_get_logits_ith(self._context, -1)
            made.append(int(np.ctypeslib.as_array(row, (self._vocabulary,)).argmax()))
            if made[-1] in ends:
                break
            self.step([made[-1]], len(prompt) + len(made) - 1, every_row=True)
        return made, time.perf_counter() - start

    def close(self) -> None:
        """Frees the model."""
        self._model.close()
