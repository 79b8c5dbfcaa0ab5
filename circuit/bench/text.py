"""Whole texts: an artifact with drafts, without, and llama.cpp on the
same file, prompt by prompt in turns.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING

from circuit import options
from circuit.bench.llama_peer import LLAMA, LlamaModel
from circuit.bench.peers import llama_file
from circuit.engine.engine import Engine
from circuit.engine.statistics import Statistics
from circuit.loaded import Loaded, compiled_engine
from circuit.report import NoSuchPath, Record, Screen, UsageError, table
from proposers.rules.tree_growth import parse_tree

if TYPE_CHECKING:
    from circuit.bench.command import BenchRequest

MOST_DRAFTS = 3


class NotPrompts(UsageError):
    says = "{path} is not a list of prompts: {why}."
    hint = "Give a JSON file that holds a list of texts, such as bench/prompts.json."


@dataclass
class Side:
    """The texts of one contender: tokens and seconds by prompt, and the counts of drafting."""

    peer: str
    drafts: int
    lookup: bool = False
    tree: str = ""
    tokens: list[list[int]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    steps: int = 0
    emitted: int = 0  # tokens of the steps
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    @property
    def rates(self) -> list[float]:
        """Tokens per second of each text, its first token (which the prompt gives) left out."""
        return [(len(t) - 1) / s if s else 0.0 for t, s in zip(self.tokens, self.seconds)]

    def count(
        self, tokens: list[int], seconds: float, statistics: Statistics | None = None
    ) -> None:
        """Adds a text."""
        self.tokens.append(tokens)
        self.seconds.append(seconds)
        if statistics is not None:
            self.steps += statistics.steps
            self.emitted += statistics.acceptance.tokens
            self.drafted = _added(self.drafted, statistics.drafted)
            self.accepted = _added(self.accepted, statistics.accepted)

    def plain(self) -> dict[str, object]:
        """The record as JSON values."""
        return {
            "peer": self.peer,
            "drafts": self.drafts,
            "lookup": self.lookup,
            "tree": self.tree,
            "texts": len(self.tokens),
            "tokens": sum(map(len, self.tokens)),
            "seconds": round(sum(self.seconds), 3),
            "tokens_per_second": round(mean(self.rates), 2),
            "accepted_per_position": [
                round(a / d, 4) for a, d in zip(self.accepted, self.drafted) if d
            ],
            "mean_accepted_length": round(self.emitted / self.steps, 4) if self.steps else None,
        }


def _added(sums: Sequence[int], more: Sequence[int]) -> list[int]:
    size = max(len(sums), len(more))
    padded = [[*row, *[0] * (size - len(row))] for row in (sums, more)]
    return [a + b for a, b in zip(*padded)]


def read_prompts(path: Path, count: int | None) -> list[str]:
    """The first `count` texts of a JSON list; NotPrompts if it holds none."""
    if not path.exists():
        raise NoSuchPath(path=path, hint="Give a JSON file that holds a list of texts.")
    if not path.is_file():
        raise NotPrompts(path=path, why="it is no file")
    try:
        found = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise NotPrompts(path=path, why=str(error)) from error
    if isinstance(found, dict):
        found = found.get("prompts")
    if not isinstance(found, list) or not found or not all(isinstance(p, str) for p in found):
        raise NotPrompts(path=path, why="it holds no list of texts")
    return found[:count]


def bench_texts(loaded: Loaded, request: BenchRequest, screen: Screen) -> dict[str, object]:
    """Times whole texts; the record says how fast each side is and which texts are equal."""
    prompts = read_prompts(request.text, request.prompts)
    notes: list[str] = []
    engine, close = compiled_engine(loaded, request.threads, options.levers())
    model: LlamaModel | None = None
    try:
        with screen.progress("bench") as report:
            if LLAMA in request.peers:
                path = llama_file(loaded, report)
                if isinstance(path, str):
                    notes.append(path)
                else:
                    model = LlamaModel(path, request.threads)
            sides = _sides(loaded, model, _fitting(request.trees, engine))
            for done, prompt in enumerate(prompts):
                report("texts", done, len(prompts))
                ids = loaded.tokenizer.encode_chat([{"role": "user", "content": prompt}])
                for side in sides if done % 2 == 0 else reversed(sides):
                    _write(side, engine, model, ids, request, loaded)
            report("texts", len(prompts), len(prompts))
    finally:
        close()
        if model is not None:
            model.close()
    record = _record(sides, notes)
    _tell(sides, record, screen)
    return record


def _fitting(trees: Sequence[str], engine: Engine) -> list[str]:
    """The trees that the artifact has programs for."""
    return [t for t in trees if parse_tree(t).verify_width <= engine.target.widest_tree]


def _sides(loaded: Loaded, model: LlamaModel | None, trees: Sequence[str]) -> list[Side]:
    sides = [Side("circuit", 0)]
    if loaded.recipe.heads:
        most = MOST_DRAFTS if len(loaded.recipe.heads) == 1 else len(loaded.recipe.heads)
        sides += [Side("circuit", most), Side("circuit", most, lookup=True)]
        if len(loaded.recipe.heads) == 1:
            sides += [Side("circuit", most, tree=tree) for tree in trees]
    return [*sides, Side(LLAMA, 0)] if model is not None else sides


def _write(
    side: Side, engine: Engine, model: LlamaModel | None, ids: list[int],
    request: BenchRequest, loaded: Loaded,
) -> None:  # fmt: skip
    """One text of one side, timed from its first token to its last."""
    stop = frozenset(loaded.tokenizer.eos_token_ids)
    if side.peer == LLAMA:
        side.count(*model.greedy(ids, request.max_tokens, stop))
        return
    with engine.generate(
        ids, request.max_tokens, drafts=side.drafts, stop=stop, lookup=side.lookup,
        tree=parse_tree(side.tree) if side.tree else None,
    ) as generation:  # fmt: skip
        for _ in generation:
            pass
    side.count(list(generation.tokens), generation.statistics.seconds, generation.statistics)


def _name(side: Side) -> str:
    """The key of a side's comparison with the text without drafts."""
    if not side.drafts:
        return side.peer
    if side.tree:
        return f"with_tree_{side.tree}"
    return "with_drafts_and_lookup" if side.lookup else "with_drafts"


