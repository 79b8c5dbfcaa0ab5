"""The multi-token-prediction head as a proposer: its rows, its chain of
drafts, its upkeep after a verify.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from ir.key import DECODE, Mode
from proposers.base import Drafts, ProposeRequest
from proposers.config import Contract, HeadConfig, StreamPoint
from proposers.errors import BadRequest
from proposers.levers import ModelLevers
from proposers.mtp_steps import batch_step, chain, logprob_of, stepwise, write_rows
from proposers.paged import PagedProposer
from proposers.state import MtpState, ProposerState, Row
from runners.base import DraftRunner
from runners.kv import BLOCK_ROWS

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
        """Exactly `num_drafts` drafts; pending rows are written in the
        same step as the first of them.
        """
        if request.grammar_bitmask is not None or request.want_logprobs:
            return self.propose_stepwise(request, state)[0]
        mine = self._begin(request, state)
        tokens = chain(self.runner, mine, request.num_drafts) if request.num_drafts > 0 else []
        return self._finish(request, mine, tokens, None)

    def propose_stepwise(
        self, request: ProposeRequest, state: ProposerState
    ) -> tuple[Drafts, np.ndarray]:
        """As `propose`, one step at a time; also the hidden [n] that a further step would take."""
        ids = self._scored_ids()
        mine = self._begin(request, state)
        if request.num_drafts < 1:
            return self._finish(request, mine, [], []), request.target_hidden
        tokens, logprobs, hidden = stepwise(
            self.runner, mine, request.num_drafts, ids, request.grammar_bitmask
        )
        return self._finish(request, mine, tokens, logprobs), hidden

    def _begin(self, request: ProposeRequest, state: ProposerState) -> MtpState:
        """The state, with the request's row pending and room for its drafts."""
        mine = self._adopt(state)
        mine.last_num_drafted, mine.last_drafts = 0, ()
        if request.num_drafts > 0:
            self._check(request, mine)
            mine.pending.append(Row(request.last_token, request.target_hidden, request.position))
        return mine

    def _finish(
        self, request: ProposeRequest, mine: MtpState, tokens: list[int],
        logprobs: list[float] | None,
    ) -> Drafts:  # fmt: skip
        """The drafts as they are returned, recorded in the state."""
        deferred = None
        if tokens:
            mine.drafted(tokens, request.position)
            if request.draft_embed_target is not None:
                deferred, tokens = tokens[-1], [*tokens[:-1], 0]
                request.draft_embed_target[...] = self._embedding_row(deferred)
        asked = tuple(logprobs) if logprobs is not None and request.want_logprobs else None
        return Drafts(tuple(tokens), asked, deferred)

    def propose_batch(
        self, requests: Sequence[ProposeRequest], states: Sequence[ProposerState]
    ) -> list[Drafts] | None:
        """Exactly `num_drafts` drafts per sequence; None for a width or
        a request that needs `propose`.
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
        for request, state in zip(requests, mine, strict=True):
            self._check(request, state)
            state.last_num_drafted, state.last_drafts = 0, ()
            self._flush(state)
        rows = [Row(r.last_token, r.target_hidden, r.position) for r in requests]
        drafts: list[list[int]] = [[] for _ in rows]
        logprobs: list[list[float]] = [[] for _ in rows]
        for _ in range(counts.pop()):
            tokens, hiddens, logits = batch_step(self.runner, mine, rows)
            for i, token in enumerate(map(int, tokens)):
                drafts[i].append(token)
                if requests[i].want_logprobs:
                    logprobs[i].append(logprob_of(logits[i], token, self._scored_ids()))
                mine[i].drafted(drafts[i], requests[i].position)
                rows[i] = Row(token, hiddens[i], rows[i].position + 1)
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

    def catchup_drafter(
        self, tokens: Sequence[int], hiddens: np.ndarray, row_base: int, pos_base: int,
        state: ProposerState,
    ) -> int:  # fmt: skip
        """Rows queued for the next propose; 0 where `row_base` is not the append point."""
        if not isinstance(state, MtpState) or row_base != state.rows or len(tokens) < 2:
            return 0
        return self._queue(tokens[1:], hiddens, pos_base, state)

    def catchup_batch(
        self, tokens: Sequence[Sequence[int]], hiddens: Sequence[np.ndarray],
        first_pos: Sequence[int], states: Sequence[ProposerState],
    ) -> int:  # fmt: skip
        """Rows queued for the next propose of each sequence."""
        if not len(tokens) == len(hiddens) == len(first_pos) == len(states):
            self._refuse("tokens, hiddens, positions and states are of different lengths")
        mine = [MtpState.of(state, self) for state in states]
        given = zip(tokens, hiddens, first_pos, mine, strict=True)
        return sum(self._queue(t, h, p, s) for t, h, p, s in given)

    def _queue(
        self, tokens: Sequence[int], hiddens: np.ndarray, first: int, state: MtpState
    ) -> int:
        if len(tokens) != len(hiddens):
            self._refuse(f"{len(tokens)} tokens for {len(hiddens)} hiddens")
        for j, (token, hidden) in enumerate(zip(tokens, hiddens, strict=True)):
            state.pending.append(Row(int(token), np.array(hidden), first + j))
        if len(tokens):
            state.last_pair_key = first + len(tokens) - 2
        if len(state.pending) >= self.runner.widest(Mode.VERIFY):
            self._flush(self._adopt(state))
        return len(tokens)

    def prefill_drafter(
        self, prompt_tokens: Sequence[int], hiddens: np.ndarray, state: ProposerState
    ) -> int:
        """Row i from token i + 1 and hidden i, keys and values only; 0
        if the state holds rows already.
        """
        if not isinstance(state, MtpState) or state.rows or len(prompt_tokens) < 2:
            return 0
        if not (self.levers.drafter_prefill and self.runner.widest(Mode.PREFILL)):
            return 0
        mine = self._adopt(state)
        given = enumerate(zip(prompt_tokens[1:], hiddens, strict=False), start=1)
        rows = [Row(int(token), hidden, position) for position, (token, hidden) in given]
        mine.lease.reserve(len(rows))
        write_rows(self.runner, mine, rows)
        mine.last_pair_key = len(rows) - 1
        return len(rows)

    def _scored_ids(self) -> np.ndarray:
        """The target ids of the scored columns, i32 [vocab]."""
        if self._read_ids is None:
            self._refuse("the target ids of its scored columns are not at hand")
        if self._ids is None:
            self._ids = self._read_ids()
        return self._ids

    def _check(self, request: ProposeRequest, state: MtpState) -> None:
        """Refuses a request that cannot be run, with room made for one that can."""
        context = self.runner.inputs(DECODE)["tables"].shape[1] * BLOCK_ROWS
        width = self.config.hidden_size
        last = request.position + request.num_drafts - 1
        if request.position < 1:
            self._refuse(f"position {request.position} has no hidden before it")
        if last >= context:
            self._refuse(f"the last draft stands at position {last} of a context of {context}")
        if request.target_hidden.shape != (width,):
            self._refuse(f"target_hidden is {list(request.target_hidden.shape)}, not [{width}]")
        if request.draft_embed_target is not None and self._embedding_row is None:
            self._refuse("an embed target is given, but rows of the embedding are not at hand")
        state.lease.reserve(state.rows + request.num_drafts)

    def _refuse(self, problem: str) -> NoReturn:
        raise BadRequest(proposer=type(self).__name__, problem=problem)
