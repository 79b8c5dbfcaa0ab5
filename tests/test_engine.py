"""Generation: drafts never change the text, and what they save is an exact number."""

import logging
from dataclasses import dataclass, field, replace

import checkpoints
import heads
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_target import loaded

from circuit.engine.engine import Engine
from circuit.engine.errors import (
    EmptyPrompt,
    HiddenMissing,
    NoDraftHead,
    NotANumber,
    PromptTooLong,
    SamplingRefused,
    TooManyDrafts,
)
from circuit.engine.sampling import Sampling
from circuit.engine.statistics import Finish, Statistics
from circuit.models.target import target_binding, target_keys, target_side
from ir.key import DECODE, GraphKey, Mode
from proposers.base import DraftProposer, Drafts
from proposers.config import StreamPoint
from proposers.errors import BadRequest
from proposers.levers import Depth, ModelLevers, TrimPolicy
from proposers.lookup import Lookup
from proposers.mtp_binding import make_mtp_head
from proposers.mtp_program import CACHE
from proposers.options import DraftOptions, head_keys
from proposers.state import ProposerState
from runners.eager import EagerRunner

CONTEXT = 64
PROMPT = [5, 17, 80, 3, 41, 9, 77]


@dataclass
class Script(DraftProposer):
    """Drafts the text that is known to follow, except where the
    script says no; remembers its calls.
    """

    text: list[int]
    rights: list[list[bool]]
    calls: list = field(default_factory=list)

    def alloc_state(self):
        return ProposerState()

    def propose(self, request, state):
        right = self.rights[len(self.calls) % len(self.rights)]
        known = self.text[request.position + 1 : request.position + 1 + request.num_drafts]
        self.calls.append((request.position, request.num_drafts, request.last_token))
        return Drafts(tuple(t if ok else (t + 1) % 97 for t, ok in zip(known, right, strict=False)))

    def after_verify(self, num_accepted, state):
        self.calls[-1] += (num_accepted,)


@pytest.fixture(scope="module")
def target():
    """A target whose rows do not depend on the program's width, but for the last bits of an f64."""
    model = checkpoints.make_model("llama", seed=3)
    binding = target_binding(
        *loaded(model), CONTEXT, target_keys(batches=(), chunk=8), sequences=2, normed_hidden=True
    )
    return EagerRunner(binding, double=True, context=CONTEXT)


@pytest.fixture(scope="module")
def plain(target):
    """The greedy text after the prompt, to the end of the context."""
    generation = Engine(target).generate(PROMPT, 100)
    assert [step.tokens for step in generation] == [(t,) for t in generation.tokens]
    assert generation.statistics.finish is Finish.CONTEXT
    assert len(generation.tokens) == CONTEXT - len(PROMPT) + 1
    assert generation.statistics.steps == len(generation.tokens) - 1
    return generation.tokens


def scripted(target, plain, rights):
    """An engine that drafts by script, and the script."""
    script = Script(PROMPT + plain, rights)
    return Engine(target, script), script


def run(engine, max_tokens, **options):
    generation = engine.generate(PROMPT, max_tokens, **options)
    for _ in generation:
        pass
    assert engine.target.runner.pool.owners == 0
    return generation


def test_greedy_text_is_that_of_transformers(target, plain):
    model = checkpoints.make_model("llama", seed=3).double()
    ids = list(PROMPT)
    with torch.no_grad():
        for _ in range(20):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    assert plain[:20] == ids[len(PROMPT) :]
    assert len(set(plain)) > 5


@pytest.mark.parametrize("drafts", [1, 2, 3])
def test_all_drafts_right(target, plain, drafts):
    engine, script = scripted(target, plain, [[True] * 3])
    generation = run(engine, 25, drafts=drafts)
    assert generation.tokens == plain[:25]
    whole, rest = divmod(24, drafts + 1)
    counted = generation.statistics
    assert counted.steps == whole + (rest > 0)
    assert counted.accepted == counted.drafted
    assert counted.mean_accepted_length == 24 / counted.steps
    assert script.calls[0] == (len(PROMPT), drafts, plain[0], drafts)


