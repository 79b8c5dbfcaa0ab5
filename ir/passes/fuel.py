"""Fuel: rewrites are counted, and refused once it is spent, so that a bad one can be found."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch.fx


@dataclass(frozen=True)
class Rewrite:
    """One rewrite: its number from 1, the pass that made it, the node and what was done to it."""

    number: int
    pass_name: str
    node: str
    origin: str
    what: str

    def __str__(self) -> str:
        return f"rewrite {self.number}: {self.pass_name} {self.what} {self.node} ({self.origin})"


@dataclass
class Fuel:
    """The rewrites made so far, at most `limit` of them (None: no limit)."""

    limit: int | None = None
    spent: list[Rewrite] = field(default_factory=list)
    pass_name: str = ""

    def spend(self, node: torch.fx.Node, what: str) -> bool:
        """True if the rewrite `what` of `node` may be made; it is then counted."""
        if self.limit is not None and len(self.spent) >= self.limit:
            return False
        number, origin = len(self.spent) + 1, node.meta.get("origin", "?")
        self.spent.append(Rewrite(number, self.pass_name, node.name, origin, what))
        return True