def _record(sides: list[Side], notes: list[str]) -> dict[str, object]:
    plain = sides[0]
    record: dict[str, object] = {"rows": [side.plain() for side in sides], "notes": notes}
    for side in sides[1:]:
        name = _name(side)
        equal = sum(a == b for a, b in zip(side.tokens, plain.tokens))
        ratios = [a / b for a, b in zip(side.rates, plain.rates) if b]
        record[name] = {
            "equal_texts": equal,
            "texts": len(plain.tokens),
            "tokens_per_second_ratio": round(mean(ratios), 4) if ratios else None,
        }
    return record


def _title(side: Side) -> str:
    if not side.drafts:
        return side.peer
    if side.tree:
        return f"{side.peer}, trees {side.tree}"
    return f"{side.peer}, {side.drafts} drafts{' and lookup' if side.lookup else ''}"


def _tell(sides: list[Side], record: Record, screen: Screen) -> None:
    rows = []
    for side, plain in zip(sides, record["rows"]):
        shares = " / ".join(f"{share:.2f}" for share in plain["accepted_per_position"])
        length = plain["mean_accepted_length"]
        equal = sum(a == b for a, b in zip(side.tokens, sides[0].tokens))
        rows.append([
            _title(side),
            str(plain["tokens"]), f"{plain['tokens_per_second']:.1f}",
            f"{plain['tokens_per_second'] / record['rows'][0]['tokens_per_second']:.2f}x",
            f"{length:.2f}" if length and side.drafts else "", shares,
            f"{equal} of {len(side.tokens)}",
        ])  # fmt: skip
    headings = ["", "tokens", "tokens/s", "ratio", "per step", "accepted", "equal texts"]
    screen.say(table(headings, rows))
    for note in record["notes"]:
        screen.say(f"note: {note}")
