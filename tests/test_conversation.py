"""Turns of a conversation: the text of a fresh run, from the rows that earlier turns have left."""

import logging

import numpy as np
import pytest
import torch
from test_engine import PROMPT, headed, plain, target
from test_native_heads import OPTIONS, pair

from circuit.engine import conversation as module
from circuit.engine.conversation import Conversation
from circuit.engine.engine import Engine
from circuit.engine.sampling import Sampling
from proposers.levers import TrimPolicy
from proposers.mtp_binding import make_mtp_head
from proposers.mtp_program import CACHE
from proposers.multi_module import MultiModuleMtpHead
from proposers.rules.carry import Adopted, Refusal

__all__ = ["pair", "plain", "target"]  # fixtures

ASIDE = [11, 60, 2, 8]  # what a person adds between two turns


def fresh(engine, prompt, count, **options):
    generation = engine.generate(prompt, count, **options)
    list(generation)
    return generation.tokens


def turn(conversation, prompt, count, **options):
    generation = conversation.turn(prompt, count, **options)
    list(generation)
    return generation.tokens


def owners(engine, head):
    return engine.target.runner.pool.owners, head.runner.pool.owners


def test_a_second_turn_is_the_fresh_text_from_rows_that_are_there(target):
    engine, tiny, head = headed(target)
    computed, step = [], engine.target._step

    def counted(key, lease, ids):
        computed.append(len(ids))
        return step(key, lease, ids)

    engine.target._step = counted
    with Conversation(engine) as conversation:
        first = turn(conversation, PROMPT, 12, drafts=3)
        assert first == fresh(engine, PROMPT, 12, drafts=3)
        assert conversation.outcome is Refusal.NO_CARRY and conversation.reused == 0
        prompt = [*PROMPT, *first, *ASIDE]
        wanted = fresh(engine, prompt, 12, drafts=3)
        computed.clear()
        generation = conversation.turn(prompt, 12, drafts=3)
        next(iter(generation))
        held = len(PROMPT) + len(first) - 2  # keys 0 to N - 3 of a text of N tokens
        assert conversation.outcome == Adopted(held, len(prompt) - 1 - held, held)
        assert conversation.reused == held and sum(computed) == len(prompt) - held
        state = generation.drafting.state
        assert head.drafter_rows(state) == len(prompt) - 1
        assert head.last_pair_key(state) == len(prompt) - 2
        with target.pool.lease() as lease:
            hiddens = np.array(engine.target.prompt(lease, prompt, keep_hidden=True).hidden)
        head._flush(state)
        exact = tiny.run(prompt[1:], hiddens[: len(prompt) - 1])
        np.testing.assert_allclose(state.lease.read(CACHE), torch.stack(exact[2:]), atol=1e-4)
        list(generation)
        assert generation.tokens == wanted
        assert owners(engine, head) == (1, 1)
    assert owners(engine, head) == (0, 0)


@pytest.mark.parametrize("policy", TrimPolicy)
@pytest.mark.parametrize("common", [0, 1, 2, 7, 12, 18])
def test_an_edited_history_keeps_what_both_texts_begin_with(target, policy, common):
    engine, _, head = headed(target, trim=policy)
    with Conversation(engine) as conversation:
        first = turn(conversation, PROMPT, 12, drafts=3)
        prompt = [*[*PROMPT, *first][:common], *ASIDE]
        assert turn(conversation, prompt, 10, drafts=3) == fresh(engine, prompt, 10, drafts=3)
        assert conversation.reused <= common
        if common < 2:
            assert conversation.outcome is Refusal.PREFIX_MISMATCH
        elif policy is TrimPolicy.KV_EXACT:
            rows = min(common - 1, len(PROMPT) + 12 - 2)
            assert conversation.outcome == Adopted(rows, len(prompt) - 1 - rows, rows)
    assert owners(engine, head) == (0, 0)


