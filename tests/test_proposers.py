"""MTP heads against oracles of transformers' own classes: drafts,
hiddens, logits and cache rows.
"""

import sys
from dataclasses import replace

import heads
import numpy as np
import pytest
import torch

from ir.format import Format
from ir.interpret import interpret
from ir.key import DECODE, GraphKey, Mode
from ir.quantize import stored_as
from ir.tensor import TensorType, unpacked
from proposers.base import ProposeRequest
from proposers.config import ConcatOrder, StreamPoint
from proposers.errors import BadRequest, ForeignState, HeadRefused, NoModules
from proposers.levers import ModelLevers, TrimPolicy
from proposers.mtp import MtpHead
from proposers.mtp_binding import bind_head, make_mtp_head
from proposers.mtp_program import CACHE
from proposers.multi_module import MultiModuleMtpHead
from proposers.options import DraftOptions, head_keys
from proposers.rules.ring import CatchupRing
from proposers.state import ProposerState
from runners.eager import EagerRunner
from runners.errors import CacheFull
from runners.rows import Lane, index_inputs, padded

OPTIONS = DraftOptions(heads.CONTEXT, head_keys(batches=(2, 4), chunk=8))
KINDS = {
    "llama": ("llama", {}),
    "llama, full vocabulary": ("llama", {"mapped": False}),
    "llama, hidden first, normed recycle": (
        "llama", {"concat_order": ConcatOrder.HIDDEN_EMBED, "recycle": StreamPoint.POST_NORM},
    ),
    "llama, first embedding hidden": ("llama", {"pos0_mask": True}),
    "qwen3.5": ("qwen3.5", {}),
    "qwen3.5, normed recycle": ("qwen3.5", {"recycle": StreamPoint.POST_NORM, "mapped": False}),
}  # fmt: skip


@pytest.fixture(params=KINDS)
def tiny(request):
    family, changes = KINDS[request.param]
    return heads.make_head(family, **changes)


