"""Several one-layer heads in a row: draft i comes from module i, on
the hidden that module i - 1 left.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from proposers.base import DraftProposer, Drafts, ProposeRequest
from proposers.config import StreamPoint
from proposers.errors import NoModules
from proposers.levers import ModelLevers
from proposers.mtp import MtpHead
from proposers.state import MtpState, MultiModuleState, ProposerState, undone_on_error


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

    @property
    def levers(self) -> ModelLevers:
        """The modules' levers."""
        return self.modules[0].levers

    def propose(self, request: ProposeRequest, state: ProposerState) -> Drafts:
        """One draft per module, at most `num_drafts`, with the masks and the stop of `MtpHead`.

        After an error every module's state is as it was.
        """
        mine = MultiModuleState.of(state, self)
        asked = min(max(request.num_drafts, 0), len(self.modules))
        with undone_on_error([module._adopt(s) for module, s in self._pairs(mine)]):
            drafts = self._chain(request, mine, asked)
        mine.last_num_drafted = len(drafts.tokens)
        return drafts

    def _chain(self, request: ProposeRequest, state: MultiModuleState, asked: int) -> Drafts:
        """`asked` drafts; the embed target is for the last of those that are made."""
        self.modules[0].check_embed_target(request)
        masks = self.modules[0].masks(replace(request, num_drafts=asked))
        stop, tokens, logprobs = self.levers.stop_rule, [], []
        ranks: list[Drafts] = []
        token, hidden = request.last_token, request.target_hidden
        for index, mask in enumerate(masks):
            step = ProposeRequest(
                token, hidden, request.position + index, 1, grammar_bitmask=mask,
                want_logprobs=request.want_logprobs or stop is not None,
                ranks=request.ranks,
            )  # fmt: skip
            drafts, hidden = self.modules[index].propose_stepwise(step, state.modules[index])
            token = drafts.tokens[0]
            tokens.append(token)
            logprobs += drafts.logprobs or ()
            ranks.append(drafts)
            if stop is not None and not stop.goes_on(logprobs[-1]):
                break
        shown, deferred = self.modules[len(tokens) - 1].deferred(request, tokens)
        asked = tuple(logprobs) if request.want_logprobs else None
        return Drafts(
            shown, asked, deferred, tuple(r for d in ranks for r in d.ranks),
            tuple(r for d in ranks for r in d.rank_logprobs),
        )  # fmt: skip

    def _pairs(self, state: MultiModuleState) -> Iterator[tuple[MtpHead, MtpState]]:
        return zip(self.modules, state.modules, strict=True)

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
        for module, inner in self._pairs(mine):
            module.free_state(inner)
        mine.last_num_drafted = 0
