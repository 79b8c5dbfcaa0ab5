"""A binding: a program with its weights and states, ready to be interpreted or compiled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from ir.errors import KeyNotServed, Unmodelled
from ir.graph import Graph, GraphKey
from ir.tensor import PackedTensor, TensorType
from ir.tracing import Scope, trace


@dataclass(frozen=True)
class Binding:
    """A target or a draft head: `program` is traced once per key over `weights` and `states`.

    `states` maps the name of each state to its type for one pool of blocks. `keys` are the programs
    that the binding offers. `unmodelled` lists, in words, what the program cannot express of the
    checkpoint: a build with a non-empty list is refused with all of them. `contract` is printed
    when a head is compiled.
    """

    name: str
    program: Callable[[Scope], None]
    weights: Mapping[str, torch.Tensor | PackedTensor]
    states: Mapping[str, TensorType]
    keys: tuple[GraphKey, ...]
    unmodelled: tuple[str, ...] = ()
    contract: Mapping[str, object] = field(default_factory=dict)

    def graph(self, key: GraphKey) -> Graph:
        """The TRACED graph of `key`; an unserved key or an unmodelled feature is an error."""
        if self.unmodelled:
            raise Unmodelled(
                binding=self.name, count=len(self.unmodelled), reasons="; ".join(self.unmodelled)
            )
        if key not in self.keys:
            raise KeyNotServed(
                binding=self.name, key=key, served=", ".join(str(k) for k in self.keys)
            )
        types = {name: TensorType.of(value) for name, value in self.weights.items()}
        return trace(self.program, key, types, self.states, self.name)


@dataclass(frozen=True)
class DraftBinding(Binding):
    """The binding of a draft head: scores `vocab` rows, recycles `hidden` columns between steps."""

    vocab: int = 0
    hidden: int = 0