def test_all_drafts_wrong_cost_steps_only(target, plain):
    engine, _ = scripted(target, plain, [[False] * 3])
    generation = run(engine, 10, drafts=3)
    assert generation.tokens == plain[:10]
    counted = generation.statistics
    assert (counted.steps, counted.accepted, counted.mean_accepted_length) == (9, [0, 0, 0], 1.0)


def test_acceptance_is_the_exact_number_that_the_script_gives(target, plain):
    """Right, right, wrong: three tokens; wrong first: one; all right: four; a wrong middle: two."""
    rights = [[True, True, False], [False, True, True], [True] * 3, [True, False, True]]
    engine, script = scripted(target, plain, rights)
    generation = engine.generate(PROMPT, 31, drafts=3)
    steps = list(generation)
    assert [len(s.tokens) for s in steps] == [1] + [3, 1, 4, 2] * 3
    assert [s.accepted for s in steps[1:]] == [2, 0, 3, 1] * 3
    assert generation.tokens == plain[:31]
    counted = generation.statistics
    # The last step has room for one draft less than it was asked for in the end.
    assert counted.drafted == [12, 12, 11] or counted.drafted == [12, 11, 11]
    assert counted.accepted == [9, 6, 3] and counted.steps == 12
    assert counted.mean_accepted_length == 2.5
    assert counted.accepted_per_position[0] == 0.75
    assert [call[3] for call in script.calls[:-1]] == ([2, 0, 3, 1] * 3)[:-1]


@settings(max_examples=25, deadline=None)
@given(
    rights=st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=1, max_size=5),
    drafts=st.integers(1, 3),
    max_tokens=st.integers(1, 70),
    stop=st.integers(0, 58),
)
def test_any_script_leaves_the_text_as_it_is(target, plain, rights, drafts, max_tokens, stop):
    ends = {plain[stop]} if stop < len(plain) else set()
    engine, _ = scripted(target, plain, rights)
    generation = run(engine, max_tokens, drafts=drafts, stop=ends)
    first = next((i + 1 for i, t in enumerate(plain) if t in ends), len(plain))
    wanted = plain[: min(max_tokens, first)]
    assert generation.tokens == wanted
    ended = generation.statistics.finish
    if wanted[-1] in ends:
        assert ended is Finish.STOP
    else:
        assert ended is (Finish.LENGTH if len(wanted) == max_tokens else Finish.CONTEXT)


def test_a_stop_inside_accepted_drafts_ends_the_text_there(target, plain):
    at = next(i for i in range(2, 40) if plain[i] not in plain[:i] and i % 4 == 2)
    engine, _ = scripted(target, plain, [[True] * 3])
    generation = run(engine, 50, drafts=3, stop={plain[at]})
    assert generation.tokens == plain[: at + 1]
    assert generation.statistics.finish is Finish.STOP


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 5, 6])
def test_no_more_is_drafted_than_can_be_used(target, plain, max_tokens):
    engine, script = scripted(target, plain, [[True] * 3])
    generation = run(engine, max_tokens, drafts=3)
    assert generation.tokens == plain[:max_tokens]
    assert [call[1] for call in script.calls] == {
        1: [], 2: [], 3: [1], 4: [2], 5: [3], 6: [3],
    }[max_tokens]  # fmt: skip


def test_the_context_is_filled_to_its_last_row(target, plain):
    engine, script = scripted(target, plain, [[True] * 3])
    generation = run(engine, 1000, drafts=3)
    assert generation.tokens == plain and generation.statistics.finish is Finish.CONTEXT
    assert all(position + count < CONTEXT for position, count, *_ in script.calls)


@pytest.mark.parametrize("length", [1, 8, 9, CONTEXT - 1, CONTEXT])
def test_prompts_up_to_the_context(target, plain, length):
    prompt = (PROMPT + plain)[:length]
    generation = Engine(target).generate(prompt, 5)
    assert len(list(generation)) == len(generation.tokens) == min(5, CONTEXT - length + 1)
    if len(PROMPT) <= length:
        assert generation.tokens == plain[length - len(PROMPT) :][:5]


