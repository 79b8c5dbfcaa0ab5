"""What a generation counts is exact wherever its text stops: tokens, steps, accepted drafts."""

import checkpoints
import numpy as np
import pytest
from test_engine import CONTEXT, PROMPT, EveryOther, Script, headed, plain, scripted
from test_target import loaded
from test_trees import Ranking

from circuit.engine.engine import Engine
from circuit.engine.together import Together
from circuit.models.target import target_binding, target_keys
from proposers.base import Drafts
from proposers.levers import Depth, ModelLevers
from proposers.rules.cost import RunningCosts
from proposers.rules.tree_shape import TreeShape
from runners.eager import EagerRunner

__all__ = ["plain"]  # a fixture


@pytest.fixture(scope="module")
def target():
    """A target in float64 with programs for trees, and for four texts of four rows each."""
    keys = target_keys(batches=(16,), chunk=8, trees=(8,))
    model = loaded(checkpoints.make_model("llama", seed=3))
    return EagerRunner(
        target_binding(*model, CONTEXT, keys, sequences=4), double=True, context=CONTEXT
    )


def first_seen(plain, places):
    """A place of `places` whose token the text holds nowhere before."""
    return next(i for i in places if plain[i] not in plain[:i])


def check(generation, steps, counts):
    """Steps have these (drafted, accepted, tokens), and the statistics are their sums."""
    assert [(s.drafted, s.accepted, len(s.tokens)) for s in steps] == counts
    counted, depth = generation.statistics, max(drafted for drafted, _, _ in counts)
    tokens = sum(emitted for _, _, emitted in counts)
    assert (counted.steps, counted.acceptance.tokens) == (len(counts), tokens)
    assert tokens == len(generation.tokens) - 1
    assert counted.mean_accepted_length == tokens / len(counts)
    assert counted.drafted == [sum(d > i for d, _, _ in counts) for i in range(depth)]
    assert counted.accepted == [sum(a > i for _, a, _ in counts) for i in range(depth)]
    assert sum(w.tokens for w in counted.widths.widths.values()) == tokens
    assert sum(w.steps for w in counted.widths.widths.values()) == len(counts)


@pytest.mark.parametrize("place, last", [
    (0, (3, 1, 1)), (1, (3, 2, 2)), (2, (3, 3, 3)), (3, (3, 3, 4)),
])  # fmt: skip
def test_a_chain_that_stops_in_its_first_draft_to_the_token_after_its_last(
    target, plain, place, last
):
    """A stop that was drafted ends its step, which then has no token of the target's own."""
    at = first_seen(plain, range(5 + place, 50, 4))
    engine, _ = scripted(target, plain, [[True] * 3])
    generation = engine.generate(PROMPT, 60, drafts=3, stop={plain[at]})
    steps = list(generation)[1:]
    check(generation, steps, [(3, 3, 4)] * (at // 4 - (place == 3)) + [last])


@pytest.mark.parametrize("ranks, last", [
    ([1, 1, 1], [(3, 1, 1), (3, 2, 2), (3, 3, 3), (3, 3, 4)]),
    ([2, 1, 1], [(3, 1, 1), (3, 1, 2)]), ([1, 2, 1], [(3, 1, 1), (3, 2, 2), (3, 2, 3)]),
])  # fmt: skip
def test_a_tree_that_stops_at_each_node_of_its_path(target, plain, ranks, last):
    script = Ranking(PROMPT + plain, [ranks])
    size = len(last)
    for place, counts in enumerate(last):
        at = first_seen(plain, range(1 + place, 40, size))
        script.calls.clear()
        generation = Engine(target, script).generate(
            PROMPT, 60, tree=TreeShape.parse("2,2,1"), stop={plain[at]}
        )
        steps = list(generation)[1:]
        check(generation, steps, [last[-1]] * ((at - 1) // size) + [counts])
        hedges = [s for s in steps if s.accepted and ranks[s.accepted - 1] > 1]
        assert generation.statistics.branched == len(hedges)


@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_copied_drafts_that_stop_in_their_midst(target, plain, place):
    engine, _, _ = headed(target)
    generation = engine.generate(PROMPT, 60, drafts=3)
    whole = [len(step.tokens) for step in drive(generation, plain)]
    begins = [1 + sum(whole[:i]) for i in range(0, len(whole), 2)]  # of the steps that are copied
    at = first_seen(plain, [b + place for b in begins if b + place < 50])
    generation = engine.generate(PROMPT, 60, drafts=3, stop={plain[at]})
    steps = drive(generation, plain)
    last = steps[-1]
    assert (last.drafted, last.accepted, len(last.tokens)) == (3, min(place + 1, 3), place + 1)
    check(generation, steps, [(s.drafted, s.accepted, len(s.tokens)) for s in steps])
    assert generation.statistics.looked_up == sum(begin <= at for begin in begins)


def drive(generation, plain):
    """The steps of a generation whose every other step copies what is known to follow."""
    generation.drafting.lookup = EveryOther(PROMPT, plain)
    return list(generation)[1:]


@pytest.mark.parametrize("batched", [True, False])
def test_texts_that_step_together_and_stop_in_different_drafts(target, plain, batched):
    script = Script(PROMPT + plain, [[True] * 3])
    script.levers = ModelLevers(depth=Depth.FIXED, depth_cut=False, batch_verify=batched)
    stops = [first_seen(plain, range(5 + place, 50, 4)) for place in range(4)]
    with Together(Engine(target, script)) as together:
        texts = [together.add(PROMPT, 60, drafts=3, stop={plain[at]}) for at in stops]
        made = {text: [] for text in texts}
        for text, step in together.run():
            made[text].append(step)
    ends = [(3, 1, 1), (3, 2, 2), (3, 3, 3), (3, 3, 4)]
    for place, (text, at) in enumerate(zip(texts, stops)):
        assert text.tokens == plain[: at + 1]
        check(text, made[text][1:], [(3, 3, 4)] * (at // 4 - (place == 3)) + [ends[place]])


def test_drafts_after_a_stop_are_not_judged(target, plain):
    """They were never compared: as misses they would make the head look worse than it is."""
    at = first_seen(plain, range(5, 50, 4))
    engine, script = scripted(target, plain, [[True] * 3])
    made, judged = script.propose, []

    def sure(request, state):
        tokens = made(request, state).tokens
        return Drafts(tokens, (-0.1,) * len(tokens))

    script.propose, engine.pace.judge = sure, lambda *given: judged.append(given[1:])
    list(engine.generate(PROMPT, 60, drafts=3, stop={plain[at]}))
    assert all(a <= v <= 3 for v, a in judged) and judged[-1][0] == judged[-1][1]
    costs = RunningCosts(3)
    costs.record(3, 1, 1.0, 1)
    assert costs.held == [1.0]
    costs.record(3, 1, 1.0)
    assert np.allclose(costs.held, [1.0, 0.0])
