"""Errors of running a program."""

from ir.errors import CircuitError


class CacheFull(CircuitError):
    says = "the cache has {free} of {blocks} blocks free, but {wanted} more are needed"
    hint = "end a sequence, or compile with a larger context or for more sequences"


class InputMismatch(CircuitError):
    says = "the program {key} of {name} takes {wanted}; {problem}"
    hint = "give every input of the program with its exact shape"


class RunnerClosed(CircuitError):
    says = "the runner of {name} is closed"
    hint = "load the artifact again"
