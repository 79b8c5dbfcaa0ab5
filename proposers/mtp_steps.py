"""Steps of a one-layer head over its runner: rows written, rows extended, chains, batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ir.key import DECODE, GraphKey, Mode
from proposers.masks import Mask, best_allowed
from proposers.rules.draft_stop import DraftStop
from proposers.state import MtpState, Row
from runners.base import DraftRunner, Outputs
from runners.rows import Lane, index_inputs, padded, writing_key

MASKED = GraphKey(Mode.MASKED, 1)


def new_rows(
    runner: DraftRunner, key: GraphKey, states: Sequence[MtpState], positions: Sequence[int],
    count: int = 1,
) -> dict[str, np.ndarray]:  # fmt: skip
    """Index inputs of a step that writes `count` new rows of each state, which are counted as held.

    `positions` are the rotary positions of the rows that the step is given.
    """
    given = len(positions) // len(states)
    lanes = [Lane(s.lease, s.lease.append(count), 0, given) for s in states]
    inputs = index_inputs(runner, key, lanes)
    inputs["positions"][: len(positions)] = positions
    return inputs


def write_rows(runner: DraftRunner, state: MtpState, rows: Sequence[Row]) -> None:
    """Writes keys and values of `rows` after the rows held; no more
    than that is computed of them.
    """
    done = 0
    while done < len(rows):
        left = len(rows) - done
        key = writing_key(runner, left)
        part = rows[done : done + min(left, key.rows)]
        inputs = new_rows(runner, key, [state], [row.position for row in part], len(part))
        runner.run_draft(
            key,
            ids=padded(np.array([row.token for row in part], np.int32), key.rows),
            hidden=padded(np.stack([row.hidden for row in part]), key.rows),
            **inputs,
        )
        done += len(part)


def extend(runner: DraftRunner, state: MtpState, mask: Mask | None = None) -> Outputs:
    """Writes all pending rows; outputs of a step whose last row is the newest of them.

    With a `mask`, and one row in the step, the token is the best that it allows.
    """
    rows, state.pending = state.pending, []
    key = DECODE if len(rows) == 1 else GraphKey(Mode.VERIFY, len(rows))
    if mask is not None or not runner.serves(key):
        write_rows(runner, state, rows[:-1])
        rows, key = rows[-1:], DECODE
    inputs = new_rows(runner, key, [state], [row.position for row in rows], len(rows))
    if mask is not None:
        key, inputs["bitmask"] = MASKED, mask[None]
    return runner.run_draft(
        key,
        ids=np.array([row.token for row in rows], np.int32),
        hidden=np.stack([row.hidden for row in rows]),
        **inputs,
    )


@dataclass
class Steps:
    """Drafts made one step at a time, what was measured of each, and the last recycled hidden."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ranks: list[tuple[int, ...]] = field(default_factory=list)
    rank_logprobs: list[tuple[float, ...]] = field(default_factory=list)
    hidden: np.ndarray | None = None

    def take(self, best: tuple[int, ...], shares: tuple[float, ...], ranks: int = 1) -> None:
        """Adds a step that goes on with the first of its best ids."""
        self.tokens.append(best[0])
        self.logprobs.append(shares[0])
        if ranks > 1:
            self.ranks.append(best)
            self.rank_logprobs.append(shares)

    def cut(self, depth: int) -> None:
        """Forgets the steps after the first `depth`."""
        for made in (self.tokens, self.logprobs, self.ranks, self.rank_logprobs):
            del made[depth:]


def chain(
    runner: DraftRunner, state: MtpState, count: int, stop: DraftStop | None = None, *,
    ranks: int = 1, ids: np.ndarray | None = None,
) -> Steps:  # fmt: skip
    """`count` drafts after the pending rows, in as few launch lists as there are programs for.

    With several `ranks` they are of SPINE programs, which give so many of the best ids of each
    step; where pending rows are written with the first draft, its choices are taken from the
    logits, and `ids` are the target ids of the scored columns. With a `stop`, drafts after the
    first that is below its threshold are dropped with their rows.
    """
    newest, made = state.pending[-1], Steps()
    hidden = newest.hidden[None]
    if len(state.pending) > 1:
        out = extend(runner, state)
        hidden = runner.read(out["hidden"])[-1:]
        if ranks > 1:
            made.take(*best_of(runner.read(out["logits"])[-1], ids, ranks), ranks)
        else:
            made.take((int(out["tokens"][-1]),), (float(out["logprobs"][-1]),))
    else:
        state.pending.clear()
    mode = Mode.SPINE if ranks > 1 else Mode.CHAIN
    widest = runner.widest(mode)
    while len(made.tokens) < count:
        steps = min(count - len(made.tokens), widest)
        key, token = GraphKey(mode, steps), made.tokens[-1] if made.tokens else newest.token
        inputs = new_rows(runner, key, [state], [newest.position + len(made.tokens)], steps)
        inputs |= {"ids": np.array([token], np.int32), "hidden": hidden}
        hidden = _launch(runner, key, inputs, made, ranks)
    if stop is not None:
        depth = stop.chain_depth(made.logprobs)
        state.lease.trim(state.lease.rows - (count - depth))
        made.cut(depth)
    return made


