"""From a checkpoint and a head, by a recipe's choices, to the bindings
that are compiled or interpreted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from circuit.backends import working_format
from circuit.models.checkpoint import Checkpoint, load_target
from circuit.models.convert import WeightOption, converted
from circuit.models.target import target_binding, target_keys, target_side
from circuit.recipe import HEAD, TARGET, Choices, Recipe, draft_part
from codegen.artifact import Artifact, WeightMismatch
from codegen.compile import weights_digest
from ir.binding import Binding
from proposers.config import StreamPoint
from proposers.levers import ModelLevers
from proposers.mtp_binding import TargetSide, bind_head, make_mtp_head
from proposers.options import DraftOptions, head_keys
from proposers.weights import HeadWeights, load_head

SPINES = 4  # the deepest spine of a tree that one call drafts; deeper ones take two


@dataclass(frozen=True)
class Bound:
    """The bindings of an artifact by part name, and what its heads borrow of the target."""

    bindings: dict[str, Binding]
    side: TargetSide
    heads: tuple[HeadWeights, ...]
    options: DraftOptions
    backend: str


def bind(checkpoint: Checkpoint, heads: Sequence[HeadWeights], choices: Choices) -> Bound:
    """The target's binding and one per module of the head, over weights in the chosen format."""
    tensors = converted(checkpoint.tensors, WeightOption(choices.weights))
    asks_normed = any(h.contract.target_hidden is StreamPoint.POST_NORM for h in heads)
    working = working_format(choices.backend, choices.weights)
    trees = choices.trees if heads else ()
    keys = target_keys(batches=choices.batches, chunk=choices.chunk, trees=trees)
    bindings: dict[str, Binding] = {
        TARGET: target_binding(
            checkpoint.config,
            tensors,
            choices.context,
            keys,
            normed_hidden=asks_normed,
            working=working,
        )
    }
    side = target_side(checkpoint.config, tensors, choices.context)
    draft = DraftOptions(
        choices.context,
        head_keys(
            batches=choices.batches, chunk=choices.chunk, spine=SPINES if trees else 0
        ),
    )  # fmt: skip
    for index, head in enumerate(heads):
        bindings[draft_part(index, len(heads))] = bind_head(head, side, draft)
    return Bound(bindings, side, tuple(heads), draft, choices.backend)


def rebind(artifact: Artifact) -> Bound:
    """The bindings that `artifact` was compiled from, over its checkpoint, which must be unchanged.

    WeightMismatch if the weights at the recorded path are others than those that were compiled.
    """
    recipe = Recipe.read(artifact.options)
    checkpoint = load_target(recipe.origin.path, values=False)
    bound = bind(checkpoint, recorded_heads(artifact, recipe), recipe.choices)
    for name, binding in bound.bindings.items():
        seen, expected = weights_digest(binding.weights), artifact.part(name).record["source"]
        if seen != expected:
            raise WeightMismatch(
                path=artifact.path, part=name, expected=expected[:16], seen=seen[:16]
            )
    return bound


def recorded_heads(artifact: Artifact, recipe: Recipe) -> list[HeadWeights]:
    """The modules of the artifact's head, from its own copy or from the folder that is recorded."""
    if not recipe.heads:
        return []
    return load_head(Path(recipe.head_path) if recipe.head_path else artifact.extra(HEAD))


def eager_heads(bound: Bound, levers: ModelLevers) -> list:
    """The modules of the head as proposers that interpret their bindings."""
    return [make_mtp_head(h, bound.side, bound.options, levers=levers) for h in bound.heads]
