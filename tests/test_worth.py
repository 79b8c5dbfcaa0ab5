"""Drafts verified by their worth: the choice, the costs it learns, and what it gains."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proposers.rules.worth import PRIOR, DraftWorth

COSTS = (1.0, 1.1, 1.2, 1.3)


def measured(tokens=1.5, whole=1.3):
    """A rule that has seen each depth at its cost."""
    worth = DraftWorth()
    for _ in range(200):
        for drafts, cost in enumerate(COSTS):
            worth.record(drafts, tokens, cost, whole)
    return worth


def test_all_drafts_are_verified_until_a_step_is_measured():
    assert DraftWorth().depth([-9.0, -9.0, -9.0]) == 3


def test_costs_are_learnt_by_depth():
    worth = measured()
    assert [worth.cost(k) for k in range(4)] == pytest.approx(COSTS, rel=1e-3)


def test_an_unmeasured_depth_costs_what_the_nearest_one_does_and_its_rows():
    worth = DraftWorth()
    worth.record(2, 2, 1.12, 1.5)
    assert worth.cost(3) == pytest.approx(1.12 * (1 + 3 * PRIOR) / (1 + 2 * PRIOR))


def test_a_depth_is_taken_where_its_chance_pays_for_its_row():
    """At 1.5 tokens in 1.3 a row of 0.1 pays from a chance of 0.1154 on."""
    worth = measured()
    assert worth.depth([math.log(0.12)]) == 1
    assert worth.depth([math.log(0.11)]) == 0
    assert worth.depth([math.log(0.5), math.log(0.5), math.log(0.4)]) == 2
    assert worth.depth([math.log(0.9)] * 3) == 3


def test_a_poor_draft_is_verified_for_the_sake_of_those_after_it():
    """Costs may fall short of a line: two rows for the price of one."""
    worth = DraftWorth()
    for _ in range(300):
        for drafts, cost in enumerate((1.0, 1.2, 1.2)):
            worth.record(drafts, 1.5, cost, 1.5)
    assert worth.depth([math.log(0.19)]) == 0
    assert worth.depth([math.log(0.19), 0.0]) == 2


def test_a_step_that_stalls_counts_as_twice_its_cost_at_most():
    worth, before = measured(), measured().cost(3)
    worth.record(3, 1, 1000.0, 1000.0)
    assert worth.cost(3) <= before * 1.11


@given(st.lists(st.floats(-20, 0), min_size=1, max_size=8))
def test_the_depth_has_the_most_worth(logprobs):
    worth = measured()
    rate, chances = worth.tokens / worth.seconds, [1.0]
    for logprob in logprobs:
        chances.append(chances[-1] * math.exp(logprob))
    values = [sum(chances[: k + 1]) - rate * worth.cost(k) for k in range(len(chances))]
    assert values[worth.depth(logprobs)] == pytest.approx(max(values), abs=1e-12)


def test_it_gains_on_every_fixed_depth_where_confidence_is_true():
    """Chances are drawn anew for each draft, and known: no fixed depth gives as many tokens."""

    def run(choose, record=None):
        draw, tokens, time = random.Random(7), 0, 0.0
        for _ in range(4000):
            chances = [draw.choice((0.05, 0.3, 0.95)) for _ in range(3)]
            depth, taken = choose([math.log(c) for c in chances]), 0
            hits = [draw.random() < c for c in chances]
            while taken < depth and hits[taken]:
                taken += 1
            tokens, time = tokens + taken + 1, time + COSTS[depth] + 0.2
            if record:
                record(depth, taken + 1, COSTS[depth], COSTS[depth] + 0.2)
        return tokens / time

    worth = DraftWorth()
    fixed = [run(lambda _, k=k: k) for k in range(4)]
    assert run(worth.depth, worth.record) > 1.03 * max(fixed)


@pytest.mark.parametrize("power", [0.5, 1.0, 1.5])
def test_the_power_of_chances_is_learnt(power):
    draw, worth = random.Random(3), DraftWorth()
    for _ in range(20_000):
        chain = [draw.uniform(0.02, 0.98) for _ in range(3)]
        held = 0
        while held < 3 and draw.random() < chain[held] ** power:
            held += 1
        worth.judge([math.log(p) for p in chain], 3, held)
    assert worth.power == pytest.approx(power, abs=0.12)


def test_only_drafts_that_were_compared_after_right_ones_are_judged():
    worth = DraftWorth()
    worth.judge([0.0, 0.0, -5.0], 2, 2)  # certain, and right: nothing to learn
    assert worth.power == 1.0
    worth.judge([-5.0, -0.1, -0.1], 3, 0)  # an unlikely draft fails; the rest says nothing
    assert worth.power == pytest.approx(1.0 + 0.01 * math.exp(-5))
    worth.judge([-5.0], 0, 0)
    assert worth.power == pytest.approx(1.0 + 0.01 * math.exp(-5))
