"""The training loop: batches in a seeded order, lessons, updates, and a state to go on from."""

from __future__ import annotations

import math
import random
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from circuit.report import TERMINATED
from circuit.train.columns import Columns
from circuit.train.errors import Diverged
from circuit.train.loss import EARLY, LATE, Lesson, Teacher
from circuit.train.measure import Acceptance, acceptance
from circuit.train.optimiser import Optimiser
from circuit.train.run import AVERAGED, GREEDY_ONLY, STRICT, Mark, Plan, Progress, save_state
from circuit.train.texts import Written
from circuit.train.unroll import Batch, Unroller

POOL, SAVE_EVERY, DRAFTS = 512, 50, 3

# Marks of the curves and measurements of a run: how many, and the most steps from one to the next.
MARKS, MARK_EVERY, MEASUREMENTS, MEASURE_EVERY = 50, 20, 10, 200


def batches(
    texts: Sequence[Written], rows: int, seed: int, epoch: int
) -> list[list[Written]]:  # fmt: skip
    """The texts of one epoch in batches of about `rows` tokens of answers,
    alike in length, in seeded order.
    """
    rng = random.Random(f"{seed} {epoch}")
    order = list(texts)
    rng.shuffle(order)
    made: list[list[Written]] = []
    for begin in range(0, len(order), POOL):
        batch: list[Written] = []
        count = 0
        for text in sorted(order[begin : begin + POOL], key=lambda t: len(t.ids)):
            batch.append(text)
            count += text.answer
            if count >= rows:
                made.append(batch)
                batch, count = [], 0
        if count > rows // 4 or not made:
            made.append(batch)
    rng.shuffle(made)
    return made


def every(steps: int, times: int, most: int) -> int:
    """After how many of `steps` something is done that is done `times` times, or every `most`."""
    return max(1, min(most, steps // times))


@contextmanager
def between_steps() -> Iterator[Callable[[], None]]:
    """Holds Ctrl-C and termination back; the call that is given raises
    what came, where that does no harm.

    An update that is cut short would leave weights and momentum of different steps.
    """
    asked: list[int] = []

    def stop_if_asked() -> None:
        if signal.SIGINT in asked:
            raise KeyboardInterrupt
        if asked:
            raise SystemExit(TERMINATED)

    if threading.current_thread() is not threading.main_thread():
        yield stop_if_asked
        return
    held = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda number, frame: asked.append(number)) for number in held]
    try:
        yield stop_if_asked
    finally:
        for number, handler in zip(held, before, strict=True):
            signal.signal(number, handler)


@dataclass
class Training:
    """A run in memory: the head's graphs, the teacher, the texts,
    the optimiser and how far it is.
    """

    plan: Plan
    folder: Path
    unroller: Unroller
    teacher: Teacher
    columns: Columns
    optimiser: Optimiser
    progress: Progress
    texts: Sequence[Written] = field(repr=False)
    held_out: Sequence[Written] = field(repr=False)

    def run(self, told: Callable[[int], None]) -> None:
        """Trains up to the planned number of steps; a run that ends
        early is saved between two steps.
        """
        with between_steps() as stop_if_asked:
            try:
                self._steps(told, stop_if_asked)
            except Diverged:
                raise  # what is saved is from before
            except BaseException:
                self.save()
                raise
            self.save()

    def _steps(self, told: Callable[[int], None], stop_if_asked: Callable[[], None]) -> None:
        progress, total, lessons = self.progress, self.plan.steps, []
        for texts in self._batches():
            stop_if_asked()
            if progress.step >= total:
                break
            lessons.append(self._learn(Batch.of(texts)))
            told(progress.step)
            if progress.step % every(total, MARKS, MARK_EVERY) == 0 or progress.step == total:
                progress.marks.append(_mark(progress.step, lessons))
                lessons = []
            measured = every(total, MEASUREMENTS, MEASURE_EVERY)
            if progress.step % measured == 0 or progress.step == total:
                self._measure()
            if progress.step % SAVE_EVERY == 0:
                self.save()

    def _batches(self) -> Iterator[list[Written]]:
        """Batches from where the run is, epoch after epoch."""
        progress, plan = self.progress, self.plan
        while True:
            greedy = plan.past(GREEDY_ONLY, progress.step)
            texts = [t for t in self.texts if t.greedy] if greedy else self.texts
            number = progress.epoch
            epoch = batches(texts or self.texts, plan.batch_rows, plan.seed, number)
            for batch in epoch[progress.place :]:
                if progress.epoch != number:
                    break  # the update before has begun the epoch of greedy texts
                yield batch
            if progress.epoch == number:
                progress.epoch, progress.place = number + 1, 0

    def _learn(self, batch: Batch) -> tuple[float, list[list[int]]]:
        """One update; loss, and drafts and right drafts by step."""
        step, strict = self.progress.step, self.plan.past(STRICT, self.progress.step)
        width = self.plan.width(step, self.columns.count)
        columns = self.columns.pick(batch.ids, step, width)
        teacher = (self.teacher.strict() if strict else self.teacher).over(columns)
        lesson = Lesson(teacher, batch, emphasis=LATE if strict else EARLY, seed=step)
        learned = {
            n: w.to(self.teacher.rows.dtype) if w.ndim == 2 else w
            for n, w in self.optimiser.weights.items()
        }
        self.unroller.run(learned, batch, DRAFTS, lesson, columns)
        loss = float(lesson.loss.detach())
        if not math.isfinite(loss):
            raise Diverged(step=self.progress.step)
        lesson.loss.backward()
        self.optimiser.update(self.plan.share(self.progress.step))
        self.progress.step += 1
        self.progress.place += 1
        self.progress.rows += lesson.rows
        if any(self.plan.passes(part, step) for part in AVERAGED):
            self.optimiser.put_aside()
        if self.plan.passes(GREEDY_ONLY, step):
            self.progress.epoch, self.progress.place = self.progress.epoch + 1, 0
        return loss, lesson.counts

    def _measure(self) -> None:
        if self.held_out:
            found = self.measured()
            mark = Mark(self.progress.step, acceptance=tuple(found.shares),
                        tokens_per_step=found.tokens_per_step)  # fmt: skip
            self.progress.marks.append(mark)

    def measured(self) -> Acceptance:
        """Acceptance on the held-out texts, of the weights as they are shipped."""
        weights = {n: t.float() for n, t in self.learned().items()}
        return acceptance(self.unroller.exact(), weights, self.held_out, DRAFTS)

    def learned(self) -> dict[str, torch.Tensor]:
        """The head's weights so far, averaged, in bf16 as they are shipped."""
        return {n: t.bfloat16() for n, t in self.optimiser.shipped().items()}

    def save(self) -> None:
        """Writes the state, so that a run with the same plan goes on here."""
        save_state(self.folder, self.optimiser.stored(), self.progress)


def _mark(step: int, lessons: Sequence[tuple[float, list[list[int]]]]) -> Mark:
    """The mean over the lessons since the last mark."""
    counts = [[sum(c[j][i] for _, c in lessons) for i in (0, 1)] for j in range(DRAFTS)]
    return Mark(
        step, loss=sum(loss for loss, _ in lessons) / len(lessons),
        agreement=tuple(right / max(1, made) for made, right in counts),
    )  # fmt: skip
