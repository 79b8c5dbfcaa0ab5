"""Muon for matrices, Adam for vectors, and averages of the weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.nn.functional import linear

QUINTIC = (3.4445, -4.775, 2.0315)
ADAM = (0.9, 0.95)


@dataclass(frozen=True)
class Rates:
    """Learning rates of matrices and of vectors, the memory of momentum and of the average, and the
    share of a matrix that an update of full rate 1 would take away.
    """

    matrices: float = 1e-3
    vectors: float = 1e-3
    momentum: float = 0.95
    average: float = 0.99
    decay: float = 0.05


def orthogonal(update: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """The nearest orthogonal matrix of `update`, nearly: Newton-Schulz
    steps in bf16 (Jordan, Muon, 2024).
    """
    x = update.bfloat16()
    tall = x.shape[0] > x.shape[1]
    x = x.T.contiguous() if tall else x
    x = x / (x.norm() + 1e-7)
    a, b, c = QUINTIC
    for _ in range(steps):
        gram = linear(x, x)
        x = a * x + linear(b * gram + c * linear(gram, gram), x.T.contiguous())
    return (x.T if tall else x).float()


class Optimiser:
    """Learned tensors by name, with what is remembered of their
    gradients; all of it can be stored.
    """

    def __init__(self, start: Mapping[str, torch.Tensor], rates: Rates) -> None:
        self.rates, self.step = rates, 0
        self.weights = {n: t.detach().float().clone().requires_grad_() for n, t in start.items()}
        zeros = {n: torch.zeros_like(t) for n, t in self.weights.items()}
        self.first = {n: t.clone() for n, t in zeros.items()}
        self.second = {n: t for n, t in zeros.items() if t.ndim == 1}
        self.average = {n: t.detach().clone() for n, t in self.weights.items()}
        self.aside = {n: t.clone() for n, t in zeros.items()}  # sum of averages, and how many
        self.count = torch.zeros(())

    def put_aside(self) -> None:
        """Keeps the running average as it is now for `shipped`."""
        self.count += 1
        for name, total in self.aside.items():
            total += self.average[name]

    def shipped(self) -> dict[str, torch.Tensor]:
        """The mean of the running average and of those that were put aside."""
        return {n: (t + self.aside[n]) / (1 + self.count) for n, t in self.average.items()}

    @torch.no_grad()
    def update(self, share: float) -> None:
        """One step with `share` of the learning rates; gradients are cleared."""
        self.step += 1
        clip = self._norm_of_vectors()
        for name, weight in self.weights.items():
            gradient = weight.grad
            if weight.ndim == 2:
                self._muon(name, weight, gradient, share)
            else:
                self._adam(name, weight, gradient / max(1.0, clip), share)
            weight.grad = None
        memory = min(self.rates.average, self.step / (self.step + 10))
        for name, mean in self.average.items():
            mean.lerp_(self.weights[name], 1 - memory)

    def _norm_of_vectors(self) -> float:
        parts = [w.grad.square().sum() for w in self.weights.values() if w.ndim == 1]
        return float(torch.stack(parts).sum().sqrt())

    def _muon(self, name: str, weight: torch.Tensor, gradient: torch.Tensor, share: float) -> None:
        """Nesterov momentum, made orthogonal, as large as a step of Adam
        is: 0.2 of the root-mean-square.
        """
        momentum = self.first[name].lerp_(gradient, 1 - self.rates.momentum)
        direction = orthogonal(gradient.lerp(momentum, self.rates.momentum))
        weight.mul_(1 - share * self.rates.matrices * self.rates.decay)
        weight.sub_(direction, alpha=share * self.rates.matrices * 0.2 * max(weight.shape) ** 0.5)

    def _adam(self, name: str, weight: torch.Tensor, gradient: torch.Tensor, share: float) -> None:
        first = self.first[name].lerp_(gradient, 1 - ADAM[0])
        second = self.second[name].lerp_(gradient.square(), 1 - ADAM[1])
        scale = (second / (1 - ADAM[1] ** self.step)).sqrt_().add_(1e-8)
        weight.sub_(first / scale, alpha=share * self.rates.vectors / (1 - ADAM[0] ** self.step))

    def stored(self) -> dict[str, torch.Tensor]:
        """Everything that is needed to go on, as tensors by name."""
        groups = {
            "weights": self.weights, "average": self.average,
            "first": self.first, "second": self.second,
            "aside": self.aside, "put": {"aside": self.count},
        }  # fmt: skip
        return {f"{g}.{n}": t.detach() for g, tensors in groups.items() for n, t in tensors.items()}

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, torch.Tensor], step: int) -> None:
        """Goes on from what `stored` gave after `step` steps."""
        self.step = step
        for name, mine in self.stored().items():
            mine.copy_(tensors[name])
