"""What the rule of worth learns and chooses where one, two or four texts step together."""

import pytest
from test_counts import target
from test_engine import PROMPT, Script, headed, plain

from circuit.engine import drafting, generation
from circuit.engine.engine import Engine
from circuit.engine.together import Together
from proposers.base import Drafts
from proposers.levers import Depth, ModelLevers
from proposers.rules.gate import GateMode, Way
from proposers.rules.worth import DraftWorth

__all__ = ["plain", "target"]  # fixtures

PROPOSE = 0.125  # seconds of one text's drafts
FAIR = ((-0.001, -0.3, -0.3), (-0.3, -0.3, -0.3))  # log-probabilities of every other text
POOR = ((-0.001, -3.0, -3.0), (-2.5, -3.0, -3.0))


class Sure(Script):
    """Drafts what follows; every other text's first draft is sure, and a propose takes its time."""

    def __init__(self, text, clock, chances):
        super().__init__(text, [[True] * 3])
        self.clock, self.chances, self.made = clock, chances, 0

    def alloc_state(self):
        state = super().alloc_state()
        state.chances = self.chances[self.made % 2]
        self.made += 1
        return state

    def propose(self, request, state):
        self.clock[0] += PROPOSE
        tokens = super().propose(request, state).tokens
        return Drafts(tokens, state.chances[: len(tokens)])


@pytest.fixture
def timed(target, plain, monkeypatch):
    """An engine whose steps take one second and `row` for each draft; records of its rules."""
    clock, records = [0.0], []
    monkeypatch.setattr(generation.time, "perf_counter", lambda: clock[0])
    record = DraftWorth.record
    monkeypatch.setattr(
        DraftWorth, "record", lambda rule, *given: (records.append(given), record(rule, *given))
    )

    def made(row, chances=POOR, **levers):
        head = Sure(PROMPT + plain, clock, chances)
        head.levers = ModelLevers(**levers)
        engine = Engine(target, head)
        rows, rows_of = engine.target.rows, engine.target.rows_of

        def alone(lease, ids):
            clock[0] += 1.0 + row * (len(ids) - 1)
            return rows(lease, ids)

        def together(wanted):
            clock[0] += 1.0 + row * sum(len(ids) - 1 for _, ids in wanted)
            return rows_of(wanted)

        monkeypatch.setattr(engine.target, "rows", alone)
        monkeypatch.setattr(engine.target, "rows_of", together)
        return engine

    return made, records


def steps_of(engine, width, tokens=44):
    """Drafts of the texts in each step, most first, as long as all go on; the steps' tokens."""
    with Together(engine) as together:
        for _ in range(width):
            together.add(PROMPT, tokens, drafts=3)
        together.step()
        drafted, emitted = [], []
        while len(together.live) == width:
            made = [step for _, step in together.step()]
            if len(made) == width:
                drafted.append(sorted((step.drafted for step in made), reverse=True))
                emitted.append(sum(len(step.tokens) for step in made))
    return drafted, emitted


def rule_of(engine, width):
    return engine.pace.worth if width == 1 else engine.pace.worth_of(width)


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("row, chances, chosen", [(0.004, FAIR, (3, 3)), (0.25, POOR, (1, 0))])
def test_costs_that_are_learnt_and_the_drafts_that_are_chosen(timed, width, row, chances, chosen):
    """Where a row is nearly free all drafts are verified; where it is dear only those that hold
    nearly always. What a step is recorded with is exactly what it took.
    """
    made, records = timed
    engine = made(row, chances)
    drafted, emitted = steps_of(engine, width)
    assert drafted[0] == [3] * width  # nothing is known yet
    wanted = sorted((chosen[at % 2] for at in range(width)), reverse=True)
    whole = len(drafted) - 2  # towards their ends texts have room for fewer drafts
    assert drafted[whole - 1] == wanted, drafted
    for drafts, tokens, given in zip(drafted[:whole], emitted, records):
        count = sum(drafts)
        assert given == (count, tokens, pytest.approx(1 + row * count),
                         pytest.approx(1 + row * count + PROPOSE * width))  # fmt: skip
    assert rule_of(engine, width).cost(sum(wanted)) == pytest.approx(1 + row * sum(wanted), rel=0.1)


@pytest.mark.parametrize("width", [1, 2, 4])
def test_each_width_learns_for_itself_and_the_head_for_all(timed, width):
    """Costs are of a width; how well chances hold is of the head, whoever steps beside it."""
    made, _ = timed
    engine = made(0.25)
    steps_of(engine, width)
    known = [w for w in (1, 2, 4) if rule_of(engine, w).base]
    assert width in known and all(w <= width for w in known)
    assert len({rule_of(engine, w).power for w in (1, 2, 4)}) == 1
    assert engine.pace.worth.power < 1  # every draft held: chances are better than they say


def test_one_text_in_a_dispatch_learns_the_costs_that_choose_a_depth(timed):
    """Measured costs are learnt by the steps that a text takes by itself, in company or not."""
    made, _ = timed
    engine = made(0.25, depth=Depth.COST)
    drafted, _ = steps_of(engine, 1)
    assert {tuple(drafts) for drafts in drafted} >= {(3,), (2,)}
    seen = engine.pace.costs.milliseconds
    assert seen[2] == pytest.approx(1e3 * (1.5 + PROPOSE))


def test_texts_that_go_on_without_drafts_together_keep_their_drafters_whole(target, monkeypatch):
    """The ring holds 16 hiddens; what it would forget is fed, also where no text drafts."""
    monkeypatch.setattr(drafting, "RING_ROWS", 16)
    engine, _, head = headed(target, gate=GateMode.AUTO, gate_reprobe=10**6)
    engine.pace.gate.present = Way.SERIAL
    with Together(engine) as together:
        texts = [together.add(PROMPT, 60, drafts=3) for _ in range(2)]
        for _ in range(40):
            together.step()
        for text in texts:
            state, position = text.drafting.state, text.lease.rows
            assert head.last_pair_key(state) == head.drafter_rows(state) - 1 > position - 16
            text.drafting.keep_up(position)
            assert head.last_pair_key(state) == head.drafter_rows(state) - 1 == position - 2
    assert head.runner.pool.owners == 0
