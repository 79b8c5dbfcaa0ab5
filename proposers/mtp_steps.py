"""Steps of a one-layer head over its runner: rows written, rows extended, chains, batches."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from ir.key import DECODE, GraphKey, Mode
from proposers.state import MtpState, Row
from runners.base import DraftRunner, Outputs
from runners.rows import Lane, index_inputs, padded, writing_key

log = logging.getLogger(__name__)


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


def extend(runner: DraftRunner, state: MtpState) -> Outputs:
    """Writes all pending rows; outputs of a step whose last row is the newest of them."""
    rows, state.pending = state.pending, []
    key = DECODE if len(rows) == 1 else GraphKey(Mode.VERIFY, len(rows))
    if not runner.serves(key):
        write_rows(runner, state, rows[:-1])
        rows, key = rows[-1:], DECODE
    inputs = new_rows(runner, key, [state], [row.position for row in rows], len(rows))
    return runner.run_draft(
        key,
        ids=np.array([row.token for row in rows], np.int32),
        hidden=np.stack([row.hidden for row in rows]),
        **inputs,
    )


def chain(runner: DraftRunner, state: MtpState, count: int) -> list[int]:
    """`count` drafts after the pending rows, in as few launch lists as there are programs for."""
    newest = state.pending[-1]
    token, hidden, tokens = newest.token, newest.hidden[None], []
    if len(state.pending) > 1:
        out = extend(runner, state)
        token, hidden = int(out["tokens"][-1]), runner.read(out["hidden"])[-1:]
        tokens.append(token)
    else:
        state.pending.clear()
    widest = runner.widest(Mode.CHAIN)
    while len(tokens) < count:
        steps = min(count - len(tokens), widest)
        key = GraphKey(Mode.CHAIN, steps)
        inputs = new_rows(runner, key, [state], [newest.position + len(tokens)], steps)
        made, hidden = runner.run_chain(
            steps, ids=np.array([token], np.int32), hidden=hidden, **inputs
        )
        tokens += made
        token = made[-1]
    return tokens


def stepwise(
    runner: DraftRunner, state: MtpState, count: int, ids: np.ndarray,
    bitmask: np.ndarray | None,
) -> tuple[list[int], list[float], np.ndarray]:  # fmt: skip
    """`count` drafts after the pending rows, their log-probabilities,
    and the last recycled hidden [n].

    Picked on the host from logits: `ids` are the target ids of the scored columns, `bitmask` allows
    some.
    """
    position = state.pending[-1].position
    out = extend(runner, state)
    tokens: list[int] = []
    logprobs: list[float] = []
    while True:
        logits, hidden = runner.read(out["logits"])[-1], runner.read(out["hidden"])[-1:]
        token = int(out["tokens"][-1])
        if bitmask is not None:
            token = best_allowed(logits, bitmask, ids)
        tokens.append(token)
        logprobs.append(logprob_of(logits, token, ids))
        if len(tokens) == count:
            return tokens, logprobs, hidden[0]
        inputs = new_rows(runner, DECODE, [state], [position + len(tokens)])
        out = runner.run_draft(DECODE, ids=np.array([token], np.int32), hidden=hidden, **inputs)


def batch_step(
    runner: DraftRunner, states: Sequence[MtpState], rows: Sequence[Row]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens [n], hiddens [n, h] and logits [n, v] of one step, one row of each of n sequences."""
    key = runner.fitting(Mode.BATCH, len(rows))
    inputs = new_rows(runner, key, states, [row.position for row in rows])
    out = runner.run_draft(
        key,
        ids=padded(np.array([row.token for row in rows], np.int32), key.rows),
        hidden=padded(np.stack([row.hidden for row in rows]), key.rows),
        **inputs,
    )
    return tuple(runner.read(out[name])[: len(rows)] for name in ("tokens", "hidden", "logits"))


def best_allowed(logits: np.ndarray, bitmask: np.ndarray, ids: np.ndarray) -> int:
    """The target id of the first largest logit whose bit is set; 0, with a warning, if none is."""
    words = bitmask.view(np.uint32)
    inside = ids < 32 * len(words)
    bits = words[np.where(inside, ids // 32, 0)] >> (ids % 32).astype(np.uint32) & 1
    allowed = inside & (bits == 1)
    if not allowed.any():
        log.warning("the grammar allows none of the head's %d ids; 0 stands in", len(ids))
        return 0
    return int(ids[np.where(allowed, logits, -np.inf).argmax()])


def logprob_of(logits: np.ndarray, token: int, ids: np.ndarray) -> float:
    """The log-probability of target id `token`, -inf for an id that is not scored."""
    at = np.flatnonzero(ids == token)[:1]
    if not len(at):
        return float("-inf")
    wide = logits.astype(np.float64)
    return float(wide[at[0]] - wide.max() - np.log(np.exp(wide - wide.max()).sum()))
