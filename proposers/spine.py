"""Drafts for the spine of a tree: a chain that keeps the best few ids of each of its steps."""

from __future__ import annotations

import math

import numpy as np

from ir.key import GraphKey, Mode
from proposers.mtp_steps import Steps, best_of, extend, new_rows
from proposers.state import MtpState
from runners.base import DraftRunner


def spine(runner: DraftRunner, state: MtpState, count: int, ids: np.ndarray, ranks: int) -> Steps:
    """`count` drafts after the pending rows with their log-probabilities and, at each, the first
    `ranks` choices; in as few launch lists as there are SPINE programs for.

    Where pending rows are written with the first step, its choices are taken from the logits;
    `ids` are the target ids of the scored columns.
    """
    newest, made = state.pending[-1], Steps()
    token, hidden = newest.token, newest.hidden[None]
    if len(state.pending) > 1:
        out = extend(runner, state)
        hidden = runner.read(out["hidden"])[-1:]
        _take(made, *best_of(runner.read(out["logits"])[-1], ids, ranks), ranks)
    else:
        state.pending.clear()
    widest = runner.widest(Mode.SPINE)
    while len(made.tokens) < count:
        steps = min(count - len(made.tokens), widest)
        token = made.tokens[-1] if made.tokens else token
        key = GraphKey(Mode.SPINE, steps)
        inputs = new_rows(runner, key, [state], [newest.position + len(made.tokens)], steps)
        out = runner.run_draft(key, ids=np.array([token], np.int32), hidden=hidden, **inputs)
        hidden = runner.read(out["hidden"])
        for index in range(steps):
            best = runner.read(out[f"ranks.{index}"])[0, :ranks].tolist()
            shares = runner.read(out[f"logprobs.{index}"])[0, :ranks].tolist()
            live = max(1, sum(share > -math.inf for share in shares))  # -inf: no such column
            _take(made, tuple(best[:live]), tuple(shares[:live]), ranks)
    made.hidden = hidden[0]
    return made


def _take(made: Steps, best: tuple[int, ...], shares: tuple[float, ...], ranks: int) -> None:
    """Appends a step that goes on with the first of its best ids."""
    made.tokens.append(best[0])
    made.logprobs.append(shares[0])
    if ranks > 1:
        made.ranks.append(best)
        made.rank_logprobs.append(shares)
