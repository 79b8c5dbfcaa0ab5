"""The throughput gate and the cost controller against their numbers."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proposers.rules.cost import (
    CostController,
    CostTable,
    Goal,
    RunningCosts,
    conditional_of,
    expected_tokens,
)
from proposers.rules.errors import BadCostTable, BadGateSetting, StaleCostTable
from proposers.rules.gate import WINDOW, Estimate, GateSettings, ThroughputGate, Way

RATES = {Way.DRAFTED: 40.0, Way.SERIAL: 50.0}  # tokens per second


def walk(gate, steps, rates, *, depth=100, width=1):
    """The ways of `steps` steps of one token each, at the given rates."""
    ways = []
    for _ in range(steps):
        ways.append(gate.choose(depth, width))
        gate.record(1, 1 / rates[ways[-1]])
    return ways


def known(gate, rates):
    """Both estimates set and fresh."""
    for way, rate in rates.items():
        gate.estimates[way] = Estimate(rate, 0.0, True)
    return gate


def test_the_gate_drafts_first_and_looks_at_the_other_way_after_1024_tokens():
    ways = walk(ThroughputGate(), 1024 + WINDOW, {Way.DRAFTED: 50.0, Way.SERIAL: 40.0})
    assert ways == [Way.DRAFTED] * 1024 + [Way.SERIAL] * WINDOW


def test_it_changes_after_two_measurements_that_agree():
    """The probe's own window is the first, the next window of the present way the second."""
    gate = ThroughputGate()
    ways = walk(gate, 1024 + 2 * WINDOW, RATES)
    assert gate.present is Way.SERIAL and ways[-1] is Way.DRAFTED
    assert walk(gate, 1, RATES) == [Way.SERIAL]


def test_serial_looks_back_after_256_tokens():
    gate = known(ThroughputGate(present=Way.SERIAL), RATES)
    ways = walk(gate, 256 + 2 * WINDOW, RATES)
    assert ways == [Way.SERIAL] * 256 + [Way.DRAFTED] * WINDOW + [Way.SERIAL] * WINDOW
    assert gate.present is Way.SERIAL


@pytest.mark.parametrize("lead, changes", [(0.049, False), (0.051, True)])
def test_a_lead_of_five_in_a_hundred_is_needed(lead, changes):
    rates = {Way.DRAFTED: 100.0, Way.SERIAL: 100.0 * (1 + lead)}
    gate = known(ThroughputGate(), rates)
    walk(gate, 2 * WINDOW, rates)
    assert (gate.present is Way.SERIAL) is changes


def test_doubt_raises_the_lead_that_is_needed():
    rates = {Way.DRAFTED: 100.0, Way.SERIAL: 110.0}
    gate = known(ThroughputGate(), rates)
    gate.estimates[Way.SERIAL].deviation = 40.0
    walk(gate, 4 * WINDOW, rates)
    assert gate.present is Way.DRAFTED


def test_a_stale_estimate_is_replaced_and_its_doubt_halved():
    estimate = Estimate(100.0, 8.0, True)
    estimate.take(110.0, replace=False)
    assert (estimate.rate, estimate.deviation) == (103.0, pytest.approx(8 + 0.3 * 2))
    estimate.fresh = False
    estimate.take(50.0, replace=False)
    assert (estimate.rate, estimate.deviation, estimate.fresh) == (50.0, pytest.approx(4.3), True)
    estimate.take(60.0, replace=True)
    assert (estimate.rate, estimate.deviation) == (60.0, pytest.approx(2.15))


@pytest.mark.parametrize("depth, probes", [(700, False), (1023, False), (1024, True), (9000, True)])
def test_a_context_of_another_order_makes_both_stale(depth, probes):
    """Contexts below 512 count as 512, so that 1024 is the first of another order."""
    gate = known(ThroughputGate(), RATES)
    walk(gate, 3, RATES, depth=10)
    way = gate.choose(depth, 1)
    assert (way is Way.SERIAL) is probes
    assert all(e.fresh is not probes or way is Way.SERIAL for e in gate.estimates.values())