@pytest.mark.parametrize("sampling", [
    Sampling(1.0, seed=7), Sampling(0.8, top_p=0.9, seed=1), Sampling(1.3, top_k=5, seed=2),
    Sampling(2.0, top_p=0.7, top_k=40, seed=3),
])  # fmt: skip
def test_drafts_do_not_change_sampled_text(target, sampling):
    alone = run(Engine(target), 40, sampling=sampling)
    assert alone.tokens == run(Engine(target), 40, sampling=sampling).tokens
    other = Sampling(sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed + 1)
    assert alone.tokens != run(Engine(target), 40, sampling=other).tokens
    rights = [[True, True, False], [True] * 3, [False] * 3]
    engine, _ = scripted(target, alone.tokens, rights)
    drafted = run(engine, 40, sampling=sampling, drafts=3)
    assert drafted.tokens == alone.tokens and drafted.statistics.accepted[0] > 0


# Heads
# ----------------------------------------------------------------------------------------------


def headed(target, **levers):
    """An engine with a real head, in float64, over the same target.

    Every draft is verified, unless a lever says otherwise, so that counts do not depend on time.
    """
    levers = {"depth": Depth.FIXED, **levers}
    model = checkpoints.make_model("llama", seed=3)
    config, tensors = loaded(model)
    tiny = heads.make_head()
    side = target_side(config, tensors, CONTEXT)
    angles = torch.outer(
        torch.arange(CONTEXT).double(), 1e4 ** -(torch.arange(0, 12, 2) / 12).double()
    )
    tiny.side = type(side)(
        side.embedding,
        side.lm_head,
        {"rope.cos": angles.cos().float(), "rope.sin": angles.sin().float()},
    )
    options = DraftOptions(CONTEXT, head_keys(batches=(), chunk=8), sequences=2)
    head = make_mtp_head(tiny.weights, tiny.side, options, levers=ModelLevers(**levers))
    head.set_circuit_draft(EagerRunner(head.circuit_draft(options, head.levers), double=True))
    return Engine(target, head), tiny, head


@pytest.mark.parametrize("policy", TrimPolicy)
@pytest.mark.parametrize("prefill", [True, False])
def test_a_head_never_changes_the_text(target, plain, policy, prefill):
    engine, _, head = headed(target, trim=policy, drafter_prefill=prefill)
    for drafts in (1, 3):
        assert run(engine, 100, drafts=drafts).tokens == plain
        assert head.runner.pool.owners == 0


class EveryOther(Lookup):
    """Copies the text that is known to follow, in every other step."""

    def __init__(self, prompt, plain):
        super().__init__()
        self.known, self.count, self.asked = [*prompt, *plain], len(prompt), 0

    def extend(self, tokens):
        if hasattr(self, "count"):
            self.count += len(tokens)

    def drafts(self, count):
        self.asked += 1
        return self.known[self.count : self.count + count] if self.asked % 2 else ()


def test_copied_drafts_never_change_the_text_and_are_counted(target, plain):
    engine, _, _ = headed(target)
    assert run(engine, 100, drafts=3, lookup=True).tokens == plain
    generation = engine.generate(PROMPT, 33, drafts=3)
    generation.drafting.lookup = EveryOther(PROMPT, plain)
    steps = [len(step.tokens) for step in generation]
    assert generation.tokens == plain[:33]
    copied = steps[1::2]  # the first step is the prompt's own
    assert copied[:-1] == [4] * (len(copied) - 1)
    assert generation.statistics.looked_up == len(copied)


