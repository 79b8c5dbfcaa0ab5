"""A seeded stream of varied prompts, and the guard that keeps benchmark prompts out of it."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

TABLE = Path(__file__).parent / "prompts.json"
GRAM, SHARED = 5, 1 / 3
ALIKE, TWO = 0.4, 2  # part of all telling words, and how many, that make a paraphrase
COMMON = frozenset([
    "a", "an", "the", "of", "in", "to", "for", "and", "is", "are",
    "how", "what", "why", "do", "does", "i", "my", "with", "that", "it",
    "on", "at", "you", "me", "can", "please", "write", "give",
])  # fmt: skip
SUMS, LETTERS, LISTS = 0.09, 0.06, 0.07


class Kind(Enum):
    """Where a text begins: a request of the list, one that the target makes up, a filled template,
    a bare opening.
    """

    ASKED = "asked"
    OWN = "own"
    TEMPLATE = "template"
    OPENING = "opening"


SHARES = {Kind.ASKED: 0.5, Kind.OWN: 0.3, Kind.TEMPLATE: 0.19, Kind.OPENING: 0.01}


@cache
def _table() -> dict[str, Any]:
    return json.loads(TABLE.read_text("utf-8"))


def kind(rng: random.Random) -> Kind:
    """A kind of text, drawn by its share."""
    return rng.choices(list(SHARES), weights=list(SHARES.values()))[0]


def request(rng: random.Random) -> str:
    """A request made of a template with a subject, a sum, a letter or a list."""
    table, which = _table(), rng.random()
    if which < SUMS:
        small = rng.randint(2, 20)
        return rng.choice(table["sums"]).format(
            a=rng.randint(12, 999), b=rng.randint(12, 999), c=small, c2=2 * small, c3=3 * small,
            d=rng.randint(2, 12), n=rng.choice(table["names"]),
        )  # fmt: skip
    if which < SUMS + LETTERS:
        letters = table["letters"]
        return rng.choice(letters["texts"]).format(
            who=rng.choice(letters["who"]), what=rng.choice(letters["what"])
        )
    if which < SUMS + LETTERS + LISTS:
        lists = table["lists"]
        return rng.choice(lists["texts"]).format(
            n=rng.choice(lists["count"]), x=rng.choice(lists["of"])
        )
    templates = table["templates"]
    chosen = rng.choices(templates, weights=[t["weight"] for t in templates])[0]
    return _filled(chosen["text"], rng.choice(chosen["subjects"]), rng)


def opening(rng: random.Random) -> str:
    """The first words of a text that is no conversation."""
    text = rng.choice(_table()["openings"])
    family = rng.choice(["science", "history", "tech", "society", "people", "place"])
    filled = _filled(text, family, rng)
    return filled[:1].upper() + filled[1:] if text.startswith("{}") else filled


def _filled(text: str, family: str, rng: random.Random) -> str:
    """`text` with its marks replaced; braces that are part of code stay as they are."""
    table = _table()
    subjects = table["subjects"][family]
    marks = {
        "{lang}": rng.choice(table["languages"]), "{tongue}": rng.choice(table["tongues"]),
        "{b}": rng.choice(subjects), "{}": rng.choice(subjects),
    }  # fmt: skip
    for mark, value in marks.items():
        text = text.replace(mark, value)
    return text


def words(text: str) -> list[str]:
    """The words of `text`, small letters and digits only."""
    return re.findall(r"[a-z0-9]+", text.lower())


def grams(text: str) -> frozenset[tuple[str, ...]]:
    """Runs of five words; the whole text where it is shorter."""
    all_words = words(text)
    count = max(1, len(all_words) - GRAM + 1)
    return frozenset(tuple(all_words[i : i + GRAM]) for i in range(count))


def telling(text: str) -> frozenset[str]:
    """The words of `text` without those that stand in any request."""
    return frozenset(words(text)) - COMMON


class Guard:
    """Knows prompts that no training text may begin with, nor with what is nearly one of them."""

    def __init__(self, prompts: Iterable[str]) -> None:
        self._known = [(grams(p), telling(p)) for p in prompts]

    def refuses(self, text: str) -> bool:
        """True for a near copy of a prompt, which shares a third of the shorter one's runs of five
        words, and for a paraphrase, which shares 40 % of all words that tell what is asked.
        """
        runs, asked = grams(text), telling(text)
        return any(
            len(runs & known) >= SHARED * min(len(runs), len(known))
            or len(asked & wanted) >= max(TWO, ALIKE * len(asked | wanted))
            for known, wanted in self._known
        )
