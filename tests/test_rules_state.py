"""Rules of what is kept between steps and turns: ring, capture, carry; and what is counted."""

import heads
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proposers.rules.capture import NOBODY, Capture
from proposers.rules.carry import Adopted, CarriedRows, Refusal, common_prefix, plan_append
from proposers.rules.errors import BadRowTable
from proposers.rules.fingerprint import OFFSET, Multiplier, hidden_fingerprint
from proposers.rules.ladder import Ladder, ladder_of_rungs, one_sequence_only
from proposers.rules.ring import CatchupRing
from proposers.rules.row_table import RowTable, Run
from proposers.rules.rung import Rung, parse_rungs, rung_drafts
from proposers.rules.telemetry import Acceptance, AcceptanceByWidth, TopkCoverage


def hidden(position):
    """A row that says which position's it is."""
    return np.array([position, -position], np.float32)


def ring_of(labels, capacity=10, **options):
    ring = CatchupRing(capacity, **options)
    for label in labels:
        ring.put(label, hidden(label - 1))
    return ring


def fed(ring, last_key, position):
    """(first key, positions of the hiddens fed)."""
    part = ring.feed(last_key, position)
    return None if part is None else (part[0], part[1][:, 0].tolist())


# The catch-up ring
# ------------------------------------------------------------------------------------------


def test_labels_of_the_worked_trace():
    """A verify at length 6 with one draft accepted rings labels 7 and 8: hiddens 6 and 7."""
    ring = CatchupRing(8)
    ring.put_rows(6, [hidden(6), hidden(7), hidden(8)], accepted=1)
    assert ring.labels == range(7, 9)
    assert fed(ring, 5, 8) == (6, [6.0])  # key 6 from label 7; key 7 is the propose's own


@pytest.mark.parametrize("accepted", [0, 1, 2, 3])
def test_no_label_is_missing_after_any_verify(accepted):
    """The bound is inclusive for every number of rows: the next verify goes on where this ended."""
    ring = CatchupRing(16)
    rows = [hidden(20 + t) for t in range(4)]
    ring.put_rows(20, rows, accepted)
    ring.put_rows(20 + accepted + 1, [hidden(20 + accepted + 1)], 0)
    assert ring.labels == range(21, 23 + accepted)


def test_a_gap_starts_anew():
    assert ring_of([4, 5, 7, 8]).labels == range(7, 9)
    assert fed(ring_of([4, 5, 7, 8]), 2, 9) == (6, [6.0, 7.0])


def test_an_older_label_forgets_what_follows_it():
    ring = ring_of([4, 5, 6, 5])
    assert ring.labels == range(4, 6) and fed(ring, 0, 9) == (3, [3.0, 4.0])
    assert ring_of([4, 5, 3]).labels == range(3, 4)


def test_rows_end_where_the_ring_wraps_and_go_on_from_there():
    ring = ring_of(range(5, 14), 8)  # labels 6 to 13 are held, of which 8 stands at the start again
    assert ring.labels == range(6, 14)
    assert fed(ring, 1, 14) == (5, [5.0, 6.0])
    assert fed(ring, 6, 14) == (7, [7.0, 8.0, 9.0, 10.0, 11.0, 12.0])
    assert fed(ring, 12, 14) is None


def test_nothing_is_fed_that_is_not_held_or_not_wanted():
    assert fed(CatchupRing(4), 0, 9) is None
    ring = ring_of([6, 7])
    assert fed(ring, 5, 7) is None and fed(ring, 9, 11) is None and fed(ring, 0, 5) is None
    ring.forget()
    assert ring.labels == range(0) and fed(ring, 0, 9) is None


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_shifted_label_feeds_a_neighbours_hidden(shift):
    ring = ring_of([6, 7, 8], shift=shift)
    first, hiddens = fed(ring, 5, 8)
    assert hiddens[0] == first - shift


def test_the_ring_keeps_its_own_copy():
    ring, row = CatchupRing(4), hidden(3)
    ring.put(4, row)
    row[:] = 99
    assert fed(ring, 2, 5) == (3, [3.0])


@given(st.integers(1, 9), st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=30))
def test_what_is_fed_is_right_and_complete_within_the_ring(capacity, steps):
    """Feeding until nothing is left gives every key whose hidden is among the newest in a row."""
    ring, length, unbroken, last_key = CatchupRing(capacity), 5, 5, 3
    for accepted, ringed in steps:
        if ringed:
            ring.put_rows(length, [hidden(length + t) for t in range(4)], accepted)
        else:
            unbroken = length + accepted + 1
        length += accepted + 1
    start = max(unbroken, length - capacity, last_key + 1)
    keys = []
    while (part := ring.feed(last_key, length)) is not None:
        first, hiddens = part
        assert first > last_key
        assert hiddens[:, 0].tolist() == list(range(first, first + len(hiddens)))
        keys += range(first, first + len(hiddens))
        last_key = keys[-1]
    if steps and steps[-1][1]:
        assert keys == list(range(start, length - 1))


