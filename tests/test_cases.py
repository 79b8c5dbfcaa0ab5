"""Faults reported of drafters elsewhere, each as a case with its right value.

`docs/cases.md` lists the case of each test here and those that are met by other tests.
"""

import logging
import re
from pathlib import Path

import heads
import kit
import numpy as np
import pytest
import torch
from kit import runners, side
from native import native_runners
from test_engine import CONTEXT, PROMPT, headed, plain, target
from test_proposers import proposer, rows

from circuit.engine.conversation import Conversation
from circuit.engine.engine import Engine
from circuit.engine.statistics import Finish
from ir import ops
from ir.key import DECODE, GraphKey, Mode
from proposers.base import ProposeRequest
from proposers.config import ConcatOrder, StreamPoint
from proposers.levers import TrimPolicy
from proposers.mtp_binding import bind_head, make_mtp_head
from proposers.mtp_program import CACHE
from proposers.multi_module import MultiModuleMtpHead
from proposers.options import DraftOptions, head_keys
from runners.eager import EagerRunner
from runners.rows import Lane, index_inputs

__all__ = ["plain", "runners", "side", "target"]  # fixtures


# Context, rows and positions
# ------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [TrimPolicy.KEEP, TrimPolicy.KV_EXACT, TrimPolicy.REFEED])
@pytest.mark.parametrize("k", [1, 3, 4])
def test_rows_are_committed_tokens_but_the_current_one(policy, k):
    """B04: after any accepted count, and after fifty rounds of random ones."""
    head = proposer(heads.make_head(mapped=False), trim=policy)
    rng = np.random.default_rng(k)
    tokens, hiddens = rows(CONTEXT, seed=k)
    for counts in [[a] for a in range(k + 1)] + [rng.integers(0, k + 1, 50).tolist()]:
        state, position = head.alloc_state(), 4
        head.prefill_drafter(tokens[:4], hiddens[:4], state)
        for accepted in counts:
            if position + k >= CONTEXT:
                break
            given = tokens[position], hiddens[position - 1], position
            head.propose(ProposeRequest(*given, k), state)
            head.after_verify(accepted, state)
            position += accepted + 1
            missing = range(head.last_pair_key(state) + 1, position - 1)
            limit = {TrimPolicy.KEEP: accepted == k, TrimPolicy.KV_EXACT: accepted}
            assert len(missing) <= limit.get(policy, accepted + 1)
            if missing:
                fed = [tokens[key + 1] for key in missing]
                part = hiddens[missing[0] : missing[-1] + 1]
                head.catchup_batch([fed], [part], [missing[0] + 1], [state])
            assert head.drafter_rows(state) == position - 1
            assert head.last_pair_key(state) == position - 2
        head.free_state(state)


def test_only_rows_of_accepted_drafts_deviate_unless_they_are_fed_again():
    """B66: ten rounds that accept two of three, with rows exact and with rows kept as drafted."""
    tiny = heads.make_head(mapped=False)
    tokens, hiddens = rows(CONTEXT)
    for policy in (TrimPolicy.KV_EXACT, TrimPolicy.KEEP):
        head, guessed = proposer(tiny, trim=policy), set()
        text = tokens[:4]
        state, position = head.alloc_state(), 3
        head.prefill_drafter(text[:3], hiddens[:3], state)
        for _ in range(10):
            request = ProposeRequest(text[position], hiddens[position - 1], position, 3)
            drafts = head.propose(request, state).tokens
            text += [*drafts[:2], tokens[position]]
            head.after_verify(2, state)
            if policy is TrimPolicy.KV_EXACT:
                part = hiddens[position : position + 2]
                head.catchup_batch([drafts[:2]], [part], [position + 1], [state])
            else:
                guessed |= {position, position + 1}
            position += 3
        head._flush(state)
        exact = torch.stack(tiny.run(text[1:position], hiddens[: position - 1])[2:]).numpy()
        off = np.abs(state.lease.read(CACHE) - exact).max((0, 1, 3)) > 1e-3
        assert set(np.flatnonzero(off)) == guessed
        head.free_state(state)


def test_a_row_is_not_its_position(side):
    """B20: an empty drafter joins late: rows count from 0, angles follow the positions."""
    tokens, hiddens = rows(30)
    given, head = hiddens.copy(), side.head
    state = head.alloc_state()
    text = [0, *tokens]
    assert head.catchup_drafter(text[:8], hiddens[:7], 0, 20, state) == 7  # rows 0 to 6 at 20 to 26
    drafts = head.propose(ProposeRequest(text[8], hiddens[7], 27, 4), state).tokens
    mine = kit.Rows()
    for i in range(7):
        mine.add(text[i + 1], hiddens[i], 20 + i)
    exact = kit.exact_drafts([mine], text[8], hiddens[7], 27, 4)
    assert drafts == exact.drafts and head.drafter_rows(state) == 11
    head.after_verify(2, state)  # rows 7 stays, two are fed again; then three after a gap of five
    assert head.catchup_drafter([0, *drafts[:2]], hiddens[8:10], 8, 28, state) == 2
    assert head.catchup_drafter(text[10:14], hiddens[10:13], 10, 35, state) == 3
    side.flush(state)
    mine.add(text[8], hiddens[7], 27)
    for token, hidden, position in zip(
        [*drafts[:2], *text[11:14]], hiddens[8:13], [28, 29, 35, 36, 37], strict=True
    ):
        mine.add(token, hidden, position)
    cache, want = side.caches(state)[0], torch.stack(mine.run(kit.TINIES[0])[2:]).numpy()
    assert cache.shape[2] == 13 and head.last_pair_key(state) == 36
    np.testing.assert_allclose(cache, want, atol=2e-4)
    assert np.array_equal(given, hiddens)
    head.free_state(state)


