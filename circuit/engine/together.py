"""Several texts that step together: drafts of all in one propose, their verifies in one step."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from typing import Any

from circuit.engine.engine import Engine
from circuit.engine.generation import Generation, Step
from ir.errors import CircuitError
from proposers.base import Drafts
from proposers.levers import Depth
from proposers.rules.depth_cut import MOST_ROWS, worthwhile
from proposers.rules.ladder import dispatch_cap
from proposers.rules.verify_key import verify_batch_order

log = logging.getLogger(__name__)


class Together:
    """Generations of one engine that take their steps together, at most `cap` of them at a time.

    Each text is the one that it would be alone. How many drafts a sequence has is a matter of how
    many there are (the ladder, the gate, the rung), and of how sure the head is of them: those are
    verified that are worth their rows, or a share of the likeliest. A text may join or be closed
    between any two steps.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.levers = engine.proposer.levers if engine.proposer is not None else None
        most, ladder = 0, True
        if self.levers is not None:
            most, ladder = self.levers.max_sequences, self.levers.ladder.enabled
        self.cap, self.source = dispatch_cap(most or None, 0, ladder)
        self.live: list[Generation] = []

    def __enter__(self) -> Together:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes every text; a second call does nothing."""
        while self.live:
            self.live.pop().close()

    def add(self, prompt: Sequence[int], max_tokens: int, **options: Any) -> Generation:
        """A text that takes part in the steps from now on; options as of `Engine.generate`."""
        self.live.append(self.engine.generate(prompt, max_tokens, **options))
        return self.live[-1]

    def run(self) -> Iterator[tuple[Generation, Step]]:
        """The steps of all texts until each has ended."""
        while self.live:
            yield from self.step()

    def step(self) -> list[tuple[Generation, Step]]:
        """One step of every text: its prompt if it is new, else drafts and their verify.

        An error closes the texts of its dispatch and no other.
        """
        made: list[tuple[Generation, Step]] = []
        self.live = [g for g in self.live if g.statistics.finish is None]  # a reader may have left
        going = [g for g in self.live if g.begun]
        try:
            for generation in self.live:
                if not generation.begun:
                    made += self._one(generation)
            for group in self._groups(going):
                made += self._all(group) if len(group) > 1 else self._one(group[0])
        finally:
            self.live = [g for g in self.live if g.statistics.finish is None]
        return made

    @property
    def _batched(self) -> bool:
        allowed = self.levers is None or self.levers.batch_verify
        return allowed and self.engine.target.together > 1

    def _groups(self, going: Sequence[Generation]) -> Iterator[list[Generation]]:
        """Texts that are dispatched together: as many as the cap and the widest program allow."""
        size = min(self.cap, self.engine.target.together) if self._batched else 1
        for at in range(0, len(going), max(size, 1)):
            yield list(going[at : at + max(size, 1)])

    def _one(self, generation: Generation) -> list[tuple[Generation, Step]]:
        """The next step of a text by itself; none if it has nothing to write."""
        step = next(iter(generation), None)
        if step is None:
            return []
        generation.settle(0.0)
        return [(generation, step)]

    def _all(self, group: list[Generation]) -> list[tuple[Generation, Step]]:
        """The next step of texts that are verified together, of two at least."""
        began = time.perf_counter()
        try:
            drafts, verify = self._drafts(group), 0.0
            steps = []
            for part in self._dispatches(group, drafts):
                wanted = [(g.lease, [g.tokens[-1], *drafts[g]]) for g in part]
                asked = time.perf_counter()
                found = self.engine.target.rows_of(wanted)
                verify += time.perf_counter() - asked
                for g, scored in zip(part, found, strict=True):
                    steps.append((g, g.take(drafts[g], scored, len(group))))
        except BaseException:
            for generation in group:
                generation.fail()
            raise
        spent = time.perf_counter() - began
        for generation, _ in steps:
            generation.settle(spent)
        self._learn(steps, verify, spent)
        return steps

    def _dispatches(
        self, group: Sequence[Generation], drafts: dict[Generation, tuple[int, ...]]
    ) -> Iterator[list[Generation]]:
        """The group in its order of dispatch, cut where the rows of a step are full."""
        ks = [len(drafts[g]) + 1 for g in group]
        canonical = (
            self.levers is not None and self.levers.depth is not Depth.WORTH  # chosen by text
            and self.levers.canonical_rule.applies(len(group))
        )  # fmt: skip
        order, depths = verify_batch_order(list(range(len(group))), ks, canonical)
        most, part, rows = min(self.engine.target.together, MOST_ROWS), [], 0
        for index, depth in zip(order, depths, strict=True):
            generation = group[index]
            drafts[generation] = drafts[generation][: depth - 1]
            wanted = len(drafts[generation]) + 1
            if part and rows + wanted > most:
                yield part
                part, rows = [], 0
            part.append(generation)
            rows += wanted
        if part:
            yield part

    def _drafts(self, group: Sequence[Generation]) -> dict[Generation, tuple[int, ...]]:
        """The drafts of every text, after the cut of those that are not worth a row."""
        found: dict[Generation, tuple[int, ...]] = dict.fromkeys(group, ())
        drafting = [g for g in group if g.drafting is not None and not g.drafting.over]
        if not drafting:
            return found
        depth = max(g.lease.rows for g in drafting)
        count = self.engine.pace.drafts(max(g.room for g in drafting), depth, len(group))
        asking: dict[int, list[Generation]] = {}
        for g in drafting:
            wanted = min(count, g.room)
            if wanted > 0:
                found[g] = g.drafting.prepare(g.lease.rows, wanted)
                if not found[g]:
                    asking.setdefault(wanted, []).append(g)
            else:
                g.drafting.skip(g.lease.rows)
        chances: dict[Generation, tuple[float, ...]] = {}
        for wanted, texts in asking.items():
            for g, made in zip(texts, self._proposed(texts, wanted), strict=True):
                found[g] = g.drafting.take(made)
                chances[g] = (made.logprobs or ())[: len(found[g])]
        whole = [g for g in chances if len(found[g]) == count]
        for g, most in self._worthwhile(chances, whole, count, len(group)).items():
            found[g] = found[g][:most]
        return found

    def _worthwhile(
        self, chances: dict[Generation, tuple[float, ...]], whole: Sequence[Generation],
        count: int, width: int,
    ) -> dict[Generation, int]:  # fmt: skip
        """Drafts to verify, of the texts that have a choice: by what a row is worth, or by share.

        A head that does not tell how sure it is counts as certain where shares are cut.
        """
        worth = self.engine.pace.worth_of(width)
        if worth is not None:
            known = [g for g, logprobs in chances.items() if logprobs]
            kept = worthwhile([chances[g] for g in known], worth)
            return dict(zip(known, kept, strict=True))
        if not (whole and self.levers.cut_rule.applies(width, count)):
            return {}
        kept = self.levers.cut_rule.retained([chances[g] for g in whole], count)
        return dict(zip(whole, kept, strict=True))

    def _proposed(self, texts: Sequence[Generation], count: int) -> Iterator[Drafts]:
        """The drafts of texts, by the widest batches that the head takes; none where it fails."""
        widest = self.engine.proposer.propose_batch_max() if self.levers.batch_bootstrap else 1
        for at in range(0, len(texts), widest):
            part = texts[at : at + widest]
            requests = [g.drafting.request(g.lease.rows, count, logprobs=True) for g in part]
            states = [g.drafting.state for g in part]
            made = None
            try:
                made = self.engine.proposer.propose_batch(requests, states)
            except CircuitError as error:
                log.warning("texts are drafted one by one: %s", error)
            if made is not None:
                yield from made
                continue
            for request, state in zip(requests, states, strict=True):
                try:
                    yield self.engine.proposer.propose(request, state)
                except CircuitError as error:
                    log.warning("no drafts at position %d: %s", request.position, error)
                    yield Drafts()

    def _learn(
        self, steps: Sequence[tuple[Generation, Step]], verify: float, seconds: float
    ) -> None:
        """Tells the pace what the step cost and brought."""
        pace, width = self.engine.pace, len(steps)
        if pace is None:
            return
        drafted = [(s.drafted, s.accepted) for _, s in steps if s.drafted]
        tokens = sum(len(s.tokens) for _, s in steps)
        pace.observe(width, drafted, tokens, seconds)
        if (worth := pace.worth_of(width)) is not None:
            worth.record(sum(s.drafted for _, s in steps), tokens, verify, seconds)
