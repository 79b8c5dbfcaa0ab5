"""The drafter's part in one generation: its context, its drafts, what it learns of a verify."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from circuit.engine.capture import HiddenCapture
from circuit.engine.conversation import Conversation, Start
from circuit.engine.pace import Pace
from circuit.engine.statistics import Statistics
from ir.errors import CircuitError
from proposers.base import DraftProposer, Drafts, ProposeRequest
from proposers.levers import TrimPolicy
from proposers.lookup import Lookup
from proposers.rules.carry import Refusal
from proposers.rules.fingerprint import hidden_fingerprint
from proposers.rules.ring import CatchupRing
from proposers.rules.telemetry import TopkCoverage

if TYPE_CHECKING:
    from proposers.state import ProposerState

log = logging.getLogger(__name__)

RING_ROWS = 256  # of the newest hiddens: a drafter further behind is brought up to date early


class Drafting:
    """Drafts of one text. `text` is the list that its generation appends tokens to.

    `paced` is True after `drafts` if the step is one for the pace to measure. `copies` is the most
    that is copied from the text at once; trees are made of the best `ranks` ids of each step.
    """

    def __init__(
        self, proposer: DraftProposer, pace: Pace, text: list[int], statistics: Statistics, *,
        lookup: bool, copies: int, ranks: int = 1, thinking_end: int | None = None,
    ) -> None:  # fmt: skip
        self.copies, self.ranks = copies, ranks
        self.proposer, self.pace, self.text, self.statistics = proposer, pace, text, statistics
        self.lookup, self.thinking_end = Lookup(text) if lookup else None, thinking_end
        self.ring = CatchupRing(RING_ROWS, shift=proposer.levers.refeed_shift)
        self.state: ProposerState | None = None
        self.proposed: Drafts | None = None  # of this step, if they are the head's
        self.paced = False
        self._late: tuple[HiddenCapture, int, Start, Conversation | None] | None = None
        self._hidden: np.ndarray | None = None  # of the row before the newest token
        self.over = False  # the drafter cannot follow the text any more
        self._waiting = 0  # rows since the drafter was last brought up to date
        self._accepted: int | None = None  # drafts of the last propose that were taken, until told

    def begin(
        self, start: Start, hiddens: np.ndarray, capture: HiddenCapture,
        keeper: Conversation | None,
    ) -> None:  # fmt: skip
        """Takes in the prompt, from its hiddens at positions `start.first` on.

        A head that works in the target's buffers does so at its first propose.
        """
        proposer, levers = self.proposer, self.proposer.levers
        self.state, self._hidden = start.state, np.array(hiddens[-1])
        if levers.catchup and levers.trim is not TrimPolicy.DEFAULT:
            self.ring.put(len(self.text), self._hidden)
        if proposer.prefill_uses_shared_buffers():
            ticket = capture.owner.new_ticket()
            capture.write(ticket, start.first, hiddens)
            self._late = capture, ticket, start, keeper
        else:
            self._take_in(start, self.text, start.first, hiddens, keeper)

    def _take_in(
        self, start: Start, prompt: Sequence[int], lo: int, hiddens: np.ndarray,
        keeper: Conversation | None,
    ) -> None:  # fmt: skip
        try:
            if start.last_key is None and lo == 0:
                self.proposer.prefill_drafter(prompt, hiddens, start.state)
            elif keeper is not None:
                keeper.extend(self.proposer, start, prompt, lo, hiddens)
        except CircuitError as error:
            self._give_up(error)

    def _give_up(self, error: CircuitError) -> None:
        """Goes on without drafts: the text does not need them."""
        log.warning("no drafts from here on: %s", error)
        self.over = True

    def _take_in_late(self) -> None:
        """The prompt at the first propose; not if another sequence's hiddens stand there by now."""
        (capture, ticket, start, keeper), self._late = self._late, None
        lo, hiddens = capture.read(ticket)
        if len(hiddens):
            self._take_in(start, self.text[: lo + len(hiddens)], lo, hiddens, keeper)
        else:
            log.warning("the drafter has no context: %s", Refusal.FOREIGN_HIDDENS.value)

    def drafts(self, position: int, count: int) -> tuple[int, ...]:
        """At most `count` drafts for the rows after the newest token, the one at `position`."""
        self.proposed, self.paced = None, False
        if count < 1 or self.over:
            return ()
        pinned = self.pace.pinned(self._since_thinking())
        if not pinned:
            count = self.pace.drafts(count, position)
            self.paced = self.pace.measures
        if count < 1:
            self.skip(position)
            return ()
        copied = self.prepare(position, count)
        if copied or self.over:
            return copied
        try:
            made = self.proposer.propose(self.request(position, count), self.state)
        except CircuitError as error:
            log.warning("no drafts for the token at position %d: %s", position, error)
            return ()
        drafts = self.take(made)
        if made.logprobs and self.ranks == 1:
            drafts = drafts[: self.pace.verified(made.logprobs)]
        return drafts

    def skip(self, position: int) -> None:
        """A step without drafts: what the ring would forget soon is fed to the drafter."""
        self.proposed = None
        if self._waiting > self.ring.capacity - 8:
            self.keep_up(position)

    def prepare(self, position: int, count: int) -> tuple[int, ...]:
        """Brings the drafter's rows up to date; drafts copied from the text, if any are."""
        if self._late is not None:
            self._take_in_late()
        self.keep_up(position)
        copied = self.lookup.drafts(min(count, self.copies)) if self.lookup is not None else ()
        self.proposed, self.paced = None, self.paced and not copied
        return tuple(copied)

    def _since_thinking(self) -> int | None:
        """Tokens after the newest end of a thinking section, as far as that is near."""
        near = range(min(self.proposer.levers.entry_pin, len(self.text)))
        return next((n for n in near if self.text[-1 - n] == self.thinking_end), None)

    def request(self, position: int, count: int, *, logprobs: bool = False) -> ProposeRequest:
        """What the head is asked for the token at `position`."""
        levers = self.proposer.levers
        return ProposeRequest(
            last_token=self.text[-1], target_hidden=self._hidden, position=position,
            num_drafts=count,
            want_logprobs=logprobs or levers.draft_clamp > 0 or self.pace.worth is not None,
            ranks=max(levers.shadow_topk, self.ranks, 2 if levers.shadow_topk else 1),
        )  # fmt: skip

    def take(self, made: Drafts) -> tuple[int, ...]:
        """The head's drafts; none where it is less sure of them than the lever asks."""
        sure = not made.logprobs or math.exp(min(made.logprobs)) >= self.proposer.levers.draft_clamp
        if not sure:
            self.proposer.after_verify(0, self.state)
            return ()
        self.proposed = made if made.tokens else None
        return made.tokens

    def verified(
        self, position: int, hiddens: np.ndarray, drafts: Sequence[int], emitted: Sequence[int],
        accepted: int,
    ) -> None:  # fmt: skip
        """Keeps the hiddens [kept, n] of the rows from `position` on, and counts the step."""
        levers = self.proposer.levers
        self._hidden, self._waiting = hiddens[-1], self._waiting + len(hiddens)
        if levers.trim is not TrimPolicy.DEFAULT if drafts else levers.catchup:
            self.ring.put_rows(position, hiddens, len(hiddens) - 1)
            if levers.fingerprints:
                for label, hidden in enumerate(hiddens, position + 1):
                    log.info("ring: label %d holds %016x", label, hidden_fingerprint(hidden))
        if self.proposed:
            self._accepted = accepted
            if self.ranks == 1:
                compared = min(len(drafts), len(emitted))  # a stop leaves later ones unjudged
                self.pace.judge(self.proposed.logprobs or (), compared, accepted)
        self.statistics.looked_up += bool(drafts) and not self.proposed
        if levers.shadow_topk and self.proposed:
            self._cover(self.proposed, emitted)

    def _cover(self, made: Drafts, picks: Sequence[int]) -> None:
        """Counts at which rank of the head's choices the target's picks stood."""
        if self.statistics.coverage is None:
            self.statistics.coverage = TopkCoverage(self.proposer.levers.shadow_topk)
        ranks = [best[: self.proposer.levers.shadow_topk] for best in made.ranks]
        self.statistics.coverage.count(ranks, picks)
        log.info("shadow: %s with %s, picked %s", made.ranks, made.rank_logprobs, picks)

    def keep_up(self, position: int) -> None:
        """Brings the drafter's rows up to the newest token, which stands at `position`.

        Rows that the policy cut, and those of steps without drafts, are fed with the target's
        hiddens; the row of the newest pair is the next propose's own.
        """
        if self._accepted is not None:
            self.proposer.after_verify(self._accepted, self.state)
            self._accepted = None
        self._waiting, last = 0, self.proposer.last_pair_key(self.state)
        try:
            while last is not None and (part := self.ring.feed(last, position)) is not None:
                if not self._feed(*part):
                    return
                last = part[0] + len(part[1]) - 1
        except CircuitError as error:
            self._give_up(error)

    def _feed(self, first: int, hiddens: np.ndarray) -> int:
        """Rows appended from pair key `first` on; 0 if the head takes none."""
        proposer, state = self.proposer, self.state
        if proposer.levers.fingerprints:
            for key, hidden in enumerate(hiddens, first):
                log.info("feed: key %d takes %016x", key, hidden_fingerprint(hidden))
        tokens = self.text[first + 1 : first + 1 + len(hiddens)]
        if proposer.levers.trim is TrimPolicy.KV_EXACT:
            return proposer.catchup_batch([tokens], [hiddens], [first + 1], [state])
        rows, given = proposer.drafter_rows(state), [self.text[first], *tokens]
        return proposer.catchup_drafter(given, hiddens, rows, first + 1, state)

    def free(self) -> None:
        """Gives the drafter's rows back; a second call does nothing."""
        if self.state is not None:
            self.proposer.free_state(self.state)
            self.state = None
