"""Trees that grow where a head is unsure: which nodes, in which order, and the shapes they make."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proposers.rules.errors import BadTreeShape
from proposers.rules.tree_growth import TreeGrowth, likeliest, parse_tree, shape_of, shares_of
from proposers.rules.tree_shape import TreeShape


def logs(*shares):
    return [math.log(share) for share in shares]


steps = st.lists(
    st.lists(st.floats(0.001, 1.0), min_size=1, max_size=4).map(
        lambda raw: sorted((math.log(x / max(1.0, sum(raw))) for x in raw), reverse=True)
    ),
    min_size=1, max_size=4,
)  # fmt: skip


def test_a_sure_head_grows_a_chain_and_an_unsure_one_a_fan():
    sure = likeliest([logs(0.9, 0.05), logs(0.9, 0.05), logs(0.9, 0.05)], 3)
    assert [(n.depth, n.rank) for n in sure] == [(1, 1), (2, 1), (3, 1)]
    assert sure[2].chance == pytest.approx(0.729)
    unsure = likeliest([logs(0.3, 0.25, 0.2), logs(0.3, 0.25, 0.2)], 3)
    assert [(n.depth, n.rank) for n in unsure] == [(1, 1), (1, 2), (1, 3)]
    mixed = likeliest([logs(0.5, 0.3), logs(0.8, 0.1)], 3)
    assert [(n.depth, n.rank) for n in mixed] == [(1, 1), (2, 1), (1, 2)]
    assert shape_of(mixed) == TreeShape.parse("2,1")


@given(steps, st.integers(1, 7))
def test_every_cut_of_the_list_is_a_tree_of_falling_chances(logprobs, most):
    nodes = likeliest(logprobs, most)
    assert len(nodes) == min(most, sum(map(len, logprobs)))
    chances = [n.chance for n in nodes]
    assert chances == sorted(chances, reverse=True)
    for cut in range(1, len(nodes) + 1):
        held = {(n.depth, n.rank) for n in nodes[:cut]}
        for depth, rank in held:
            assert rank == 1 or (depth, rank - 1) in held
            assert depth == 1 or (depth - 1, 1) in held
        shape = shape_of(nodes[:cut])
        assert shape.nodes == cut
        assert {(d, r) for d, n in enumerate(shape.counts, 1) for r in range(1, n + 1)} == held


@given(steps)
def test_shares_multiply_to_the_chances(logprobs):
    nodes, product = likeliest(logprobs, 7), 1.0
    for node, share in zip(nodes, shares_of(nodes), strict=True):
        assert share <= 1e-12
        product *= math.exp(share)
        assert product == pytest.approx(node.chance)


def test_a_choice_without_a_chance_comes_last_and_is_no_number_to_divide_by():
    nodes = likeliest([[0.0, -math.inf], [-math.inf]], 7)
    assert [n.chance for n in nodes] == [1.0, 0.0, 0.0]
    assert shares_of(nodes) == [0.0, -math.inf, -math.inf]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("auto", TreeGrowth(8)), ("auto:4", TreeGrowth(4)), (" 2,1 ", TreeShape((2, 1)))],
)
def test_what_is_asked_for(text, wanted):
    assert parse_tree(text) == wanted


@pytest.mark.parametrize("text", ["auto:1", "auto:9", "auto:x", "auto:-2", "", "tree", "5", "2,,1"])
def test_what_is_no_tree_is_refused(text):
    with pytest.raises(BadTreeShape, match="is refused"):
        parse_tree(text)


def test_what_a_growth_asks_of_head_and_target():
    small, large = TreeGrowth(3), TreeGrowth()
    assert (small.spine_len, small.ranks, small.verify_width) == (2, 2, 3)
    assert (large.spine_len, large.ranks, large.verify_width) == (4, 4, 8)