def test_a_common_shift_of_positions_is_rounding_and_one_of_a_single_row_is_not():
    """B20: RoPE is relative."""
    tokens, hiddens = rows(9)
    tiny, found = kit.TINIES[0], []
    for first, moved in ((1, 0), (41, 0), (1, 7)):
        positions = [first + i for i in range(9)]
        positions[3] += moved
        found.append(tiny.logits(tiny.run(tokens, hiddens, positions)[1][-1]))
    assert float((found[0] - found[1]).abs().max()) < 1e-4  # angles are f32 in the oracle
    assert float((found[0] - found[2]).abs().max()) > 1e-2


@pytest.mark.parametrize("reused", [False, True])
def test_a_drafter_gets_the_whole_prompt_however_it_comes(target, plain, reused):
    """B22: plain, and with its first part from rows that are there already."""
    engine, _, head = headed(target)
    prompt = [*PROMPT, *plain[:20]]
    with Conversation(engine) as conversation:
        if reused:
            list(conversation.turn(prompt[:20], 1, drafts=1))
        generation = conversation.turn(prompt, 9, drafts=3)
        next(iter(generation))
        assert head.drafter_rows(generation.drafting.state) == len(prompt) - 1
        assert (conversation.reused > 0) is reused
        list(generation)
        assert generation.tokens == plain[20:29]


def test_a_proposer_without_context_says_so(target, caplog):
    """B22: silence would look like a slow but working drafter."""
    _, _, head = headed(target)
    with caplog.at_level(logging.WARNING):
        Engine(target, MultiModuleMtpHead([head]))
    assert "MultiModuleMtpHead takes in no prompt" in caplog.text
    caplog.clear()
    Engine(target, head)
    assert not caplog.text


@pytest.mark.parametrize("length", [57, 58, 59, 60, 61, 62, 63, 64])
def test_the_end_of_the_context(target, plain, length):
    """B38: drafts thin out; nothing is written past the last row; the text is that without."""
    engine, _, head = headed(target)
    prompt = [*PROMPT, *plain][:length]
    generation, widest = engine.generate(prompt, 50, drafts=3), 0
    for step in generation:
        held = generation.lease.rows if generation.lease is not None else CONTEXT
        assert held <= CONTEXT and step.drafted <= max(CONTEXT - length, 0)
        widest = max(widest, step.drafted)
    assert generation.tokens == plain[length - len(PROMPT) :][: CONTEXT - length + 1]
    assert generation.statistics.finish is Finish.CONTEXT
    assert widest == min(max(CONTEXT - length - 1, 0), 3)
    assert head.runner.pool.owners == 0


def test_a_drafter_with_a_shorter_context_stops_and_the_text_goes_on(target, plain, caplog):
    """B38: the drafter's limit is below the target's."""
    _, tiny, _ = headed(target)
    options = DraftOptions(32, head_keys(batches=(), chunk=8), sequences=2)
    side = type(tiny.side)(
        tiny.side.embedding, tiny.side.lm_head, {n: t[:32] for n, t in tiny.side.rope.items()}
    )
    short = make_mtp_head(tiny.weights, side, options)
    with caplog.at_level(logging.WARNING):
        generation = Engine(target, short).generate(PROMPT, 100, drafts=3)
        list(generation)
    assert generation.tokens == plain and "no drafts from here on" in caplog.text
    assert sum(generation.statistics.drafted) > 10 and len(caplog.messages) < 9
    long = [*PROMPT, *plain[:40]]
    generation = Engine(target, short).generate(long, 9, drafts=3)
    list(generation)
    assert generation.tokens == plain[40:49] and generation.statistics.drafted == []
    assert short.runner.pool.owners == 0


def test_one_flag_hides_the_first_embedding_whatever_is_padded():
    """B75: a prompt of three, a late start, padding rows; a text begun again is the same."""
    tokens, hiddens = rows(4)
    for hidden in (True, False):
        tiny = heads.make_head(mapped=False, pos0_mask=hidden)
        head = proposer(tiny)
        found = []
        for _ in range(2):
            state = head.alloc_state()
            head.prefill_drafter([0, *tokens[:2]], hiddens[:3], state)  # PREFILL_8: six are padding
            found.append(state.lease.read(CACHE))
            head.free_state(state)
        assert np.array_equal(*found)
        want = torch.stack(tiny.run(tokens[:2], hiddens[:2])[2:])
        np.testing.assert_allclose(found[0], want, atol=1e-5)
        late = head.alloc_state()
        head.catchup_drafter([0, *tokens[:2]], hiddens[:2], 0, 40, late)
        head._flush(head._adopt(late))
        want = torch.stack(tiny.run(tokens[:2], hiddens[:2], [40, 41])[2:])
        np.testing.assert_allclose(late.lease.read(CACHE), want, atol=1e-5)
        head.free_state(late)


