"""One request from prompt to end: a prompt taken in, then steps of drafts and their verify."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from circuit.engine.conversation import Conversation, fresh_start
from circuit.engine.drafting import Drafting
from circuit.engine.errors import NotANumber
from circuit.engine.request import Request
from circuit.engine.statistics import Finish, Statistics
from circuit.engine.target import Scored
from circuit.engine.tree import grown, kept_path, shape_for
from proposers.base import Drafts
from proposers.rules.worth import DraftWorth
from runners.kv import Lease

if TYPE_CHECKING:
    from circuit.engine.engine import Engine


@dataclass(frozen=True)
class Step:
    """Tokens that one step emitted, how many were drafted for it,
    and how many of those were taken.
    """

    tokens: tuple[int, ...]
    drafted: int = 0
    accepted: int = 0
    nodes: int = 0  # drafts of a tree, whose depth is in `drafted`
    verify: float = field(default=0.0, compare=False)  # seconds that its verify took


class Generation:
    """Iterates over the steps of one request; its cache is freed at the
    end, on an error, or by `close`.
    """

    def __init__(
        self, engine: Engine, request: Request, keeper: Conversation | None = None
    ) -> None:
        self.request, self._engine, self._keeper = request, engine, keeper
        self.statistics = Statistics(prompt_tokens=len(request.prompt))
        self.tokens: list[int] = []
        self._text = list(request.prompt)
        self._target = engine.target
        self.lease: Lease | None = None
        self.drafting = None
        if request.drafts:
            self.drafting = Drafting(
                engine.proposer, engine.pace, self._text, self.statistics, lookup=request.lookup,
                copies=engine.target.widest - 1, ranks=request.tree.ranks if request.tree else 1,
                thinking_end=request.thinking_end,
            )  # fmt: skip
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
        """Frees what is held, or hands it to the keeper if the text is whole so far."""
        drafting = self.drafting
        if self._keeper is not None and self.tokens and self.lease is not None:
            if drafting is not None:
                drafting.keep_up(self.lease.rows)
            self._keeper.keep(self._text, self.lease, drafting)
            self.lease = None
        if drafting is not None:
            drafting.free()
        if self.lease is not None:
            self.lease.close()
            self.lease = None

    def _run(self) -> Iterator[Step]:
        try:
            if self.request.max_tokens > 0:
                yield from self._timed(self._begin, "prompt_seconds")
                while self._unfinished():
                    yield from self._timed(self._step, "seconds")
            else:
                self.statistics.finish = Finish.LENGTH
        except GeneratorExit:  # the reader leaves between two steps: what is held is whole
            raise
        except BaseException:
            self._keeper = None  # rows of a step that failed or was cut are not for another turn
            raise
        finally:
            self._free()

    def _timed(self, work: Callable[[], Step], clock: str) -> Iterator[Step]:
        """The step that `work` makes, its time added to `clock`; the reader's own time is not."""
        began = time.perf_counter()
        step = work()
        spent = time.perf_counter() - began
        setattr(self.statistics, clock, getattr(self.statistics, clock) + spent)
        if self.drafting is not None and self.drafting.paced:
            self.drafting.pace.record(step.drafted, step.accepted, len(step.tokens), spent)
        if step.verify and (rule := self._worth) is not None:
            rule.record(step.nodes, len(step.tokens), step.verify, spent)
        yield step

    @property
    def begun(self) -> bool:
        """True once the prompt is taken in."""
        return bool(self.tokens)

    def settle(self, seconds: float) -> None:
        """Counts the time of a step made for this text, and ends the text if it is whole."""
        self.statistics.seconds += seconds
        if not self._unfinished():
            self.close()

    def fail(self) -> None:
        """Ends the text after an error in the middle of a step: nothing of it is kept."""
        self._keeper = None
        self.close()

    def _unfinished(self) -> bool:
        if self.tokens[-1] in self.request.stop:
            self.statistics.finish = Finish.STOP
        elif len(self.tokens) >= self.request.max_tokens:
            self.statistics.finish = Finish.LENGTH
        elif self.lease.rows >= self._target.context:
            self.statistics.finish = Finish.CONTEXT
        return self.statistics.finish is None

    def _begin(self) -> Step:
        """Takes in the prompt, for target and drafter, and emits the token after it."""
        prompt, drafting = self.request.prompt, self.drafting
        budget = min(len(prompt) + self.request.max_tokens, self._target.context)
        proposer = drafting.proposer if drafting is not None else None
        if self._keeper is not None:
            start = self._keeper.begin(self._target, proposer, prompt, budget)
        else:
            start = fresh_start(self._target, proposer, budget)
        self.lease, given = start.lease, prompt[start.first :]
        if drafting is not None:
            drafting.state = start.state
        scored = self._target.prompt(self.lease, given, keep_hidden=drafting is not None)
        if drafting is not None:
            drafting.begin(start, scored.hidden, self._engine.capture, self._keeper)
        return self._emit([self._pick(scored, 0, 0)])

    def _emit(self, tokens: list[int], drafted: int = 0, accepted: int = 0) -> Step:
        self.tokens += tokens
        self._text += tokens
        if self.drafting is not None and self.drafting.lookup is not None:
            self.drafting.lookup.extend(tokens)
        return Step(tuple(tokens), drafted, accepted)

    def _step(self) -> Step:
        """Drafts, verifies, and emits the accepted drafts and the target's own token after them."""
        drafts: tuple[int, ...] = ()
        if self.drafting is not None:
            drafts = self.drafting.drafts(self.lease.rows, self.room)
            if self.request.tree is not None and self.drafting.proposed is not None:
                return self._tree_step(self.drafting.proposed)
        began = time.perf_counter()
        scored = self._target.rows(self.lease, [self.tokens[-1], *drafts])
        verify = time.perf_counter() - began
        return replace(self.take(drafts, scored), nodes=len(drafts), verify=verify)

    @property
    def _worth(self) -> DraftWorth | None:
        """The rule that learns what steps of this text cost."""
        if self.drafting is None:
            return None
        return self.drafting.pace.worth if self.request.tree is None else self._engine.worth

    @property
    def room(self) -> int:
        """Drafts that the next step can use."""
        left = self.request.max_tokens - len(self.tokens) - 1
        return min(self.request.drafts, left, self._target.context - self.lease.rows - 1)

    def take(self, drafts: Sequence[int], scored: Scored, width: int = 1) -> Step:
        """Emits what a verify of `drafts` gives, in a step of `width` sequences."""
        position = self.lease.rows - len(drafts) - 1
        emitted: list[int] = []
        for row in range(len(drafts) + 1):
            emitted.append(self._pick(scored, row, len(self.tokens) + row))
            if row == len(drafts) or emitted[-1] != drafts[row] or emitted[-1] in self.request.stop:
                break
        accepted = sum(a == b for a, b in zip(emitted, drafts, strict=False))
        kept = len(emitted)
        self.lease.trim(position + kept)
        if self.drafting is not None:
            hiddens = self._target.runner.read(scored.hidden)[:kept]
            self.drafting.verified(position, hiddens, drafts, emitted, accepted)
        self.statistics.count(len(drafts), accepted, kept, width)
        return self._emit(emitted, len(drafts), accepted)

    def _tree_step(self, drafts: Drafts) -> Step:
        """Verifies a tree, makes the accepted path the sequence, and emits it."""
        position = self.lease.rows
        room = min(self._target.widest_tree, self._target.context - position)
        shape = shape_for(self.request.tree, drafts, self._engine.worth)
        rows = grown(self.tokens[-1], drafts, shape, room)
        began = time.perf_counter()
        scored = self._target.tree(
            self.lease, [row.token for row in rows], [row.parent for row in rows]
        )
        verify = time.perf_counter() - began
        kept = kept_path(
            rows,
            lambda row: self._pick(scored, row, len(self.tokens) + rows[row].depth),
            self.request.stop.__contains__,
        )
        self.lease.keep(position, kept.rows)
        hiddens = self._target.runner.read(scored.hidden)[list(kept.rows)]
        self.drafting.paced = False  # its costs are of chains
        spine = [row.token for row in rows[1:] if row.rank == 1]
        self.drafting.verified(position, hiddens, spine, kept.tokens, kept.accepted)
        self.statistics.count(len(spine), kept.accepted, len(kept.tokens))
        self.statistics.branched += kept.branched
        step = self._emit(list(kept.tokens), len(spine), kept.accepted)
        return replace(step, nodes=len(rows) - 1, verify=verify)

    def _pick(self, scored: Scored, row: int, index: int) -> int:
        if scored.tokens[row] >= scored.logits.shape[-1]:
            raise NotANumber(index=index)
        if self.request.sampling.greedy:
            return scored.tokens[row]
        return self.request.sampling.pick(np.asarray(scored.logits[row]), index)
