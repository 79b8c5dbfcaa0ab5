"""How many drafts a check accepts on given greedy texts: exact,
without running the target again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from circuit.train.texts import Written
from circuit.train.unroll import Batch, Drafted, Unroller


@dataclass(frozen=True)
class Acceptance:
    """Checks made, and how many of them accepted a draft at position 1, 2, ...

    `accepted` is cumulative: a draft counts if those before it were accepted too.
    """

    checks: int
    accepted: tuple[int, ...]

    @property
    def shares(self) -> list[float]:
        """Accepted drafts per check, by position."""
        return [count / max(1, self.checks) for count in self.accepted]

    @property
    def tokens_per_step(self) -> float:
        """Tokens that one check yields: its own and the accepted drafts."""
        return 1 + sum(self.shares)


@torch.no_grad()
def acceptance(
    unroller: Unroller, weights: Mapping[str, torch.Tensor], texts: Sequence[Written], drafts: int
) -> Acceptance:
    """What greedy speculative decoding of `texts` would accept with `drafts` drafts a check.

    A greedy text is the same with and without drafts, so the check at a place accepts the drafts
    that are the text's own next tokens. Rows of accepted drafts are re-fed with true hiddens, as in
    the engine.
    """
    checks, accepted = 0, [0] * drafts
    for text in texts:
        right = torch.zeros(drafts, len(text.ids), dtype=torch.bool)

        def visit(step: Drafted, right: torch.Tensor = right) -> torch.Tensor:
            right[step.number, step.key] = step.right
            return step.right

        unroller.run(weights, Batch.of([text]), drafts, visit)
        made, taken = walk(right, text.start - 1, len(text.ids))
        checks += made
        accepted = [a + t for a, t in zip(accepted, taken, strict=True)]
    return Acceptance(checks, tuple(accepted))


def walk(right: torch.Tensor, key: int, length: int) -> tuple[int, list[int]]:
    """Checks and accepted drafts by position from pair key `key` to the end of a text.

    `right[j, k]`: draft j of the chain that begins at key k is the text's own token.
    """
    checks, taken = 0, [0] * len(right)
    while key + 2 < length:
        count = 0
        while count < len(right) and key + 2 + count < length and right[count, key]:
            taken[count] += 1
            count += 1
        checks += 1
        key += count + 1
    return checks, taken
