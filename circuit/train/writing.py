"""The target writes: answers to requests of ours and of its own, and texts after bare openings."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from circuit.engine.batch import BatchWriter, Text
from circuit.engine.sampling import Sampling
from circuit.engine.statistics import Finish
from circuit.models.tokenizer import Tokenizer
from circuit.train.prompts import Guard, Kind, kind, opening, request, words
from circuit.train.texts import Written
from runners.base import Runner

GREEDY, WARM, OWN_WARM = 0.88, 0.7, 1.0
LONGEST_REQUEST, SHORTEST_REQUEST, SHORTEST_ANSWER = 90, 3, 4
LOOP, LONGEST_PERIOD = 60, 20
MARK = "\u2063MARK\u2063"


@dataclass(frozen=True)
class Writer:
    """Writes texts with a target's BATCH programs; no prompt is one that the guard refuses."""

    runner: Runner
    tokenizer: Tokenizer
    guard: Guard
    answer: int = 256

    def texts(
        self, rng: random.Random, tokens: int, told: Callable[[int], None]
    ) -> list[Written]:  # fmt: skip
        """Texts with about `tokens` tokens of answers; `told(n)`
        hears of the tokens as they come.
        """
        found: list[Written] = []
        done, asked = 0, 0
        while done < tokens:
            count = max(32, (tokens - done) // (self.answer // 2) + 1)
            asked += count
            for text in self._answered(self._prompts(rng, count), rng):
                if (written := usable(text, len(text.prompt))) is not None:
                    found.append(written)
                    done += written.answer
                    told(done)
            if asked > 64 and not found:
                break
        return found

    def _prompts(self, rng: random.Random, count: int) -> list[list[int]]:
        """Ids of `count` prompts or a few less: own requests may be unusable."""
        kinds = [kind(rng) for _ in range(count)]
        own = iter(self._own_requests(rng, kinds.count(Kind.OWN)))
        texts: list[list[int]] = []
        for which in kinds:
            if which is Kind.OPENING:
                texts.append(self.tokenizer.encode(opening(rng), add_special=True))
                continue
            asked = next(own, None) if which is Kind.OWN else request(rng)
            if asked is not None and not self.guard.refuses(asked):
                texts.append(self.tokenizer.encode_chat([{"role": "user", "content": asked}]))
        return texts

    def _own_requests(self, rng: random.Random, count: int) -> list[str]:
        """Requests that the target makes up where the user's words stand in its chat template."""
        whole = self.tokenizer.chat([{"role": "user", "content": MARK}])
        before = self.tokenizer.encode(whole.split(MARK)[0])
        writer = BatchWriter(self.runner, LONGEST_REQUEST, stop=self.tokenizer.eos_token_ids)
        prompts = ((before, Sampling(OWN_WARM, seed=rng.getrandbits(63))) for _ in range(count))
        known: dict[str, str] = {}
        for text in sorted(writer.write(prompts), key=lambda t: t.number):
            said = self.tokenizer.decode(text.tokens[:-1], skip_special=True).strip()
            if text.finish is Finish.STOP and len(text.tokens) > SHORTEST_REQUEST:
                known.setdefault(" ".join(words(said)), said)
        return list(known.values())

    def _answered(self, prompts: list[list[int]], rng: random.Random) -> Iterator[Text]:
        writer = BatchWriter(
            self.runner, self.answer, stop=self.tokenizer.eos_token_ids, keep_hidden=True
        )
        given = [
            (p, Sampling(0.0 if rng.random() < GREEDY else WARM, seed=rng.getrandbits(63)))
            for p in prompts
        ]
        return writer.write(given)


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
