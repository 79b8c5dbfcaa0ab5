"""Readers of lever values: text in, a value out, or ValueError; each says what it allows."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from proposers.rules.ladder import Ladder

SWITCH = {"1": True, "on": True, "0": False, "off": False}


@dataclass(frozen=True)
class Reader:
    """How the text of a lever is read, and the sentence that names what is allowed."""

    allowed: str
    read: Callable[[str], Any]


def one_of(choices: dict[str, Any]) -> Reader:
    """A closed choice by name."""

    def read(text: str) -> Any:
        if text not in choices:
            raise ValueError(text)
        return choices[text]

    return Reader("one of " + ", ".join(choices), read)


def member_of(kind: type[Enum]) -> Reader:
    """A member of an enum, by its value."""
    return one_of({member.value: member for member in kind})


def whole(low: int, high: int) -> Reader:
    """A whole number from `low` to `high`."""

    def read(text: str) -> int:
        number = int(text)
        if not (low <= number <= high and text.strip().lstrip("-").isdecimal()):
            raise ValueError(text)
        return number

    return Reader(f"a whole number from {low} to {high}", read)


def number(low: float, high: float, *, inside: bool = False, off: bool = False) -> Reader:
    """A number from `low` to `high`, between them if `inside`; with `off`, that word is None."""

    def read(text: str) -> float | None:
        if off and text == "off":
            return None
        value = float(text)
        held = low < value < high if inside else low <= value <= high
        if not held or math.isnan(value):
            raise ValueError(text)
        return value

    bounds = f"a number {'between' if inside else 'from'} {low} {'and' if inside else 'to'} {high}"
    return Reader(bounds + (", or off" if off else ""), read)


def ladder() -> Reader:
    """A ladder's text; `off` is no ladder."""
    return Reader(
        "n_max:drafts items, or off",
        lambda text: Ladder(enabled=False) if text == "off" else Ladder.parse(text),
    )


def read(reader: Reader) -> dict[str, Reader]:
    """The metadata of a field that `reader` reads."""
    return {"reader": reader}


switch = one_of(SWITCH)
