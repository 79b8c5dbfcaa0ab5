"""The commands that make things: a model fetched, a head trained, an artifact compiled."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from circuit.report import Record, Screen
from circuit.words import BackendChoice, Debug, Json, Threads, WeightChoice, run


def fetch(
    model: Annotated[str, typer.Argument(help="`demo`, the model that the examples use.")] = "demo",
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Fetch a model into the cache and print where it is."""

    def action(screen: Screen) -> Record:
        from circuit.sources import fetch_model

        return fetch_model(model, screen)

    run(action, as_json, debug)


def train(
    model: Annotated[str, typer.Argument(help="A GGUF file, a folder, a hub id, or `demo`.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The head's safetensors file to write.")],
    tokens: Annotated[
        int, typer.Option("--tokens", min=1, help="Tokens of answers that the target writes.")
    ] = 2_000_000,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Updates of the head.")] = 3500,
    seed: Annotated[int, typer.Option("--seed", min=0)] = 0,
    draft_vocab: Annotated[
        int, typer.Option("--draft-vocab", min=16, help="Ids that the head scores.")
    ] = 8192,
    batch_rows: Annotated[
        int, typer.Option("--batch-rows", min=1, help="Tokens of answers in one update.")
    ] = 4096,
    batch_columns: Annotated[
        int,
        typer.Option("--batch-columns", min=16, help="Ids scored in one update, but for the last."),
    ] = 3072,
    learning_rate: Annotated[
        float, typer.Option("--learning-rate", min=0.0, help="Of the head's matrices.")
    ] = 1e-3,
    keep_out: Annotated[
        Path | None,
        typer.Option("--keep-out", help="JSON list of prompts that no text may begin with."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with a run that was interrupted.")
    ] = False,
    threads: Threads = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Train a draft head on text that the model writes itself. Ctrl-C pauses; --resume goes on."""

    def action(screen: Screen) -> Record:
        from circuit.train.command import TrainRequest, train_head

        request = TrainRequest(
            model=model, out=out, tokens=tokens, steps=steps, seed=seed, draft_vocab=draft_vocab,
            batch_rows=batch_rows, batch_columns=batch_columns, learning_rate=learning_rate,
            resume=resume, keep_out=keep_out, threads=threads,
        )  # fmt: skip
        return train_head(request, screen)

    run(action, as_json, debug)


def compile(
    model: Annotated[str, typer.Argument(help="A GGUF file, a folder, a hub id, or `demo`.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder to write.")],
    draft: Annotated[
        str | None, typer.Option("--draft", help="A draft head's safetensors file, or `demo`.")
    ] = None,
    weights: Annotated[
        WeightChoice, typer.Option("--weights", help="The target's weights; `native`: as stored.")
    ] = WeightChoice.native,
    backend: Annotated[BackendChoice, typer.Option("--backend")] = BackendChoice.cpp,
    context: Annotated[
        int | None, typer.Option("--context", min=16, help="Longest text, in tokens [2048].")
    ] = None,
    batch: Annotated[
        str, typer.Option("--batch", help="Widths of the programs for several sequences.")
    ] = "2,4,8,16",
    trees: Annotated[
        str, typer.Option("--trees", help="Rows of the programs that verify trees of drafts.")
    ] = "4,6,8",
    archs: Annotated[
        str, typer.Option("--archs", help="Compile Triton kernels ahead of time too: 80,90,100.")
    ] = "",
    check: Annotated[
        bool, typer.Option("--check", help="Check each pass by its meaning, then the result.")
    ] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Compile a model, and a draft head for it, into an artifact."""

    def action(screen: Screen) -> Record:
        from circuit.pipeline import CompileRequest, compile_model

        request = CompileRequest.read(
            model=model, out=out, draft=draft, weights=weights.value, backend=backend.value,
            context=context, batch=batch, trees=trees, archs=archs, check=check,
        )  # fmt: skip
        return compile_model(request, screen)

    run(action, as_json, debug)
