"""What both heads do alike, interpreted and compiled: masks, stops, deferred ids, failures."""

import math
import sys
from dataclasses import replace

import heads
import kit
import numpy as np
import pytest
from kit import runners
from test_proposers import rows

from proposers.base import ProposeRequest
from proposers.errors import BadRequest, ForeignState, NothingAllowed
from proposers.levers import MaskScope, ModelLevers
from proposers.masks import allowed_columns, masks_of, words_of
from proposers.state import ProposerState
from runners.errors import CacheFull

__all__ = ["runners"]  # fixtures


@pytest.fixture(params=["single", "modules"])
def single(request):
    return request.param == "single"


@pytest.fixture(params=["eager", "compiled"])
def make(request, single, runners):
    """Makes a side with given levers; what it left behind is checked."""
    sides = []

    def made(**levers):
        sides.append(kit.Side(single, ModelLevers(**levers)))
        if request.param == "compiled":
            sides[-1].install(runners[:1] if single else runners)
        return sides[-1]

    yield made
    for side in sides:
        assert side.owners == 0
        side.install(None)


def ask(side, count=3, **options):
    """The drafts of a first propose at position 1, on a fresh state that is freed again."""
    tokens, hiddens = rows(1)
    state = side.head.alloc_state()
    try:
        return side.head.propose(ProposeRequest(tokens[0], hiddens[0], 1, count, **options), state)
    finally:
        side.head.free_state(state)


def exact(side, count):
    tokens, hiddens = rows(1)
    fresh = [kit.Rows() for _ in side.modules]
    return kit.exact_drafts(fresh, tokens[0], hiddens[0], 1, count).drafts


