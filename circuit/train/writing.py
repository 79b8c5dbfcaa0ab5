"""The target writes: answers to requests of the list, of its own and of templates, and texts after
bare openings.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass

import torch

from circuit.engine.batch import BatchWriter, Text
from circuit.engine.sampling import Sampling
from circuit.engine.statistics import Finish
from circuit.engine.target import Target
from circuit.models.tokenizer import Tokenizer
from circuit.train.asked import Asked
from circuit.train.prompts import SHARES, Guard, Kind, kind, opening, request, words
from circuit.train.texts import Openings, Written
from runners.base import Runner

GREEDY, WARM, OWN_WARM = 0.88, 0.7, 1.0
LONGEST_REQUEST, SHORTEST_REQUEST, SHORTEST_ANSWER = 90, 3, 4
LOOP, LONGEST_PERIOD = 60, 20
LIKELY, LEAST, FEW, MARGIN, HOPELESS = 0.65, 16, 32, 1.03, 64
MARK = "\u2063MARK\u2063"


@dataclass
class Tally:
    """What is being written: texts begun and ended, and tokens of the usable ones."""

    likely: float
    begun: int = 0
    ended: int = 0
    tokens: int = 0

    def short_of(self, goal: int) -> bool:
        """True while texts have to be begun so that there will be `goal` tokens, and a few texts.

        Texts that are being written count as much as those before them had. A target whose first
        texts are all unusable is asked for no more.
        """
        if self.ended >= HOPELESS and not self.tokens:
            return False
        if self.begun < LEAST:
            return True
        mean = self.tokens / self.ended if self.ended >= FEW else self.likely
        return self.tokens + (self.begun - self.ended) * mean < goal * MARGIN


@dataclass(frozen=True)
class Writer:
    """Writes texts with a target's BATCH programs; no prompt is one that the guard refuses, and no
    answer opens as one that is known.
    """

    runner: Runner
    tokenizer: Tokenizer
    guard: Guard
    asked: Asked
    known: Openings
    answer: int = 256

    def texts(
        self, rng: random.Random, tokens: int, told: Callable[[int], None]
    ) -> list[Written]:  # fmt: skip
        """Texts with about `tokens` tokens of answers; `told(n)`
        hears of the tokens as they come.
        """
        tally = Tally(LIKELY * self.answer)
        likely = tokens / tally.likely * SHARES[Kind.OWN]
        own = iter(self._own_requests(rng, int(likely) + 1))
        found: list[Written] = []
        writer = self._writer(self.answer, keep_hidden=True)
        with closing(writer.write(self._prompts(rng, own, tally, tokens))) as texts:
            for text in texts:
                tally.ended += 1
                written = usable(text, len(text.prompt))
                if written is not None and self.known.add(written):
                    found.append(written)
                    tally.tokens += written.answer
                    told(tally.tokens)
        return found

    def _writer(self, longest: int, keep_hidden: bool = False) -> BatchWriter:
        return BatchWriter(
            self.runner, longest, stop=self.tokenizer.eos_token_ids, keep_hidden=keep_hidden,
            opening=self._before_words(),
        )  # fmt: skip

    def _before_words(self) -> list[int]:
        """What stands before the user's words in the chat template."""
        whole = self.tokenizer.chat([{"role": "user", "content": MARK}])
        return self.tokenizer.encode(whole.split(MARK)[0])

    def _prompts(
        self, rng: random.Random, own: Iterator[str], tally: Tally, goal: int
    ) -> Iterator[tuple[list[int], Sampling]]:
        """Ids of prompts and how they are answered, as many as the goal takes."""
        longest = Target(self.runner).context - self.answer // 2
        while tally.short_of(goal):
            ids, greedy = self._prompt(rng, own)
            if len(ids) <= longest:
                tally.begun += 1
                warmth = 0.0 if greedy and rng.random() < GREEDY else WARM
                yield ids, Sampling(warmth, seed=rng.getrandbits(63))

    def _prompt(self, rng: random.Random, own: Iterator[str]) -> tuple[list[int], bool]:
        """Ids of one prompt of a kind drawn by its share, and whether a greedy answer is new."""
        which, text = kind(rng), None
        if which is Kind.OPENING:
            return self.tokenizer.encode(opening(rng), add_special=True), True
        if which is Kind.OWN:
            text = next(own, None)
        elif which is Kind.TEMPLATE:
            text = request(rng)
        again = False
        if text is None or self.guard.refuses(text):
            again, text = self.asked.again, self.asked.next()
        return self.tokenizer.encode_chat([{"role": "user", "content": text}]), not again

    def _own_requests(self, rng: random.Random, count: int) -> list[str]:
        """Requests that the target makes up where the user's words stand in its chat template."""
        before = self._before_words()
        prompts = ((before, Sampling(OWN_WARM, seed=rng.getrandbits(63))) for _ in range(count))
        known: dict[str, str] = {}
        with closing(self._writer(LONGEST_REQUEST).write(prompts)) as texts:
            for text in sorted(texts, key=lambda t: t.number):
                said = self.tokenizer.decode(text.tokens[:-1], skip_special=True).strip()
                if text.finish is Finish.STOP and len(text.tokens) > SHORTEST_REQUEST:
                    known.setdefault(" ".join(words(said)), said)
        return list(known.values())


def usable(text: Text, start: int) -> Written | None:
    """The text as it is learned from: cut where it goes round in
    circles; None if it says too little.
    """
    tokens = text.tokens[: circle(text.tokens)]
    if len(tokens) < SHORTEST_ANSWER:
        return None
    ids = torch.tensor([*text.prompt, *tokens], dtype=torch.int32)
    hidden = torch.from_numpy(text.hidden[: len(ids) - 1].copy()).bfloat16()
    return Written(ids, hidden, start, text.sampling.greedy)


def circle(tokens: list[int]) -> int:
    """How many tokens are worth keeping: all, or those up to the
    first full round of a repetition.
    """
    for end in range(LOOP, len(tokens) + 1):
        tail = tokens[end - LOOP : end]
        if any(tail[p:] == tail[:-p] for p in range(1, LONGEST_PERIOD + 1)):
            return end
    return len(tokens)
