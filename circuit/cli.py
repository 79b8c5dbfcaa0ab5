"""The commands: options in, one call into the part that does the work, an exit code out.

Nothing heavy is imported before a command runs, so that help is immediate and a compiled artifact
starts fast.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from circuit.report import Record, Screen, carry_out
from circuit.usage import Commands

app = typer.Typer(
    name="circuit",
    cls=Commands,
    help="Compile a language model and its draft head to native code, and generate text with both.",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class WeightChoice(StrEnum):
    """The formats that weights can be compiled in."""

    native = "native"
    f32 = "f32"
    bf16 = "bf16"
    q8_0 = "q8_0"


class BackendChoice(StrEnum):
    """The backends that kernels can be generated for."""

    cpp = "cpp"
    triton = "triton"


class PageFormat(StrEnum):
    """What `circuit show` writes."""

    text = "text"
    svg = "svg"
    html = "html"


Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on stdout, nothing else.")
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Folder = Annotated[Path, typer.Argument(metavar="DIR", help="An artifact of `circuit compile`.")]
Threads = Annotated[
    int | None, typer.Option("--threads", min=1, max=256, help="Threads; by default every core.")
]


def _run(action: Callable[[Screen], Record], as_json: bool, debug: bool) -> None:
    raise typer.Exit(carry_out(action, as_json=as_json, debug=debug))


@app.command()
def fetch(
    model: Annotated[str, typer.Argument(help="`demo`, the model that the examples use.")] = "demo",
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Fetch a model into the cache and print where it is."""

    def action(screen: Screen) -> Record:
        from circuit.sources import fetch_model

        return fetch_model(model, screen)

    _run(action, as_json, debug)


@app.command()
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

    _run(action, as_json, debug)


@app.command()
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

    _run(action, as_json, debug)


@app.command()
def generate(
    folder: Folder,
    prompt: Annotated[
        str, typer.Option("--prompt", "-p", help="The text to go on from; `-`: stdin.")
    ],
    chat: Annotated[
        bool, typer.Option("--chat", help="Put the prompt in the chat template.")
    ] = False,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", min=1)] = 200,
    drafts: Annotated[
        int, typer.Option("--drafts", min=1, max=3, help="Tokens guessed ahead of each check.")
    ] = 3,
    tree: Annotated[
        str,
        typer.Option(
            "--tree", help="Draft trees: nodes by depth as 2,2,1; auto or auto:ROWS; or off."
        ),
    ] = "off",
    no_draft: Annotated[bool, typer.Option("--no-draft", help="Leave the draft head out.")] = False,
    lookup: Annotated[
        bool,
        typer.Option(
            help="Draft from the text itself where it repeats; the head drafts elsewhere."
        ),
    ] = True,
    eager: Annotated[
        bool, typer.Option("--eager", help="Interpret the same programs with torch instead.")
    ] = False,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on past the end-of-text token.")
    ] = False,
    lever: Annotated[
        list[str] | None,
        typer.Option("--lever", help="A switch of drafting, as draft_stop=0.5; may be repeated."),
    ] = None,
    levers: Annotated[
        Path | None, typer.Option("--levers", help="Such switches in TOML, under [levers].")
    ] = None,
    threads: Threads = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Generate text, streamed as it comes."""

    def action(screen: Screen) -> Record:
        from circuit.generate import GenerateRequest, generate_text

        request = GenerateRequest(
            folder=folder, prompt=prompt, chat=chat, max_tokens=max_tokens,
            drafts=0 if no_draft else drafts, lookup=lookup, eager=eager, ignore_eos=ignore_eos,
            levers=tuple(lever or ()), lever_file=levers, threads=threads, tree=tree,
        )  # fmt: skip
        return generate_text(request, screen)

    _run(action, as_json, debug)


@app.command()
def check(
    folder: Folder,
    bisect: Annotated[
        bool, typer.Option("--bisect", help="On a failure, find the first bad rewrite.")
    ] = False,
    keys: Annotated[
        str | None, typer.Option("--keys", help="Only these programs, as DECODE,VERIFY_2.")
    ] = None,
    threads: Threads = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Compare every compiled program with the eager one, and say how much was compared."""

    def action(screen: Screen) -> Record:
        from circuit.check import check_artifact

        return check_artifact(folder, screen, keys=keys, bisect=bisect, threads=threads)

    _run(action, as_json, debug)


@app.command()
def bench(
    folder: Folder,
    peers: Annotated[
        str, typer.Option("--peers", help="Any of eager, torch.compile, llama.cpp.")
    ] = "eager,torch.compile,llama.cpp",
    keys: Annotated[
        str | None, typer.Option("--keys", help="Only these programs, as DECODE,VERIFY_4.")
    ] = None,
    runs: Annotated[int, typer.Option("--runs", min=3, help="Timed rounds.")] = 15,
    text: Annotated[
        Path | None,
        typer.Option("--text", help="Time whole texts instead, for this JSON list of prompts."),
    ] = None,
    prompts: Annotated[
        int | None, typer.Option("--prompts", min=1, help="With --text: how many prompts [all].")
    ] = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", "-n", min=1, help="With --text: tokens of each text.")
    ] = 200,
    tree: Annotated[
        list[str] | None,
        typer.Option("--tree", help="With --text: trees of drafts to time too [auto:4]."),
    ] = None,
    threads: Threads = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Time the artifact and its peers side by side, in rounds that take turns."""

    def action(screen: Screen) -> Record:
        from circuit.bench.command import BenchRequest, bench_artifact

        request = BenchRequest.read(
            folder=folder, peers=peers, keys=keys, runs=runs, text=text, prompts=prompts,
            max_tokens=max_tokens, threads=threads, trees=tuple(tree or ("auto:4",)),
        )  # fmt: skip
        return bench_artifact(request, screen)

    _run(action, as_json, debug)


@app.command()
def show(
    folder: Folder,
    level: Annotated[
        str | None,
        typer.Option("--level", help="traced, typed, fused or ordered: show that graph."),
    ] = None,
    key: Annotated[str, typer.Option("--key", help="The program to show.")] = "DECODE",
    part: Annotated[
        str, typer.Option("--part", help="`target` or `draft`; both if left out.")
    ] = "",
    page: Annotated[PageFormat, typer.Option("--format")] = PageFormat.text,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write there instead of to stdout.")
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show the launches of a program with bytes and flops, its arena, and its graph at a level."""

    def action(screen: Screen) -> Record:
        from circuit.show import ShowRequest, show_artifact

        request = ShowRequest.read(
            folder=folder, level=level, key=key, part=part, format=page.value, out=out
        )
        return show_artifact(request, screen)

    _run(action, as_json, debug)


def main() -> None:
    """Runs the command line."""
    app()


if __name__ == "__main__":
    main()
