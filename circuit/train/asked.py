"""The project's own list of requests, each asked once before any is asked again."""

from __future__ import annotations

import lzma
import random
from functools import cache
from pathlib import Path

from circuit.train.prompts import Guard

LIST = Path(__file__).parent / "requests.txt.xz"


@cache
def requests() -> tuple[str, ...]:
    """The requests of the list in its order; one is a line there, with `\\n` for a line break."""
    lines = lzma.decompress(LIST.read_bytes()).decode("utf-8").split("\n")
    return tuple(line.replace("\\n", "\n") for line in lines)


class Asked:
    """Gives the requests that a guard allows in an order of `seed`, round after round.

    `count` says how many were given: with it, a later run goes on where one before it ended.
    """

    def __init__(self, guard: Guard, seed: int, count: int = 0) -> None:
        self._allowed = [text for text in requests() if not guard.refuses(text)]
        self._seed, self.count = seed, count
        self._round: tuple[int, list[str]] = (-1, [])

    @property
    def again(self) -> bool:
        """True if the next request was given before."""
        return self.count >= len(self._allowed)

    def next(self) -> str:
        """The next request."""
        number, place = divmod(self.count, len(self._allowed))
        if self._round[0] != number:
            order = list(self._allowed)
            random.Random(f"{self._seed} asked {number}").shuffle(order)
            self._round = (number, order)
        self.count += 1
        return self._round[1][place]
