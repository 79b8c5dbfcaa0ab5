"""The multi-token-prediction head as a proposer: its rows, its chain of
drafts, its upkeep after a verify.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ir.key import Mode
from proposers.base import Drafts, ProposeRequest
from proposers.config import Contract, HeadConfig, StreamPoint
from proposers.errors import NothingAllowed
from proposers.levers import ModelLevers
from proposers.masks import Mask, masks_of, reachable, words_of
from proposers.mtp_steps import Steps, batch_step, chain, stepwise
from proposers.paged import PagedProposer
from proposers.rules.tree_shape import MAX_RANK
from proposers.state import MtpState, ProposerState, Row, undone_on_error
from runners.base import DraftRunner

if TYPE_CHECKING:
    from ir.binding import DraftBinding
    from proposers.options import DraftOptions


class MtpHead(PagedProposer):
    """A one-layer head that drafts a chain: each step takes the draft
    and the hidden of the step before.

    The row of pair key p holds token p + 1 and the hidden of position p, rotated by p + 1. A
    propose at position p writes key p - 1 from the target's true hidden, then one row per further
    draft from its own. `eager` makes the runner that is used until another one is installed; `bind`
    makes the binding that a build compiles (None: only compiled programs are at hand); `scored_ids`
    gives the target ids of the scored columns; `embedding_row` gives one row of the table. Without
    those two, a request that needs them is refused.
    """

    def __init__(
        self, contract: Contract, config: HeadConfig, eager: Callable[[], DraftRunner], *,
        levers: ModelLevers | None = None,
        bind: Callable[[DraftOptions, Contract], DraftBinding] | None = None,
        scored_ids: Callable[[], np.ndarray] | None = None,
        embedding_row: Callable[[int], np.ndarray] | None = None,
    ) -> None:  # fmt: skip
        self.levers = levers or ModelLevers()
        self.contract, self.config = self.levers.resolve(contract), config
        self._make_eager, self._bind = eager, bind
        self._read_ids, self._embedding_row = scored_ids, embedding_row
        self._eager: DraftRunner | None = None
        self._installed: DraftRunner | None = None
        self._ids: np.ndarray | None = None

    @property
    def target_hidden(self) -> StreamPoint:
        """Where the target's hidden rows are read."""
        return self.contract.target_hidden

    @property
    def runner(self) -> DraftRunner:
        """What the head drafts with: the installed runner, else the eager one."""
        if self._installed is not None:
            return self._installed
        if self._eager is None:
            self._eager = self._make_eager()
        return self._eager

    @property
    def installed(self) -> DraftRunner | None:
        """The runner that `set_circuit_draft` put in place."""
        return self._installed

    def set_circuit_draft(self, runner: DraftRunner | None) -> None:
        """Drafts with `runner` from now on; None restores the eager
        forward. Sequences keep their rows.
        """
        if runner is self._installed:
            return
        if runner is not None:
            runner.hold(self)
        old, self._installed = self._installed, runner
        if old is not None:
            old.release(self)

    def circuit_draft(self, options: DraftOptions, levers: ModelLevers) -> DraftBinding | None:
        """The head as a binding; None where only compiled programs are at hand."""
        return None if self._bind is None else self._bind(options, levers.resolve(self.contract))

    def propose(self, request: ProposeRequest, state: ProposerState) -> Drafts:
        """Exactly `num_drafts` drafts, fewer only where a stop rule or the masks end the chain.

        Pending rows are written in the same step as the first draft's. After an error the state is
        as it was.
        """
        ranks, stop = request.ranks, self.levers.stop_rule
        spines = ranks < 2 or (ranks <= MAX_RANK and self.runner.widest(Mode.SPINE))
        if request.grammar_bitmask is not None or not spines:
            return self.propose_stepwise(request, state)[0]
        mine, count = self._adopt(state), request.num_drafts
        with undone_on_error([mine]):
            self._begin(request, mine)
            made = Steps()
            if count > 0:
                ids = self._scored_ids() if ranks > 1 else None
                made = chain(self.runner, mine, count, stop, ranks=ranks, ids=ids)
            return self._finish(request, mine, made)

    def propose_stepwise(
        self, request: ProposeRequest, state: ProposerState
    ) -> tuple[Drafts, np.ndarray]:
        """As `propose`, one step at a time; also the hidden [n] that a further step would take."""
        ids = self._scored_ids()
        mine = self._adopt(state)
        masks = self.masks(request)
        with undone_on_error([mine]):
            self._begin(request, mine)
            if not masks:
                return self._finish(request, mine, Steps()), request.target_hidden
            ranks, stop = request.ranks, self.levers.stop_rule
            made = stepwise(self.runner, mine, masks, ids, ranks, stop)
            return self._finish(request, mine, made), made.hidden

    def masks(self, request: ProposeRequest) -> list[Mask | None]:
        """The mask of each draft that can be made; NothingAllowed if not even the first can be."""
        given, words = request.grammar_bitmask, words_of(self.config.target_vocab_size)
        ids = self._scored_ids()
        if given is not None and (given.dtype != np.int32 or given.shape[-1] != words):
            self._refuse(f"a mask is {given.dtype} {list(given.shape)}, not int32 [{words}]")
        masks = masks_of(given, max(request.num_drafts, 0), self.levers.mask_scope)
        count = reachable(masks, ids)
        if masks and not count:
            raise NothingAllowed(proposer=type(self).__name__, count=len(ids))
        return masks[:count]

    def _begin(self, request: ProposeRequest, mine: MtpState) -> None:
        """Puts the request's row among the pending ones of the state and makes room for drafts."""
        mine.last_num_drafted, mine.last_drafts = 0, ()
        if request.num_drafts > 0:
            self._check(request, mine)
            mine.pending.append(Row(request.last_token, request.target_hidden, request.position))

    def _finish(self, request: ProposeRequest, mine: MtpState, made: Steps) -> Drafts:
        """The drafts as they are returned, recorded in the state."""
        if made.tokens:
            mine.drafted(made.tokens, request.position)
        tokens, deferred = self.deferred(request, made.tokens)
        asked = tuple(made.logprobs) if request.want_logprobs else None
        ranks, shares = tuple(made.ranks), tuple(made.rank_logprobs)
        return Drafts(tokens, asked, deferred, ranks, shares)

    def deferred(
        self, request: ProposeRequest, tokens: Sequence[int]
    ) -> tuple[tuple[int, ...], int | None]:
        """The drafts as they are returned, and the last id where an embed target has its row."""
        if not tokens or request.draft_embed_target is None:
            return tuple(tokens), None
        request.draft_embed_target[...] = self._embedding_row(tokens[-1])
        return (*tokens[:-1], 0), tokens[-1]

    def propose_batch(
        self, requests: Sequence[ProposeRequest], states: Sequence[ProposerState]
    ) -> list[Drafts] | None:
        """Exactly `num_drafts` drafts per sequence, fewer only where a stop rule ends a chain.

        None for a width or a request that needs `propose`. After an error all states are as before.
        """
        if len(requests) != len(states):
            self._refuse(f"{len(requests)} requests for {len(states)} states")
        plain = all(r.grammar_bitmask is None and r.draft_embed_target is None for r in requests)
        counts = {r.num_drafts for r in requests}
        own = all(isinstance(state, MtpState) for state in states)
        if not (
            2 <= len(requests) <= self.propose_batch_max() and plain and own and len(counts) == 1
        ):
            return None
        mine = [self._adopt(state) for state in states]
        with undone_on_error(mine):
            for request, state in zip(requests, mine, strict=True):
                self._check(request, state)
                state.last_num_drafted, state.last_drafts = 0, ()
            count = counts.pop()
            waiting = sum(len(state.pending) for state in mine)
            if count < 1 or waiting + len(mine) > self.propose_batch_max():
                for state in mine:
                    self._flush(state)
            return self._chains(requests, mine, count)

    def _chains(
        self, requests: Sequence[ProposeRequest], states: Sequence[MtpState], count: int
    ) -> list[Drafts]:
        """The drafts of all sequences, one batched step per position.

        Rows that wait are written in the step of the first; a chain that ended is left out of the
        steps after it.
        """
        stop, lanes = self.levers.stop_rule, list(range(len(requests)))
        rows = [
            [*state.pending, Row(r.last_token, r.target_hidden, r.position)]
            for r, state in zip(requests, states, strict=True)
        ]
        drafts: list[list[int]] = [[] for _ in rows]
        logprobs: list[list[float]] = [[] for _ in rows]
        for _ in range(count):
            made = batch_step(self.runner, [states[i] for i in lanes], [rows[i] for i in lanes])
            for i in lanes:
                states[i].pending = []
            for i, token, logprob, hidden in zip(list(lanes), *made, strict=True):
                drafts[i].append(int(token))
                logprobs[i].append(float(logprob))
                states[i].drafted(drafts[i], requests[i].position)
                rows[i] = [Row(int(token), hidden, rows[i][-1].position + 1)]
                if stop is not None and not stop.goes_on(logprobs[i][-1]):
                    lanes.remove(i)
            if not lanes:
                break
        return [Drafts(tuple(d), tuple(p) if r.want_logprobs else None)
                for d, p, r in zip(drafts, logprobs, requests, strict=True)]  # fmt: skip

    def propose_batch_max(self) -> int:
        """The widest BATCH program, 1 if there is none."""
        return max(self.runner.widest(Mode.BATCH), 1)

    def after_verify(self, num_accepted: int, state: ProposerState) -> None:
        """Cuts the rows that the policy of the levers does not keep."""
        mine = MtpState.of(state, self)
        drafted = max(mine.last_num_drafted, 1)
        if not 0 <= num_accepted <= drafted:
            self._refuse(f"{num_accepted} drafts accepted of {drafted}")
        mine.drop(self.levers.trim.dropped(drafted, num_accepted))
        mine.last_num_drafted = 0

    def _scored_ids(self) -> np.ndarray:
        """The target ids of the scored columns, i32 [vocab]."""
        if self._read_ids is None:
            self._refuse("the target ids of its scored columns are not at hand")
        if self._ids is None:
            self._ids = self._read_ids()
        return self._ids

    def _check(self, request: ProposeRequest, state: MtpState) -> None:
        """Refuses a request that cannot be run, with room made for one that can."""
        context = self.context
        width = self.config.hidden_size
        last = request.position + request.num_drafts - 1
        if request.position < 1:
            self._refuse(f"position {request.position} has no hidden before it")
        if last >= context:
            self._refuse(f"the last draft stands at position {last} of a context of {context}")
        if request.target_hidden.shape != (width,):
            self._refuse(f"target_hidden is {list(request.target_hidden.shape)}, not [{width}]")
        self.check_embed_target(request)
        state.lease.reserve(state.rows + request.num_drafts)

    def check_embed_target(self, request: ProposeRequest) -> None:
        """Refuses an embed target where no row of the embedding can be read."""
        if request.draft_embed_target is not None and self._embedding_row is None:
            self._refuse("an embed target is given, but rows of the embedding are not at hand")
