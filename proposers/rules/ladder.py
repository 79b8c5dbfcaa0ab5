"""The ladder: how many drafts a sequence may have, by how many
sequences are active; and its cap.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from proposers.rules.errors import BadDispatchCap, BadLadder

DEFAULT_MAX_SEQUENCES = 32
SERIAL_MAX_SEQUENCES = 4  # without a ladder, wide batches would draft at full depth
MOST_SEQUENCES = 128


@dataclass(frozen=True)
class Ladder:
    """Steps (n_max, drafts) by ascending n_max. `pinned`: a person chose
    it, so the adaptive rung is off.
    """

    steps: tuple[tuple[int, int], ...] = ((4, 3), (8, 3), (16, 1), (32, 1))
    enabled: bool = True
    pinned: bool = False

    @staticmethod
    def parse(text: str) -> Ladder:
        """The pinned ladder written as `n_max:drafts` items in any order;
        one bad item refuses the whole.
        """
        steps: dict[int, int] = {}
        for item in text.split(","):
            n_max, colon, drafts = (part.strip() for part in item.partition(":"))
            if not (colon and n_max.isdecimal() and drafts.isdecimal()):
                raise BadLadder(text=text, problem=f"`{item.strip()}` is not n_max:drafts")
            if int(n_max) == 0 or int(drafts) == 0:
                raise BadLadder(text=text, problem=f"`{item.strip()}` has a 0")
            if int(n_max) in steps:
                raise BadLadder(text=text, problem=f"{int(n_max)} sequences have two entries")
            steps[int(n_max)] = int(drafts)
        return Ladder(tuple(sorted(steps.items())), pinned=True)

    def drafts(self, n_active: int, num_drafts: int) -> int:
        """Drafts for each of `n_active` sequences where `num_drafts` are wanted.

        The step with the smallest n_max that is not below `n_active` decides (past the end: the
        last one); its count is held between 1 and `num_drafts`. A disabled ladder gives
        `num_drafts`.
        """
        if num_drafts <= 0 or not self.enabled:
            return max(num_drafts, 0)
        wanted = next((k for n_max, k in self.steps if n_max >= n_active), self.steps[-1][1])
        return min(max(wanted, 1), num_drafts)

    def rungs(self) -> tuple[tuple[int, int], ...]:
        """The same table by lower bounds: (least active count, drafts)."""
        lows = (0, *(n_max + 1 for n_max, _ in self.steps[:-1]))
        return tuple((low, drafts) for low, (_, drafts) in zip(lows, self.steps, strict=True))


def ladder_of_rungs(rungs: tuple[tuple[int, int], ...]) -> Ladder:
    """The pinned ladder that is a rung table written by upper bounds; the last rung has no end."""
    highs = (*(low - 1 for low, _ in rungs[1:]), max(MOST_SEQUENCES, rungs[-1][0]))
    steps = tuple((high, drafts) for high, (_, drafts) in zip(highs, rungs, strict=True))
    return Ladder(steps, pinned=True)


def one_sequence_only(cap: int) -> bool:
    """True where catch-up, refeed and carry may be on: one sequence is dispatched at a time.

    What is kept for one sequence would otherwise be fed to another.
    """
    return cap <= 1


class CapSource(Enum):
    """Where the dispatch cap came from."""

    CLI = "the command line"
    MODEL_DEFAULT = "the model's default"
    ENGINE_DEFAULT = "the engine's default"


def dispatch_cap(
    cli: int | None, model_default: int, ladder_enabled: bool
) -> tuple[int, CapSource]:
    """(most sequences per speculative dispatch, its source); outside
    1..128 from any source is refused.
    """
    if cli is not None:
        cap, source = cli, CapSource.CLI
    elif model_default > 0:
        cap, source = model_default, CapSource.MODEL_DEFAULT
    else:
        cap = DEFAULT_MAX_SEQUENCES if ladder_enabled else SERIAL_MAX_SEQUENCES
        source = CapSource.ENGINE_DEFAULT
    if not 1 <= cap <= MOST_SEQUENCES:
        raise BadDispatchCap(value=cap, source=source.value, most=MOST_SEQUENCES)
    return cap, source