def _launch(
    runner: DraftRunner, key: GraphKey, inputs: dict[str, np.ndarray], made: Steps, ranks: int
) -> Any:
    """The hidden [1, n] after the steps of one launch list, whose drafts are added to `made`."""
    if key.mode is Mode.CHAIN:
        tokens, logprobs, hidden = runner.run_chain(key.rows, **inputs)
        for token, logprob in zip(tokens, logprobs, strict=True):
            made.take((token,), (logprob,))
        return hidden
    out = runner.run_draft(key, **inputs)
    for index in range(key.rows):
        best = runner.read(out[f"ranks.{index}"])[0, :ranks].tolist()
        shares = runner.read(out[f"logprobs.{index}"])[0, :ranks].tolist()
        live = max(1, sum(share > -math.inf for share in shares))  # -inf: no such column
        made.take(tuple(best[:live]), tuple(shares[:live]), ranks)
    return out["hidden"]


def stepwise(
    runner: DraftRunner, state: MtpState, masks: Sequence[Mask | None], ids: np.ndarray,
    ranks: int = 1, stop: DraftStop | None = None,
) -> Steps:  # fmt: skip
    """A draft per mask after the pending rows, each with its best `ranks` ids if that is several.

    `ids` are the target ids of the scored columns. A runner without a MASKED program leaves masks
    to the host. A draft whose log-probability is below the threshold of `stop` is the last one.
    """
    made, inside = Steps(), runner.serves(MASKED)  # or masks are applied here
    for mask in masks:
        newest = state.pending[-1]
        out = extend(runner, state, mask if inside else None)
        token, logprob = int(out["tokens"][-1]), float(out["logprobs"][-1])
        logits, made.hidden = out["logits"][-1], runner.read(out["hidden"])[-1]
        if mask is not None and not inside:
            logits = runner.read(logits)
            token = best_allowed(logits, mask, ids)
            logprob = logprob_of(logits, token, ids)
        made.tokens.append(token)
        made.logprobs.append(logprob)
        if ranks > 1:
            best, shares = best_of(runner.read(logits), ids, ranks)
            made.ranks.append(best)
            made.rank_logprobs.append(shares)
        if stop is not None and not stop.goes_on(logprob):
            break
        if len(made.tokens) < len(masks):
            state.pending.append(Row(token, made.hidden, newest.position + 1))
    return made


def batch_step(
    runner: DraftRunner, states: Sequence[MtpState], rows: Sequence[Sequence[Row]]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens [n], their log-probabilities [n] and hiddens [n, h] after the last of each sequence's
    rows.

    A row of a BATCH program says whose it is: a sequence may have several, at least one.
    """
    flat = [row for part in rows for row in part]
    key = runner.fitting(Mode.BATCH, len(flat))
    lanes = [
        Lane(state.lease, state.lease.append(len(part)), 0, len(part))
        for state, part in zip(states, rows, strict=True)
    ]
    inputs = index_inputs(runner, key, lanes)
    inputs["positions"][: len(flat)] = [row.position for row in flat]
    out = runner.run_draft(
        key,
        ids=padded(np.array([row.token for row in flat], np.int32), key.rows),
        hidden=padded(np.stack([row.hidden for row in flat]), key.rows),
        **inputs,
    )
    last = np.cumsum([len(part) for part in rows]) - 1
    return tuple(runner.read(out[name])[last] for name in ("tokens", "logprobs", "hidden"))


def logprob_of(logits: np.ndarray, token: int, ids: np.ndarray) -> float:
    """The log-probability of target id `token`, -inf for an id that is not scored."""
    at = np.flatnonzero(ids == token)[:1]
    if not len(at):
        return float("-inf")
    wide = logits.astype(np.float64)
    return float(wide[at[0]] - wide.max() - np.log(np.exp(wide - wide.max()).sum()))


def best_of(
    logits: np.ndarray, ids: np.ndarray, count: int
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """The `count` likeliest target ids and their log-probabilities, ties by column."""
    left, order = np.array(logits), []
    for _ in range(min(count, len(left))):  # a few passes cost less than a sort
        order.append(int(left.argmax()))
        left[order[-1]] = -np.inf
    low = logits - logits[order[0]]
    shares = low[order] - np.log(np.exp(low).sum(dtype=np.float64))
    return tuple(ids[order].tolist()), tuple(shares.tolist())
