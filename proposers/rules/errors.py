"""Refusals of the rules of drafting."""

from ir.errors import CircuitError


class BadLadder(CircuitError):
    says = "the ladder `{text}` is refused: {problem}"
    hint = "write `n_max:drafts` items separated by commas, such as 4:3,8:3,16:1,32:1"


class BadDispatchCap(CircuitError):
    says = "{value} sequences per speculative dispatch, from {source}, is outside 1..{most}"
    hint = "give a number from 1 to {most}"


class BadRungTable(CircuitError):
    says = "the rung table `{text}` is refused: {problem}"
    hint = "write `min_active:drafts` items that start at 1 and increase, such as 1:7,2:5,4:3"


class BadTreeShape(CircuitError):
    says = "the tree shape `{text}` is refused: {problem}"
    hint = "write one node count per depth, each 1..{rank}, at most {nodes} in all, such as 1,2,2,2"


class BadStopThreshold(CircuitError):
    says = "the confidence threshold {value} is not a probability between 0 and 1"
    hint = "give a number above 0 and below 1; leave it out to draft whole chains"


class BadCutRatio(CircuitError):
    says = "the cut ratio {value} is not a number from 0 to 1"
    hint = "ratios are rounded to 0.25, 0.5, 0.75 or 1"


class BadGateSetting(CircuitError):
    says = "the gate's {name} is {value}, which is not {wanted}"
    hint = "leave it out for its default"


class BadCostTable(CircuitError):
    says = "the cost table is refused: {problem}"
    hint = "measure every (sequences, drafts) pair with `circuit bench` and give positive costs"


class StaleCostTable(CircuitError):
    says = "the cost table was measured with {mode} plan {measured}, the live plan is {live}"
    hint = "measure again with the artifact that is to be run"


class BadRowTable(CircuitError):
    says = "the row table `{text}` is refused: {problem}"
    hint = "write depth x count runs of unequal neighbours, such as `4x3 3x2! 2x1!`"


class BadRankWords(CircuitError):
    says = "the words {words} between ranks are refused: {problem}"
    hint = "run every rank with the same version and the same dispatch cap"
