"""`circuit train`: compile the target, let it write, train the head, write it with its recipe."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from circuit.models.checkpoint import Checkpoint, load_target
from circuit.models.target import EMBEDDING, HEAD, NORM, target_side
from circuit.report import Record, Screen
from circuit.sources import model_source
from circuit.train.columns import Columns, draft_ids, frequencies
from circuit.train.corpus import CONTEXT, Wanted, corpus
from circuit.train.errors import NotPrompts, OutputIsFolder
from circuit.train.loop import Training
from circuit.train.loss import EARLY, LATE, STEP_WEIGHTS, Teacher
from circuit.train.measure import Acceptance
from circuit.train.optimiser import Optimiser, Rates
from circuit.train.picture import draw, require_pictures
from circuit.train.prompts import SHARES, Guard
from circuit.train.run import (
    ALL_COLUMNS,
    AVERAGED,
    FLAT,
    GREEDY_ONLY,
    STRICT,
    Plan,
    Progress,
    load_state,
    open_run,
)
from circuit.train.start import head_config, head_contract, start_weights
from circuit.train.texts import Written
from circuit.train.unroll import Unroller
from circuit.train.writing import GREEDY, OWN_WARM, WARM
from codegen.store import scratch, write_atomically
from ir.tensor import unpacked
from proposers.mtp_binding import bind_head, rows_of
from proposers.options import DraftOptions
from proposers.weights import HeadWeights, load_head, save_head

HELD_OUT = 40


@dataclass(frozen=True)
class TrainRequest:
    """One training as it was asked for; `keep_out` is a JSON list of
    prompts that no text may begin with.
    """

    model: str
    out: Path
    tokens: int
    steps: int
    seed: int
    draft_vocab: int
    batch_rows: int
    batch_columns: int
    learning_rate: float
    resume: bool
    keep_out: Path | None
    threads: int | None

    @property
    def folder(self) -> Path:
        """Where the run keeps its texts and its state."""
        return self.out.with_name(self.out.name + ".run")


def train_head(request: TrainRequest, screen: Screen) -> Record:
    """Trains a head for the model and writes it, with curves beside
    it; the record of the result.
    """
    if request.out.is_dir():
        raise OutputIsFolder(path=request.out)
    require_pictures()
    source = model_source(request.model, screen)
    with screen.progress("train") as report:
        checkpoint = load_target(source)
        plan = Plan(
            request.model, checkpoint.provenance.sha256, request.seed, request.tokens,
            request.steps, request.draft_vocab, request.batch_rows, request.batch_columns,
            request.learning_rate,
        )  # fmt: skip
        open_run(request.folder, plan, request.resume)
        if request.threads:
            torch.set_num_threads(request.threads)
        guard = Guard(_kept_out(request.keep_out))
        wanted = Wanted(source, request.folder, request.tokens, request.seed, request.threads)
        texts = corpus(wanted, guard, report)
        report("start the head", 0, 1)
        training, head = _prepared(plan, request.folder, checkpoint, texts)
        report("start the head", 1, 1)
        training.run(lambda step: report("steps", step, plan.steps))
        found = training.measured()
        finished = replace(head, tensors=training.learned(), recipe=_recipe(plan, training, found))
        write_head(request.out, finished)
        picture = request.out.with_suffix(".png")
        draw(training.progress.marks, picture, f"{request.out.name}: {plan.tokens} tokens")
    return _told(request, training, found, picture, screen)


def _kept_out(path: Path | None) -> list[str]:
    """The prompts of a JSON list, none without a file; NotPrompts if it is no such list."""
    if path is None:
        return []
    try:
        prompts = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise NotPrompts(path=path) from error
    if not isinstance(prompts, list) or not all(isinstance(p, str) for p in prompts):
        raise NotPrompts(path=path)
    return prompts


def write_head(path: Path, head: HeadWeights) -> None:
    """Writes a head, whole or not at all, and reads it back to see that it loads."""
    with scratch(path.parent) as folder:
        draft = folder / path.name
        save_head(draft, [head])
        load_head(draft)
        write_atomically(path, draft.read_bytes())


def _prepared(
    plan: Plan, folder: Path, checkpoint: Checkpoint, texts: list[Written]
) -> tuple[Training, HeadWeights]:
    """The training where it stands, and the head that its weights belong to."""
    config, tensors = checkpoint.config, checkpoint.tensors
    scored = min(plan.draft_vocab, config.vocab_size)
    counts = frequencies(texts, config.vocab_size)
    ids = draft_ids(counts, scored, set(config.eos_token_ids))
    stride = max(20, len(texts) // HELD_OUT)
    held = [t for t in texts[stride // 2 :: stride] if t.greedy][:HELD_OUT]
    known = {id(t) for t in held}
    learned = [t for t in texts if id(t) not in known]
    start = start_weights(config, tensors, learned)
    head = HeadWeights(folder, head_contract(config), head_config(config, scored), start, ids)
    side = target_side(config, tensors, CONTEXT)
    binding = bind_head(head, side, DraftOptions(CONTEXT))
    scores = unpacked(rows_of(tensors[EMBEDDING if config.tie_word_embeddings else HEAD], ids))
    teacher = Teacher(unpacked(tensors[NORM]).float(), config.rms_norm_eps, scores.bfloat16())
    unroller = Unroller(binding, torch.bfloat16)
    optimiser = Optimiser(start, Rates(matrices=plan.learning_rate))
    progress = Progress()
    if (saved := load_state(folder)) is not None:
        optimiser.restore(saved[0], saved[1].step)
        progress = saved[1]
    columns = Columns(ids, counts, plan.seed)
    training = Training(
        plan, folder, unroller, teacher, columns, optimiser, progress, learned, held
    )
    return training, head


def _recipe(plan: Plan, training: Training, found: Acceptance) -> dict[str, object]:
    """What the head was made by, for its metadata."""
    return {
        **asdict(plan),
        "texts": len(training.texts),
        "answer_tokens": sum(t.answer for t in training.texts),
        "prompts": {kind.value: share for kind, share in SHARES.items()},
        "answers": {"greedy": GREEDY, "temperature_of_the_others": WARM,
                    "temperature_of_own_requests": OWN_WARM},
        "rows": training.progress.rows,
        "loss": "cross entropy with the target's distribution over the scored ids",
        "step_weights": STEP_WEIGHTS,
        "emphasis": {"early": asdict(EARLY), "strict": asdict(LATE)},
        "optimiser": "Muon for matrices, Adam for vectors",
        "rates": asdict(training.optimiser.rates),
        "parts": {
            "rate_falls": FLAT,
            "strict": STRICT,
            "greedy_only": GREEDY_ONLY,
            "all_columns": ALL_COLUMNS,
        },
        "weights": {"mean_of_running_averages_at": [*AVERAGED, 1.0]},
        "held_out": {
            "texts": len(training.held_out),
            "acceptance": [round(s, 4) for s in found.shares],
            "tokens_per_step": round(found.tokens_per_step, 4),
        },
    }


def _told(
    request: TrainRequest, training: Training, found: Acceptance, picture: Path, screen: Screen
) -> Record:
    shares = " / ".join(f"{share:.2f}" for share in found.shares)
    screen.say(
        f"{request.out}: {training.progress.step} steps; on {len(training.held_out)} held-out "
        f"texts "
        f"{shares} accepted, {found.tokens_per_step:.2f} tokens per step"
    )
    return {
        "path": str(request.out), "bytes": request.out.stat().st_size, "picture": str(picture),
        "steps": training.progress.step, "rows": training.progress.rows,
        "acceptance": found.shares, "tokens_per_step": found.tokens_per_step,
    }  # fmt: skip
