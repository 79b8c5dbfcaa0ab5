"""Many texts at once: each step computes one row of every live
sequence, and a finished one makes room.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from circuit.engine.errors import EmptyPrompt, NoBatch, NotANumber, PromptTooLong
from circuit.engine.sampling import Sampling
from circuit.engine.statistics import Finish
from circuit.engine.target import Target
from ir.key import DECODE, Mode
from runners.base import Runner
from runners.kv import Lease
from runners.rows import Lane, index_inputs, padded


@dataclass
class Text:
    """One text while it is written and after: `number` counts prompts in the order given.

    `hidden` [prompt + tokens - 1, n] are the target's hiddens of all its rows, if they are kept.
    """

    number: int
    prompt: Sequence[int]
    sampling: Sampling
    tokens: list[int] = field(default_factory=list)
    finish: Finish | None = None
    hiddens: list[np.ndarray] = field(default_factory=list, repr=False)
    lease: Lease | None = field(default=None, repr=False)

    @property
    def hidden(self) -> np.ndarray:
        """The hiddens of all rows in order."""
        return np.concatenate(self.hiddens)


class BatchWriter:
    """Writes texts with the BATCH programs of a target, at most `width` of them at a time.

    The tokens of a text are those that it would have alone, where rows do not depend on the width
    of their program. A text ends with a stop id, after `max_tokens`, or with the context.
    """

    def __init__(
        self, runner: Runner, max_tokens: int, *, stop: Collection[int] = (),
        width: int | None = None, keep_hidden: bool = False, hidden_output: str = "hidden",
    ) -> None:  # fmt: skip
        self.target = Target(runner, hidden_output)
        self.runner = runner
        self.max_tokens, self.stop, self.keep_hidden = max_tokens, frozenset(stop), keep_hidden
        widest = max(runner.widest(Mode.BATCH), 1)
        self.width = widest if width is None else width
        if not 1 <= self.width <= widest:
            raise NoBatch(width=self.width, widest=widest)

    def write(self, prompts: Iterable[tuple[Sequence[int], Sampling]]) -> Iterator[Text]:
        """The texts after `prompts`, each as soon as it is finished;
        prompts are read when there is room.
        """
        waiting = enumerate(prompts)
        live: list[Text] = []
        try:
            more = True
            while live or more:
                while more and len(live) < self.width:
                    given = next(waiting, None)
                    more = given is not None
                    if given is not None:
                        number, (prompt, sampling) = given
                        live.append(Text(number, prompt, sampling))
                        self._begin(live[-1])
                for text in [t for t in live if t.finish is not None]:
                    live.remove(text)
                    text.lease.close()
                    yield text
                if live:
                    self._step(live)
        finally:
            for text in live:
                if text.lease is not None:
                    text.lease.close()

    def _begin(self, text: Text) -> None:
        """Takes in the prompt and picks the token after it."""
        if not len(text.prompt):
            raise EmptyPrompt()
        if len(text.prompt) > self.target.context:
            raise PromptTooLong(tokens=len(text.prompt), context=self.target.context)
        text.lease = self.runner.pool.lease()
        scored = self.target.prompt(text.lease, text.prompt, keep_hidden=self.keep_hidden)
        if self.keep_hidden:
            text.hiddens.append(scored.hidden)
        self._take(text, scored.tokens[0], scored.logits[0])

    def _step(self, live: list[Text]) -> None:
        """One further token of every live text."""
        key = self.runner.fitting(Mode.BATCH, len(live)) if len(live) > 1 else DECODE
        lanes = []
        for text in live:
            first = text.lease.append(1)
            lanes.append(Lane(text.lease, first, first))
        ids = padded(np.array([text.tokens[-1] for text in live], np.int32), key.rows)
        out = self.runner.step(key, ids=ids, **index_inputs(self.runner, key, lanes))
        hidden = self.runner.read(out[self.target.hidden_output]) if self.keep_hidden else None
        for row, text in enumerate(live):
            if hidden is not None:
                text.hiddens.append(hidden[row : row + 1])
            self._take(text, int(out["tokens"][row]), out["logits"][row])

    def _take(self, text: Text, best: int, logits: np.ndarray) -> None:
        """Adds the next token, and ends the text if it is the last."""
        if best >= logits.shape[-1]:
            raise NotANumber(index=len(text.tokens))
        greedy = text.sampling.greedy
        text.tokens.append(
            best if greedy else text.sampling.pick(np.asarray(logits), len(text.tokens))
        )
        if text.tokens[-1] in self.stop:
            text.finish = Finish.STOP
        elif len(text.tokens) >= self.max_tokens:
            text.finish = Finish.LENGTH
        elif text.lease.rows >= self.target.context:
            text.finish = Finish.CONTEXT
