"""Turns of one text: what target and drafter have computed of it is kept from one to the next."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from proposers.base import DraftProposer
from proposers.rules.carry import Adopted, CarriedRows, Refusal, common_prefix, plan_append
from proposers.state import ProposerState
from runners.kv import DetachedRows, Lease

if TYPE_CHECKING:
    from circuit.engine.drafting import Drafting
    from circuit.engine.engine import Engine
    from circuit.engine.generation import Generation
    from circuit.engine.target import Target

log = logging.getLogger(__name__)
RECOMPUTED = 64  # rows of the target at most, for hiddens that the drafter's rows lack


@dataclass
class Kept:
    """What a turn left: its text, the target's rows of it, and the drafter's if it has any."""

    tokens: tuple[int, ...]
    rows: DetachedRows
    drafter: CarriedRows | None = None
    blocks: Any = None  # the drafter's rows, as its proposer hands them out


@dataclass
class Start:
    """Where a turn begins: `first` rows of the prompt are there; keys up to `last_key` are."""

    lease: Lease
    first: int = 0
    state: ProposerState | None = None
    last_key: int | None = None


def fresh_start(target: Target, proposer: DraftProposer | None, budget: int) -> Start:
    """The start of a text of which nothing is computed; room for `budget` tokens is its own."""
    lease = target.runner.pool.lease(budget)
    return Start(lease, state=proposer.alloc_state_for(budget) if proposer is not None else None)


class Conversation:
    """Generations over a growing text, each from the rows that the one before has left.

    The prompt of a turn is the whole text so far. Its tokens are those of a fresh generation: rows
    are only used as far as both texts agree, and a row is the same whenever it is computed.
    `outcome` says what became of the drafter's rows at the last turn. `session` marks whose text it
    is: rows of one are never used by another, and session 0 keeps none of the drafter's.
    """

    def __init__(self, engine: Engine, session: int = 1) -> None:
        self.engine, self.session = engine, session
        self.outcome: Adopted | Refusal = Refusal.NO_CARRY
        self.reused = 0  # rows of the target that the last turn did not compute again
        self._kept: Kept | None = None
        self._busy: Generation | None = None

    def __enter__(self) -> Conversation:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def turn(self, prompt: Sequence[int], max_tokens: int, **options: Any) -> Generation:
        """A generation as `Engine.generate` makes it; the one before it is closed first."""
        if self._busy is not None:
            self._busy.close()
        busy = self._busy = self.engine.generate(prompt, max_tokens, keeper=self, **options)
        return busy

    def close(self) -> None:
        """Frees everything; a second call does nothing."""
        if self._busy is not None:
            self._busy.close()
            self._busy = None
        self._drop()

    def begin(
        self, target: Target, proposer: DraftProposer | None, prompt: Sequence[int], budget: int
    ) -> Start:
        """The rows that `prompt` starts from; what it cannot use of the kept ones is freed."""
        kept, self._kept = self._kept, None
        self.outcome, self.reused = Refusal.NO_CARRY, 0
        if kept is None:
            return fresh_start(target, proposer, budget)
        start = Start(target.runner.pool.attach(kept.rows))
        try:
            self._install(proposer, start, kept, prompt, budget)
            held = min(common_prefix(kept.tokens, prompt), start.lease.rows, len(prompt) - 1)
            if start.last_key is not None and held - start.last_key - 1 <= RECOMPUTED:
                held = min(held, start.last_key + 1)
            start.lease.trim(held)
            start.lease.reserve(budget)
            start.lease.floor = len(start.lease.blocks)
            start.first = self.reused = held
        except BaseException:
            start.lease.close()
            if start.state is not None:
                proposer.free_state(start.state)
            raise
        return start

    def _install(
        self, proposer: DraftProposer | None, start: Start, kept: Kept, prompt: Sequence[int],
        budget: int,
    ) -> None:  # fmt: skip
        """Gives the start a state with the carried rows, or an empty one and frees them."""
        usable = None
        if kept.drafter is not None and proposer is not None:
            usable = kept.drafter.usable_by(prompt, self.session)
            if usable is None:
                self.outcome = kept.drafter.refusal(self.session)
        if usable is not None:
            start.state = proposer.alloc_state()
            if proposer.install_drafter_kv(start.state, kept.blocks, *usable):
                start.last_key = usable[1]
                self.outcome = Adopted(usable[0], 0, usable[1] + 1)
                return
            proposer.free_state(start.state)
        if kept.blocks is not None:
            self.engine.proposer.free_drafter_kv(kept.blocks)
        start.state = proposer.alloc_state_for(budget) if proposer is not None else None

    def extend(
        self, proposer: DraftProposer, start: Start, prompt: Sequence[int], lo: int,
        hiddens: np.ndarray,
    ) -> None:  # fmt: skip
        """Brings the drafter's rows up to the prompt, from its hiddens at positions `lo` and on."""
        last_key = -1 if start.last_key is None else start.last_key
        plan = plan_append(last_key, len(prompt), lo, lo + len(hiddens))
        if plan is None or not proposer.levers.drafter_prefill:
            needed = last_key < len(prompt) - 2
            if isinstance(self.outcome, Adopted) and needed:
                self.outcome = Refusal.NO_HIDDENS
            return
        first, count = plan
        rows = proposer.drafter_rows(start.state)
        part = hiddens[first - lo : first - lo + count]
        tokens = prompt[first : first + count + 1]
        wrote = proposer.catchup_drafter(tokens, part, rows, first + 1, start.state)
        if isinstance(self.outcome, Adopted):
            self.outcome = replace(self.outcome, appended=wrote, first_key=first)
        log.info("carry: %s", self.outcome)

    def keep(self, tokens: Sequence[int], lease: Lease, drafting: Drafting | None) -> None:
        """Takes over the rows of a turn that has ended, and frees what it does not keep."""
        self._drop()
        self._busy = None
        self._kept = Kept(tuple(tokens), lease.detach())
        if drafting is None:
            return
        proposer, state = drafting.proposer, drafting.state
        armed = self.session != 0 and proposer.levers.drafter_carry
        taken = proposer.take_drafter_kv(state) if armed else None
        if taken is not None:
            self._kept.blocks = taken[0]
            self._kept.drafter = CarriedRows(tuple(tokens), taken[1], taken[2], self.session)

    def _drop(self) -> None:
        if self._kept is not None:
            self._kept.rows.close()
            if self._kept.blocks is not None:
                self.engine.proposer.free_drafter_kv(self._kept.blocks)
            self._kept = None