def test_accepted_counts_of_zero(side):
    """B72: lengths [0, 2, 1], [0, 0, 0] and [1]: a sequence without rows is left out."""
    tokens, hiddens = rows(12)
    head = side.head
    for counts in ([0, 2, 1], [0, 0, 0], [1]):
        states = [head.alloc_state() for _ in counts]
        for state in states:
            head.prefill_drafter([0, *tokens[:3]], hiddens[:4], state)
        fed = [tokens[3 : 3 + n] for n in counts]
        parts = [hiddens[3 : 3 + n] for n in counts]
        assert head.catchup_batch(fed, parts, [4] * len(counts), states) == sum(counts)
        exact = torch.stack(kit.TINIES[0].run(tokens[:5], hiddens[:5])[2:]).numpy()
        for n, state in zip(counts, states):
            side.flush(state)
            assert (head.drafter_rows(state), head.last_pair_key(state)) == (3 + n, 2 + n)
            np.testing.assert_allclose(side.caches(state)[0], exact[:, :, : 3 + n], atol=2e-4)
            head.free_state(state)
    with pytest.raises(Exception, match="tokens for"):
        head.catchup_batch([[1]], [hiddens[:0]], [4], [state])


# What the head is given
# ------------------------------------------------------------------------------


def test_numbers_of_a_norm_once_and_twice():
    """B11, B47: a norm is not idempotent, and w is not 1 + w."""
    weight, x = torch.tensor([0.5, 2.0]), torch.tensor([[3.0, 4.0]])
    once = ops.rms_norm(x, weight, eps=0.0)
    assert once[0].tolist() == pytest.approx([0.424264, 2.262742], abs=1e-6)
    twice = ops.rms_norm(once, weight, eps=0.0)
    assert twice[0].tolist() == pytest.approx([0.130312, 2.779982], abs=1e-6)
    x, weight = torch.tensor([[1.0, -2.0, 2.0]]), torch.tensor([-0.1, 0.0, 0.2])
    for offset, wanted in (
        (1.0, [0.519615, -1.154701, 1.385641]),
        (0.0, [-0.057735, 0.0, 0.23094]),
    ):
        got = ops.rms_norm(x, weight, eps=0.0, offset=offset)[0].tolist()
        assert got == pytest.approx(wanted, abs=1e-6)


def test_each_choice_of_the_contract_changes_eager_and_compiled_alike(tmp_path, kernel_folder):
    """B11: concat order, recycled hidden; a flag that only one of the two honours is a fault."""
    keys = (DECODE, *(GraphKey(Mode.CHAIN, steps) for steps in (1, 2, 3)))
    options = DraftOptions(heads.CONTEXT, keys, sequences=2)
    changes = {
        "plain": {}, "order": {"concat_order": ConcatOrder.HIDDEN_EMBED},
        "recycle": {"recycle": StreamPoint.POST_NORM},
    }  # fmt: skip
    bindings = {}
    for name, fields in changes.items():
        tiny = heads.make_head(mapped=False, **fields)
        tiny.weights.tensors.update(heads.make_head(mapped=False).weights.tensors)
        bindings[name] = bind_head(tiny.weights, tiny.side, options)
    made = native_runners(tmp_path, kernel_folder, bindings, blocks=9)
    tokens, hiddens = rows(1)
    found = {}
    for name, binding in bindings.items():
        for kind, runner in (("eager", EagerRunner(binding)), ("compiled", made[name])):
            with runner.pool.lease() as lease:
                first = lease.append(3)
                inputs = index_inputs(runner, GraphKey(Mode.CHAIN, 3), [Lane(lease, first, 1)])
                given = np.array(tokens, np.int32)
                drafts, _, last = runner.run_chain(3, ids=given, hidden=hiddens, **inputs)
                found[name, kind] = drafts, runner.read(last)
        np.testing.assert_allclose(found[name, "eager"][1], found[name, "compiled"][1], atol=1e-3)
        assert found[name, "eager"][0] == found[name, "compiled"][0]
    hidden = [found[name, "compiled"][1] for name in changes]
    assert np.abs(hidden[0] - hidden[1]).max() > 1e-2 < np.abs(hidden[0] - hidden[2]).max()
    for runner in made.values():
        runner.close()


@pytest.mark.parametrize("page, least", [("cases.md", 40), ("rules.md", 50)])
def test_every_test_that_a_page_names_exists(page, least):
    """A name that is listed and gone would look like a case that is met."""
    root = Path(__file__).parent
    named = re.findall(r"`(test_\w+)::(test_\w+)`", (root.parent / "docs" / page).read_text())
    assert len(named) >= least
    for file, name in named:
        assert f"def {name}(" in (root / f"{file}.py").read_text(), f"{file}::{name}"
