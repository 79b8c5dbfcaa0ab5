"""Errors a caller can cause: a sentence that says what is wrong, a hint that says what to do."""

from __future__ import annotations


class CircuitError(Exception):
    """A mistake of the caller, or of the caller's files, told in one sentence and a hint.

    Subclasses set `says` and `hint` as format strings over the keyword arguments of the
    constructor, which are kept in `facts` so that a program can read what a person reads.
    """

    says: str = "{message}"
    hint: str = ""

    def __init__(self, **facts: object) -> None:
        self.facts = facts
        self.sentence = self.says.format(**facts)
        self.advice = self.hint.format(**facts)
        super().__init__(
            self.sentence if not self.advice else f"{self.sentence}\n  hint: {self.advice}"
        )


class DimMismatch(CircuitError):
    says = "op {op}: dimension {dim} is {seen} in `{argument}` but {bound} in `{first}`"
    hint = "the signature is {signature}; check the shapes given: {shapes}"


class RankMismatch(CircuitError):
    says = (
        "op {op}: `{argument}` has shape {shape}, but its signature {pattern} has {rank} dimensions"
    )
    hint = "the whole signature is {signature}"


class BadOpCall(CircuitError):
    says = "op {op}: {problem}"
    hint = "tensors are positional and attributes are keywords; the signature is {signature}"


class Mistyped(CircuitError):
    """A program calls an op with values that do not fit, told with the program's own line."""

    says = "{origin}: {sentence}"
    hint = "{advice}"


class UnknownWeight(CircuitError):
    says = "the program of {binding} asks for weight {name}, which the binding does not hold"
    hint = "it holds: {known}"


class UnknownState(CircuitError):
    says = "the program of {binding} asks for state {name}, which the binding does not declare"
    hint = "it declares: {known}"


class Unmodelled(CircuitError):
    """The one refusal of a build: every reason at once."""

    says = "{binding} cannot be compiled: {count} reason(s): {reasons}"
    hint = "run it eagerly, or remove each reason named above"


class KeyNotServed(CircuitError):
    says = "{binding} has no program for {key}"
    hint = "it serves: {served}"
