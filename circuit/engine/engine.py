"""The engine: one sequence from prompt to end, with drafts that never change what is written."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from circuit.engine.errors import (
    EmptyPrompt,
    NoDraftHead,
    NotANumber,
    PromptTooLong,
    TooManyDrafts,
)
from circuit.engine.sampling import Sampling
from circuit.engine.statistics import Finish, Statistics
from circuit.engine.target import Scored, Target
from ir.errors import CircuitError
from proposers.base import DraftProposer, ProposeRequest
from proposers.levers import TrimPolicy
from proposers.lookup import Lookup
from proposers.state import ProposerState
from runners.base import Runner
from runners.kv import Lease

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Step:
    """Tokens that one step emitted, how many were drafted for it,
    and how many of those were taken.
    """

    tokens: tuple[int, ...]
    drafted: int = 0
    accepted: int = 0


@dataclass(frozen=True)
class Request:
    """What to generate: `drafts` per step at most, `stop` ids that end
    the text (and are its last token).
    """

    prompt: Sequence[int]
    max_tokens: int
    drafts: int
    sampling: Sampling
    stop: Collection[int]
    lookup: bool = False


class Engine:
    """A target and, if there is one, a draft head.

    With a target whose rows do not depend on the width of their program (the compiled ones), the
    tokens of a request are the same for every number of drafts, greedy or sampled. An eager target
    computes rows of different widths with different roundings, so that near ties may fall
    differently.
    """

    def __init__(self, target: Runner, proposer: DraftProposer | None = None) -> None:
        output = proposer.target_hidden.output if proposer else "hidden"
        self.target = Target(target, output)
        self.proposer = proposer

    @property
    def most_drafts(self) -> int:
        """Drafts that one step can verify."""
        return self.target.widest - 1 if self.proposer else 0

    def generate(
        self, prompt: Sequence[int], max_tokens: int, *, drafts: int = 0,
        sampling: Sampling | None = None, stop: Collection[int] = (), lookup: bool = False,
    ) -> Generation:  # fmt: skip
        """A generation that runs as its steps are read; every error of the request is raised here.

        With `lookup`, tokens that stood in the text before are drafted from what followed them
        there, and the head drafts where there is nothing to copy.
        """
        if not len(prompt):
            raise EmptyPrompt()
        if len(prompt) > self.target.context:
            raise PromptTooLong(tokens=len(prompt), context=self.target.context)
        if drafts and self.proposer is None:
            raise NoDraftHead(drafts=drafts)
        if drafts > self.most_drafts:
            raise TooManyDrafts(drafts=drafts, most=self.most_drafts)
        prompt = [int(token) for token in prompt]
        picks = sampling or Sampling()
        return Generation(self, Request(prompt, max_tokens, drafts, picks, frozenset(stop), lookup))


class Generation:
    """Iterates over the steps of one request; its cache is freed at the
    end, on an error, or by `close`.
    """

    def __init__(self, engine: Engine, request: Request) -> None:
        self.request = request
        self.statistics = Statistics(prompt_tokens=len(request.prompt))
        self.tokens: list[int] = []
        self._text = list(request.prompt)
        self._target, self._proposer = engine.target, engine.proposer if request.drafts else None
        self._lease: Lease | None = None
        self._state: ProposerState | None = None
        self._lookup = Lookup(self._text) if request.lookup and self._proposer else None
        self._proposed = False  # the drafts of this step are the head's
        self._hiddens: dict[int, np.ndarray] = {}  # by pair key: what the next propose may need
        self._accepted: int | None = None  # drafts of the last propose that were taken, until told
        self._steps = self._run()

    def __iter__(self) -> Iterator[Step]:
        return self._steps

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the generation and frees what it holds; a second call does nothing."""
        self._steps.close()
        self._free()
        self.statistics.finish = self.statistics.finish or Finish.CLOSED

    def _free(self) -> None:
        if self._state is not None:
            self._proposer.free_state(self._state)
            self._state = None
        if self._lease is not None:
            self._lease.close()
            self._lease = None

    def _run(self) -> Iterator[Step]:
        try:
            if self.request.max_tokens > 0:
                yield from self._timed(self._begin, "prompt_seconds")
                while self._unfinished():
                    yield from self._timed(self._step, "seconds")
            else:
                self.statistics.finish = Finish.LENGTH
        finally:
            self._free()

    def _timed(self, work: Callable[[], Step], clock: str) -> Iterator[Step]:
        """The step that `work` makes, its time added to `clock`; the reader's own time is not."""
        began = time.perf_counter()
        step = work()
        spent = time.perf_counter() - began
        setattr(self.statistics, clock, getattr(self.statistics, clock) + spent)
        yield step

    def _unfinished(self) -> bool:
        if self.tokens[-1] in self.request.stop:
            self.statistics.finish = Finish.STOP
        elif len(self.tokens) >= self.request.max_tokens:
            self.statistics.finish = Finish.LENGTH
        elif self._lease.rows >= self._target.context:
            self.statistics.finish = Finish.CONTEXT
        return self.statistics.finish is None

    def _begin(self) -> Step:
        """Takes in the prompt, for target and drafter, and emits the token after it."""
        prompt, proposer = self.request.prompt, self._proposer
        budget = min(len(prompt) + self.request.max_tokens, self._target.context)
        self._lease = self._target.runner.pool.lease(budget)
        scored = self._target.prompt(self._lease, prompt, keep_hidden=proposer is not None)
        if proposer is not None:
            self._state = proposer.alloc_state_for(budget)
            proposer.prefill_drafter(prompt, scored.hidden, self._state)
            self._hiddens = {len(prompt) - 1: scored.hidden[-1]}
        return self._emit([self._pick(scored, 0, 0)])

    def _emit(self, tokens: list[int], drafted: int = 0, accepted: int = 0) -> Step:
        self.tokens += tokens
        self._text += tokens
        if self._lookup is not None:
            self._lookup.extend(tokens)
        return Step(tuple(tokens), drafted, accepted)

    def _step(self) -> Step:
        """Drafts, verifies, and emits the accepted drafts and the target's own token after them."""
        position = self._lease.rows
        drafts = self._draft(position)
        scored = self._target.rows(self._lease, [self.tokens[-1], *drafts])
        emitted: list[int] = []
        for row in range(len(drafts) + 1):
            emitted.append(self._pick(scored, row, len(self.tokens) + row))
            if row == len(drafts) or emitted[-1] != drafts[row] or emitted[-1] in self.request.stop:
                break
        accepted = sum(a == b for a, b in zip(emitted, drafts, strict=False))
        kept = len(emitted)
        self._lease.trim(position + kept)
        if self._proposer is not None:
            hidden = self._target.runner.read(scored.hidden)
            self._hiddens = {position - 1: self._hiddens[position - 1]}
            self._hiddens |= {position + row: hidden[row] for row in range(kept)}
            self._accepted = accepted if self._proposed else None
        self.statistics.count(len(drafts), accepted)
        self.statistics.looked_up += bool(drafts) and not self._proposed
        return self._emit(emitted, len(drafts), accepted)

    def _draft(self, position: int) -> tuple[int, ...]:
        """Drafts for the rows after the newest token, as many as can still be used."""
        left = self.request.max_tokens - len(self.tokens) - 1
        count = min(self.request.drafts, left, self._target.context - position - 1)
        self._proposed = False
        if self._proposer is None or count < 1:
            return ()
        self._keep_up(position)
        copied = self._lookup.drafts(count) if self._lookup is not None else ()
        if copied:
            return tuple(copied)
        request = ProposeRequest(
            last_token=self.tokens[-1], target_hidden=self._hiddens[position - 1],
            position=position, num_drafts=count,
        )  # fmt: skip
        try:
            drafts = self._proposer.propose(request, self._state).tokens[:count]
        except CircuitError as error:
            log.warning("no drafts for the token at position %d: %s", position, error)
            return ()
        self._proposed = bool(drafts)
        return drafts

    def _pick(self, scored: Scored, row: int, index: int) -> int:
        if scored.tokens[row] >= scored.logits.shape[-1]:
            raise NotANumber(index=index)
        if self.request.sampling.greedy:
            return scored.tokens[row]
        return self.request.sampling.pick(np.asarray(scored.logits[row]), index)

    def _keep_up(self, position: int) -> None:
        """Brings the drafter's rows up to the newest token, which stands at `position`.

        Rows that the policy cut, and those of steps without drafts, are fed with the target's
        hiddens; the row of the newest pair is the next propose's own.
        """
        proposer, state = self._proposer, self._state
        if self._accepted is not None:
            proposer.after_verify(self._accepted, state)
            self._accepted = None
        policy, last = proposer.levers.trim, proposer.last_pair_key(state)
        if policy is TrimPolicy.DEFAULT or last is None:
            return
        keys = [key for key in range(last + 1, position - 1) if key in self._hiddens]
        if not keys:
            return
        text = self._text
        tokens = [text[key + 1] for key in keys]
        hiddens = np.stack([self._hiddens[key] for key in keys])
        if policy is TrimPolicy.KV_EXACT:
            proposer.catchup_batch([tokens], [hiddens], [keys[0] + 1], [state])
        else:
            rows = proposer.drafter_rows(state)
            proposer.catchup_drafter([text[keys[0]], *tokens], hiddens, rows, keys[0] + 1, state)
