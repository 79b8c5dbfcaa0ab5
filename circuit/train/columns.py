"""Which of the scored ids a batch is taught on: most of the cost of a
step is the product with their rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from circuit.train.texts import Written

FREQUENT = 0.55  # the part of a batch's columns that is the same in every batch


def frequencies(texts: Sequence[Written], vocabulary: int) -> torch.Tensor:
    """In how many of `texts`, prompts included, each id stands, [vocabulary].

    A rare word that one text repeats says little of other texts, and words of prompts are words of
    answers: counted so, the ids cover more of texts on other subjects than by how often they stand
    in answers.
    """
    counts = torch.zeros(vocabulary, dtype=torch.long)
    for text in texts:
        counts[text.ids.long().unique()] += 1
    return counts


def draft_ids(counts: torch.Tensor, scored: int, always: set[int]) -> torch.Tensor:
    """The `scored` most frequent ids, `always` among them, in rising order, i32."""
    raised = counts.clone()
    raised[sorted(always)] += 1 << 40
    return raised.sort(descending=True, stable=True).indices[:scored].sort().values.int()


class Columns:
    """Picks some of the head's `count` columns: the ids of a batch, the
    most frequent ones, and random others.

    Distributions over the columns picked are those of the target among these ids; ids that are rare
    get their share of batches by chance. The last part of a training is taught on all of them.
    """

    def __init__(self, ids: torch.Tensor, counts: torch.Tensor, seed: int) -> None:
        self._seed, self.count = seed, len(ids)
        self._column = torch.full((len(counts),), -1)
        self._column[ids.long()] = torch.arange(len(ids))
        self._order = counts[ids.long()].sort(descending=True, stable=True).indices

    def pick(self, ids: torch.Tensor, step: int, width: int) -> torch.Tensor:
        """Columns [width] in rising order for a batch with `ids` at
        `step`; all if there are no more.
        """
        if width >= self.count:
            return torch.arange(self.count)
        own = self._column[ids.flatten().long().unique()]
        chosen = torch.zeros(self.count, dtype=torch.bool)
        chosen[own[own >= 0]] = True
        chosen[self._order[: int(width * FREQUENT)]] = True
        others = (~chosen).nonzero()[:, 0]
        draw = torch.Generator().manual_seed(self._seed * 1_000_003 + step)
        missing = max(0, width - int(chosen.sum()))
        chosen[others[torch.randperm(len(others), generator=draw)[:missing]]] = True
        return chosen.nonzero()[:, 0]
