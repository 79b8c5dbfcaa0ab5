"""Mistakes in the use of runners and of the memory that sequences hold."""

from ir.errors import CircuitError


class InputMismatch(CircuitError):
    says = "program {key} of {name} is given inputs that it does not take: {problem}"
    hint = "it takes: {wanted}; pad the rows to its row count (padding rows have index -1)"


class BadTree(CircuitError):
    says = "rows with the parents {parents} are no tree: {problem}"
    hint = "row 0 is the root and its own parent; each further row continues a row before it"


class RunnerClosed(CircuitError):
    says = "the runner of {name} is closed"
    hint = "build or load a new one; an installed runner is replaced with `set_circuit_draft`"


class RunnerInUse(CircuitError):
    says = "the runner of {name} cannot be freed: {count} user(s) still refer to it: {users}"
    hint = "take it out of each user first (`set_circuit_draft(None)`)"


class CacheFull(CircuitError):
    says = (
        "the KV pool has {free} of its {blocks} blocks (16 rows each) free, but {wanted} "
        "more are needed"
    )
    hint = "close or trim sequences that are finished, or open the runner with more blocks"


class ContextFull(CircuitError):
    says = "a sequence of {rows} rows does not fit in a context of {limit}"
    hint = "compile with a larger context, or trim the sequence"


class LeaseClosed(CircuitError):
    says = "this lease no longer holds rows: it was closed or detached"
    hint = "take a new lease from the pool, or attach the detached rows"


class PoolInUse(CircuitError):
    says = "the KV pool still has {count} open lease(s) holding {blocks} block(s)"
    hint = "close or detach the sequences that use it first"


class StatesDiffer(CircuitError):
    says = "rows of states {seen} cannot move to a pool of states {expected}"
    hint = "both runners must run the same binding with the same state format"


class OutOfMemory(CircuitError):
    says = "{nbytes} bytes of memory cannot be had: {problem}"
    hint = "open the runner with fewer KV blocks, or a smaller context"