def test_another_width_throws_the_open_window_away():
    gate = known(ThroughputGate(), {Way.DRAFTED: 1.0, Way.SERIAL: 1.0})
    walk(gate, 5, RATES, width=2)
    assert gate.choose(100, 3) is Way.DRAFTED and gate.steps == 5  # the same bucket
    assert gate.choose(100, 4) is Way.SERIAL and gate.steps == 0
    assert gate.estimates[Way.DRAFTED].rate == 1.0  # not measured from five steps


def test_another_depth_closes_the_open_window_early():
    gate = known(ThroughputGate(), {Way.DRAFTED: 1.0, Way.SERIAL: 1.0})
    walk(gate, 5, RATES)
    assert gate.choose(2000, 1) is Way.SERIAL
    assert gate.estimates[Way.DRAFTED].rate == pytest.approx(40.0)


def test_the_entry_is_pinned():
    pinned = [GateSettings().pinned(n) for n in (None, 0, 7, 8)]
    assert pinned == [False, True, True, False]
    assert not GateSettings(entry_pin=0).pinned(0)
    for bad in ({"reprobe": 0}, {"refresh": -1}, {"entry_pin": -1}):
        with pytest.raises(BadGateSetting):
            GateSettings(**bad)


@given(st.lists(st.tuples(st.integers(1, 3000), st.integers(1, 40), st.floats(0.001, 1)),
                max_size=200))  # fmt: skip
def test_a_change_needs_a_measurement_of_both_ways(steps):
    gate, seen = ThroughputGate(GateSettings(reprobe=20, refresh=30)), set()
    for depth, width, seconds in steps:
        before = gate.present
        way = gate.choose(depth, width)
        assert way in (gate.present, gate.present.other)
        gate.record(width, seconds)
        seen.add(way)
        assert gate.present is before or seen == set(Way)
        assert 0 <= gate.steps < WINDOW


@pytest.mark.parametrize(
    "conditional, drafts, want",
    [((), 3, 1.0), ((0.5,), 0, 1.0), ((0.5,), 1, 1.5), ((0.5, 0.5), 2, 1.75),
     ((0.66, 0.735, 0.838), 3, 1 + 0.66 * (1 + 0.735 * (1 + 0.838))), ((0.5,), 3, 1.875)],
)  # fmt: skip
def test_expected_tokens(conditional, drafts, want):
    assert expected_tokens(conditional, drafts) == pytest.approx(want)


def test_chances_from_counts():
    assert conditional_of([66, 48, 40], [100, 100, 100]) == (0.66, 48 / 66, 40 / 48)
    assert conditional_of([3, 1], [4, 2]) == (0.75, 0.5) and conditional_of([], []) == ()
    assert conditional_of([0, 0], [5, 5]) == (0.0,)


def test_one_draft_pays_from_two_thirds_on_where_a_verify_costs_35_and_a_token_21():
    table = CostTable({(1, 0): 21.0, (1, 1): 35.0})
    best = [CostController(margin=0).best(table, 1, (p,)) for p in (0.65, 0.66, 0.667, 0.7)]
    assert best == [0, 0, 1, 1]


FIXTURE = CostTable.of_parts(
    {(1, 0): 80.0, (1, 1): 83.6, (1, 3): 84.2, (8, 0): 100.0, (8, 1): 125.0, (8, 3): 158.0},
    {(1, 1): 5.5, (1, 3): 16.0, (8, 1): 5.5, (8, 3): 16.0},
)


