"""The engine: a target and its draft head, with drafts that never change what is written."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

from circuit.engine.capture import HiddenCapture
from circuit.engine.conversation import Conversation
from circuit.engine.generation import Generation
from circuit.engine.pace import Pace
from circuit.engine.request import Request
from circuit.engine.sampling import Sampling
from circuit.engine.target import Target
from proposers.base import DraftProposer
from proposers.rules.tree_growth import TreeGrowth
from proposers.rules.tree_shape import TreeShape
from proposers.rules.worth import DraftWorth
from runners.base import Runner

log = logging.getLogger(__name__)


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
        self.pace = Pace(proposer.levers, self.target.widest - 1) if proposer else None
        self.worth = DraftWorth()  # of the nodes of trees that grow
        if proposer and type(proposer).prefill_drafter is DraftProposer.prefill_drafter:
            log.warning("%s takes in no prompt: its drafts know only what they have drafted",
                        type(proposer).__name__)  # fmt: skip
        rows = proposer.prefill_hidden_rows(self.target.context) if proposer else 0
        self.capture = HiddenCapture(rows)

    def generate(
        self, prompt: Sequence[int], max_tokens: int, *, drafts: int = 0,
        sampling: Sampling | None = None, stop: Collection[int] = (), lookup: bool = False,
        keeper: Conversation | None = None, tree: TreeShape | TreeGrowth | None = None,
        thinking_end: int | None = None,
    ) -> Generation:  # fmt: skip
        """A generation that runs as its steps are read; every error of the request is raised here.

        With `lookup`, tokens that stood in the text before are drafted from what followed them
        there, and the head drafts where there is nothing to copy. A `keeper` gives the rows that
        are there already and takes them back at the end. With `tree` the head's drafts are the
        spine of a tree, and its next choices hedges beside it; `drafts` is not read. After
        `thinking_end`, the id that closes a thinking section, steps are drafted for a while
        whatever is measured.
        """
        request = Request(
            [int(token) for token in prompt], max_tokens, tree.spine_len if tree else drafts,
            sampling or Sampling(), frozenset(stop), lookup, tree, thinking_end,
        )  # fmt: skip
        request.check(self.target, headed=self.proposer is not None)
        return Generation(self, request, keeper)
