"""Drafts copied from the text."""

from hypothesis import given
from hypothesis import strategies as st

from proposers.lookup import Lookup


def test_a_new_run_has_no_drafts():
    assert Lookup([1, 2, 3, 4]).drafts(3) == ()
    assert Lookup().drafts(3) == ()
    assert Lookup([1, 2]).drafts(3) == ()


def test_the_longest_and_then_the_latest_match_decides():
    assert Lookup([1, 2, 3, 7, 1, 2, 3, 8, 1, 2, 3]).drafts(2) == [8, 1]
    assert Lookup([9, 1, 2, 3, 7, 5, 1, 2, 3, 8, 9, 1, 2, 3]).drafts(1) == [7]


def test_a_loop_goes_on_with_itself():
    assert Lookup([5, 6, 5, 6, 5, 6]).drafts(5) == [5, 6, 5, 6, 5]
    assert Lookup([4] * 5).drafts(3) == [4, 4, 4]


def continuation(text: list[int], count: int, shortest: int, longest: int) -> list[int]:
    """The drafts by a plain search."""
    for length in range(longest, shortest - 1, -1):
        for end in range(len(text) - 1, length - 1, -1):
            if length <= len(text) and text[end - length : end] == text[-length:]:
                out: list[int] = []
                for step in range(count):
                    at = end + step
                    out.append(text[at] if at < len(text) else out[at - len(text)])
                return out
    return []


@given(st.lists(st.integers(0, 2), max_size=40), st.integers(1, 4), st.integers(1, 3))
def test_drafts_are_those_of_a_plain_search(text, count, shortest):
    grown = Lookup(text[:10], shortest=shortest, longest=5)
    for token in text[10:]:
        grown.extend([token])
    assert list(grown.drafts(count)) == continuation(text, count, shortest, 5)
