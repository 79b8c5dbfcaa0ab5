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

# Programs of fewer rows cost what reading the weights costs: a step is divided into wider ones,
# and only where the program for all of its rows would be filled to less than this part.
WIDE, NEARLY_FULL = 8, 7 / 8


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
    of their program. A text ends with a stop id, after `max_tokens`, or with the context. Every
    step takes one row of each live text, of its prompt first, so that programs are full while
    there are prompts; the rows of `opening` are computed once for all prompts that begin with it.
    """

    def __init__(
        self, runner: Runner, max_tokens: int, *, stop: Collection[int] = (),
        width: int | None = None, keep_hidden: bool = False, hidden_output: str = "hidden",
        opening: Sequence[int] = (),
    ) -> None:  # fmt: skip
        self.target = Target(runner, hidden_output)
        self.runner = runner
        self.max_tokens, self.stop, self.keep_hidden = max_tokens, frozenset(stop), keep_hidden
        self.opening = list(opening)
        self._widths = (1, *runner.rows(Mode.BATCH))
        self.width = self._widths[-1] if width is None else width
        if not 1 <= self.width <= self._widths[-1]:
            raise NoBatch(width=self.width, widest=self._widths[-1])

    def write(self, prompts: Iterable[tuple[Sequence[int], Sampling]]) -> Iterator[Text]:
        """The texts after `prompts`, each as soon as it is finished;
        prompts are read when there is room.
        """
        waiting = enumerate(prompts)
        live: list[Text] = []
        with self.runner.pool.lease() as opened:
            hidden = self._opened(opened)
            try:
                while True:
                    for text in [t for t in live if t.finish is not None]:
                        live.remove(text)
                        text.lease.close()
                        yield text
                    while len(live) < self.width and (given := next(waiting, None)) is not None:
                        number, (prompt, sampling) = given
                        live.append(Text(number, prompt, sampling))
                        self._begin(live[-1], opened, hidden)
                    if not live:
                        return
                    for texts in self._parts(live):
                        self._step(texts)
            finally:
                for text in live:
                    if text.lease is not None:
                        text.lease.close()

    def _opened(self, lease: Lease) -> np.ndarray | None:
        """The hiddens of the rows of `opening`, which are computed in
        `lease`; None if there are none.
        """
        if not self.opening:
            return None
        return self.target.prompt(lease, self.opening, keep_hidden=self.keep_hidden).hidden.copy()

    def _begin(self, text: Text, opened: Lease, hidden: np.ndarray | None) -> None:
        """Makes room for the text, and takes over what is known of its prompt."""
        if not len(text.prompt):
            raise EmptyPrompt()
        if len(text.prompt) > self.target.context:
            raise PromptTooLong(tokens=len(text.prompt), context=self.target.context)
        text.lease = self.runner.pool.lease()
        known = min(len(self.opening), len(text.prompt) - 1)
        if known and list(text.prompt[:known]) == self.opening[:known]:
            text.lease.begin_with(opened, known)
            if self.keep_hidden:
                text.hiddens.append(hidden[:known])

    def _parts(self, live: Sequence[Text]) -> Iterator[Sequence[Text]]:
        """The live texts by the steps that compute them: one of all if its program is nearly full,
        else full ones as far as they go.
        """
        rest = list(live)
        while rest:
            fitting = min((w for w in self._widths if w >= len(rest)), default=self._widths[-1])
            full = max(w for w in self._widths if w <= len(rest))
            width = fitting if full < WIDE or len(rest) >= NEARLY_FULL * fitting else full
            yield rest[:width]
            rest = rest[width:]

    def _step(self, texts: Sequence[Text]) -> None:
        """One further row of each text, and the token after it where
        its prompt is whole.
        """
        key = self.runner.fitting(Mode.BATCH, len(texts)) if len(texts) > 1 else DECODE
        lanes, given = [], []
        for text in texts:
            first = text.lease.append(1)
            lanes.append(Lane(text.lease, first, first))
            behind = first - len(text.prompt)
            given.append(text.prompt[first] if behind < 0 else text.tokens[behind])
        ids = padded(np.array(given, np.int32), key.rows)
        out = self.runner.step(key, ids=ids, **index_inputs(self.runner, key, lanes))
        tokens = self.runner.read(out["tokens"]).tolist()
        hidden = self.runner.read(out[self.target.hidden_output]) if self.keep_hidden else None
        for row, text in enumerate(texts):
            if hidden is not None:
                text.hiddens.append(hidden[row : row + 1])
            if text.lease.rows >= len(text.prompt):
                self._take(text, tokens[row], out["logits"][row])

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
