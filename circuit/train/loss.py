"""What a draft row learns: the target's own distribution over the ids that the head scores."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.nn.functional import linear

from circuit.train.unroll import Batch, Drafted
from ir.ops import rms_norm

STEP_WEIGHTS = (1.0, 0.8, 0.6)
LAST_FIRST_CHOICE = 0.5
FOLLOWED = 0.5  # the part of the right chains that goes on before the lesson is strict


class _Divergence(torch.autograd.Function):
    """Sum over rows of the cross entropy of `logits` against `wanted` [m, v], times `weight`.

    The gradient by the logits is `weight * (softmax - wanted)`; it is made in the forward, in place
    of the logits, since nothing else of them is needed.
    """

    @staticmethod
    def forward(ctx, logits, wanted, weight):
        mass = logits.float()
        shifted = mass - mass.amax(-1, keepdim=True)
        mass = shifted.exp()
        total = mass.sum(-1, keepdim=True)
        loss = (total[:, 0].log() - (wanted * shifted).sum(-1)).sum() * weight
        mass.div_(total).sub_(wanted).mul_(weight)
        ctx.save_for_backward(mass.to(logits.dtype))
        return loss

    @staticmethod
    def backward(ctx, gradient):
        return ctx.saved_tensors[0] * gradient, None, None


def divergence(logits: torch.Tensor, wanted: torch.Tensor, weight: float) -> torch.Tensor:
    """`weight` times the summed cross entropy of rows of `logits`
    against distributions `wanted`.
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
        normed = rms_norm(hidden.float(), self.norm, eps=self.eps)
        mass = linear(normed.to(self.rows.dtype), self.rows).float().softmax(-1)
        if self.first_choice:
            best = mass.argmax(-1, keepdim=True)
            mass = mass.mul_(1 - self.first_choice)
            mass.scatter_add_(-1, best, torch.full_like(best, self.first_choice, dtype=mass.dtype))
        return mass.to(self.rows.dtype)


class Lesson:
    """Visits the steps of one batch: sums the loss, counts agreement, lets right drafts go on.

    A chain goes on while its draft is the text's own token, because only then is its next draft of
    use; so step 2 is learned where step 1 was right. Of the chains that are right at step 1, a
    random part `followed` goes on and weighs the more, which leaves more time for first steps.
    `loss` is the weighted mean over the rows of the first step.
    """

    def __init__(
        self, teacher: Teacher, batch: Batch, weights: tuple[float, ...] = STEP_WEIGHTS,
        followed: float = 1.0, seed: int = 0,
    ) -> None:  # fmt: skip
        self._batch, self._followed = batch, followed
        self._weights = (weights[0], *(w / followed for w in weights[1:]))
        self._draw = torch.Generator().manual_seed(seed)
        places = torch.arange(batch.hidden.shape[1])[None]
        text, place = (
            (places >= batch.starts[:, None]) & (places < (batch.lengths - 1)[:, None])
        ).nonzero(as_tuple=True)
        self._row = torch.full(batch.hidden.shape[:2], -1)
        self._row[text, place] = torch.arange(len(text))
        self._wanted = teacher.distribution(batch.hidden[text, place])
        self.rows = 0
        self.loss = torch.zeros(())
        self.counts = [[0, 0] for _ in weights]  # per step: drafts, right ones

    def __call__(self, step: Drafted) -> torch.Tensor:
        if step.number == 0:
            self.rows = len(step.key)
        wanted = self._wanted[self._row[step.text, step.key + step.number + 1]]
        weight = self._weights[step.number] / self.rows
        self.loss = self.loss + divergence(step.logits, wanted, weight)
        right = step.right
        self.counts[step.number] = [len(right), int(right.sum())]
        if step.number == 0 and self._followed < 1:
            return right & (torch.rand(len(right), generator=self._draw) < self._followed)
        return right
