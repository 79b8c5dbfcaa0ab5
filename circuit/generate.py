"""Text from an artifact, streamed as it comes, with the counts of drafting."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from circuit import options
from circuit.loaded import Loaded, compiled_engine
from circuit.options import BadOption
from circuit.recipe import TARGET
from circuit.report import Record, Screen, UsageError
from proposers.rules.tree_growth import TreeGrowth, parse_tree
from proposers.rules.tree_shape import TreeShape

if TYPE_CHECKING:
    from circuit.engine.engine import Engine
    from circuit.models.tokenizer import Tokenizer
    from proposers.levers import ModelLevers

STDIN, OFF = "-", "off"
MOST_DRAFTS = 3


class NoPrompt(UsageError):
    says = "The prompt is empty."
    hint = "Give some text to --prompt, or write it to stdin with `--prompt -`."


class NotText(UsageError):
    says = "The prompt is not text: byte {index} begins no character."
    hint = "Write UTF-8."


@dataclass(frozen=True)
class GenerateRequest:
    """One generation as it was asked for; `drafts` 0 leaves the head out."""

    folder: Path
    prompt: str
    chat: bool
    max_tokens: int
    drafts: int
    lookup: bool
    eager: bool
    ignore_eos: bool
    threads: int | None
    tree: str = OFF
    levers: tuple[str, ...] = ()
    lever_file: Path | None = None

    @staticmethod
    def read(
        *, drafts: int | None, no_draft: bool, tree: str = OFF, **given: object
    ) -> GenerateRequest:
        """The request that the options stand for; BadOption if two contradict each other."""
        for name, value in (("--drafts", drafts), ("--tree", None if tree == OFF else tree)):
            if no_draft and value is not None:
                raise BadOption(
                    name=name, given=value, problem="--no-draft leaves the draft head out",
                    advice="Leave one of the two out.",
                )  # fmt: skip
        wanted = 0 if no_draft else MOST_DRAFTS if drafts is None else drafts
        return GenerateRequest(drafts=wanted, tree=tree, **given)


def generate_text(request: GenerateRequest, screen: Screen) -> Record:
    """Streams the text that follows the prompt; the record holds it
    with its ids, times and counts.
    """
    levers = options.levers(request.levers, request.lever_file)
    tree_asked(request.tree)
    loaded = Loaded.read(request.folder)
    prompt = prompt_ids(loaded.tokenizer, _text(request.prompt), request.chat)
    drafts = request.drafts if loaded.recipe.heads else 0
    engine, close = open_engine(loaded, request, levers, draft=drafts > 0)
    try:
        return _run(engine, loaded, prompt, drafts, request, screen)
    finally:
        close()


def tree_asked(text: str) -> TreeShape | TreeGrowth | None:
    """The trees that `text` names; None for `off`."""
    return None if text == OFF else parse_tree(text)


def _text(given: str) -> str:
    try:
        text = given if given != STDIN else sys.stdin.read() if sys.stdin else ""
        # bytes that are no text come as halves of characters
        text.encode("utf-8", "surrogateescape").decode("utf-8")
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise NotText(index=error.start) from error
    if not text:
        raise NoPrompt()
    return text


def prompt_ids(tokenizer: Tokenizer, text: str, chat: bool) -> list[int]:
    """The ids of a prompt, as it stands or as the one message of a chat."""
    if chat:
        return tokenizer.encode_chat([{"role": "user", "content": text}])
    return tokenizer.encode(text, add_special=True)


def open_engine(
    loaded: Loaded, request: GenerateRequest, levers: ModelLevers, *, draft: bool
) -> tuple[Engine, Callable[[], None]]:
    """The engine that the request names, compiled or eager, and the call that frees it."""
    if not request.eager:
        return compiled_engine(loaded, request.threads, levers, draft=draft)
    from circuit.eager import eager_engine

    return eager_engine(loaded, request.threads, levers, draft=draft)


def _run(
    engine: Engine, loaded: Loaded, prompt: list[int], drafts: int, request: GenerateRequest,
    screen: Screen,
) -> Record:  # fmt: skip
    tokenizer = loaded.tokenizer
    stop = () if request.ignore_eos else tokenizer.eos_token_ids
    stream, parts = tokenizer.stream(skip_special=True), []

    def show(text: str) -> None:
        parts.append(text)
        screen.stream(text)

    with engine.generate(
        prompt, request.max_tokens, drafts=drafts, stop=stop, lookup=request.lookup,
        tree=tree_asked(request.tree) if drafts else None,
    ) as generation:  # fmt: skip
        for step in generation:
            show(stream.push(*step.tokens))
        show(stream.finish())
        screen.stream("\n")
    counted = generation.statistics
    made = len(generation.tokens)
    rate = (made - 1) / counted.seconds if counted.seconds else 0.0
    record = {
        "text": "".join(parts),
        "token_ids": list(generation.tokens),
        "seconds": counted.prompt_seconds + counted.seconds,
        "tokens_per_second": rate,
        "steps": counted.steps,
        "accepted_per_position": counted.accepted_per_position,
        "mean_accepted_length": counted.mean_accepted_length,
        "plan_digest": loaded.artifact.part(TARGET).digest,
        "drafts": drafts,
        "looked_up_steps": counted.looked_up,
        "eager": request.eager,
        "prompt_tokens": counted.prompt_tokens,
        "prompt_seconds": counted.prompt_seconds,
        "finish": counted.finish.value if counted.finish else None,
        "acceptance_by_width": counted.widths.plain(),
    }
    if drafts and request.tree != OFF:
        record |= {"tree": request.tree, "branched_steps": counted.branched}
    if engine.pace is not None and (found := engine.pace.plain()):
        record["pace"] = found
    if counted.coverage is not None:
        record["shadow_topk"] = counted.coverage.plain()
    if not screen.as_json:
        print(summary(record), file=sys.stderr, flush=True)
    if engine.proposer is not None and engine.proposer.levers.acceptance_log:
        print(*counted.widths.lines(), sep="\n", file=sys.stderr, flush=True)
    return record


def summary(record: Record) -> str:
    """One line on how fast the text came, and how many drafts were taken."""
    line = f"{len(record['token_ids'])} tokens, {record['tokens_per_second']:.1f} per second"
    if record["drafts"]:
        shares = " / ".join(f"{share:.2f}" for share in record["accepted_per_position"])
        line += (
            f"; {record['mean_accepted_length']:.2f} per step with {record['drafts']} drafts"
            f" (accepted: {shares})"
        )
    if record["finish"] == "stop" and len(record["token_ids"]) == 1:
        line += "; the text ended at once: --chat asks as a user would"
    if record["finish"] == "context":
        line += "; the context of the artifact is full: compile with a longer --context"
    return f"[{line}]"
