"""Arena offsets, canonical plan text, and digests."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from codegen.arena import ALIGNMENT, Value, interference, place
from codegen.plan import Buffer, Launch, Plan, Space
from ir.format import Format, TensorType
from ir.key import DECODE, GraphKey, Mode


@st.composite
def lifetimes(draw):
    """Values with sizes and lifetimes, named in order."""
    spans = draw(
        st.lists(
            st.tuples(st.integers(0, 5000), st.integers(0, 30), st.integers(0, 8)), max_size=40
        )
    )
    return [
        Value(f"v{i}", size, first, first + more) for i, (size, first, more) in enumerate(spans)
    ]


@settings(max_examples=200, deadline=None)
@given(lifetimes())
def test_values_alive_together_never_overlap(values):
    arena = place(values)
    for i, a in enumerate(values):
        start, stop = arena.offsets[a.name], arena.offsets[a.name] + a.nbytes
        assert start % ALIGNMENT == 0 and stop <= arena.nbytes
        for b in values[:i]:
            if a.first <= b.last and b.first <= a.last:
                other = arena.offsets[b.name]
                assert stop <= other or other + b.nbytes <= start


@settings(max_examples=100, deadline=None)
@given(lifetimes())
def test_interference_joins_exactly_the_values_alive_together(values):
    graph = interference(values)
    together = {
        frozenset((a.name, b.name))
        for i, a in enumerate(values)
        for b in values[:i]
        if a.first <= b.last and b.first <= a.last
    }
    assert {frozenset(e) for e in graph.edges} == together


def test_a_chain_of_values_uses_the_space_of_two():
    values = [Value(f"v{i}", 1000, i, i + 1) for i in range(20)]
    assert place(values).nbytes == 2 * 1024


def test_a_freed_gap_is_used_again():
    values = [Value("a", 256, 0, 1), Value("b", 512, 0, 9), Value("c", 256, 2, 3)]
    arena = place(values)
    assert arena.nbytes == 768 and arena.offsets["c"] == arena.offsets["a"]


F32 = Format.F32
PLAN = Plan(
    GraphKey(Mode.VERIFY, 3),
    "cpp",
    (
        Buffer(Space.INPUT, "ids", TensorType((3,), Format.I32)),
        Buffer(Space.WEIGHT, "embed", TensorType((97, 64), Format.Q4_1), "rows"),
        Buffer(Space.ARENA, "x", TensorType((3, 64), F32), offset=256),
        Buffer(Space.OUTPUT, "hidden", TensorType((3, 64), F32)),
    ),
    (
        Launch("embed_1", (0, 1, 2), 0, "embed", 0, 900),
        Launch("add_2", (2, 2, 3), 1, "add", 0, 2304, ("exact",)),
    ),
    (("hidden", 3),),
    1024,
)


def test_text_and_plan_are_one():
    assert Plan.parse(PLAN.text()) == PLAN
    assert Plan.parse(PLAN.text()).digest == PLAN.digest


@pytest.mark.parametrize(
    "change",
    [
        {"key": DECODE},
        {"backend": "other"},
        {"arena_bytes": 1280},
        {"outputs": (("hidden", 2),)},
        {
            "buffers": (
                *PLAN.buffers[:2],
                dataclasses.replace(PLAN.buffers[2], offset=0),
                PLAN.buffers[3],
            )
        },
        {
            "buffers": (
                PLAN.buffers[0],
                dataclasses.replace(PLAN.buffers[1], layout="w16"),
                *PLAN.buffers[2:],
            )
        },
        {
            "launches": (
                PLAN.launches[0],
                dataclasses.replace(PLAN.launches[1], numerics=("differs",)),
            )
        },
        {"launches": (dataclasses.replace(PLAN.launches[0], kernel="embed_2"), PLAN.launches[1])},
    ],
    ids=lambda change: next(iter(change)),
)
def test_every_choice_is_part_of_the_digest(change):
    assert dataclasses.replace(PLAN, **change).digest != PLAN.digest


def test_entry_symbols_are_named_after_keys():
    assert PLAN.symbol == "circuit_run_VERIFY_3"
    assert dataclasses.replace(PLAN, key=DECODE).symbol == "circuit_run_DECODE"