def mask(ids, vocabulary=heads.VOCAB):
    """The bit mask that allows `ids`, as signed words."""
    words = np.zeros(words_of(vocabulary), np.uint32)
    for i in ids:
        words[i // 32] |= np.uint32(1) << np.uint32(i % 32)
    return words.view(np.int32)


def scored(side, module=0):
    ids = kit.TINIES[module].weights.draft_ids
    return list(range(heads.VOCAB)) if ids is None else ids.tolist()


# Masks
# -------------------------------------------------------------------------------------------


def test_bits_of_a_mask_of_forty_ids():
    """Bit 31 is a bit like any other; spare and absent bits forbid."""
    ids = np.arange(64)
    for words, wanted in (
        ([-(2**31), 129], [31, 32, 39]),
        ([-(2**31), -127], [31, 32, 39, *range(40, 64)]),
        ([-(2**31)], [31]),
        ([0, 0], []),
        ([-1, -1], list(range(64))),
    ):
        got = allowed_columns(np.array(words, np.int32), ids)
        assert np.flatnonzero(got).tolist() == wanted
    garbage = np.array([-(2**31), -127], np.int32)
    assert np.flatnonzero(allowed_columns(garbage, ids[:40])).tolist() == [31, 32, 39]
    few = np.array([39, 3, 31])  # columns of a reduced vocabulary: the bit is the target id's
    assert allowed_columns(garbage, few).tolist() == [True, False, True]


def test_what_one_mask_limits():
    one, several = mask([1]), np.stack([mask([1]), mask([2])])
    assert [m is None for m in masks_of(one, 3, MaskScope.FIRST)] == [False, True, True]
    assert [m is None for m in masks_of(one, 3, MaskScope.EVERY)] == [False] * 3
    assert masks_of(None, 2, MaskScope.EVERY) == [None, None]
    assert masks_of(one, 0, MaskScope.FIRST) == []
    for scope in MaskScope:
        assert [m.tolist() for m in masks_of(several, 3, scope)] == several.tolist()


def test_a_mask_that_allows_everything_changes_nothing(make):
    side = make()
    plain = ask(side).tokens
    assert plain == exact(side, 3)
    assert ask(side, grammar_bitmask=np.full(words_of(heads.VOCAB), -1, np.int32)).tokens == plain


@pytest.mark.parametrize("scope", MaskScope)
def test_one_mask_for_the_next_token_or_for_every_draft(make, scope):
    side = make(mask_scope=scope)
    allowed = [i for i in scored(side) if i not in ask(side).tokens][::2]
    got = ask(side, grammar_bitmask=mask(allowed)).tokens
    inside = [token in allowed for token in got]
    assert len(got) == 3 and inside[0]
    if scope is MaskScope.EVERY:
        assert all(inside)


def test_masks_by_position_walk_a_grammar(make):
    """A grammar a b c a b c: the masks of three states give a b c, one of them never a a a."""
    side = make()
    a, b, c = [i for i in scored(side) if all(i in scored(side, m) for m in range(3))][:3]
    masks = np.stack([mask([a]), mask([b]), mask([c])])
    assert ask(side, grammar_bitmask=masks).tokens == (a, b, c)
    assert ask(side, grammar_bitmask=masks[:2]).tokens == (a, b)
    assert ask(side, grammar_bitmask=masks[0]).tokens != (a, a, a)
    for token in (a, 31, 32, 96):
        if token in scored(side):
            assert ask(side, 1, grammar_bitmask=mask([token])).tokens == (token,)


def test_a_mask_without_a_way_out_is_an_error_and_ends_a_chain_before_it(make):
    side = make()
    a = scored(side)[0]
    with pytest.raises(NothingAllowed, match="allows none of the"):
        ask(side, grammar_bitmask=mask([]))
    assert ask(side, grammar_bitmask=np.stack([mask([a]), mask([]), mask([a])])).tokens == (a,)
    state = side.head.alloc_state()
    with pytest.raises(NothingAllowed):
        tokens, hiddens = rows(1)
        request = ProposeRequest(tokens[0], hiddens[0], 1, 2, grammar_bitmask=mask([]))
        side.head.propose(request, state)
    assert [c.shape[2] for c in side.caches(state)] == [0] * len(side.modules)
    side.head.free_state(state)


def test_masks_of_another_length_are_refused(make):
    side = make()
    for bad in (np.zeros(3, np.int32), np.zeros(5, np.int32), np.zeros(4, np.int64)):
        with pytest.raises(BadRequest, match=r"not int32 \[4\]"):
            ask(side, grammar_bitmask=bad)


# Stops and confidences
# -----------------------------------------------------------------------------


def test_confidences_are_log_probabilities(make):
    side = make()
    drafts = ask(side, want_logprobs=True)
    assert drafts.tokens == ask(side).tokens and ask(side).logprobs is None
    assert len(drafts.logprobs) == 3
    tokens, hiddens = rows(1)
    _, final, _, _ = kit.TINIES[0].run(tokens, hiddens)
    logits = kit.TINIES[0].logits(final[-1])
    wanted = float(logits.max() - logits.logsumexp(0))
    assert drafts.logprobs[0] == pytest.approx(wanted, abs=1e-4)
    assert side.head.last_confidence() is None


def test_a_chain_ends_with_the_first_draft_below_the_threshold(make):
    logprobs = ask(make(), want_logprobs=True).logprobs
    for depth in (1, 2, 3):
        least = math.exp(min(logprobs[:depth]))
        stop = min(max(least * 1.001, 1e-9), 1 - 1e-9)
        side = make(draft_stop=stop)
        wanted = side.head.levers.stop_rule.chain_depth(logprobs)
        drafts = ask(side, want_logprobs=True)
        assert len(drafts.tokens) == wanted and drafts.tokens == ask(make()).tokens[:wanted]
        assert len(drafts.logprobs) == wanted and ask(side).logprobs is None


def test_the_rows_of_a_stopped_chain_are_those_of_its_drafts(make):
    side = make(draft_stop=1 - 1e-9)
    tokens, hiddens = rows(1)
    state = side.head.alloc_state()
    side.head.propose(ProposeRequest(tokens[0], hiddens[0], 1, 3), state)
    assert [c.shape[2] for c in side.caches(state)] == [1, *[0] * (len(side.modules) - 1)]
    assert state.last_num_drafted == 1
    side.head.free_state(state)


# Deferred ids, swaps, failures, ends
# -----------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_deferred_id_is_the_last_drafts_whatever_it_is(make, count):
    side = make()
    plain, row = ask(side, count).tokens, np.zeros(heads.HIDDEN, np.float32)
    drafts = ask(side, count, draft_embed_target=row)
    assert drafts.tokens == (*plain[:-1], 0) and drafts.deferred == plain[-1]
    assert side.head.read_deferred_draft_token(drafts) == plain[-1]
    assert np.array_equal(row, kit.TINIES[0].side.embedding[plain[-1]].numpy())
    assert ask(side, 0).deferred is None and ask(side, count).deferred is None


def test_a_deferred_id_where_a_stop_ends_the_chain(make):
    """The first draft is the last one made: its row is written, whichever module made it."""
    side, row = make(draft_stop=1 - 1e-9), np.zeros(heads.HIDDEN, np.float32)
    (first,) = ask(side).tokens
    drafts = ask(side, draft_embed_target=row)
    assert drafts.tokens == (0,) and drafts.deferred == first
    assert np.array_equal(row, kit.TINIES[0].side.embedding[first].numpy())


def test_a_head_without_its_embedding_table_refuses_an_embed_target_and_goes_on(make):
    """As one of an artifact, whose packed table only the backend's own kernels read."""
    side, row = make(), np.full(heads.HIDDEN, 7, np.float32)
    for module in side.modules:
        module._embedding_row = None
    state, (tokens, hiddens) = side.head.alloc_state(), rows(1)
    request = ProposeRequest(tokens[0], hiddens[0], 1, 3, draft_embed_target=row)
    with pytest.raises(BadRequest, match="rows of the embedding are not at hand"):
        side.head.propose(request, state)
    assert (row == 7).all() and all(c.shape[2] == 0 for c in side.caches(state))
    assert list(side.head.propose(replace(request, draft_embed_target=None), state).tokens) == list(
        exact(side, 3)
    )
    side.head.free_state(state)


def test_a_deferred_id_of_zero_is_told_from_none(make):
    side = make()
    if 0 not in scored(side):
        pytest.skip("the head does not score id 0")
    row = np.zeros(heads.HIDDEN, np.float32)
    drafts = ask(side, 1, draft_embed_target=row, grammar_bitmask=mask([0]))
    assert drafts.tokens == (0,) and drafts.deferred == 0
    assert np.array_equal(row, kit.TINIES[0].side.embedding[0].numpy())


def test_a_swap_in_the_middle_changes_no_draft(single, runners):
    side, whole = kit.Side(single), kit.Side(single)
    compiled = runners[:1] if single else runners
    tokens, hiddens = rows(20)
    states = side.head.alloc_state(), whole.head.alloc_state()
    for turn, installed in enumerate((None, compiled, None, compiled)):
        side.install(installed)
        position = 1 + 3 * turn
        request = ProposeRequest(tokens[position], hiddens[position - 1], position, 3)
        made = [one.head.propose(request, s).tokens for one, s in zip((side, whole), states)]
        assert made[0] == made[1]
        for one, state in zip((side, whole), states):
            one.head.after_verify(2, state)
        for one, other in zip(side.caches(states[0]), whole.caches(states[1])):
            assert one.shape == other.shape
            np.testing.assert_allclose(one, other, atol=2e-4)
    side.install(None)
    for one, state in zip((side, whole), states):
        one.head.free_state(state)
        one.head.free_state(state)
    assert side.owners == whole.owners == 0 and not any(r.pool.owners for r in compiled)


def test_a_failed_propose_leaves_every_modules_rows(make, single):
    side = make()
    last = side.modules[-1].runner.pool
    tokens, hiddens = rows(1)
    state = side.head.alloc_state()
    with last.lease() as held:
        held.blocks += last.take(last.free, held.owner)
        with pytest.raises(CacheFull):
            side.head.propose(ProposeRequest(tokens[0], hiddens[0], 1, 3), state)
        held.close()
    assert [c.shape[2] for c in side.caches(state)] == [0] * len(side.modules)
    again = side.head.propose(ProposeRequest(tokens[0], hiddens[0], 1, 3), state)
    assert again.tokens == exact(side, 3)
    side.head.free_state(state)
    side.head.free_state(state)


def test_foreign_states(make):
    side, foreign = make(), ProposerState()
    tokens, hiddens = rows(2)
    for call in (
        lambda: side.head.propose(ProposeRequest(1, hiddens[0], 1, 1), foreign),
        lambda: side.head.after_verify(0, foreign),
        lambda: side.head.free_state(foreign),
    ):
        with pytest.raises(ForeignState):
            call()
    head = side.head
    assert head.drafter_rows(foreign) == 0 and head.last_pair_key(foreign) is None
    assert head.take_drafter_kv(foreign) is None
    assert head.prefill_drafter(tokens, hiddens, foreign) == 0
    assert head.catchup_drafter(tokens, hiddens[:1], 0, 1, foreign) == 0
    assert not head.install_drafter_kv(foreign, None, 1, 1)
    assert head.propose_batch([], []) is None


def test_states_of_any_budget_draft_alike(make):
    side = make()
    tokens, hiddens = rows(1)
    made = set()
    for budget in (0, 3, 64, 2**40, sys.maxsize):
        state = side.head.alloc_state_for(budget)
        made.add(side.head.propose(ProposeRequest(tokens[0], hiddens[0], 1, 3), state).tokens)
        side.head.free_state(state)
    assert made == {exact(side, 3)}


# Batches
# -------------------------------------------------------------------------------------------


def batch(side, count):
    """Requests and states of `count` texts of different lengths, hiddens of unrelated memory."""
    requests, states = [], []
    for i in range(count):
        tokens, hiddens = rows(4 + 3 * i, seed=i)
        states.append(side.head.alloc_state())
        side.head.prefill_drafter([0, *tokens[:-1]], hiddens, states[-1])
        row = np.array(hiddens[-1])
        requests.append(ProposeRequest(tokens[-1], row, len(tokens), 3, want_logprobs=True))
    return requests, states


@pytest.fixture(params=["eager", "compiled"])
def batching(request, runners):
    sides = []

    def made(**levers):
        sides.append(kit.Side(True, ModelLevers(**levers)))
        if request.param == "compiled":
            sides[-1].install(runners[:1])
        return sides[-1]

    yield made
    for side in sides:
        assert side.owners == 0
        side.install(None)


def test_counts_are_exact_without_a_stop_and_chain_depths_with_one(batching):
    side = batching()
    requests, states = batch(side, 3)
    whole = side.head.propose_batch(requests, states)
    assert [len(d.tokens) for d in whole] == [3, 3, 3]
    firsts = [d.logprobs[0] for d in whole]
    for state in states:
        side.head.free_state(state)
    side = batching(draft_stop=math.exp((min(firsts) + max(firsts)) / 2))
    requests, states = batch(side, 3)
    stopped = side.head.propose_batch(requests, states)
    depths = [side.head.levers.stop_rule.chain_depth(d.logprobs) for d in whole]
    assert [len(d.tokens) for d in stopped] == depths and len(set(depths)) > 1
    for one, other, depth, state in zip(stopped, whole, depths, states):
        assert one.tokens == other.tokens[:depth] == state.last_drafts
        assert state.last_num_drafted == depth
        side.head.free_state(state)


@pytest.mark.parametrize("at", [0, 1, 2])
def test_states_advance_only_after_success(batching, at):
    side = batching()
    requests, states = batch(side, 3)
    before = [(s.rows, s.last_pair_key) for s in states]
    runner, step, count = side.head.runner, side.head.runner.step, iter(range(9))
    runner.step = lambda key, **inputs: step(key, **inputs) if next(count) < at else 1 / 0
    try:
        with pytest.raises(ZeroDivisionError):
            side.head.propose_batch(requests, states)
    finally:
        del runner.step
    assert [(s.rows, s.last_pair_key) for s in states] == before
    made = [d.tokens for d in side.head.propose_batch(requests, states)]
    alone, others = batch(side, 3)
    assert made == [side.head.propose(r, s).tokens for r, s in zip(alone, others)]
    for state in states + others:
        side.head.free_state(state)


def test_a_batch_that_needs_more_is_not_served(batching):
    side = batching()
    requests, states = batch(side, 2)
    for options in ({"grammar_bitmask": mask([1])}, {"draft_embed_target": np.zeros(32)}):
        other = ProposeRequest(
            requests[1].last_token, requests[1].target_hidden, requests[1].position, 3, **options
        )
        assert side.head.propose_batch([requests[0], other], states) is None
    assert side.head.propose_batch(requests[:1], states[:1]) is None
    assert side.head.propose_batch([requests[0]] * 5, [states[0]] * 5) is None
    assert [s.last_num_drafted for s in states] == [0, 0]
    for state in states:
        side.head.free_state(state)