def rows(count, seed=1):
    """Tokens and hiddens of a made-up text."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, heads.VOCAB, count).tolist(), rng.normal(
        size=(count, heads.HIDDEN)
    ).astype(np.float32)


def oracle_runner(tiny):
    """The head interpreted in float64."""
    return EagerRunner(bind_head(tiny.weights, tiny.side, OPTIONS), double=True)


def proposer(tiny, **levers):
    """The head as a proposer whose runner interprets in float64."""
    head = make_mtp_head(tiny.weights, tiny.side, OPTIONS, levers=ModelLevers(**levers))
    head.set_circuit_draft(oracle_runner(tiny))
    return head


def feed(runner, lease, tokens, hiddens, key):
    """One step over the next rows of a sequence, key of pair i at position i + 1."""
    count = len(tokens)
    first = lease.append(count)
    inputs = index_inputs(runner, key, [Lane(lease, first, first + 1, count)])
    ids = padded(np.array(tokens, np.int32), key.rows)
    return runner.run_draft(key, ids=ids, hidden=padded(hiddens, key.rows), **inputs)


def close(a, b, atol=2e-5):
    np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=atol, rtol=1e-5)


# Programs
# -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("widths", [[1] * 9, [4, 2, 3], [2, 1, 4, 2]])
def test_steps_and_extends_are_the_oracles_rows(tiny, widths):
    tokens, hiddens = rows(9)
    x, final, keys, values = tiny.run(tokens, hiddens)
    recycled = x if tiny.weights.contract.recycle is StreamPoint.PRE_NORM else final
    runner, at = oracle_runner(tiny), 0
    lease = runner.pool.lease()
    for width in widths:
        key = DECODE if width == 1 else GraphKey(Mode.VERIFY, width)
        part = slice(at, at + width)
        out = feed(runner, lease, tokens[part], hiddens[part], key)
        close(out["logits"], tiny.logits(final[part]))
        close(out["hidden"], recycled[part])
        assert out["tokens"].tolist() == [tiny.best(row) for row in final[part]]
        at += width
    close(lease.read(CACHE), torch.stack([keys, values]))


def test_prompt_rows_are_the_oracles_keys_and_values(tiny):
    tokens, hiddens = rows(20)
    _, _, keys, values = tiny.run(tokens, hiddens)
    runner = oracle_runner(tiny)
    lease = runner.pool.lease()
    for part in (slice(0, 8), slice(8, 16), slice(16, 20)):
        out = feed(runner, lease, tokens[part], hiddens[part], GraphKey(Mode.PREFILL, 8))
        assert out == {}
    close(lease.read(CACHE), torch.stack([keys, values]))


def test_a_prompt_program_computes_keys_and_values_only(tiny):
    graph = bind_head(tiny.weights, tiny.side, OPTIONS).graph(GraphKey(Mode.PREFILL, 8))
    called = [node.target.name for node in graph.computed()]
    assert called.count("linear") == 3 and called.count("kv_write") == 1
    assert not {"attention", "argmax", "silu_mul"} & set(called)


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_a_chain_is_its_steps(tiny, steps):
    tokens, hiddens = rows(6)
    runner = oracle_runner(tiny)
    lease, other = runner.pool.lease(), runner.pool.lease()
    feed(runner, lease, tokens[:4], hiddens[:4], GraphKey(Mode.VERIFY, 4))
    feed(runner, other, tokens[:4], hiddens[:4], GraphKey(Mode.VERIFY, 4))
    first = lease.append(steps)
    inputs = index_inputs(runner, GraphKey(Mode.CHAIN, steps), [Lane(lease, first, first + 1)])
    made, logprobs, hidden = runner.run_chain(
        steps, ids=np.array(tokens[4:5], np.int32), hidden=hiddens[4:5], **inputs
    )
    token, last, single = tokens[4], hiddens[4:5], []
    for logprob in logprobs:
        out = feed(runner, other, [token], last, DECODE)
        token, last = int(out["tokens"][0]), out["hidden"].astype(np.float32)
        single.append(token)
        chances = torch.from_numpy(out["logits"][0]).double().log_softmax(-1)
        assert logprob == pytest.approx(float(chances.max()), abs=1e-6)
    assert made == single == tiny.chain(tokens[:5], hiddens[:5], steps)
    close(hidden, last)
    close(lease.read(CACHE), other.read(CACHE))


def test_a_batch_is_its_sequences(tiny):
    runner = oracle_runner(tiny)
    texts = [rows(n, seed=n) for n in (3, 7, 5)]
    leases = [runner.pool.lease() for _ in texts]
    for lease, (tokens, hiddens) in zip(leases, texts, strict=True):
        for i in range(len(tokens) - 1):
            feed(runner, lease, tokens[i : i + 1], hiddens[i : i + 1], DECODE)
    key = GraphKey(Mode.BATCH, 4)
    lanes = [Lane(lease, lease.append(1), lease.rows) for lease in leases]
    out = runner.run_draft(
        key,
        ids=padded(np.array([t[-1] for t, _ in texts], np.int32), 4),
        hidden=padded(np.stack([h[-1] for _, h in texts]), 4),
        **index_inputs(runner, key, lanes),
    )
    for i, (tokens, hiddens) in enumerate(texts):
        _, final, keys, values = tiny.run(tokens, hiddens)
        close(out["logits"][i], tiny.logits(final[-1]))
        close(leases[i].read(CACHE), torch.stack([keys, values]))


def test_the_eager_head_in_f32_is_near_its_oracle(tiny):
    tokens, hiddens = rows(7)
    head = make_mtp_head(tiny.weights, tiny.side, OPTIONS)
    state = head.alloc_state()
    assert head.prefill_drafter([0, *tokens[:6]], hiddens[:7], state) == 6
    drafts = head.propose(ProposeRequest(tokens[6], hiddens[6], 7, 3), state)
    assert list(drafts.tokens) == tiny.chain(tokens, hiddens, 3)
    close(state.lease.read(CACHE)[:, :, :7], torch.stack(tiny.run(tokens, hiddens)[2:]), atol=1e-4)


def test_the_forward_can_be_trained(tiny):
    """Gradients through the traced graph are those of the oracle:
    training needs no second forward.
    """
    tokens, hiddens = rows(6)
    binding = bind_head(tiny.weights, tiny.side, replace(OPTIONS, keys=(GraphKey(Mode.VERIFY, 6),)))
    graph = binding.graph(binding.keys[0])
    weights = {n: t.double() if t.is_floating_point() else t for n, t in binding.weights.items()}
    learned = [n for n in weights if n.startswith("mtp.")]
    for name in learned:
        weights[name].requires_grad_()
    runner = EagerRunner(binding, double=True)
    lease = runner.pool.lease()
    lanes = [Lane(lease, lease.append(6), 1, 6)]
    inputs = index_inputs(runner, binding.keys[0], lanes) | {
        "ids": np.array(tokens, np.int32), "hidden": hiddens,
    }  # fmt: skip
    states = {n: torch.zeros(t.shape, dtype=torch.float64) for n, t in binding.states.items()}
    given = {n: torch.from_numpy(a) for n, a in inputs.items()}
    out = interpret(graph, given, weights, states, double=True)
    labels = torch.arange(6)
    torch.nn.functional.cross_entropy(out["logits"], labels).backward()
    _, final, _, _ = tiny.run(tokens, hiddens, learn=True)
    torch.nn.functional.cross_entropy(tiny.logits(final), labels).backward()
    theirs = {heads.renamed(n): p.grad for n, p in tiny.layer.named_parameters()}
    for name in learned:
        close(weights[name].grad, theirs[name])


# The trait
# ------------------------------------------------------------------------------------------


def test_the_worked_trace_of_pair_keys(tiny):
    """Prompt of 5, a bootstrap decode, two drafts of which one is
    accepted: keys 5, then 6 and 7.
    """
    head = proposer(tiny)
    text, hiddens = rows(9)
    state = head.alloc_state()
    assert (head.drafter_rows(state), head.last_pair_key(state)) == (0, None)
    assert head.prefill_drafter(text[:5], hiddens[:5], state) == 4
    assert (head.drafter_rows(state), head.last_pair_key(state)) == (4, 3)
    assert head.prefill_drafter(text[:5], hiddens[:5], state) == 0
    assert head.catchup_drafter(text[4:6], hiddens[4:5], 4, 5, state) == 1  # key 4
    head.propose(ProposeRequest(text[6], hiddens[5], 6, 2), state)  # keys 5 and 6
    assert (head.drafter_rows(state), head.last_pair_key(state)) == (7, 6)
    head.after_verify(1, state)
    assert (head.drafter_rows(state), head.last_pair_key(state)) == (6, 5)
    assert head.catchup_batch([[text[7]]], [hiddens[6:7]], [7], [state]) == 1  # key 6, true hidden
    drafts = head.propose(ProposeRequest(text[8], hiddens[7], 8, 2), state)
    assert (head.drafter_rows(state), head.last_pair_key(state)) == (9, 8)
    assert list(drafts.tokens) == tiny.chain(text[1:9], hiddens[:8], 2)
    exact = torch.stack(tiny.run(text[1:9], hiddens[:8])[2:])
    close(state.lease.read(CACHE)[:, :, :8], exact)


@pytest.mark.parametrize("policy, kept, fed", [
    (TrimPolicy.DEFAULT, [0, 1, 2, 3, 5], []), (TrimPolicy.REFEED, [0, 1, 2, 3, 5], [6]),
    (TrimPolicy.KV_EXACT, [0, 1, 2, 3, 5], [6]), (TrimPolicy.KEEP, [0, 1, 2, 3, 5, 6], []),
])  # fmt: skip
def test_the_worked_trace_with_ring_labels(policy, kept, fed):
    """Two drafts at position 6 of which one is taken: labels 7 and 8 carry hiddens 6 and 7.

    Key 4 is missing context, as nobody ringed its hidden; rows are compacted, angles are not.
    """
    tiny = heads.make_head(mapped=False)
    head, ring = proposer(tiny, trim=policy), CatchupRing(8)
    text, hiddens = rows(9)
    state = head.alloc_state()
    head.prefill_drafter(text[:5], hiddens[:5], state)
    d1, _ = head.propose(ProposeRequest(text[6], hiddens[5], 6, 2), state).tokens
    text[7] = d1
    ring.put_rows(6, hiddens[6:9], accepted=1)
    assert ring.labels == range(7, 9)
    head.after_verify(1, state)
    assert head.last_pair_key(state) == kept[-1] and head.drafter_rows(state) == len(kept)
    part = ring.feed(head.last_pair_key(state), 8) if policy is not TrimPolicy.DEFAULT else None
    assert ([] if part is None else [part[0] + i for i in range(len(part[1]))]) == fed
    if policy is TrimPolicy.REFEED:
        assert head.catchup_drafter([text[6], d1], part[1], head.drafter_rows(state), 7, state) == 1
    elif fed:
        assert head.catchup_batch([[d1]], [part[1]], [7], [state]) == 1
    head.propose(ProposeRequest(text[8], hiddens[7], 8, 1), state)
    keys = [*kept, *fed, 7]
    assert (head.drafter_rows(state), head.last_pair_key(state)) == (len(keys), 7)
    cache = state.lease.read(CACHE)
    _, _, k, v = tiny.run([text[key + 1] for key in keys], hiddens[keys], [key + 1 for key in keys])
    off = np.abs(cache - torch.stack([k, v]).numpy()).max((0, 1, 3)) > 1e-4
    assert np.flatnonzero(off).tolist() == ([5] if policy is TrimPolicy.KEEP else [])
    head.free_state(state)


DROPPED = {  # (drafts, accepted): rows cut by default, refeed, exact rows, keep
    (1, 0): (1, 1, 0, 0), (1, 1): (0, 0, 0, 0), (2, 0): (2, 2, 1, 1), (2, 1): (1, 1, 1, 0),
    (2, 2): (0, 1, 1, 0), (3, 0): (3, 3, 2, 2), (3, 1): (2, 2, 2, 1), (3, 2): (1, 2, 2, 0),
    (3, 3): (0, 2, 2, 0),
}  # fmt: skip


@pytest.mark.parametrize("policy", TrimPolicy)
def test_rows_cut_after_a_verify(policy):
    head = proposer(heads.make_head(), trim=policy)
    tokens, hiddens = rows(5)
    for (count, accepted), cut in DROPPED.items():
        state = head.alloc_state()
        head.prefill_drafter(tokens, hiddens, state)
        head.propose(ProposeRequest(1, hiddens[4], 5, count), state)
        assert head.drafter_rows(state) == 4 + count
        head.after_verify(accepted, state)
        kept = 4 + count - cut[list(TrimPolicy).index(policy)]
        assert (head.drafter_rows(state), head.last_pair_key(state)) == (kept, kept - 1)
        head.free_state(state)
    assert head.runner.pool.owners == 0


@pytest.mark.parametrize("policy, kept", list(zip(TrimPolicy, (3, 3, 4, 4))))
def test_a_verify_after_no_drafts_counts_as_one_of_one_draft(policy, kept):
    head = proposer(heads.make_head(), trim=policy)
    tokens, hiddens = rows(5)
    state = head.alloc_state()
    head.prefill_drafter(tokens, hiddens, state)
    head.propose(ProposeRequest(1, hiddens[4], 5, 0), state)
    head.after_verify(0, state)
    assert head.drafter_rows(state) == kept
    for _ in range(9):
        head.after_verify(0, state)
    assert head.drafter_rows(state) == (0 if kept == 3 else 4)
    head.free_state(state)


@pytest.mark.parametrize("waiting", [0, 1, 2, 3, 5])
def test_rows_of_accepted_drafts_are_written_with_the_next_propose(waiting):
    tiny = heads.make_head()
    head, steps = proposer(tiny), []
    run = head.runner.step
    head.runner.step = lambda key, **inputs: (steps.append(str(key)), run(key, **inputs))[1]
    tokens, hiddens = rows(5 + waiting)
    state = head.alloc_state()
    head.prefill_drafter([0, *tokens[:4]], hiddens[:5], state)
    steps.clear()
    head.catchup_batch([tokens[4 : 4 + waiting]], [hiddens[4 : 4 + waiting]], [5], [state])
    drafts = head.propose(ProposeRequest(tokens[-1], hiddens[-1], 5 + waiting, 3), state)
    assert list(drafts.tokens) == tiny.chain(tokens, hiddens, 3)
    assert steps == {
        0: ["CHAIN_3"], 1: ["VERIFY_2", "CHAIN_2"], 2: ["VERIFY_3", "CHAIN_2"],
        3: ["VERIFY_4", "CHAIN_2"], 5: ["PREFILL_8", "CHAIN_3"],
    }[waiting]  # fmt: skip


def test_more_drafts_than_the_longest_chain():
    tiny = heads.make_head()
    head = proposer(tiny)
    tokens, hiddens = rows(1)
    drafts = head.propose(ProposeRequest(tokens[0], hiddens[0], 1, 7), state := head.alloc_state())
    assert list(drafts.tokens) == tiny.chain(tokens, hiddens, 7) and head.drafter_rows(state) == 7


@pytest.mark.parametrize("count", [2, 3, 4])
def test_a_batch_of_proposes_is_the_proposes(tiny, count):
    head = proposer(tiny)
    requests, states, alone = [], [], []
    for i in range(count):
        tokens, hiddens = rows(4 + 3 * i, seed=i)
        pair = head.alloc_state(), head.alloc_state()
        for state in pair:
            head.prefill_drafter([0, *tokens[:-2]], hiddens[:-1], state)
            head.catchup_batch([tokens[-2:-1]], [hiddens[-2:-1]], [len(tokens) - 1], [state])
        requests.append(ProposeRequest(tokens[-1], hiddens[-1], len(tokens), 3, want_logprobs=True))
        states.append(pair[0])
        alone.append(head.propose(requests[-1], pair[1]))
    batched = head.propose_batch(requests, states)
    for one, other, state in zip(batched, alone, states, strict=True):
        assert one.tokens == other.tokens == state.last_drafts
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
        assert all(p < 0 for p in one.logprobs)


def test_widths_that_a_batch_does_not_take():
    head = proposer(heads.make_head())
    tokens, hiddens = rows(6)
    request = ProposeRequest(tokens[0], hiddens[0], 1, 1)
    assert head.propose_batch_max() == 4
    for width in (1, 5):
        states = [head.alloc_state() for _ in range(width)]
        assert head.propose_batch([request] * width, states) is None
        assert [head.drafter_rows(s) for s in states] == [0] * width
    assert head.propose_batch([request] * 2, [head.alloc_state(), ProposerState()]) is None
    with pytest.raises(BadRequest, match="2 requests for 1 states"):
        head.propose_batch([request] * 2, [head.alloc_state()])


@pytest.mark.parametrize("program", [True, False])
def test_a_mask_is_of_target_ids_whatever_the_head_scores(tiny, program):
    """The same by the MASKED program and, where a runner has none, by the host."""
    head, ids = proposer(tiny), tiny.weights.draft_ids
    if not program:
        binding = bind_head(tiny.weights, tiny.side, OPTIONS)
        keys = [key for key in binding.keys if key.mode is not Mode.MASKED]
        head.set_circuit_draft(EagerRunner(binding, keys=keys, double=True))
    scored = list(range(heads.VOCAB)) if ids is None else ids.tolist()
    tokens, hiddens = rows(1)
    allowed = scored[1::3]
    words = np.zeros(4, np.uint32)
    for i in [*allowed, *(set(range(heads.VOCAB)) - set(scored))]:  # more than the head scores
        words[i // 32] |= np.uint32(1 << (i % 32))
    request = ProposeRequest(tokens[0], hiddens[0], 1, 1, grammar_bitmask=words.view(np.int32))
    logits = tiny.logits(tiny.run(tokens, hiddens)[1][-1])
    best = max(allowed, key=lambda i: float(logits[scored.index(i)]))
    assert head.propose(request, head.alloc_state()).tokens == (best,)


def test_a_deferred_draft_leaves_its_embedding_row():
    tiny = heads.make_head()
    head = proposer(tiny)
    tokens, hiddens = rows(1)
    plain = head.propose(ProposeRequest(tokens[0], hiddens[0], 1, 3), head.alloc_state()).tokens
    row = np.zeros(heads.HIDDEN, np.float32)
    request = ProposeRequest(tokens[0], hiddens[0], 1, 3, draft_embed_target=row)
    drafts = head.propose(request, head.alloc_state())
    assert drafts.tokens == (*plain[:2], 0) and head.read_deferred_draft_token(drafts) == plain[2]
    assert np.array_equal(row, tiny.side.embedding[plain[2]].numpy())


def test_nothing_is_drafted_when_nothing_is_asked_for():
    head = proposer(heads.make_head())
    state = head.alloc_state()
    _, hiddens = rows(1)
    assert head.propose(ProposeRequest(1, hiddens[0], 1, 0), state).tokens == ()
    assert head.drafter_rows(state) == 0 and state.last_num_drafted == 0


def test_carried_rows_go_on_where_they_were(tiny):
    head = proposer(tiny)
    tokens, hiddens = rows(8)
    state = head.alloc_state()
    head.prefill_drafter([0, *tokens[:6]], hiddens[:7], state)
    head.catchup_batch([tokens[6:7]], [hiddens[6:7]], [7], [state])
    blocks, count, key = head.take_drafter_kv(state)
    assert (count, key) == (7, 6) and head.drafter_rows(state) == 0
    assert head.take_drafter_kv(state) is None
    fresh = head.alloc_state()
    assert head.install_drafter_kv(fresh, blocks, count, key)
    assert not head.install_drafter_kv(fresh, blocks, count, key)
    drafts = head.propose(ProposeRequest(tokens[7], hiddens[7], 8, 3), fresh)
    assert list(drafts.tokens) == tiny.chain(tokens, hiddens, 3)
    head.free_state(state)
    taken = head.take_drafter_kv(fresh)
    head.free_drafter_kv(taken[0])
    head.free_drafter_kv(None)
    assert head.runner.pool.owners == 0


def test_a_swap_keeps_the_rows_of_a_sequence():
    tiny = heads.make_head()
    head = make_mtp_head(tiny.weights, tiny.side, OPTIONS)
    tokens, hiddens = rows(6)
    state = head.alloc_state()
    head.prefill_drafter([0, *tokens[:5]], hiddens[:6], state)
    eager = head.runner
    other = EagerRunner(head.circuit_draft(OPTIONS, head.levers))
    head.set_circuit_draft(other)
    assert head.runner is head.installed is other and state.lease.pool is eager.pool
    drafts = head.propose(ProposeRequest(tokens[5], hiddens[5], 6, 3), state)
    assert list(drafts.tokens) == tiny.chain(tokens, hiddens, 3)
    assert state.lease.pool is other.pool and eager.pool.owners == 0
    head.set_circuit_draft(None)
    assert head.runner is eager and head.installed is None
    head.free_state(state)
    other.close()


def test_states_of_others_and_bad_requests_are_refused():
    head = proposer(heads.make_head())
    _, hiddens = rows(2)
    state = head.alloc_state()
    foreign = MultiModuleMtpHead([head]).alloc_state()
    with pytest.raises(ForeignState, match="MtpHead was given a MultiModuleState"):
        head.propose(ProposeRequest(1, hiddens[0], 1, 1), foreign)
    with pytest.raises(ForeignState):
        head.after_verify(0, foreign)
    with pytest.raises(ForeignState):
        head.free_state(foreign)
    assert head.drafter_rows(foreign) == 0 and head.last_pair_key(foreign) is None
    assert (
        head.take_drafter_kv(foreign) is None
        and head.prefill_drafter([1, 2], hiddens, foreign) == 0
    )
    for request, said in (
        (ProposeRequest(1, hiddens[0], 0, 1), "position 0 has no hidden"),
        (ProposeRequest(1, hiddens[0], 62, 3), "position 64 of a context of 64"),
        (ProposeRequest(1, hiddens[0][:5], 1, 1), r"target_hidden is \[5\], not \[32\]"),
    ):
        with pytest.raises(BadRequest, match=said):
            head.propose(request, state)
    with pytest.raises(BadRequest, match="2 drafts accepted of 1"):
        head.after_verify(2, state)
    assert head.catchup_drafter([1, 2], hiddens[:1], 3, 1, state) == 0
    assert head.drafter_rows(state) == 0


def test_what_a_head_of_compiled_programs_only_cannot_do_is_refused():
    tiny = heads.make_head()
    _, hiddens = rows(1)
    head = MtpHead(tiny.weights.contract, tiny.weights.config, lambda: oracle_runner(tiny))
    state = head.alloc_state()
    for options, said in (
        ({"grammar_bitmask": np.ones(4, np.int32)}, "ids of its scored columns are not at hand"),
        ({"ranks": 99}, "ids of its scored columns are not at hand"),
        ({"draft_embed_target": np.zeros(heads.HIDDEN)}, "rows of the embedding are not at hand"),
    ):
        with pytest.raises(BadRequest, match=said):
            head.propose(ProposeRequest(1, hiddens[0], 1, 2, **options), state)
    assert head.drafter_rows(state) == 0 and head.circuit_draft(OPTIONS, ModelLevers()) is None


def test_a_full_cache_costs_the_drafts_only():
    head = proposer(heads.make_head())
    held = head.runner.pool.lease()
    held.blocks += head.runner.pool.take(head.runner.pool.free - 1, held.owner)
    tokens, hiddens = rows(15)
    state = head.alloc_state()
    assert head.prefill_drafter([0, *tokens[:-1]], hiddens, state) == 14
    with pytest.raises(CacheFull):
        head.propose(ProposeRequest(tokens[-1], hiddens[-1], 15, 3), state)
    assert head.drafter_rows(state) == 14
    assert len(head.propose(ProposeRequest(tokens[-1], hiddens[-1], 15, 2), state).tokens) == 2


def test_defaults_of_the_trait():
    head = proposer(heads.make_head())
    assert head.prefill_hidden_rows(100) == 100 and head.block_gamma() is None
    assert not head.needs_comm() and not head.prefill_uses_shared_buffers()
    assert head.last_confidence() is None


@pytest.mark.parametrize("budget, blocks", [
    (20, 2), (16, 1), (0, 0), (-3, 0), (63, 4), (64, 4), (65, 4), (2**62, 4), (sys.maxsize, None),
])  # fmt: skip
def test_a_budget_is_met_up_to_the_context_and_unknown_at_its_greatest(budget, blocks):
    head = proposer(heads.make_head())
    state = head.alloc_state_for(budget)
    assert (None if state.lease is None else len(state.lease.blocks)) == blocks
    head.free_state(state)
    head.free_state(state)
    assert head.runner.pool.owners == 0


# Several modules
# ------------------------------------------------------------------------------------


def modules(count=3):
    tinies = [heads.make_head(seed=seed) for seed in range(count)]
    for tiny in tinies[1:]:
        tiny.side = tinies[0].side
    return tinies, MultiModuleMtpHead([proposer(tiny) for tiny in tinies])


def test_draft_i_comes_from_module_i():
    tinies, head = modules()
    assert head.num_modules() == 3
    tokens, hiddens = rows(1)
    token, hidden, wanted = tokens[0], hiddens, []
    for i, tiny in enumerate(tinies):
        x, final, _, _ = tiny.run([token], hidden, [1 + i])
        token, hidden = tiny.best(final[-1]), x
        wanted.append(token)
    for asked in (1, 2, 3, 5):
        state = head.alloc_state()
        drafts = head.propose(ProposeRequest(tokens[0], hiddens[0], 1, asked), state)
        assert list(drafts.tokens) == wanted[:asked]
        assert [s.rows for s in state.modules] == [1] * min(asked, 3) + [0] * max(3 - asked, 0)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("accepted", [0, 1, 2, 3])
def test_modules_keep_rows_of_accepted_drafts(count, accepted):
    """Module i drops its one row unless draft i was accepted, whatever was drafted."""
    _, head = modules()
    tokens, hiddens = rows(1)
    state = head.alloc_state()
    head.propose(ProposeRequest(tokens[0], hiddens[0], 1, count), state)
    assert [s.rows for s in state.modules] == [int(i < count) for i in range(3)]
    if accepted > count:
        head.free_state(state)
        return
    head.after_verify(accepted, state)
    assert [s.rows for s in state.modules] == [int(i < accepted) for i in range(3)]
    head.free_state(state)
    head.free_state(state)
    assert all(m.runner.pool.owners == 0 for m in head.modules)


def test_a_deferred_draft_of_fewer_modules_is_the_last_ones():
    _, head = modules()
    tokens, hiddens = rows(1)
    plain = head.propose(ProposeRequest(tokens[0], hiddens[0], 1, 2), head.alloc_state()).tokens
    row = np.zeros(heads.HIDDEN, np.float32)
    request = ProposeRequest(tokens[0], hiddens[0], 1, 2, draft_embed_target=row)
    drafts = head.propose(request, head.alloc_state())
    assert drafts.tokens == (plain[0], 0) and head.read_deferred_draft_token(drafts) == plain[1]
    assert np.array_equal(row, head.modules[0]._embedding_row(plain[1]))


def test_several_modules_have_no_binding_and_are_not_none():
    _, head = modules(1)
    assert head.circuit_draft(OPTIONS, ModelLevers()) is None
    assert head.propose_batch([], []) is None and head.propose_batch_max() == 1
    with pytest.raises(NoModules):
        MultiModuleMtpHead([])


# Bindings
# -------------------------------------------------------------------------------------------


def test_a_binding_says_what_it_is(tiny):
    binding = bind_head(tiny.weights, tiny.side, OPTIONS)
    scored = tiny.weights.config.vocab_size
    assert (binding.vocab, binding.hidden) == (scored, heads.HIDDEN)
    assert binding.contract == tiny.weights.contract.plain()
    assert binding.weights["lm_head.weight"].shape == (scored, heads.HIDDEN)
    assert {str(k) for k in binding.keys} == {
        "DECODE", "VERIFY_2", "VERIFY_3", "VERIFY_4", "BATCH_2", "BATCH_4", "PREFILL_8",
        "CHAIN_1", "CHAIN_2", "CHAIN_3", "CHAIN_4", "MASKED_1",
    }  # fmt: skip


def test_a_tied_full_vocabulary_is_bound_once():
    tiny = heads.make_head(mapped=False)
    tiny.side = type(tiny.side)(tiny.side.embedding, tiny.side.embedding, tiny.side.rope)
    binding = bind_head(tiny.weights, tiny.side, OPTIONS)
    assert "lm_head.weight" not in binding.weights
    assert "lm_head.weight" not in {s.name for s in binding.graph(DECODE).slots.values()}
    tokens, hiddens = rows(3)
    head = make_mtp_head(tiny.weights, tiny.side, OPTIONS)
    drafts = head.propose(ProposeRequest(tokens[0], hiddens[0], 1, 3), head.alloc_state())
    assert list(drafts.tokens) == tiny.chain(tokens[:1], hiddens[:1], 3)


@pytest.mark.parametrize("stored, own, cache", [
    (Format.Q4_1, Format.Q8_0, Format.F16),
    (Format.BF16, Format.BF16, Format.BF16),
    (Format.F16, Format.F32, Format.F32),
])  # fmt: skip
def test_matrices_are_stored_as_the_target_stores_its_own(stored, own, cache):
    tiny = heads.make_head("qwen3.5")
    table = stored_as(tiny.side.lm_head, stored)
    side = type(tiny.side)(table, table, tiny.side.rope)
    binding = bind_head(tiny.weights, side, OPTIONS)
    formats = {n: TensorType.of(t).format for n, t in binding.weights.items()}
    assert formats["mtp.fc.weight"] is own and formats["mtp.norm.weight"] is Format.F32
    assert formats["lm_head.weight"] is stored
    assert {t.format for t in binding.states.values()} == {cache}
    gathered = unpacked(binding.weights["lm_head.weight"])
    assert torch.equal(gathered, unpacked(table)[tiny.weights.draft_ids.long()])


def test_a_matrix_that_does_not_fill_blocks_is_refused():
    tiny = heads.make_head()
    with pytest.raises(HeadRefused, match=r"o_proj.weight has 48 columns, which q8_0 cannot hold"):
        bind_head(tiny.weights, tiny.side, OPTIONS, format=Format.Q8_0)
