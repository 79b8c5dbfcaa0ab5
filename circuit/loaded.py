"""A compiled folder, loaded: its tokenizer, its runners, an engine over
them. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NoReturn

import numpy as np

from circuit.backends import RUNNERS, Opened
from circuit.engine.engine import Engine
from circuit.models.tokenizer import Tokenizer
from circuit.recipe import TARGET, TOKENIZER, HeadRecord, Recipe, draft_part
from circuit.report import NoSuchPath
from codegen.artifact import Artifact, Part, load_artifact
from codegen.manifest import NotAnArtifact
from ir.errors import CircuitError
from ir.key import DECODE
from proposers.base import DraftProposer
from proposers.levers import ModelLevers
from proposers.mtp import MtpHead
from proposers.multi_module import MultiModuleMtpHead
from runners.base import DraftRunner
from runners.kv import BLOCK_ROWS


class NoRecipe(NotAnArtifact):
    says = "{path} was not written by `circuit compile`: {problem}"


class RecycleCompiled(CircuitError):
    says = "the head of this artifact was compiled to recycle its {built} hidden, not {asked}"
    hint = "leave the lever recycle out, or generate with --eager"


class OnlyCompiled(CircuitError):
    says = "the head of this artifact has no eager forward at hand"
    hint = "generate with --eager, which reads the checkpoint again"


@dataclass(frozen=True)
class Loaded:
    """An artifact and the recipe it was made by."""

    artifact: Artifact
    recipe: Recipe

    @staticmethod
    def read(path: Path, *, verify: bool = False) -> Loaded:
        """The artifact at `path`, refused unless it is whole,
        unedited and made for this machine.
        """
        if not path.exists():
            raise NoSuchPath(path=path, hint=f"Make it with `circuit compile MODEL -o {path}`.")
        artifact = load_artifact(path, verify=verify)
        try:
            recipe = Recipe.read(artifact.options)
        except (ValueError, OverflowError) as problem:
            raise NoRecipe(path=path, problem=problem) from problem
        loaded = Loaded(artifact, recipe)
        if recipe.choices.backend not in RUNNERS:
            raise NoRecipe(path=path, problem=f"there is no backend {recipe.choices.backend}")
        if missing := {TARGET, *loaded.draft_parts} - artifact.parts.keys():
            raise NoRecipe(path=path, problem=f"it has no {min(missing)}")
        loaded._compare_sizes()
        return loaded

    def _compare_sizes(self) -> None:
        """Refuses a recipe of another model than that of the programs."""
        part, config = self.artifact.part(TARGET), self.recipe.config
        plan = part.plan(DECODE)
        sizes = {name: plan.buffers[number].type.shape[-1] for name, number in plan.outputs}
        for name, told in (("logits", config.vocab_size), ("hidden", config.hidden_size)):
            if sizes.get(name, told) != told:
                raise NoRecipe(
                    path=self.artifact.path,
                    problem=f"its programs give {sizes[name]} {name}, its options say {told}",
                )
        if not 0 <= part.context - self.recipe.choices.context < BLOCK_ROWS:
            raise NoRecipe(
                path=self.artifact.path,
                problem=f"its programs hold {part.context} tokens, its options say "
                f"{self.recipe.choices.context}",
            )

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The target's tokenizer."""
        text = self.artifact.read(TOKENIZER).decode("utf-8")
        return Tokenizer.from_json(self.artifact.extra(TOKENIZER), text, self.recipe.config)

    @property
    def parts(self) -> dict[str, Part]:
        """The artifact's parts by name, the target first."""
        return {name: self.artifact.part(name) for name in (TARGET, *self.draft_parts)}

    @property
    def draft_parts(self) -> tuple[str, ...]:
        """Names of the parts that hold the modules of the draft head."""
        count = len(self.recipe.heads)
        return tuple(draft_part(index, count) for index in range(count))

    @property
    def digest(self) -> str:
        """The digest of the whole artifact: programs, weights, choices."""
        return self.artifact.manifest["digest"]

    def runners(self, threads: int | None = None, *, sequences: int = 1) -> Opened:
        """A runner of compiled programs for each part, with room for `sequences` contexts,
        and the call that frees what they share.
        """
        parts = self.parts
        blocks = {n: 1 + sequences * -(-p.context // BLOCK_ROWS) for n, p in parts.items()}
        return RUNNERS[self.recipe.choices.backend](parts, threads, blocks)


def compiled_head(
    record: HeadRecord, runner: DraftRunner, levers: ModelLevers, part: Part
) -> MtpHead:
    """The proposer of one module whose programs are all compiled."""

    def nothing_eager() -> NoReturn:
        raise OnlyCompiled()

    def scored_ids() -> np.ndarray:
        stored = [key for key in part.record["weights"] if key.startswith("draft_ids@")]
        if not stored:
            return np.arange(record.config.vocab_size, dtype=np.int32)
        return part.weight(*stored[0].split("@")).view(np.int32)

    head = MtpHead(
        record.contract, record.config, nothing_eager, levers=levers, scored_ids=scored_ids
    )
    head.set_circuit_draft(runner)
    return head


def whole_head(modules: list[MtpHead]) -> DraftProposer | None:
    """One proposer of the modules of a head; None if there are none."""
    if len(modules) > 1:
        return MultiModuleMtpHead(modules)
    return modules[0] if modules else None


def compiled_engine(
    loaded: Loaded, threads: int | None, levers: ModelLevers, *, draft: bool = True,
    sequences: int = 1,
) -> tuple[Engine, Callable[[], None]]:  # fmt: skip
    """An engine over the compiled programs with room for `sequences` contexts, and the call that
    frees them.
    """
    for head in loaded.recipe.heads if draft else ():
        built, asked = head.contract.recycle, levers.resolve(head.contract).recycle
        if asked is not built:
            raise RecycleCompiled(built=built.value, asked=asked.value)
    runners, free_shared = loaded.runners(threads, sequences=sequences)
    modules: list[MtpHead] = []
    if draft:
        modules = [
            compiled_head(record, runners[name], levers, loaded.artifact.part(name))
            for name, record in zip(loaded.draft_parts, loaded.recipe.heads)
        ]

    def close() -> None:
        for module in modules:
            module.set_circuit_draft(None)
        for runner in runners.values():
            runner.close()
        free_shared()

    return Engine(runners[TARGET], whole_head(modules)), close