def test_a_large_model_drafts_three_alone_and_one_in_a_batch_that_accepts_less():
    controller = CostController(margin=0)
    assert FIXTURE.milliseconds[1, 3] == pytest.approx(100.2)
    assert controller.best(FIXTURE, 1, (0.66, 0.735, 0.838)) == 3
    assert controller.best(FIXTURE, 1, (0.05,)) == 0
    assert controller.best(FIXTURE, 8, (0.66, 0.735, 0.838)) == 3
    assert controller.best(FIXTURE, 8, (0.6, 0.2, 0.2)) == 1
    assert controller.best(FIXTURE, 5, (0.6, 0.2, 0.2)) == 1  # the table of eight decides
    assert controller.best(FIXTURE, 99, (0.25, 0.2, 0.2)) == 0
    assert controller.best(FIXTURE, 1, (0.9,), most=1) == 1


def test_the_present_depth_has_a_margin():
    table = CostTable({(1, 0): 10.0, (1, 1): 15.0})
    controller = CostController(margin=0.03)
    assert controller.best(table, 1, (0.53,), present=0) == 0  # two in a hundred better
    assert controller.best(table, 1, (0.56,), present=0) == 1  # four
    assert controller.best(table, 1, (0.46,), present=1) == 1
    assert controller.best(table, 1, (0.53,), present=7) == 1  # not of the table


def test_energy_is_chosen_among_the_depths_that_are_fast_enough():
    times = {(1, 0): 10.0, (1, 1): 14.0, (1, 2): 19.0}
    joules = {(1, 0): 1.0, (1, 1): 1.2, (1, 2): 1.3}
    table = CostTable(times, joules)
    assert CostController(Goal.ENERGY, slack=0.5, margin=0).best(table, 1, (0.6, 0.5)) == 2
    assert CostController(Goal.ENERGY, slack=0.02, margin=0).best(table, 1, (0.6, 0.5)) == 1
    with pytest.raises(BadCostTable, match="joules are not measured"):
        CostController(Goal.ENERGY).best(CostTable(times), 1, (0.6,))
    assert CostController(Goal.THROUGHPUT).best(table, 1, (0.6, 0.5)) == 1


def test_a_table_of_other_plans_is_refused():
    table = CostTable({(1, 0): 1.0}, digests={"verify": "aa", "draft": "bb"})
    table.check({"verify": "aa", "draft": "bb", "decode": "cc"})
    with pytest.raises(StaleCostTable, match="draft plan bb, the live plan is none"):
        table.check({"verify": "aa"})
    for bad in ({}, {(0, 1): 1.0}, {(1, 1): 0.0}, {(1, 1): math.inf}, {(1, -1): 1.0}):
        with pytest.raises(BadCostTable):
            CostTable(bad)
    with pytest.raises(BadCostTable, match="drafting is not measured"):
        CostTable.of_parts({(1, 1): 1.0}, {})
    with pytest.raises(BadCostTable, match="not a share"):
        CostController(margin=1.0)


def test_running_costs_try_every_depth_and_look_again():
    costs = RunningCosts(2, tries=2, refresh=10)
    tried = []
    while (due := costs.due()) is not None and len(tried) < 20:
        tried.append(due)
        costs.record(due, min(due, 1), 10.0 + due)
    assert tried == [2, 2, 1, 1, 0, 0]
    assert costs.table().milliseconds == {(1, 2): 12.0, (1, 1): 11.0, (1, 0): 10.0}
    assert costs.held[0] == 1.0 and costs.held[1] == 0.0
    for _ in range(7):
        costs.record(1, 1, 11.0)
    assert costs.due() == 2


@given(st.lists(st.floats(0, 1), max_size=4), st.dictionaries(st.integers(0, 4), st.floats(1, 99),
       min_size=1))  # fmt: skip
def test_the_best_depth_is_the_best_of_all(conditional, costs):
    table = CostTable({(1, k): ms for k, ms in costs.items()})
    best = CostController(margin=0).best(table, 1, conditional)
    speed = {k: expected_tokens(conditional, k) / ms for k, ms in costs.items()}
    assert speed[best] == max(speed.values())
