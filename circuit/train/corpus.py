"""The texts of a run: what its folder holds, and what is missing, written shard by shard."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from circuit.loaded import Loaded
from circuit.pipeline import CompileRequest, compile_model
from circuit.recipe import TARGET
from circuit.report import Report, Screen
from circuit.train.asked import Asked
from circuit.train.errors import TooFewTexts
from circuit.train.prompts import Guard
from circuit.train.texts import SHARD, Openings, Written, read_shard, save_shard, shards
from circuit.train.writing import Writer

CONTEXT, SHARD_TOKENS, FEWEST = 512, 20_000, 8
BATCHES, SEQUENCES = "8,16,32,64", 64
ENOUGH = 0.99  # of the tokens that were asked for: a few more texts would take as long as many


@dataclass(frozen=True)
class Wanted:
    """Texts to have: those of `source`, about `tokens` tokens of answers, in `folder`.

    A shard depends on the seed and on the shards before it alone, so that a run which was
    interrupted writes what it would have written.
    """

    source: str
    folder: Path
    tokens: int
    seed: int
    threads: int | None


def corpus(wanted: Wanted, guard: Guard, report: Report) -> list[Written]:
    """The texts in the folder, written as far as they were not there; TooFewTexts if the target
    says nothing of use.
    """
    texts: list[Written] = []
    asked = 0
    for path in shards(wanted.folder):
        more, asked = read_shard(path)
        texts += more
    if sum(t.answer for t in texts) < ENOUGH * wanted.tokens:
        _write(wanted, texts, Asked(guard, wanted.seed, asked), guard, report)
    if len(texts) < FEWEST:
        raise TooFewTexts(count=len(texts))
    return texts


def _write(
    wanted: Wanted, texts: list[Written], asked: Asked, guard: Guard, report: Report
) -> None:  # fmt: skip
    """Adds to `texts`, and to the folder, what is missing."""
    compiled = _compiled(wanted, report)
    runners, free_shared = compiled.runners(wanted.threads, sequences=SEQUENCES + 1)
    writer = Writer(runners[TARGET], compiled.tokenizer, guard, asked, Openings(texts))
    done = sum(t.answer for t in texts)
    try:
        while done < ENOUGH * wanted.tokens:
            number = len(shards(wanted.folder))
            rng = random.Random(f"{wanted.seed} {number}")
            goal = min(SHARD_TOKENS, wanted.tokens - done)
            more = writer.texts(rng, goal, _counter(report, done, wanted.tokens))
            if not more:
                return
            save_shard(wanted.folder / SHARD.format(number), more, asked.count)
            texts += more
            done += sum(t.answer for t in more)
    finally:
        runners[TARGET].close()
        free_shared()


def _counter(report: Report, done: int, total: int) -> Callable[[int], None]:
    report("write texts", min(done, total), total)
    return lambda n: report("write texts", min(done + n, total), total)


def _compiled(wanted: Wanted, report: Report) -> Loaded:
    """The target with its BATCH programs, compiled into the run's folder if it is not there."""
    path = wanted.folder / "target"
    if not path.exists():
        request = CompileRequest.read(
            model=wanted.source, out=path, draft=None, weights="native", backend="cpp",
            context=CONTEXT, batch=BATCHES, trees="", check=False,
        )  # fmt: skip
        compile_model(request, _Stages(report))
    return Loaded.read(path)


class _Stages(Screen):
    """A screen whose progress are stages of another's, and that says nothing: a terminal shows the
    bars of one display at a time.
    """

    def __init__(self, report: Report) -> None:
        super().__init__(as_json=True)
        self._report = report

    def say(self, line: str = "") -> None:
        """Leaves the line out."""

    @contextmanager
    def progress(self, title: str) -> Iterator[Report]:
        """Gives the other's report."""
        yield self._report
