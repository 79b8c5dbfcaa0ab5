"""The trait of draft proposers: what the engine may ask of any
head, and what it gets by default.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from proposers.config import StreamPoint
from proposers.levers import ModelLevers
from proposers.state import ProposerState
from runners.base import DraftRunner

if TYPE_CHECKING:
    from ir.binding import DraftBinding
    from proposers.options import DraftOptions


@dataclass(frozen=True)
class ProposeRequest:
    """One propose for one sequence.

    `last_token` is the newest emitted token, at sequence position `position`, not yet in the
    target's cache; `target_hidden` [n] is the target's hidden of the position before it, at the
    point that the head's contract names. `grammar_bitmask`: i32 words, bit `id % 32` of word `id //
    32` set = allowed; one mask [words] for the next token, or [d, words], one for each draft.
    `draft_embed_target` [n] receives the embedding row of the last draft, whose id is then returned
    as deferred. `target_hidden_stack`: hiddens of several layers, for block-diffusion heads.
    `want_logprobs` asks for the log-probability of each draft under the head, `ranks` for so many
    of the best ids of each step; a head may give fewer.
    """

    last_token: int
    target_hidden: np.ndarray
    position: int
    num_drafts: int
    draft_embed_target: np.ndarray | None = None
    grammar_bitmask: np.ndarray | None = None
    target_hidden_stack: np.ndarray | None = None
    want_logprobs: bool = False
    ranks: int = 1


@dataclass(frozen=True)
class Drafts:
    """What a propose returns: target ids, their log-probabilities if
    asked for, the deferred last id.

    With an embed target the last of `tokens` is 0 and its id is in `deferred`. `ranks` are the best
    ids of each step, the draft first, if more than that was asked for, with `rank_logprobs`.
    """

    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] | None = None
    deferred: int | None = None
    ranks: tuple[tuple[int, ...], ...] = ()
    rank_logprobs: tuple[tuple[float, ...], ...] = ()


class DraftProposer(ABC):
    """A draft head as the engine sees it; mutable data lives in the state of each sequence.

    A foreign state is an error in `propose`, `after_verify` and `free_state`, and 0, None or False
    in the queries.
    """

    target_hidden: StreamPoint = StreamPoint.PRE_NORM
    levers: ModelLevers = ModelLevers()

    @abstractmethod
    def alloc_state(self) -> ProposerState:
        """The state of a new sequence."""

    def alloc_state_for(self, budget_tokens: int) -> ProposerState:
        """The state of a new sequence of at most `budget_tokens` tokens (sys.maxsize: unknown)."""
        return self.alloc_state()

    @abstractmethod
    def propose(self, request: ProposeRequest, state: ProposerState) -> Drafts:
        """Up to `num_drafts` drafts for one sequence; none is legal."""

    def propose_batch(
        self, requests: Sequence[ProposeRequest], states: Sequence[ProposerState]
    ) -> list[Drafts] | None:
        """The drafts of several sequences, each weight read once per
        draft position; None: unsupported.
        """
        return None

    def propose_batch_max(self) -> int:
        """The widest `propose_batch`; 1: per sequence only."""
        return 1

    @abstractmethod
    def after_verify(self, num_accepted: int, state: ProposerState) -> None:
        """Cuts the state to what a verify that accepted `num_accepted` drafts leaves valid."""

    def catchup_drafter(
        self, tokens: Sequence[int], hiddens: np.ndarray, row_base: int, pos_base: int,
        state: ProposerState,
    ) -> int:  # fmt: skip
        """Rows appended from `hiddens` [r, n] and tokens 1..r (token 0 is not
        used); 0: unsupported or refused.

        Row j goes to drafter row `row_base + j`, rotated by `pos_base + j`; any `row_base` but the
        rows held is refused.
        """
        return 0

    def catchup_batch(
        self, tokens: Sequence[Sequence[int]], hiddens: Sequence[np.ndarray],
        first_pos: Sequence[int], states: Sequence[ProposerState],
    ) -> int:  # fmt: skip
        """Rows appended for accepted drafts: row j of sequence i is
        (`tokens[i][j]`, `hiddens[i][j]`).
        """
        return 0

    def prefill_drafter(
        self, prompt_tokens: Sequence[int], hiddens: np.ndarray, state: ProposerState
    ) -> int:
        """Rows made from a prompt of P tokens and its hiddens [P, n], P
        - 1 of them; 0: nothing done.
        """
        return 0

    def prefill_hidden_rows(self, max_seq_len: int) -> int:
        """Prompt rows whose hiddens this head can use."""
        return max_seq_len

    def prefill_uses_shared_buffers(self) -> bool:
        """True if the prompt prefill must wait for the first propose."""
        return False

    def needs_comm(self) -> bool:
        """True if the head's block is sharded over ranks."""
        return False

    def drafter_rows(self, state: ProposerState) -> int:
        """Drafter rows held, which is where the next one goes; 0: none or unknown."""
        return 0

    def last_pair_key(self, state: ProposerState) -> int | None:
        """The pair key of the newest drafter row; None: untracked."""
        return None

    def take_drafter_kv(self, state: ProposerState) -> tuple[list[int], int, int] | None:
        """Blocks, rows and last pair key moved out of the state; None: unsupported or empty."""
        return None

    def install_drafter_kv(
        self, state: ProposerState, blocks: list[int], rows: int, last_pair_key: int
    ) -> bool:
        """The inverse, into a fresh state; False: refused, and the caller keeps the blocks."""
        return False

    def free_drafter_kv(self, blocks: list[int]) -> None:
        """Releases blocks that no state owns."""
        return None

    def read_deferred_draft_token(self, drafts: Drafts) -> int:
        """The id that `propose` left behind an embed target; 0 if there is none."""
        return drafts.deferred or 0

    def block_gamma(self) -> int | None:
        """The block size of a block-diffusion head; None for others."""
        return None

    def last_confidence(self) -> float | None:
        """Always None: confidences are returned with the drafts, as log-probabilities."""
        return None

    def free_state(self, state: ProposerState) -> None:
        """Releases what the state holds; a second call does nothing."""
        return None

    def circuit_draft(self, options: DraftOptions, levers: ModelLevers) -> DraftBinding | None:
        """The head as a binding to compile; None: there is none for this head."""
        return None

    def set_circuit_draft(self, runner: DraftRunner | None) -> None:
        """Drafts with `runner` from now on; None restores the eager forward."""
        return None
