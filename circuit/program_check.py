"""The comparison of one program: its numbers and its tokens, each held to the float64 oracle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from circuit.compare import Distance, allowance, clear_rows, distance, pooled, share_used
from circuit.scenario import Observed
from ir.key import GraphKey

CHANCES = "logprobs"


@dataclass
class Compared:
    """What was compared of one program: how much, and the worst share
    of the allowance that it used.
    """

    part: str
    key: GraphKey
    rows: int = 0
    numbers: int = 0
    tokens: int = 0
    near_ties: int = 0
    worst: float = 0.0
    problems: list[str] = field(default_factory=list)

    def plain(self) -> dict[str, object]:
        """The record as JSON values."""
        return {
            "part": self.part, "key": str(self.key), "rows": self.rows, "numbers": self.numbers,
            "tokens": self.tokens, "near_ties": self.near_ties, "worst": round(self.worst, 4),
            "problems": self.problems,
        }  # fmt: skip


def numbers_of(observed: Observed) -> dict[str, np.ndarray]:
    """Everything that a program gave and stored which is a real number."""
    outputs = {n: a for n, a in observed.outputs.items() if not n.startswith("tokens")}
    return outputs | {f"stored {n}": a for n, a in observed.stored.items()}


def kind_of(name: str) -> str:
    """What the numbers of this name are: those of a chain's steps are of one kind."""
    return CHANCES if name.startswith(CHANCES) else name


def eager_distances(pairs: Sequence[tuple[Observed, Observed]]) -> dict[str, Distance]:
    """By kind of number: how far eager is from the oracle, over all programs of a part."""
    found: dict[str, list[Distance]] = {}
    for plain, exact in pairs:
        known = numbers_of(exact)
        for name, array in numbers_of(plain).items():
            found.setdefault(kind_of(name), []).append(distance(array, known[name]))
    return {name: pooled(distances) for name, distances in found.items()}


def compare(
    part: str, compiled: Observed, oracle: Observed, eager: Mapping[str, Distance]
) -> Compared:
    """The comparison of one program's outputs and stored rows, each held to the contract."""
    found = Compared(part, compiled.key, compiled.rows)
    _compare_all(found, compiled, oracle, eager)
    if "logits" in compiled.outputs:
        clear = clear_rows(oracle.outputs["logits"], compiled.outputs["logits"])
        equal = compiled.outputs["tokens"] == oracle.outputs["tokens"]
        found.tokens += int(clear.sum())
        found.near_ties += int((~clear).sum())
        if not equal[clear].all():
            found.problems.append(f"{int((~equal[clear]).sum())} tokens differ from the oracle's")
    return found


def _compare_all(
    found: Compared, compiled: Observed, oracle: Observed, eager: Mapping[str, Distance]
) -> None:
    known = numbers_of(oracle)
    for name, array in numbers_of(compiled).items():
        _compare_numbers(found, name, array, eager[kind_of(name)], known[name])


def _compare_numbers(
    found: Compared, name: str, compiled: np.ndarray, eager: Distance, oracle: np.ndarray
) -> None:
    if compiled.shape != oracle.shape:
        found.problems.append(f"{name} is {list(compiled.shape)}, not {list(oracle.shape)}")
        return
    share = share_used(compiled, eager, oracle)
    found.numbers += compiled.size
    found.worst = max(found.worst, share)
    if not share <= 1:
        found.problems.append(f"{name} is {share:.1f} times as far from the oracle as it may be")


# Chains: the reference follows the compiled drafts, so that a near tie hides nothing after it
# ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Columns:
    """Where target ids stand among the scored columns; `ids` [vocab] are those of the columns."""

    ids: np.ndarray

    def of(self, tokens: np.ndarray) -> np.ndarray | None:
        """The columns of `tokens`; None if one of them is not scored."""
        order = np.argsort(self.ids)
        places = np.searchsorted(self.ids, tokens, sorter=order)
        columns = order[np.minimum(places, len(order) - 1)]
        return columns if np.array_equal(self.ids[columns], tokens) else None


def choices_of(chain: Observed) -> list[np.ndarray]:
    """The ids that each step of a chain gave, the draft first."""
    return [chain.outputs[f"tokens.{step}"].ravel() for step in range(chain.key.rows)]


def drafts_of(chain: Observed, columns: Columns) -> list[int] | None:
    """The drafts that a chain went on with; None if it chose an id that is not scored."""
    choices = choices_of(chain)
    if any(columns.of(ids) is None for ids in choices):
        return None
    return [int(ids[0]) for ids in choices]


def chances_of(logits: np.ndarray) -> np.ndarray:
    """Log-probabilities [m, v] in float64."""
    low = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return low - np.log(np.exp(low).sum(-1, keepdims=True))


def along(chain: Observed, steps: Observed, columns: Columns) -> Observed:
    """What single steps that followed a chain gave, in the chain's own form: the log-probabilities
    of the ids that it chose, its last hidden, its rows.
    """
    chances = chances_of(steps.outputs["logits"])
    given = {
        f"{CHANCES}.{step}": chances[step][columns.of(ids)].reshape(
            chain.outputs[f"{CHANCES}.{step}"].shape
        )
        for step, ids in enumerate(choices_of(chain))
    }
    return Observed(chain.key, chain.rows, given | {"hidden": steps.outputs["hidden"]},
                    steps.stored)  # fmt: skip


def compare_chain(
    part: str, chain: Observed, steps: Observed | None, eager: Mapping[str, Distance],
    columns: Columns,
) -> Compared:  # fmt: skip
    """The comparison of a chain with the oracle's single `steps` along its drafts (None: they
    could not be followed): every log-probability, the last hidden, the stored rows, the choices.

    The ids of a step are right if the oracle's chance of each is its chance of that rank, but for
    the error of two log-probabilities; those that are not of that rank are near ties.
    """
    found = Compared(part, chain.key, chain.rows)
    if steps is None:
        found.problems.append("it drafts an id that the head does not score")
        return found
    oracle = along(chain, steps, columns)
    _compare_all(found, chain, oracle, eager)
    chances = chances_of(steps.outputs["logits"])
    for step, ids in enumerate(choices_of(chain)):
        chosen = columns.of(ids)
        ranked = np.argsort(-chances[step], kind="stable")[: len(ids)]
        gaps = np.abs(chances[step][ranked] - chances[step][chosen])
        slack = 2 * allowance(eager[CHANCES], oracle.outputs[f"{CHANCES}.{step}"]).largest
        wrong = int((gaps > slack).sum()) + len(ids) - len(set(ids.tolist()))
        found.tokens += int((chosen == ranked).sum())
        found.near_ties += int((chosen != ranked).sum())
        if wrong:
            found.problems.append(f"step {step}: {wrong} of {len(ids)} ids are not the likeliest")
    return found