# Capture and carry
# ------------------------------------------------------------------------------------------


def test_the_owner_extends_and_everyone_else_replaces():
    capture = Capture()
    mine, other = capture.new_ticket(), capture.new_ticket()
    assert (mine, other) == (1, 2) and capture.owned_by(NOBODY) == (0, 0)
    capture.wrote(mine, 4, 8)
    capture.wrote(mine, 8, 12)
    assert capture.owned_by(mine) == (4, 12)
    capture.wrote(mine, 2, 5)
    assert capture.owned_by(mine) == (2, 12)
    capture.wrote(mine, 13, 14)  # a gap
    assert capture.owned_by(mine) == (13, 14)
    capture.wrote(other, 14, 20)
    assert capture.owned_by(other) == (14, 20) and capture.owned_by(mine) == (0, 0)


@given(st.lists(st.tuples(st.integers(1, 2), st.integers(0, 20), st.integers(0, 6)), min_size=1))
def test_an_owner_never_reads_what_another_wrote(writes):
    capture, buffer = Capture(), {}
    for ticket, lo, count in writes:
        buffer.update(dict.fromkeys(range(lo, lo + count), ticket))
        capture.wrote(ticket, lo, lo + count)
        for reader in (0, 1, 2):
            lo_read, hi_read = capture.owned_by(reader)
            assert all(buffer[row] == reader for row in range(lo_read, hi_read))


def carried(rows=11, key=10, session=7, tokens=range(12)):
    return CarriedRows(tuple(tokens), rows, key, session)


def test_carried_rows_are_cut_to_the_common_prefix():
    prompt = [*range(8), 99, 98]
    assert carried().usable_by(prompt, 7) == (7, 6)
    assert carried().usable_by([*range(12), 1], 7) == (11, 10)
    assert carried(rows=3).usable_by(prompt, 7) is None  # compacted rows: all of them are later
    assert carried(rows=5).usable_by(prompt, 7) == (1, 6)


@pytest.mark.parametrize(
    "entry, prompt, session, why",
    [
        (carried(), [0, 1, 2], 8, Refusal.FOREIGN_SESSION),
        (carried(session=0), [0, 1, 2], 0, Refusal.FOREIGN_SESSION),
        (carried(key=None), [0, 1, 2], 7, Refusal.NO_CARRY),
        (carried(rows=0), [0, 1, 2], 7, Refusal.NO_CARRY),
        (carried(), [0, 9], 7, Refusal.PREFIX_MISMATCH),
    ],
)
def test_why_carried_rows_are_not_used(entry, prompt, session, why):
    assert entry.usable_by(prompt, session) is None and entry.refusal(session) is why


def test_rows_to_append():
    assert plan_append(6, 20, 5, 20) == (7, 12)
    assert plan_append(6, 20, 9, 20) == (9, 10)  # keys 7 and 8 are missing context
    assert plan_append(18, 20, 5, 20) is None  # nothing is needed
    assert plan_append(6, 20, 5, 18) is None  # the last hidden is not captured
    assert plan_append(6, 20, 5, 19) == (7, 12)
    assert Adopted(7, 12, 7).first_key == 7


@given(st.lists(st.integers(0, 2), max_size=9), st.lists(st.integers(0, 2), max_size=9))
def test_the_common_prefix_is_the_longest(one, other):
    length = common_prefix(one, other)
    assert one[:length] == other[:length]
    assert length in (len(one), len(other)) or one[length] != other[length]


@given(st.integers(0, 30), st.integers(0, 30), st.integers(0, 30), st.integers(0, 30))
def test_what_is_appended_ends_at_the_key_that_the_prompt_needs(last_key, prompt, lo, hi):
    plan = plan_append(last_key, prompt, lo, hi)
    if plan is not None:
        first, count = plan
        assert count > 0 and first > last_key and first + count - 1 == prompt - 2
        assert lo <= first and first + count <= hi


# Tables and counts
# ------------------------------------------------------------------------------------------


def test_row_tables():
    table = RowTable.of([4, 4, 4, 3, 3, 2, 2, 2], [0, 1, 2, 5, 6, 7, 8, 9])
    assert str(table) == "4x3 3x2 2x3" and (table.rows, table.sequences) == (24, 8)
    assert str(RowTable.of([4, 4, 2], [0, 2, 3], carried=False)) == "uncarried: 4x2! 2x1!"
    for bad in ("", "4x0", "0x2", "4x2 4x3", "4x1", "x2", "4*2"):
        with pytest.raises(BadRowTable):
            RowTable.parse(bad)


