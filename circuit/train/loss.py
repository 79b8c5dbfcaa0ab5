"""What a draft row learns: the target's own distribution over the ids that the head scores."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch.nn.functional import linear

from circuit.train.unroll import Batch, Drafted
from ir.ops import rms_norm

STEP_WEIGHTS = (1.0, 0.8, 0.6)
LAST_FIRST_CHOICE = 0.5
ROWS = 128


def parts(rows: int) -> Iterator[slice]:
    """Slices of a few of `rows` rows each: what is made of the logits of
    one stays in the cache of a core.
    """
    return (slice(begin, begin + ROWS) for begin in range(0, rows, ROWS))


class _Divergence(torch.autograd.Function):
    """Sum over rows of the cross entropy of `logits` against `wanted` [m, v], times `weight` [m].

    The gradient by the logits is `weight * (softmax - wanted)`; it is made in the forward, since
    nothing else of them is needed.
    """

    @staticmethod
    def forward(ctx, logits, wanted, weight):
        loss, gradient = weight.new_zeros(()), torch.empty_like(logits)
        for part in parts(len(logits)):
            mass = logits[part].float()
            mass = mass - mass.amax(-1, keepdim=True)
            right = wanted[part].float()
            aimed = torch.einsum("mv,mv->m", right, mass)
            total = mass.exp_().sum(-1, keepdim=True)
            loss += ((total[:, 0].log() - aimed) * weight[part]).sum()
            gradient[part] = mass.div_(total).sub_(right).mul_(weight[part, None])
        ctx.save_for_backward(gradient)
        return loss

    @staticmethod
    def backward(ctx, gradient):
        return ctx.saved_tensors[0] * gradient, None, None


def divergence(logits: torch.Tensor, wanted: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The cross entropies of rows of `logits` against distributions
    `wanted`, summed by `weight` [m].
    """
    return _Divergence.apply(logits, wanted, weight)


@dataclass(frozen=True)
class Teacher:
    """The target after its last layer: the final norm and the rows of
    its head that the draft scores.

    `first_choice` is the share of the lesson that is its first choice alone: greedy acceptance asks
    for that token, however sure the target is of it.
    """

    norm: torch.Tensor
    eps: float
    rows: torch.Tensor
    first_choice: float = 0.0

    def over(self, columns: torch.Tensor) -> Teacher:
        """The teacher of some of the scored ids."""
        return replace(self, rows=self.rows[columns])

    def strict(self) -> Teacher:
        """The teacher of the last part of a run."""
        return replace(self, first_choice=LAST_FIRST_CHOICE)

    @torch.no_grad()
    def distribution(self, hidden: torch.Tensor) -> torch.Tensor:
        """The distributions [m, v] of the token after each row of
        `hidden`, in the format of `rows`.
        """
        found = self.rows.new_empty(len(hidden), len(self.rows))
        for part in parts(len(hidden)):
            normed = rms_norm(hidden[part].float(), self.norm, eps=self.eps)
            mass = linear(normed.to(self.rows.dtype), self.rows).float().softmax(-1)
            if self.first_choice:
                best = mass.argmax(-1, keepdim=True)
                mass *= 1 - self.first_choice
                mass.scatter_add_(-1, best, mass.new_full(best.shape, self.first_choice))
            found[part] = mass
        return found


@dataclass(frozen=True)
class Emphasis:
    """What of a batch is learned most: a row where no draft begins at
    run time weighs `inside`, and of the chains that are right at step
    1 a part `followed` goes on.
    """

    inside: float = 1.0
    followed: float = 1.0


EARLY, LATE = Emphasis(inside=0.6, followed=0.5), Emphasis(inside=0.35)


class Lesson:
    """Visits the steps of one batch: sums the loss, counts agreement, lets right drafts go on.

    A chain goes on while its draft is the text's own token, because only then is its next draft of
    use; so step 2 is learned where step 1 was right. At run time a chain begins after a token that
    was not foretold, and within a chain that goes well none does: such rows weigh less. Chains are
    followed by chance in proportion to their weight, and weigh the more for it. `loss` is the
    weighted mean over the rows of the first step.
    """

    def __init__(
        self, teacher: Teacher, batch: Batch, weights: tuple[float, ...] = STEP_WEIGHTS,
        emphasis: Emphasis = LATE, seed: int = 0,
    ) -> None:  # fmt: skip
        self._batch, self._weights, self._emphasis = batch, weights, emphasis
        self._draw = torch.Generator().manual_seed(seed)
        places = torch.arange(batch.hidden.shape[1])[None]
        text, place = (
            (places >= batch.starts[:, None]) & (places < (batch.lengths - 1)[:, None])
        ).nonzero(as_tuple=True)
        self._row = torch.full(batch.hidden.shape[:2], -1)
        self._row[text, place] = torch.arange(len(text))
        self._wanted = teacher.distribution(batch.hidden[text, place])
        self._weight = torch.zeros(batch.hidden.shape[:2])
        self.rows = 0
        self.loss = torch.zeros(())
        self.counts = [[0, 0] for _ in weights]  # per step: drafts, right ones

    def __call__(self, step: Drafted) -> torch.Tensor:
        at, right = (step.text, step.key), step.right
        if step.number == 0:
            self.rows = len(step.key)
            self._weight[at] = self._begun(step) / self.rows
        wanted = self._wanted[self._row[step.text, step.key + step.number + 1]]
        weight = self._weight[at]
        self.loss = self.loss + divergence(step.logits, wanted, self._weights[step.number] * weight)
        self.counts[step.number] = [len(right), int(right.sum())]
        return right & self._followed(at) if step.number == 0 else right

    def _begun(self, step: Drafted) -> torch.Tensor:
        """The weight of each row of step 1, with a mean of one: whole where a chain begins."""
        right = torch.zeros(self._row.shape, dtype=torch.bool)
        right[step.text, step.key] = step.right
        before = right[step.text, (step.key - 1).clamp(min=0)] & (step.key > 0)
        weight = torch.where(before, self._emphasis.inside, 1.0)
        return weight / weight.mean()

    def _followed(self, at: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Which chains are followed to their next steps; they weigh for
        those that are not.
        """
        if self._emphasis.followed >= 1:
            return torch.ones(len(at[0]), dtype=torch.bool)
        chance = (self._weight[at] * self.rows * self._emphasis.followed).clamp(max=1.0)
        self._weight[at] /= chance
        return torch.rand(len(chance), generator=self._draw) < chance
