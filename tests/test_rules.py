"""The rules of drafting against their tables, and the properties that hold for every input."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proposers.rules.depth_cut import DepthCut, likeliest_drafts, worthwhile
from proposers.rules.draft_stop import DraftStop
from proposers.rules.errors import (
    BadCutRatio,
    BadDispatchCap,
    BadLadder,
    BadRungTable,
    BadStopThreshold,
    BadTreeShape,
)
from proposers.rules.ladder import CapSource, Ladder, dispatch_cap
from proposers.rules.rung import Rung, parse_rungs, rung_drafts, token_ratio
from proposers.rules.tree_shape import Hedge, TreeShape, accept_path, tree_rows
from proposers.rules.verify_key import (
    CanonicalRule,
    key_has_slot,
    verify_batch_order,
    verify_batch_permutation,
    verify_graph_key,
)
from proposers.rules.worth import DraftWorth


@pytest.mark.parametrize("n", [0, 1, 4, 5, 8])
def test_ladder_gives_three_drafts_up_to_eight_sequences(n):
    assert [Ladder().drafts(n, nd) for nd in (0, 1, 2, 3, 7)] == [0, 1, 2, 3, 3]


@pytest.mark.parametrize("n", [9, 16, 32, 33, 128])
def test_ladder_gives_one_draft_beyond(n):
    assert [Ladder().drafts(n, nd) for nd in (0, 1, 2, 3)] == [0, 1, 1, 1]


def test_ladder_switched_off_gives_what_is_asked():
    assert Ladder(enabled=False).drafts(100, 7) == 7


def test_ladder_text_in_any_order_is_pinned():
    ladder = Ladder.parse(" 8:2 , 2:5 ")
    assert ladder.steps == ((2, 5), (8, 2)) and ladder.pinned
    assert [ladder.drafts(n, 9) for n in (1, 2, 3, 8, 9)] == [5, 5, 2, 2, 2]
    assert ladder.rungs() == ((0, 5), (3, 2))


@pytest.mark.parametrize(
    "text", ["", "4", "4:", "x:1", "4:3,,8:1", "4:-1", "4:0", "0:3", "4:3,4:2"]
)
def test_one_bad_item_refuses_the_ladder(text):
    with pytest.raises(BadLadder, match="hint: write"):
        Ladder.parse(text)


@pytest.mark.parametrize(
    "cli, model, ladder, want",
    [
        (8, 128, True, (8, CapSource.CLI)),
        (None, 128, True, (128, CapSource.MODEL_DEFAULT)),
        (None, 0, True, (32, CapSource.ENGINE_DEFAULT)),
        (None, 0, False, (4, CapSource.ENGINE_DEFAULT)),
    ],
)
def test_dispatch_cap_and_its_source(cli, model, ladder, want):
    assert dispatch_cap(cli, model, ladder) == want


@pytest.mark.parametrize("cli, model", [(0, 5), (129, 5), (None, 129)])
def test_dispatch_cap_outside_its_bounds_names_value_and_source(cli, model):
    with pytest.raises(BadDispatchCap) as caught:
        dispatch_cap(cli, model, True)
    assert caught.value.facts["value"] == (model if cli is None else cli)


def test_rung_text():
    rungs = parse_rungs("1:7,2:5,3:4,4:3,5:2,6:7")
    assert [rung_drafts(rungs, n) for n in (0, 1, 2, 5, 6, 99)] == [7, 7, 5, 2, 7, 7]


@pytest.mark.parametrize("text", ["", "2:3", "1:3,1:2", "1:3,3:2,2:1", "1:0", "1"])
def test_bad_rung_text(text):
    with pytest.raises(BadRungTable):
        parse_rungs(text)


def test_two_drafts_are_entered_and_left_at_their_thresholds():
    p1 = 0.7
    for p2c, ratio_holds in ((0.778, True), (0.776, False)):
        assert (token_ratio(p1, p1 + p1 * p2c) >= 1.32) is ratio_holds
    at_two = Rung().observed(2, p1, p1 + p1 * 0.8)
    assert at_two.depth == 2
    assert at_two.observed(2, p1, p1 + p1 * 0.70).depth == 2  # the average is still above 1.30
    assert Rung(2, p1, p1, None).observed(2, p1, p1 + p1 * 0.728).depth == 1


def test_rung_acts_on_batches_of_nine_to_sixteen_and_probes():
    unknown = Rung()
    assert [unknown.drafts(n, 1, 3) for n in (8, 9, 16, 17)] == [1, 2, 2, 1]
    known = unknown.observed(2, 0.5, 0.5)
    assert known.depth == 1 and known.drafts(12, 1, 3) == 1
    assert known.drafts(12, 3, 3) == 3
    risen = known
    for _ in range(4):
        risen = risen.observed(1, 0.8, 0.8)
    assert risen.probes()
    assert Rung(1, 0.5, 0.5, 0.5, 0.5, 2048).probes()
    assert not Rung(1, 0.5, 0.5, 0.5, 0.5, 2047).probes()


def test_averages_of_acceptance_begin_with_the_first_sample():
    """A new sample has half the weight in the fast average, 0.15 in the slow one."""
    one = Rung().observed(1, 0.4, 0.4)
    assert (one.fast_p1, one.slow_p1, one.accepted) == (0.4, 0.4, None)
    two = one.observed(2, 0.8, 1.0)
    assert (two.fast_p1, two.slow_p1) == pytest.approx((0.6, 0.46)) and two.accepted == 1.0
    three = two.observed(2, 0.8, 0.5)
    assert (three.fast_p1, three.slow_p1) == pytest.approx((0.7, 0.511))
    assert three.accepted == 0.75 and three.flush_p1 == three.slow_p1


@pytest.mark.parametrize(
    "text, spine, width, chain, shape_id",
    [("1,2", 2, 4, False, 0x12), ("1,2,2,2", 4, 8, False, 0x1222), ("1,1", 2, 3, True, 0x11)],
)
def test_tree_shapes(text, spine, width, chain, shape_id):
    shape = TreeShape.parse(text)
    assert (shape.spine_len, shape.verify_width, shape.is_chain, shape.shape_id) == (
        spine, width, chain, shape_id,
    )  # fmt: skip


@pytest.mark.parametrize("text", ["", "1,0", "5", "2,2,2,2", "1,x", "-1"])
def test_bad_tree_shapes(text):
    with pytest.raises(BadTreeShape):
        TreeShape.parse(text)


@pytest.mark.parametrize(
    "spine, hedges, picks, want",
    [
        ((10, 20), (), (10, 20, 99), ([1, 2], 99)),
        ((10, 20), (Hedge(1, 2, 11),), (11, 55, 66, 20), ([3], 20)),
        ((10, 20, 30), (Hedge(2, 2, 21),), (10, 21, 66, 77, 88), ([1, 4], 88)),
        ((10, 20), (), (9, 20, 99), ([], 9)),
    ],
)
def test_accepted_path(spine, hedges, picks, want):
    assert accept_path(tree_rows(1, spine, hedges), picks) == want


def test_rows_of_a_tree():
    rows = tree_rows(5, (10, 20), (Hedge(1, 2, 11), Hedge(2, 2, 21)))
    assert [(r.token, r.depth, r.parent) for r in rows] == [
        (5, 0, 0), (10, 1, 0), (20, 2, 1), (11, 1, 0), (21, 2, 1),
    ]  # fmt: skip


def test_canonical_order_repairs_depths_and_own_order_does_not():
    assert verify_batch_order([5, 1, 3], [4, 2, 3], True) == ([1, 2, 0], [4, 3, 2])
    assert verify_batch_order([5, 1, 3], [4, 2, 3], False) == ([0, 2, 1], [4, 3, 2])


def test_graph_key_and_its_slots():
    key = verify_graph_key([(0, 4), (1, 4), (2, 3)], null_steps=False, write_on_accept=True)
    assert key == (0, 4, 1, 4, 2, 3, 4294967293)
    assert [key_has_slot(key, s) for s in (0, 1, 2, 3, 4, 4294967293)] == [
        True, True, True, False, False, False,
    ]  # fmt: skip


def test_canonical_rule_by_width():
    assert [CanonicalRule().applies(n) for n in (7, 8)] == [False, True]
    assert CanonicalRule(min_width=0).applies(1) and not CanonicalRule(enabled=False).applies(99)


def test_266_keys_of_eight_sequences_collapse_to_three():
    """Every way to lay depths shaped (5, 2, 1), (4, 4) and (6, 2) onto eight slots."""
    shapes = ([2] * 5 + [3] * 2 + [4], [2] * 4 + [4] * 4, [3] * 6 + [4] * 2)
    batches = [{*itertools.permutations(shape)} for shape in shapes]
    assert [len(batch) for batch in batches] == [168, 70, 28]
    own, canonical = set(), set()
    for depths in itertools.chain(*batches):
        for keys, flag in ((own, False), (canonical, True)):
            order, ks = verify_batch_order(range(8), depths, flag)
            keys.add(verify_graph_key(list(zip(order, ks)), null_steps=False, write_on_accept=True))
    assert (len(own), len(canonical)) == (266, 3)


@given(st.data())
def test_a_canonical_key_is_of_the_slots_and_the_depths_whoever_has_them(data):
    pairs = data.draw(st.lists(st.tuples(st.integers(0, 40), st.integers(2, 4)), min_size=1,
                               max_size=8, unique_by=lambda pair: pair[0]))  # fmt: skip
    keys = set()
    for _ in range(3):
        slots = data.draw(st.permutations([slot for slot, _ in pairs]))
        depths = data.draw(st.permutations([depth for _, depth in pairs]))
        order, ks = verify_batch_order(slots, depths, True)
        laid = [(slots[i], k) for i, k in zip(order, ks)]
        keys.add(verify_graph_key(laid, null_steps=False, write_on_accept=False))
    assert len(keys) == 1


BATCHES = st.lists(st.integers(2, 4), min_size=1, max_size=8).flatmap(
    lambda ks: st.tuples(st.permutations(range(len(ks))), st.just(ks))
)


@given(BATCHES, st.booleans())
def test_orders_are_permutations_with_depths_descending(batch, canonical):
    slots, depths = batch
    order, ks = verify_batch_order(slots, depths, canonical)
    assert sorted(order) == list(range(len(slots)))
    assert sorted(ks) == sorted(depths) and ks == sorted(ks, reverse=True)
    if canonical:
        arranged = [slots[i] for i in order]
        assert arranged == sorted(slots)
        again, same = verify_batch_order(arranged, ks, True)
        assert again == list(range(len(slots))) and same == ks


@given(st.permutations(range(6)))
def test_equal_depths_order_alike_in_both_arms(slots):
    depths = [3] * 6
    assert verify_batch_permutation(slots, depths, True) == verify_batch_permutation(
        slots, depths, False
    )


@pytest.mark.parametrize(
    "logprobs, want",
    [([-0.1, -0.2, -0.3], 3), ([-0.1, -2, -0.1], 2), ([-2, -0.1, -0.1], 1), ([], 0)],
)
def test_chain_depth(logprobs, want):
    assert DraftStop(0.5).chain_depth(logprobs) == want


def test_a_draft_exactly_at_the_threshold_goes_on():
    assert DraftStop(0.5).goes_on(math.log(0.5))


@pytest.mark.parametrize("value", [0.0, 1.0, -0.1, 2.0, math.nan])
def test_threshold_outside_its_range(value):
    with pytest.raises(BadStopThreshold):
        DraftStop(value)


@given(st.lists(st.floats(-9, 0), max_size=6), st.floats(0.01, 0.99))
def test_chain_depth_is_the_step_by_step_walk(logprobs, threshold):
    stop, walked = DraftStop(threshold), 0
    for logprob in logprobs:
        walked += 1
        if not stop.goes_on(logprob):
            break
    assert stop.chain_depth(logprobs) == walked


def test_depth_cut_example():
    logprobs = [[-0.1, -0.1, -0.1], [-2, -0.1, -0.1], [-0.05, -3, -0.1], [-0.3, -0.3, -0.3]]
    assert DepthCut(0.75).retained(logprobs, 3) == [3, 3, 1, 3]


def test_depth_cut_without_confidence_is_certain():
    assert DepthCut(0.25).retained([[-0.5, -0.5], []], 2) == [1, 2]
    assert DepthCut(0.25).retained([[-0.5, -0.5], [-0.1]], 2) == [1, 2]


def test_drafts_of_a_batch_are_weighed_against_each_other():
    """A row costs what 0.2 tokens bring: drafts whose prefixes hold more often are kept."""
    worth = DraftWorth()
    assert worthwhile([[-0.1, -3.0], [-3.0]], worth) == [2, 1]  # all, until costs are known
    worth.tokens, worth.seconds, worth.base = 10.0, 10.0, 1.0
    worth.shares = {k: 1.0 + 0.2 * k for k in range(9)}
    assert worthwhile([[-0.1, -3.0], [-3.0], [-0.5, -0.5, -0.1]], worth) == [1, 0, 3]
    assert worthwhile([[-3.0], [-2.0]], worth) == [0, 0] and worthwhile([], worth) == []


@given(st.lists(st.lists(st.floats(-5, 0), max_size=4), max_size=6))
def test_every_start_of_the_likeliest_drafts_is_whole_prefixes(logprobs):
    seen = [0] * len(logprobs)
    chances = []
    for cost, sequence, depth in likeliest_drafts(logprobs):
        assert depth == seen[sequence] + 1
        seen[sequence] = depth
        chances.append(cost)
    assert seen == [len(row) for row in logprobs] and chances == sorted(chances)


def test_depth_cut_applies():
    assert (
        DepthCut().applies(8, 2) and not DepthCut().applies(9, 2) and not DepthCut().applies(8, 1)
    )
    with pytest.raises(BadCutRatio):
        DepthCut(1.5)


@given(st.lists(st.lists(st.floats(-5, -0.01), min_size=3, max_size=3), min_size=1, max_size=8))
def test_depth_cut_keeps_prefixes_within_its_budget(logprobs):
    kept = DepthCut(0.5).retained(logprobs, 3)
    assert all(1 <= k <= 3 for k in kept)
    assert sum(k - 1 for k in kept) <= math.floor(len(logprobs) * 2 * 0.5 + 0.5)
