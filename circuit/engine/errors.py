"""Errors of generating text."""

from ir.errors import CircuitError


class EmptyPrompt(CircuitError):
    says = "the prompt has no tokens"
    hint = "give at least one token, the beginning-of-text token for instance"


class PromptTooLong(CircuitError):
    says = "the prompt has {tokens} tokens, the target was compiled for a context of {context}"
    hint = "shorten the prompt or compile with a larger --context"


class TooManyDrafts(CircuitError):
    says = "{drafts} drafts per step are asked for, at most {most} can be verified at once"
    hint = "ask for at most {most} drafts"


class TreeTooWide(CircuitError):
    says = "a tree of {rows} rows is asked for, at most {most} can be verified at once"
    hint = "ask for fewer nodes, or compile with a wider --trees"


class NoDraftHead(CircuitError):
    says = "{drafts} drafts per step are asked for, but there is no draft head"
    hint = "compile with --draft HEAD, or generate without drafts"


class HiddenMissing(CircuitError):
    says = "the draft head reads the target's {output}, which the target's programs do not output"
    hint = "compile target and head together"


class SamplingRefused(CircuitError):
    says = "{name} is {value}, which is not {wanted}"
    hint = "temperature 0 is greedy; top_p and top_k narrow what a temperature above 0 draws from"


class NotANumber(CircuitError):
    says = "the target's logits for output token {index} hold NaN"
    hint = "run `circuit check`; the weights or the compiled kernels are at fault"


class NoBatch(CircuitError):
    says = "a batch of {width} sequences is asked for, the target has programs for up to {widest}"
    hint = "compile with a wider --batch, or ask for fewer sequences"