@pytest.mark.parametrize("policy", [TrimPolicy.KV_EXACT, TrimPolicy.REFEED])
@pytest.mark.parametrize("rights", [[[True, True, False], [False] * 3, [True] * 3], None])
@pytest.mark.parametrize("copying", [False, True])
def test_drafter_rows_are_those_of_a_fresh_replay(target, plain, policy, rights, copying):
    """After any history the drafter holds exactly the rows that the
    text and the true hiddens make.
    """
    engine, tiny, head = headed(target, trim=policy)
    if rights is not None:  # the head's rows, the script's tokens
        script, made = Script(PROMPT + plain, rights), head.propose
        head.propose = lambda request, state: (
            made(request, state),
            script.propose(request, state),
        )[1]
    kept = []
    original = engine.target.rows
    engine.target.rows = lambda *a: (s := original(*a), kept.append(np.array(s.hidden)))[0]
    generation = engine.generate(PROMPT, 30, drafts=3)
    generation.drafting.lookup = EveryOther(PROMPT, plain) if copying else None
    hiddens = None
    for count, step in enumerate(generation):
        if hiddens is None:
            hiddens = engine_prompt_hiddens(target)
            continue
        hiddens = np.concatenate([hiddens, kept[-1][: len(step.tokens)]])
        if count % 3 or count < 3:
            continue
        state, position = generation.drafting.state, generation.lease.rows
        generation.drafting.keep_up(position)
        head._flush(state)
        text = PROMPT + generation.tokens
        keys = position - 1
        assert (head.drafter_rows(state), head.last_pair_key(state)) == (keys, keys - 1)
        exact = tiny.run(text[1 : keys + 1], hiddens[:keys])
        np.testing.assert_allclose(state.lease.read(CACHE), torch.stack(exact[2:]), atol=1e-4)
    assert generation.tokens == plain[:30]


def engine_prompt_hiddens(target):
    from circuit.engine.target import Target

    with target.pool.lease() as lease:
        return np.array(Target(target).prompt(lease, PROMPT, keep_hidden=True).hidden)


def test_the_head_gets_the_hidden_that_its_contract_names(target):
    engine, _, _ = headed(target, target_hidden=StreamPoint.POST_NORM)
    assert engine.target.hidden_output == "hidden_normed"
    generation = run(engine, 5, drafts=1)
    with target.pool.lease() as lease:
        scored = Engine(target).target.prompt(lease, PROMPT, keep_hidden=True)
    with target.pool.lease() as lease:
        normed = engine.target.prompt(lease, PROMPT, keep_hidden=True)
    weight = target.binding.weights["model.norm.weight"].numpy()
    row = scored.hidden[-1]
    wanted = row / np.sqrt(np.square(row).mean() + 1e-5) * weight
    np.testing.assert_allclose(normed.hidden[-1], wanted, atol=1e-6)
    assert len(generation.tokens) == 5


def test_a_propose_that_fails_costs_its_drafts_only(target, plain, caplog):
    engine, script = scripted(target, plain, [[True] * 3])
    made, count = script.propose, iter(range(100))

    def failing(request, state):
        if next(count) % 2:
            raise BadRequest(proposer="Script", problem="it is every other time")
        return made(request, state)

    script.propose = failing
    with caplog.at_level(logging.WARNING):
        generation = run(engine, 16, drafts=3)
    assert generation.tokens == plain[:16] and "it is every other time" in caplog.text
    assert generation.statistics.steps == 6


# Ends and errors
# ------------------------------------------------------------------------------------


def test_closing_early_frees_everything(target, plain):
    engine, _, head = headed(target)
    with engine.generate(PROMPT, 50, drafts=3) as generation:
        for step in generation:
            assert step.tokens and target.pool.owners == 1
            if len(generation.tokens) > 5:
                break
    assert target.pool.owners == 0 and head.runner.pool.owners == 0
    assert generation.statistics.finish is Finish.CLOSED
    generation.close()
    assert engine.generate(PROMPT, 5).close() is None


def test_an_error_in_the_middle_frees_everything(target):
    engine = Engine(target)
    generation = engine.generate(PROMPT, 50)
    steps = iter(generation)
    next(steps)
    held, target.step = target.step, lambda key, **inputs: 1 / 0
    try:
        with pytest.raises(ZeroDivisionError):
            next(steps)
    finally:
        target.step = held
    assert target.pool.owners == 0


def test_requests_that_cannot_be_met(target, plain):
    engine, _ = scripted(target, plain, [[True] * 3])
    with pytest.raises(EmptyPrompt):
        engine.generate([], 5)
    with pytest.raises(PromptTooLong, match=r"65 tokens, .* context of 64"):
        engine.generate([1] * 65, 5)
    with pytest.raises(TooManyDrafts, match=r"4 drafts .* at most 3"):
        engine.generate(PROMPT, 5, drafts=4)
    with pytest.raises(NoDraftHead):
        Engine(target).generate(PROMPT, 5, drafts=1)
    nothing = engine.generate(PROMPT, 0, drafts=1)
    assert list(nothing) == [] and nothing.statistics.finish is Finish.LENGTH