def test_the_same_prompt_again_and_a_shorter_one(target, plain):
    engine, _, head = headed(target)
    with Conversation(engine) as conversation:
        for count in (9, 9, 3):
            assert turn(conversation, PROMPT, count, drafts=2) == plain[:count]
        assert turn(conversation, PROMPT[:1], 5, drafts=2) == fresh(engine, PROMPT[:1], 5)
        assert conversation.reused == 0
    assert owners(engine, head) == (0, 0)


def test_turns_without_drafts_and_with_them(target, plain):
    engine, _, head = headed(target)
    with Conversation(engine) as conversation:
        text = list(PROMPT)
        for drafts in (0, 3, 0, 2, 2):
            made = turn(conversation, text, 8, drafts=drafts)
            assert made == plain[len(text) - len(PROMPT) :][:8]
            text += made
        assert isinstance(conversation.outcome, Adopted)
    assert owners(engine, head) == (0, 0)
    with Conversation(Engine(target)) as alone:
        assert turn(alone, PROMPT, 8) == plain[:8]
        assert turn(alone, [*PROMPT, *plain[:8]], 8) == plain[8:16]
        assert alone.reused == len(PROMPT) + 7


def test_sampled_turns_are_the_fresh_ones(target):
    engine, _, _ = headed(target)
    sampling = Sampling(1.0, top_p=0.9, seed=4)
    with Conversation(engine) as conversation:
        first = turn(conversation, PROMPT, 12, drafts=3, sampling=sampling)
        prompt = [*PROMPT, *first, *ASIDE]
        made = turn(conversation, prompt, 12, drafts=3, sampling=sampling)
    assert made == fresh(engine, prompt, 12, sampling=sampling)


def test_a_turn_that_is_left_early_is_carried_on_from_where_it_stands(target, plain):
    engine, _, head = headed(target)
    with Conversation(engine) as conversation:
        for step in conversation.turn(PROMPT, 30, drafts=3):
            if step.drafted:
                break
        rows = conversation._busy.lease.rows
        assert turn(conversation, [*PROMPT, *plain[:20]], 6, drafts=3) == plain[20:26]
        assert conversation.reused == rows - 1 and isinstance(conversation.outcome, Adopted)
        conversation.turn(PROMPT, 5, drafts=1)  # never begun
        assert turn(conversation, PROMPT, 5, drafts=1) == plain[:5]
    conversation.close()
    assert owners(engine, head) == (0, 0)


@pytest.mark.parametrize("kind", [ZeroDivisionError, KeyboardInterrupt])
def test_a_step_that_is_cut_keeps_nothing(target, plain, monkeypatch, kind):
    def cut(lease, ids):
        lease.append(len(ids))  # rows are counted before they are computed
        raise kind

    engine, _, head = headed(target)
    with Conversation(engine) as conversation:
        generation = conversation.turn(PROMPT, 20, drafts=3)
        steps = iter(generation)
        next(steps)
        monkeypatch.setattr(engine.target, "rows", cut)
        with pytest.raises(kind):
            next(steps)
        monkeypatch.undo()
        assert owners(engine, head) == (0, 0)
        assert turn(conversation, PROMPT, 9, drafts=3) == plain[:9] and conversation.reused == 0


@pytest.mark.parametrize("session, levers, outcome", [
    (0, {}, Refusal.NO_CARRY), (1, {"drafter_carry": False}, Refusal.NO_CARRY),
])  # fmt: skip
def test_without_a_session_or_by_the_lever_only_the_targets_rows_are_kept(
    target, plain, session, levers, outcome
):
    engine, _, head = headed(target, **levers)
    with Conversation(engine, session) as conversation:
        assert turn(conversation, PROMPT, 9, drafts=3) == plain[:9]
        assert owners(engine, head) == (1, 0)
        prompt = [*PROMPT, *plain[:9]]
        assert turn(conversation, prompt, 9, drafts=3) == plain[9:18]
        assert conversation.outcome is outcome and conversation.reused == len(prompt) - 1