@given(st.lists(st.tuples(st.integers(1, 4), st.booleans()), min_size=1, max_size=12),
       st.booleans())  # fmt: skip
def test_a_row_table_reads_back_and_keeps_its_depths(batch, carried):
    depths, slots = [depth for depth, _ in batch], [0]
    for _, follows in batch[1:]:
        slots.append(slots[-1] + (1 if follows else 2))
    table = RowTable.of(depths, slots, carried=carried)
    assert RowTable.parse(str(table)) == table
    assert [r.depth for r in table.runs for _ in range(r.count)] == depths
    assert all(isinstance(run, Run) and (run.count > 1 or not run.contiguous) for run in table.runs)


def test_ladder_and_rungs_are_one_table_by_either_bound():
    rungs = parse_rungs("1:7,2:5,3:4,4:3,5:2,6:7")
    ladder = ladder_of_rungs(rungs)
    assert ladder.steps == ((1, 7), (2, 5), (3, 4), (4, 3), (5, 2), (128, 7)) and ladder.pinned
    widths = range(1, 9)
    assert [ladder.drafts(n, 9) for n in widths] == [rung_drafts(rungs, n) for n in widths]
    assert Ladder().rungs() == ((0, 3), (5, 3), (9, 1), (17, 1))


def test_the_rung_is_still_where_the_ladder_was_chosen():
    assert Rung().drafts(12, 1, 3) == 2 and Rung().drafts(12, 1, 3, adaptive=False) == 1


def test_what_is_kept_for_one_sequence_needs_a_cap_of_one():
    assert [one_sequence_only(cap) for cap in (1, 2, 32)] == [True, False, False]


def test_fingerprints_of_either_multiplier():
    row = np.array([1, 2], np.uint8)
    primes = {Multiplier.OLDER: 2**44 + 0x1B3, Multiplier.FNV_64: 2**40 + 0x1B3}
    for multiplier, prime in primes.items():
        want = ((((OFFSET ^ 1) * prime) % 2**64 ^ 2) * prime) % 2**64
        assert hidden_fingerprint(row, multiplier) == want
    letter = np.frombuffer(b"a", np.uint8)
    assert hidden_fingerprint(letter, Multiplier.FNV_64) == 0xAF63DC4C8601EC8C
    assert hidden_fingerprint(np.zeros(0)) == OFFSET
    assert hidden_fingerprint(np.zeros(heads.HIDDEN)) != hidden_fingerprint(np.ones(heads.HIDDEN))


@pytest.mark.parametrize(
    "drafted, accepted, rate, length, positions",
    [
        ((3, 3, 3, 3), (3, 1, 0, 2), 0.5, 2.5, [0.75, 0.5, 0.25]),
        ((3, 3, 3, 1), (3, 1, 0, 1), 0.5, 2.25, [0.75, 1 / 3, 1 / 3]),
        ((), (), None, 1.0, []),
    ],
)
def test_acceptance_numbers(drafted, accepted, rate, length, positions):
    """The bonus token is in the length, never in the rate; what was not drafted is not missed."""
    counted = Acceptance()
    for made, taken in zip(drafted, accepted):
        counted.count(made, taken, taken + 1)
    assert (counted.rate, counted.tokens_per_step) == (rate, length)
    assert counted.per_position == positions


def test_acceptance_is_kept_by_width():
    counted = AcceptanceByWidth()
    for width, drafted, accepted in ((1, 2, 2), (4, 1, 0), (4, 1, 1), (1, 2, 0)):
        counted.count(width, drafted, accepted, accepted + 1)
    assert counted.widths[4].per_position == [0.5] and counted.widths[1].per_position == [0.5, 0.5]
    assert counted.widths[1].conditional == (0.5, 1.0)
    assert counted.lines() == [
        "1 sequences: 2 steps, p1 0.500, 1.000 accepted, 2.000 tokens per step",
        "4 sequences: 2 steps, p1 0.500, 0.500 accepted, 1.500 tokens per step",
    ]
    assert counted.plain()["4"]["accepted"] == [1] and list(counted.plain()) == ["1", "4"]


def test_coverage_counts_a_depth_where_the_drafts_before_it_held():
    seen = TopkCoverage(3)
    seen.count([[5, 6, 7], [8, 9, 4], [1, 2, 3]], [5, 9, 1])  # the second pick is of rank two
    seen.count([[5, 6, 7], [8, 9, 4]], [7, 8])
    seen.count([[5, 6, 7]], [0])
    assert seen.tried == [3, 1]
    assert [seen.coverage(1, r) for r in (1, 2, 3)] == [1 / 3, 1 / 3, 2 / 3]
    assert seen.plain()[1] == [0.0, 1.0, 1.0]
