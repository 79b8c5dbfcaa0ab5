"""Several one-layer heads in a row: draft i comes from module i, on
the hidden that module i - 1 left.
"""

from __future__ import annotations

from collections.abc import Sequence

from proposers.base import DraftProposer, Drafts, ProposeRequest
from proposers.config import StreamPoint
from proposers.errors import NoModules
from proposers.mtp import MtpHead
from proposers.state import MultiModuleState, ProposerState


class MultiModuleMtpHead(DraftProposer):
    """A chain over modules; a module's cache holds rows of the steps
    whose draft from it was accepted.
    """

    def __init__(self, modules: Sequence[MtpHead]) -> None:
        if not modules:
            raise NoModules()
        self.modules = tuple(modules)

    def num_modules(self) -> int:
        """Modules, and so the most drafts of one propose."""
        return len(self.modules)

    @property
    def target_hidden(self) -> StreamPoint:
        """Where the target's hidden rows are read."""
        return self.modules[0].target_hidden

    def alloc_state(self) -> MultiModuleState:
        """One state per module."""
        return MultiModuleState([module.alloc_state() for module in self.modules])

    def propose(self, request: ProposeRequest, state: ProposerState) -> Drafts:
        """One draft per module, at most `num_drafts`; the mask applies to all modules."""
        mine = MultiModuleState.of(state, self)
        count = min(max(request.num_drafts, 0), len(self.modules))
        mine.last_num_drafted = 0
        tokens: list[int] = []
        logprobs: list[float] = []
        token, hidden, deferred = request.last_token, request.target_hidden, None
        for index in range(count):
            last = index == count - 1
            step = ProposeRequest(
                token, hidden, request.position + index, 1,
                draft_embed_target=request.draft_embed_target if last else None,
                grammar_bitmask=request.grammar_bitmask, want_logprobs=request.want_logprobs,
            )  # fmt: skip
            drafts, hidden = self.modules[index].propose_stepwise(step, mine.modules[index])
            token, deferred = drafts.tokens[0], drafts.deferred
            tokens.append(token)
            logprobs += drafts.logprobs or ()
            mine.last_num_drafted = index + 1
        return Drafts(tuple(tokens), tuple(logprobs) if request.want_logprobs else None, deferred)

    def after_verify(self, num_accepted: int, state: ProposerState) -> None:
        """Cuts the newest row of each module whose draft was not accepted."""
        mine = MultiModuleState.of(state, self)
        for index in range(mine.last_num_drafted):
            inner = mine.modules[index]
            if index >= num_accepted:
                inner.drop(1)
            inner.last_num_drafted = 0
        mine.last_num_drafted = 0

    def free_state(self, state: ProposerState) -> None:
        """Gives every module's blocks back."""
        mine = MultiModuleState.of(state, self)
        for module, inner in zip(self.modules, mine.modules, strict=True):
            module.free_state(inner)