def test_rows_of_another_session_are_not_used(target, plain):
    engine, _, head = headed(target)
    with Conversation(engine, 5) as conversation:
        turn(conversation, PROMPT, 9, drafts=3)
        conversation.session = 6
        assert turn(conversation, [*PROMPT, *plain[:9]], 9, drafts=3) == plain[9:18]
        assert conversation.outcome is Refusal.FOREIGN_SESSION
    assert owners(engine, head) == (0, 0)


def test_hiddens_that_are_too_far_back_are_not_computed_again(target, plain, monkeypatch):
    monkeypatch.setattr(module, "RECOMPUTED", 0)
    engine, _, head = headed(target)
    with Conversation(engine) as conversation:
        turn(conversation, PROMPT, 9, drafts=3)
        prompt = [*PROMPT, *plain[:9], *ASIDE]
        generation = conversation.turn(prompt, 4, drafts=3)
        next(iter(generation))
        held = len(PROMPT) + 9 - 1
        assert conversation.reused == held  # one row more than there are hiddens for
        assert conversation.outcome == Adopted(held - 1, len(prompt) - 1 - held, held)
        assert head.drafter_rows(generation.drafting.state) == len(prompt) - 2  # one key missing
        list(generation)
        assert generation.tokens == fresh(engine, prompt, 4)


def test_rows_that_nothing_can_be_appended_to_are_told(target, plain):
    """By the lever the drafter takes in no prompt: what it has drafted itself is all it carries."""
    engine, _, head = headed(target, drafter_prefill=False)
    with Conversation(engine) as conversation:
        turn(conversation, PROMPT, 9, drafts=3)
        prompt = [*PROMPT, *plain[:9], *ASIDE]
        assert turn(conversation, prompt, 5, drafts=3) == fresh(engine, prompt, 5)
        assert conversation.outcome is Refusal.NO_HIDDENS
    assert owners(engine, head) == (0, 0)


def test_prefill_that_waits_is_given_its_own_hiddens_or_none(target, plain, caplog):
    engine, _, head = headed(target)
    head.prefill_uses_shared_buffers = lambda: True
    first = engine.generate(PROMPT, 9, drafts=3)
    steps = iter(first)
    next(steps)
    assert head.drafter_rows(first.drafting.state) == 0
    next(steps)
    assert head.drafter_rows(first.drafting.state) >= len(PROMPT) - 1
    list(first)
    assert first.tokens == plain[:9] and not caplog.messages
    late, other = engine.generate(PROMPT, 9, drafts=3), engine.generate(ASIDE, 3, drafts=1)
    next(iter(late))
    with caplog.at_level(logging.WARNING):
        next(iter(other))  # another prompt stands in the buffer now
        list(late)
    assert late.tokens == plain[:9] and "another sequence's" in caplog.text
    list(other)
    assert owners(engine, head) == (0, 0)


def test_a_head_of_modules_carries_nothing_and_changes_nothing(target, plain):
    engine, _, head = headed(target)
    several = Engine(target, MultiModuleMtpHead([head]))
    with Conversation(several) as conversation:
        assert turn(conversation, PROMPT, 9, drafts=1) == plain[:9]
        assert turn(conversation, [*PROMPT, *plain[:9]], 9, drafts=1) == plain[9:18]
        assert conversation.outcome is Refusal.NO_CARRY
        assert conversation.reused == len(PROMPT) + 8
    assert owners(engine, head) == (0, 0)


def test_compiled_turns_are_the_compiled_fresh_text(pair):
    compiled, runner, tiny, _ = pair
    head = make_mtp_head(tiny.weights, tiny.side, OPTIONS)
    head.set_circuit_draft(runner)
    engine = Engine(compiled, head)
    with Conversation(engine) as conversation:
        text = list(PROMPT)
        for count, added in ((9, ASIDE), (7, [5]), (6, [])):
            made = turn(conversation, text, count, drafts=3)
            assert made == fresh(Engine(compiled), text, count)
            text += [*made, *added]
        assert isinstance(conversation.outcome, Adopted) and conversation.outcome.appended > 0
    assert compiled.pool.owners == runner.pool.owners == 0
    head.set_circuit_draft(None)