def test_a_target_without_the_hidden_that_the_head_reads(plain):
    model = checkpoints.make_model("llama", seed=3)
    binding = target_binding(*loaded(model), CONTEXT, (DECODE, GraphKey(Mode.VERIFY, 2)))
    script = Script(PROMPT + plain, [[True]])
    script.target_hidden = StreamPoint.POST_NORM
    with pytest.raises(HiddenMissing, match="hidden_normed"):
        list(Engine(EagerRunner(binding), script).generate(PROMPT, 5, drafts=1))


def test_logits_that_are_not_numbers_are_an_error(target, plain):
    weights = dict(target.binding.weights)
    weights["model.norm.weight"] = torch.full((32,), float("nan"))
    runner = EagerRunner(replace(target.binding, weights=weights))
    for sampling in (Sampling(), Sampling(1.0)):
        with pytest.raises(NotANumber):
            list(Engine(runner).generate(PROMPT, 5, sampling=sampling))
    assert runner.pool.owners == 0


# Sampling
# -------------------------------------------------------------------------------------------


def law(logits, temperature, top_p=1.0, top_k=0):
    """The probabilities to draw from, written the slow way."""
    p = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    order = sorted(range(len(p)), key=lambda i: (-p[i], i))
    order = order[: top_k or len(p)]
    total, kept, mass = sum(p[i] for i in order), [], 0.0
    for i in order:
        kept.append(i)
        mass += p[i]
        if mass >= top_p * total:
            break
    out = np.zeros(len(p))
    out[kept] = p[kept] / p[kept].sum()
    return out


@pytest.mark.parametrize("temperature, top_p, top_k", [
    (1.0, 1.0, 0), (0.7, 0.8, 0), (1.5, 1.0, 4), (1.0, 0.6, 5), (0.3, 0.95, 7),
])  # fmt: skip
def test_draws_follow_their_law(temperature, top_p, top_k):
    logits = np.random.default_rng(0).normal(size=11).astype(np.float32)
    wanted = law(logits, temperature, top_p, top_k)
    sampling = Sampling(temperature, top_p, top_k, seed=5)
    count = 4000
    seen = np.bincount([sampling.pick(logits, i) for i in range(count)], minlength=11)
    assert not seen[wanted == 0].any()
    live = wanted > 0
    chi = float((np.square(seen[live] - count * wanted[live]) / (count * wanted[live])).sum())
    assert chi < 40  # eleven classes: below one in ten thousand by chance


def test_candidates_of_a_large_vocabulary_are_those_of_a_full_sort():
    rng = np.random.default_rng(1)
    for scale in (0.05, 3.0):
        logits = (rng.normal(size=5000) * scale).round(2).astype(np.float32)
        for top_p, top_k in ((0.9, 0), (0.5, 2000), (1.0, 1500), (0.99, 0)):
            ids, mass = Sampling(1.0, top_p, top_k)._candidates(logits)
            wanted = law(logits, 1.0, top_p, top_k)
            assert set(ids) == set(np.flatnonzero(wanted))
            np.testing.assert_allclose(mass / mass.sum(), wanted[ids])


def test_greedy_settings_and_bad_ones():
    logits = np.array([1.0, 3.0, 3.0], np.float32)
    for sampling in (Sampling(), Sampling(1.0, top_k=1), Sampling(1.0, top_p=0.0)):
        assert sampling.greedy and sampling.pick(logits, 0) == 1
    for bad in ({"temperature": -1}, {"temperature": float("nan")}, {"top_p": 1.5}, {"top_k": -1},
                {"seed": -1}):  # fmt: skip
        with pytest.raises(SamplingRefused):
            Sampling(**bad)


def test_statistics_of_uneven_steps():
    counted = Statistics()
    for drafted, accepted in ((3, 3), (3, 1), (1, 0), (0, 0)):
        counted.count(drafted, accepted, accepted + 1)
    assert (counted.drafted, counted.accepted) == ([3, 2, 2], [2, 1, 1])
    assert counted.accepted_per_position == [2 / 3, 0.5, 0.5]
    assert counted.mean_accepted_length == 2.0
    assert Statistics().mean_accepted_length == 0.0 and Statistics().accepted_per_position == []
