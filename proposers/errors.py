"""Errors of drafting and of loading draft heads."""

from ir.errors import CircuitError


class HeadRefused(CircuitError):
    """A draft head cannot be used as it is."""

    says = "the draft head {path} cannot be used: {problem}"
    hint = (
        "give a head that was made for this target: one safetensors file, or a folder with "
        "mtp.* tensors"
    )


class ForeignState(CircuitError):
    says = "{proposer} was given a {given}, which is not a state that it made"
    hint = "pass the state that alloc_state of the same proposer returned"


class BadRequest(CircuitError):
    says = "{proposer} cannot draft: {problem}"
    hint = "see ProposeRequest for what a request holds"


class NothingAllowed(CircuitError):
    says = "the grammar allows none of the {count} ids that {proposer} scores"
    hint = "go on without drafts for this token; the target scores every id"


class LeverRefused(CircuitError):
    says = "lever {name} is {value!r}, which is not {wanted}"
    hint = "levers are parsed once and never guessed; leave {name} out for its default"


class UnknownLever(LeverRefused):
    says = "there is no lever {name}; the levers are {known}"
    hint = "docs/levers.md says what each of them does"


class NoModules(CircuitError):
    says = "a multi-module head was made of no modules"
    hint = "give one MtpHead per prediction depth"
