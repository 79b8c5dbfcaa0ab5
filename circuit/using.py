"""The commands that use an artifact: text from it, a check, a benchmark, pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from circuit.report import Record, Screen
from circuit.words import Debug, Folder, Json, PageFormat, Threads, run


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
        int | None,
        typer.Option("--drafts", min=1, max=3, help="Tokens guessed ahead of each check [3]."),
    ] = None,
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

        request = GenerateRequest.read(
            folder=folder, prompt=prompt, chat=chat, max_tokens=max_tokens,
            drafts=drafts, no_draft=no_draft, lookup=lookup, eager=eager, ignore_eos=ignore_eos,
            levers=tuple(lever or ()), lever_file=levers, threads=threads, tree=tree,
        )  # fmt: skip
        return generate_text(request, screen)

    run(action, as_json, debug)


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

    run(action, as_json, debug)


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
            max_tokens=max_tokens, threads=threads, trees=tuple(tree or ()),
        )  # fmt: skip
        return bench_artifact(request, screen)

    run(action, as_json, debug)


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

    run(action, as_json, debug)
