"""Classification of configuration keys: used, ignored for a reason, or allowed some values only."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass

LARGEST = 2**63


@dataclass(frozen=True)
class Used:
    """The value decides the graph, the tokens or the limits; `kind` is its type."""

    kind: type | tuple[type, ...]

    def problem(self, key: str, value: object) -> str | None:
        """Why `value` cannot be used, or None."""
        kinds = self.kind if isinstance(self.kind, tuple) else (self.kind,)
        wanted = tuple(kinds) + ((int,) if float in kinds else ())
        if value is None and type(None) not in kinds:
            return f"{key} is null; {_names(kinds)} is needed"
        if (isinstance(value, bool) and bool not in kinds) or not isinstance(value, wanted):
            return f"{key} is {_short(value)}; {_names(kinds)} is needed"
        if isinstance(value, (int, float)) and not -LARGEST < value < LARGEST:
            return f"{key} is {_short(value)}, which is not a number of a model's size"
        return None


@dataclass(frozen=True)
class Ignored:
    """The value cannot change what is computed; `reason` says why."""

    reason: str

    def problem(self, key: str, value: object) -> None:
        """None: an ignored key is never a problem."""
        return None


@dataclass(frozen=True)
class Allowed:
    """The value selects something that is modelled for `values` only."""

    values: tuple

    def problem(self, key: str, value: object) -> str | None:
        """Why `value` is refused, or None."""
        if any(
            (type(value) is type(v) and value == v) or _same_number(value, v) for v in self.values
        ):
            return None
        shown = ", ".join(repr(v) for v in self.values)
        return f"{key} is {_short(value)}; allowed: {shown or 'absent'}"


Rule = Used | Ignored | Allowed


def classify(found: Mapping[str, object], rules: Mapping[str, Rule], prefix: str = "") -> list[str]:
    """The problems of `found` under `rules`, whose keys may be
    patterns; a key with no rule is one.
    """
    problems = []
    for key, value in found.items():
        rule = rule_of(key, rules)
        shown = prefix + key
        if rule is None:
            problems.append(f"{shown} is an unknown key (value {_short(value)})")
            continue
        problem = rule.problem(shown, value)
        if problem is not None:
            problems.append(problem)
    return problems


def rule_of(key: str, rules: Mapping[str, Rule]) -> Rule | None:
    """The rule of `key`: its own if there is one, else that of the first pattern that matches."""
    if key in rules:
        return rules[key]
    return next(
        (
            rule
            for pattern, rule in rules.items()
            if "*" in pattern and fnmatch.fnmatchcase(key, pattern)
        ),
        None,
    )


def _same_number(a: object, b: object) -> bool:
    """Whether both are numbers, neither is a bool, and they are equal."""
    numbers = (int, float)
    return (
        isinstance(a, numbers)
        and isinstance(b, numbers)
        and not isinstance(a, bool)
        and not isinstance(b, bool)
        and a == b
    )


def _names(kinds: tuple[type, ...]) -> str:
    words = {
        int: "an integer",
        float: "a number",
        str: "a string",
        bool: "true or false",
        dict: "an object",
        list: "a list",
        type(None): "null",
    }
    return " or ".join(words[kind] for kind in kinds)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
