"""The peers that an artifact is timed against, each as contenders over
the same rows of the same weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from circuit import options
from circuit.bench.circuit_peer import HELD, PROMPT, label_of, random_ids, steps_of
from circuit.bench.llama_peer import LLAMA, LlamaModel, is_installed
from circuit.bench.rounds import Contender
from circuit.feed import in_order
from circuit.recipe import TARGET
from codegen.store import file_digest
from ir.key import DECODE, GraphKey, Mode

if TYPE_CHECKING:
    from circuit.bench.command import BenchRequest
    from circuit.loaded import Loaded
    from codegen.backend import Report
    from runners.base import Runner

EAGER, COMPILED = "eager", "torch.compile"
PEERS = (EAGER, COMPILED, LLAMA)
VERIFIES = tuple(GraphKey(Mode.VERIFY, rows) for rows in (2, 3, 4))
COMPILED_KEYS = {DECODE, *VERIFIES, GraphKey(Mode.CHAIN, 3)}  # a minute of autotuning each


@dataclass
class Found:
    """A peer's contenders, what there is to say about them, and the call that frees the peer."""

    contenders: list[Contender] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    close: Callable[[], None] = lambda: None


def peer_contenders(
    peer: str, loaded: Loaded, runners: Mapping[str, Runner], request: BenchRequest, report: Report
) -> Found:
    """The contenders of `peer` for the programs that the request times."""
    if peer == LLAMA:
        return _llama(loaded, request, report)
    return _torch(peer, loaded, runners, request, report)


def _torch(
    peer: str, loaded: Loaded, runners: Mapping[str, Runner], request: BenchRequest, report: Report
) -> Found:
    """The graphs as plain torch with f32 weights: called op by op, or through `torch.compile`."""
    import torch

    from circuit.bench.torch_peer import TorchProgram, float_weights, serves
    from circuit.bindings import rebind

    torch.set_num_threads(request.threads)
    bound, found = rebind(loaded.artifact), Found()
    for part, runner in runners.items():
        weights = float_weights(bound.bindings[part])
        keys = {k for k in runner.keys if serves(k)}
        if part != TARGET:
            keys &= {DECODE, *(k for k in keys if k.mode is Mode.CHAIN)}
        keys &= request.keys if request.keys is not None else COMPILED_KEYS
        steps = steps_of(loaded, part, runner, frozenset(keys))
        for done, step in enumerate(steps):
            report(f"{peer} {label_of(part, step.key)}", done, len(steps))
            context = PROMPT if step.key.mode is Mode.PREFILL else 2 * HELD
            program = TorchProgram(
                bound.bindings[part], step.key, weights, context, peer == COMPILED
            )

            def call(program=program, step=step) -> None:
                for given in step.feeds:
                    program(given)

            call()
            found.contenders.append(Contender(peer, "f32", step.label, step.rows, call))
            report(f"{peer} {label_of(part, step.key)}", len(steps), len(steps))
    return found


def llama_file(loaded: Loaded, report: Report) -> Path | str:
    """A GGUF file of the artifact's very weights; a sentence where there can be none."""
    origin, weights = loaded.recipe.origin, loaded.recipe.choices.weights
    path = Path(origin.path)
    if not is_installed():
        return "llama.cpp is left out: llama-cpp-python is not installed"
    if path.suffix != ".gguf" or not path.is_file():
        return "llama.cpp is left out: the artifact was not compiled from a GGUF file"
    if file_digest(path) != origin.sha256:
        return f"llama.cpp is left out: {path} is not the file that was compiled"
    if weights == "native":
        return path
    from circuit.bench.gguf_copy import gguf_copy
    from circuit.models.convert import WeightOption

    report(f"{LLAMA}: write the weights as {weights}", 0, 1)
    name = f"{path.stem}-{origin.sha256[:12]}"
    made = gguf_copy(path, WeightOption(weights), options.cache_dir() / "peers", name)
    report(f"{LLAMA}: write the weights as {weights}", 1, 1)
    return made


def _llama(loaded: Loaded, request: BenchRequest, report: Report) -> Found:
    """Steps of 1 to 4 rows after 64 tokens, and a prompt of 512, in
    llama.cpp on the same weights.
    """
    path = llama_file(loaded, report)
    if isinstance(path, str):
        return Found(notes=[path])
    model, found = LlamaModel(path, request.threads), Found()
    found.close = model.close
    ids = [int(i) for i in random_ids(loaded.recipe.config.vocab_size, HELD + PROMPT)]
    weights = loaded.recipe.choices.weights
    wanted = loaded.artifact.part(TARGET).keys
    for key in in_order(k for k in wanted if request.keys is None or k in request.keys):
        if key in (DECODE, *VERIFIES):
            call = _llama_step(model, ids, key.rows)
            found.contenders.append(Contender(LLAMA, weights, str(key), key.rows, call))
        elif key.mode is Mode.PREFILL:
            call = _llama_prompt(model, ids)
            found.contenders.append(Contender(LLAMA, weights, "PREFILL", PROMPT, call))
    return found


def _llama_step(model: LlamaModel, ids: list[int], rows: int) -> Callable[[], None]:
    def call() -> None:
        if model.held < HELD:
            model.trim(0)
            model.step(ids[:HELD], 0, every_row=False)
        model.trim(HELD)
        model.step(ids[HELD : HELD + rows], HELD, every_row=True)

    return call


def _llama_prompt(model: LlamaModel, ids: list[int]) -> Callable[[], None]:
    def call() -> None:
        model.trim(0)
        model.step(ids[:PROMPT], 0, every_row=False)

    return call
