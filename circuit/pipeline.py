"""Compile, then serve: a checkpoint and a head become one artifact."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from circuit import options
from circuit.feed import in_order
from circuit.loaded import Loaded
from circuit.options import BadOption
from circuit.recipe import HEAD, TOKENIZER, Choices, HeadRecord, Origin, Recipe
from circuit.report import Record, Report, Screen, UsageError
from circuit.sources import head_source, model_source
from proposers.rules.tree_shape import MAX_NODES

if TYPE_CHECKING:
    from circuit.models.checkpoint import Checkpoint
    from codegen.artifact import Part
    from ir.key import GraphKey
    from proposers.weights import HeadWeights

DEFAULT_CONTEXT = 2048
WIDEST_BATCH = 64
MEANING_SEED = 0


class FolderTaken(UsageError):
    says = "{path} exists and is not a compiled artifact, so it is not replaced."
    hint = "Choose a folder that does not exist; only an artifact is replaced."


@dataclass(frozen=True)
class CompileRequest:
    """One compile as it was asked for; `context` None leaves it to the
    model, up to `DEFAULT_CONTEXT`.
    """

    model: str
    out: Path
    draft: str | None
    weights: str
    backend: str
    context: int | None
    batches: tuple[int, ...]
    trees: tuple[int, ...]
    archs: tuple[int, ...]
    check: bool

    @staticmethod
    def read(
        *, batch: str, archs: str = "", trees: str = "4,6,8", **given: object
    ) -> CompileRequest:
        """The request that the options stand for; BadOption if a width cannot be read."""
        return CompileRequest(
            batches=_widths("--batch", batch, WIDEST_BATCH),
            trees=_widths("--trees", trees, MAX_NODES + 1), archs=_archs(archs), **given,
        )  # fmt: skip


def _widths(name: str, given: str, widest: int) -> tuple[int, ...]:
    """Rising widths of programs; BadOption if one cannot be read."""
    words = [word.strip() for word in given.split(",") if word.strip()]
    wrong = [w for w in words if not w.isdecimal() or not 2 <= int(w) <= widest]
    if wrong:
        raise BadOption(
            name=name, given=given, problem=f"{wrong[0]} is not a width from 2 to {widest}",
            advice="Give widths as 2,4,8, or an empty text for none.",
        )  # fmt: skip
    return tuple(sorted({int(w) for w in words}))


def _archs(given: str) -> tuple[int, ...]:
    """Compute capabilities such as 80 and 90; BadOption if one cannot be read."""
    words = [word.strip().removeprefix("sm_") for word in given.split(",") if word.strip()]
    wrong = [w for w in words if not w.isdecimal() or int(w) < 80]
    if wrong:
        raise BadOption(
            name="--archs", given=given, problem=f"{wrong[0]} is not an architecture from sm_80 on",
            advice="Give architectures as 80,90,100, or an empty text for none.",
        )  # fmt: skip
    return tuple(sorted({int(w) for w in words}))


def compile_model(request: CompileRequest, screen: Screen) -> Record:
    """Compiles what `request` names into its folder; the record of the result.

    The folder is whole or not there: everything is written beside it and renamed at the end.
    """
    from circuit.backends import BACKENDS
    from circuit.bindings import bind
    from circuit.models.checkpoint import load_target
    from codegen.compile import CompileOptions
    from codegen.save import compile_artifact
    from proposers.weights import load_head

    check_free(request.out)
    head_path = head_source(request.draft)
    source = model_source(request.model, screen)
    backend = BACKENDS[request.backend](request.archs)
    began = time.perf_counter()
    with screen.progress("compile") as report:
        heads = load_head(head_path) if head_path else []
        checkpoint = load_target(source, progress=_read(report))
        recipe = make_recipe(request, source, checkpoint, heads, head_path)
        bound = bind(checkpoint, heads, recipe.choices)
        extras = {TOKENIZER: checkpoint.tokenizer.to_json().encode("utf-8")}
        if head_path and head_path.is_file():
            extras[HEAD] = head_path.read_bytes()
        path = compile_artifact(
            request.out,
            {name: (binding, binding.keys) for name, binding in bound.bindings.items()},
            backend,
            CompileOptions(
                store=options.kernel_dir(), check_meaning=MEANING_SEED if request.check else None
            ),
            recorded=recipe.plain(), extras=extras, report=report,
        )  # fmt: skip
    return _finished(path, time.perf_counter() - began, request, screen)


def check_free(out: Path) -> None:
    """Refuses a folder that holds something else than an artifact, before any work is done."""
    from codegen.manifest import MANIFEST

    if (
        out.exists()
        and not (out / MANIFEST).exists()
        and not (out.is_dir() and not any(out.iterdir()))
    ):
        raise FolderTaken(path=out)


def _read(report: Report):
    return lambda done, total: report("read weights", done, total)


def make_recipe(
    request: CompileRequest, source: str, checkpoint: Checkpoint,
    heads: list[HeadWeights], head_path: Path | None,
) -> Recipe:  # fmt: skip
    """What the artifact records; BadOption if the context is longer than the model was made for."""
    longest = checkpoint.config.max_position_embeddings
    context = min(longest, DEFAULT_CONTEXT) if request.context is None else request.context
    if context > longest:
        raise BadOption(
            name="--context", given=context, problem=f"the model was made for {longest} tokens",
            advice="Give a smaller number, or leave it out.",
        )  # fmt: skip
    path = options.at_home(source)
    return Recipe(
        origin=Origin(
            source=request.model,
            path=str(path.resolve()) if path.exists() else source,
            sha256=checkpoint.provenance.sha256,
        ),
        choices=Choices(
            weights=request.weights, backend=request.backend, context=context,
            batches=request.batches, trees=request.trees,
        ),
        config=checkpoint.config,
        heads=tuple(HeadRecord(h.contract, h.config) for h in heads),
        head_path=str(head_path.resolve()) if head_path and head_path.is_dir() else "",
        notes=checkpoint.notes,
    )  # fmt: skip


def _finished(path: Path, seconds: float, request: CompileRequest, screen: Screen) -> Record:
    """The record of a finished compile, told to the person as well,
    checked if that was asked for.
    """
    loaded = Loaded.read(path)
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    record: dict[str, object] = {
        "path": str(path),
        "seconds": round(seconds, 3),
        "bytes": size,
        "digest": loaded.digest,
        "parts": {name: _part(part) for name, part in loaded.parts.items()},
    }
    rows = [
        [name, ", ".join(str(k) for k in keys), str(launches)]
        for name, part in loaded.parts.items()
        for launches, keys in _by_launches(part).items()
    ]
    for name, programs, launches in rows:
        screen.say(f"{name}: {launches} launches a step in {programs}")
    screen.say(f"{path}: {size / 1e6:.0f} MB in {seconds:.1f} s")
    if request.check:
        from circuit.check import check_artifact

        checked = check_artifact(path, screen)
        record |= {"check": checked, "exit_code": checked["exit_code"]}
    return record


def _part(part: Part) -> dict[str, object]:
    launches = {str(key): len(part.plan(key).launches) for key in in_order(part.keys)}
    return {"digest": part.digest, "launches": launches, "facts": dict(part.facts)}


def _by_launches(part: Part) -> dict[int, list[GraphKey]]:
    """Number of launches -> the programs that have it."""
    found: dict[int, list[GraphKey]] = {}
    for key in in_order(part.keys):
        found.setdefault(len(part.plan(key).launches), []).append(key)
    return found
