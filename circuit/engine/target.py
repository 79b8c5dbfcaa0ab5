"""The target's programs as two verbs: take in a prompt, and compute a few rows of a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from circuit.engine.errors import HiddenMissing
from ir.key import DECODE, GraphKey, Mode
from runners.base import Runner
from runners.kv import BLOCK_ROWS, Lease
from runners.rows import Lane, index_inputs, padded, tree_inputs, tree_key


@dataclass(frozen=True)
class Scored:
    """What the target says after some rows: `tokens` [m] (the maxima),
    `logits` [m, v], `hidden` [m, n].

    `logits` and `hidden` may be the runner's own buffers: they hold until its next step.
    """

    tokens: Sequence[int]
    logits: np.ndarray
    hidden: np.ndarray


class Target:
    """A target's runner, seen from one sequence at a time;
    `hidden_output` names the rows a head reads.
    """

    def __init__(self, runner: Runner, hidden_output: str = "hidden") -> None:
        self.runner = runner
        self.hidden_output = hidden_output
        self.context = runner.inputs(DECODE)["tables"].shape[1] * BLOCK_ROWS
        modes = (Mode.DECODE, Mode.VERIFY, Mode.PREFILL)
        self._keys = [GraphKey(mode, rows) for mode in modes for rows in runner.rows(mode)]

    @property
    def widest(self) -> int:
        """The most rows of one sequence that are computed at once outside of a prompt."""
        return max(self.runner.widest(Mode.VERIFY), 1)

    def rows(self, lease: Lease, ids: Sequence[int]) -> Scored:
        """Computes `ids` as the next rows of the sequence; they are counted as held."""
        key = DECODE if len(ids) == 1 else GraphKey(Mode.VERIFY, len(ids))
        return self._step(key, lease, ids)

    @property
    def widest_tree(self) -> int:
        """The most rows of a tree that are computed at once; 0 without programs for trees."""
        return self.runner.widest(Mode.TREE)

    def tree(self, lease: Lease, ids: Sequence[int], parents: Sequence[int]) -> Scored:
        """Computes `ids` as rows that branch off the sequence: row i continues row `parents[i]`.

        All are counted as held until `lease.keep` makes one path the sequence. BadTree for a table
        that is no tree, or too many rows.
        """
        assert len(ids) == len(parents), f"{len(ids)} ids for {len(parents)} parents"
        key = tree_key(self.runner, parents)
        if len(ids) <= self.widest and all(p == max(i - 1, 0) for i, p in enumerate(parents)):
            return self.rows(lease, ids)  # a chain has programs of its own
        first = lease.append(len(ids))
        inputs = tree_inputs(self.runner, key, lease, first, parents)
        return self._computed(key, ids, inputs)

    @property
    def together(self) -> int:
        """The most rows that are computed at once of several sequences; 0: there is no program."""
        return self.runner.widest(Mode.BATCH)

    def rows_of(self, wanted: Sequence[tuple[Lease, Sequence[int]]]) -> list[Scored]:
        """Computes the next rows of several sequences in one step; they are counted as held.

        A row of a BATCH program says whose it is, so that a sequence may have several: all are
        written before any is attended from, each sees its own sequence up to itself, and its value
        is that of the program of any other width.
        """
        if len(wanted) == 1:
            return [self.rows(*wanted[0])]
        counts = [len(ids) for _, ids in wanted]
        key = self.runner.fitting(Mode.BATCH, sum(counts))
        lanes = []
        for lease, ids in wanted:
            first = lease.append(len(ids))
            lanes.append(Lane(lease, first, first, len(ids)))
        given = np.array([token for _, ids in wanted for token in ids], np.int32)
        inputs = index_inputs(self.runner, key, lanes)
        out = self.runner.step(key, ids=padded(given, key.rows), **inputs)
        if self.hidden_output not in out:
            raise HiddenMissing(output=self.hidden_output)
        tokens, hidden = self.runner.read(out["tokens"]).tolist(), out[self.hidden_output]
        scored, at = [], 0
        for count in counts:
            part = slice(at, at + count)
            scored.append(Scored(tokens[part], out["logits"][part], hidden[part]))
            at += count
        return scored

    def prompt(self, lease: Lease, ids: Sequence[int], *, keep_hidden: bool) -> Scored:
        """Computes a prompt in chunks; the score of its last row, and
        all hiddens if they are kept.
        """
        done, hiddens = 0, []
        while done < len(ids):
            left = len(ids) - done
            key = min(self._keys, key=lambda k: (_cost(k) / min(k.rows, left), -k.rows))
            part = ids[done : done + key.rows]
            scored = self._step(key, lease, part)
            done += len(part)
            if keep_hidden:
                hiddens.append(self.runner.read(scored.hidden)[: len(part)])
        last = slice(0, 1) if key.mode is Mode.PREFILL else slice(len(part) - 1, len(part))
        hidden = np.concatenate(hiddens) if hiddens else scored.hidden[len(part) - 1 : len(part)]
        return Scored(scored.tokens[last], scored.logits[last], hidden)

    def _step(self, key: GraphKey, lease: Lease, ids: Sequence[int]) -> Scored:
        first = lease.append(len(ids))
        inputs = index_inputs(self.runner, key, [Lane(lease, first, first, len(ids))])
        if key.mode is Mode.PREFILL:
            inputs["last_row"] = np.array([len(ids) - 1], np.int32)
        return self._computed(key, ids, inputs)

    def _computed(
        self, key: GraphKey, ids: Sequence[int], inputs: dict[str, np.ndarray]
    ) -> Scored:
        out = self.runner.step(key, ids=padded(np.array(ids, np.int32), key.rows), **inputs)
        if self.hidden_output not in out:
            raise HiddenMissing(output=self.hidden_output)
        tokens = self.runner.read(out["tokens"]).tolist()
        return Scored(tokens, out["logits"], out[self.hidden_output])


def _cost(key: GraphKey) -> float:
    """What a step costs, in readings of all weights: one, and arithmetic that grows with its rows.

    On two cores a 135M target takes 1.1 times a decode for 4 rows and 27 times for 256.
    """
    return 1 + key.rows / 10
