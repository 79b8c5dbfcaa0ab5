"""What is asked of a generation, and why it may be refused before anything is computed."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from circuit.engine.errors import (
    EmptyPrompt,
    NoDraftHead,
    PromptTooLong,
    TooManyDrafts,
    TreeTooWide,
)
from circuit.engine.sampling import Sampling
from circuit.engine.target import Target
from proposers.rules.tree_growth import TreeGrowth
from proposers.rules.tree_shape import TreeShape


@dataclass(frozen=True)
class Request:
    """What to generate: `drafts` per step at most, `stop` ids that end
    the text (and are its last token).
    """

    prompt: Sequence[int]
    max_tokens: int
    drafts: int
    sampling: Sampling
    stop: Collection[int]
    lookup: bool = False
    tree: TreeShape | TreeGrowth | None = None
    thinking_end: int | None = None

    def check(self, target: Target, *, headed: bool) -> None:
        """Raises what keeps `target`, with a draft head if `headed`, from this request."""
        if not len(self.prompt):
            raise EmptyPrompt()
        if len(self.prompt) > target.context:
            raise PromptTooLong(tokens=len(self.prompt), context=target.context)
        if self.drafts and not headed:
            raise NoDraftHead(drafts=self.drafts)
        if self.tree and self.tree.verify_width > target.widest_tree:
            raise TreeTooWide(rows=self.tree.verify_width, most=target.widest_tree)
        most = target.widest - 1 if headed else 0
        if not self.tree and self.drafts > most:
            raise TooManyDrafts(drafts=self.drafts, most=most)
