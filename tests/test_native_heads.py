"""Compiled heads and targets: near the float64 oracle, and the same
bytes whatever the program's width.
"""

import checkpoints
import heads
import numpy as np
import pytest
import torch
from native import native_runners
from test_engine import PROMPT, Script
from test_proposers import feed, rows
from test_target import loaded

from circuit.engine.batch import BatchWriter
from circuit.engine.engine import Engine
from circuit.engine.sampling import Sampling
from circuit.models.convert import WeightOption, converted
from circuit.models.target import target_binding, target_keys, target_side
from ir.key import DECODE, GraphKey, Mode
from proposers.base import ProposeRequest
from proposers.config import Sharing
from proposers.mtp_binding import bind_head, make_mtp_head
from proposers.mtp_program import CACHE
from proposers.options import DraftOptions, head_keys
from runners.eager import EagerRunner
from runners.rows import Lane, index_inputs, padded

CONTEXT = heads.CONTEXT
OPTIONS = DraftOptions(CONTEXT, head_keys(batches=(2,), chunk=8, chain=3), sequences=4)
WEIGHTS = {"f32": WeightOption.F32, "q8_0": WeightOption.Q8_0}


@pytest.fixture(scope="module", params=["f32 llama", "q8_0 qwen3.5"])
def pair(request, tmp_path_factory, kernel_folder):
    """A compiled target, a compiled head that borrows its tables, and the head as loaded."""
    option, family = request.param.split()
    model = checkpoints.make_model("llama", seed=3, intermediate_size=64, num_hidden_layers=1)
    config, tensors = loaded(model)
    tensors = converted(tensors, WEIGHTS[option])
    target = target_binding(
        config, tensors, CONTEXT, target_keys(batches=(2,), chunk=8), sequences=4
    )
    tiny = heads.make_head(family)
    side = target_side(config, tensors, CONTEXT)
    rope = tiny.side.rope  # the head's own width of rotation
    tiny.side = type(side)(side.embedding, side.lm_head, rope)
    binding = bind_head(tiny.weights, tiny.side, OPTIONS)
    made = native_runners(
        tmp_path_factory.mktemp(option), kernel_folder, {"target": target, "draft": binding},
        blocks=17,
    )  # fmt: skip
    yield made["target"], made["draft"], tiny, binding
    made["target"].close()
    made["draft"].close()


def stepped(runner, tokens, hiddens, widths):
    """Outputs of rows computed in steps of `widths`, and the cache rows that they left."""
    found, at = {"tokens": [], "hidden": [], "logits": []}, 0
    with runner.pool.lease() as lease:
        for width in widths:
            key = DECODE if width == 1 else GraphKey(Mode.VERIFY, width)
            out = feed(runner, lease, tokens[at : at + width], hiddens[at : at + width], key)
            for name, kept in found.items():
                kept.append(runner.read(out[name]))
            at += width
        cache = lease.read(CACHE)
    return {name: np.concatenate(kept) for name, kept in found.items()} | {"cache": cache}


def test_a_draft_step_is_no_further_from_the_oracle_than_eager_is(pair):
    _, runner, _, binding = pair
    tokens, hiddens = rows(9)
    found = stepped(runner, tokens, hiddens, [1] * 9)
    exact = stepped(EagerRunner(binding, double=True), tokens, hiddens, [1] * 9)
    for name in ("hidden", "logits", "cache"):
        error = np.abs(found[name].astype(np.float64) - exact[name]).max()
        assert error < (2e-4 if found["cache"].dtype == np.float32 else 0.15), name
    assert np.array_equal(found["tokens"], exact["tokens"]) or found["cache"].dtype != np.float32


@pytest.mark.parametrize("widths", [[4, 3, 2], [2, 2, 1, 4], [3, 1, 4, 1]])
def test_the_bytes_of_a_draft_row_do_not_depend_on_the_width(pair, widths):
    _, runner, _, _ = pair
    tokens, hiddens = rows(9)
    single = stepped(runner, tokens, hiddens, [1] * 9)
    for name, value in stepped(runner, tokens, hiddens, widths).items():
        assert value.tobytes() == single[name].tobytes(), name


def test_prompt_rows_have_the_bytes_of_steps(pair):
    _, runner, _, _ = pair
    tokens, hiddens = rows(20)
    single = stepped(runner, tokens, hiddens, [1] * 20)
    with runner.pool.lease() as lease:
        for part in (slice(0, 8), slice(8, 16), slice(16, 20)):
            assert not feed(runner, lease, tokens[part], hiddens[part], GraphKey(Mode.PREFILL, 8))
        assert lease.read(CACHE).tobytes() == single["cache"].tobytes()


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_chain_has_the_bytes_of_its_steps(pair, steps):
    _, runner, _, _ = pair
    tokens, hiddens = rows(6)
    with runner.pool.lease() as lease, runner.pool.lease() as other:
        for where in (lease, other):
            feed(runner, where, tokens[:4], hiddens[:4], GraphKey(Mode.VERIFY, 4))
        key = GraphKey(Mode.CHAIN, steps)
        first = lease.append(steps)
        made, logprobs, hidden = runner.run_chain(
            steps, ids=np.array(tokens[4:5], np.int32), hidden=hiddens[4:5],
            **index_inputs(runner, key, [Lane(lease, first, first + 1)]),
        )  # fmt: skip
        hidden = runner.read(hidden)
        token, last, single, chances = tokens[4], hiddens[4:5], [], []
        for _ in range(steps):
            out = feed(runner, other, [token], last, DECODE)
            token, last = int(out["tokens"][0]), runner.read(out["hidden"])
            single.append(token)
            chances.append(float(out["logprobs"][0]))
        assert made == single and logprobs == chances and hidden.tobytes() == last.tobytes()
        assert lease.read(CACHE).tobytes() == other.read(CACHE).tobytes()


def test_a_batch_has_the_bytes_of_its_sequences(pair):
    _, runner, _, _ = pair
    texts = [rows(n, seed=n) for n in (3, 7)]
    singles = [stepped(runner, t, h, [1] * len(t)) for t, h in texts]
    leases = [runner.pool.lease() for _ in texts]
    for lease, (tokens, hiddens) in zip(leases, texts, strict=True):
        for i in range(len(tokens) - 1):
            feed(runner, lease, tokens[i : i + 1], hiddens[i : i + 1], DECODE)
    key = GraphKey(Mode.BATCH, 2)
    lanes = [Lane(lease, lease.append(1), lease.rows) for lease in leases]
    out = runner.run_draft(
        key, ids=padded(np.array([t[-1] for t, _ in texts], np.int32), 2),
        hidden=np.stack([h[-1] for _, h in texts]), **index_inputs(runner, key, lanes),
    )  # fmt: skip
    for i, single in enumerate(singles):
        for name in ("hidden", "logits"):
            assert out[name][i].tobytes() == single[name][-1].tobytes(), name
        assert leases[i].read(CACHE).tobytes() == single["cache"].tobytes()
        leases[i].close()


@pytest.mark.parametrize("step", [1, 2, 5])
def test_a_masked_step_is_a_step_with_the_best_token_that_is_allowed(pair, step):
    """Of every `step`-th scored id: the rest of the step has the bytes of DECODE."""
    _, runner, tiny, _ = pair
    tokens, hiddens = rows(1)
    allowed = tiny.weights.draft_ids.numpy()[::step]
    words = np.zeros(4, np.uint32)
    for i in allowed:
        words[i // 32] |= np.uint32(1) << np.uint32(i % 32)
    found = []
    masked = GraphKey(Mode.MASKED, 1), {"bitmask": words.view("i4")[None]}
    for key, more in ((DECODE, {}), masked):
        with runner.pool.lease() as lease:
            inputs = index_inputs(runner, key, [Lane(lease, lease.append(1), 1)]) | more
            given = np.array(tokens, np.int32)
            out = runner.run_draft(key, ids=given, hidden=hiddens, **inputs)
            found.append({n: runner.read(v) for n, v in out.items()})
    for name in ("logits", "hidden"):
        assert found[0][name].tobytes() == found[1][name].tobytes()
    best = allowed[found[0]["logits"][0, ::step].argmax()]
    assert found[1]["tokens"].tolist() == [best]
    assert step > 1 or found[0]["tokens"].tolist() == [best]


def test_a_swap_between_eager_and_compiled_keeps_rows_and_drafts(pair):
    _, runner, tiny, _ = pair
    head = make_mtp_head(tiny.weights, tiny.side, OPTIONS)
    tokens, hiddens = rows(8)
    state = head.alloc_state()
    head.prefill_drafter([0, *tokens[:7]], hiddens, state)
    request = ProposeRequest(tokens[7], hiddens[7], 8, 3)
    eager = head.propose(request, state).tokens
    head.after_verify(0, state)
    state.drop(1)
    head.set_circuit_draft(runner)
    compiled = head.propose(request, state).tokens
    assert state.lease.pool is runner.pool and len(compiled) == 3
    if (
        tiny.weights.contract.norm_form.value == "w"
    ):  # f32: no rounding of activations between the two
        assert compiled == eager
    head.set_circuit_draft(None)
    head.free_state(state)
    assert runner.pool.owners == 0


# The engine
# -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain(pair):
    generation = Engine(pair[0]).generate(PROMPT, 100)
    list(generation)
    return generation.tokens


@pytest.mark.parametrize("drafts", [1, 2, 3])
def test_text_with_a_compiled_head_is_the_text_without(pair, plain, drafts):
    target, runner, tiny, _ = pair
    head = make_mtp_head(tiny.weights, tiny.side, OPTIONS)
    head.set_circuit_draft(runner)
    generation = Engine(target, head).generate(PROMPT, 100, drafts=drafts)
    list(generation)
    assert generation.tokens == plain
    assert runner.pool.owners == target.pool.owners == 0
    head.set_circuit_draft(None)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, top_p=0.95, seed=11)])
def test_text_with_scripted_drafts_is_the_text_without(pair, sampling):
    target = pair[0]
    alone = Engine(target).generate(PROMPT, 50, sampling=sampling)
    list(alone)
    for rights in ([[True] * 3], [[True, True, False], [False] * 3, [True, False, True]]):
        script = Script(PROMPT + alone.tokens, rights)
        drafted = Engine(target, script).generate(PROMPT, 50, drafts=3, sampling=sampling)
        list(drafted)
        assert drafted.tokens == alone.tokens
    assert drafted.statistics.accepted[0] > 0


def test_the_logits_of_a_target_row_do_not_depend_on_the_width(pair):
    target, ids = Engine(pair[0]).target, PROMPT * 3
    found = []
    for widths in ([1] * 21, [4, 3, 2, 4, 4, 3, 1]):
        with target.runner.pool.lease() as lease:
            out, at = [], 0
            for width in widths:
                scored = target.rows(lease, ids[at : at + width])
                out.append(np.concatenate([scored.logits.copy(), scored.hidden.copy()], axis=1))
                at += width
            caches = [lease.read(name).tobytes() for name in target.runner.pool.types]
            found.append((np.concatenate(out).tobytes(), caches))
    with target.runner.pool.lease() as lease:
        scored = target.prompt(lease, ids, keep_hidden=True)
        caches = [lease.read(name).tobytes() for name in target.runner.pool.types]
    assert found[0] == found[1] and caches == found[0][1]
    single = np.frombuffer(found[0][0], np.float32).reshape(21, -1)
    assert scored.logits[0].tobytes() == single[-1, :97].tobytes()
    assert scored.hidden.tobytes() == np.ascontiguousarray(single[:, 97:]).tobytes()


def test_texts_of_a_batch_are_the_texts_alone(pair):
    target = pair[0]
    given = [(PROMPT[:n], Sampling()) for n in (2, 5, 7)]
    for text in BatchWriter(target, 15).write(given):
        alone = Engine(target).generate(text.prompt, 15)
        list(alone)
        assert alone.tokens == text.tokens


def test_a_head_with_its_own_tables(tmp_path, kernel_folder):
    tiny = heads.make_head(
        "llama", embedding=Sharing.OWN, lm_head=Sharing.OWN, mapped=False, pos0_mask=True
    )
    own = {"mtp.embed_tokens.weight": torch.randn(heads.VOCAB, heads.HIDDEN),
           "mtp.lm_head.weight": torch.randn(heads.VOCAB, heads.HIDDEN)}  # fmt: skip
    tiny.weights.tensors.update(own)
    binding = bind_head(
        tiny.weights,
        tiny.side,
        DraftOptions(CONTEXT, (DECODE, GraphKey(Mode.CHAIN, 2)), sequences=1),
    )
    with native_runners(tmp_path, kernel_folder, {"draft": binding}, blocks=5)["draft"] as runner:
        tiny.side = type(tiny.side)(*own.values(), tiny.side.rope)
        tokens, hiddens = rows(1)
        with runner.pool.lease() as lease:
            lease.append(2)
            made, _, _ = runner.run_chain(
                2, ids=np.array(tokens, np.int32), hidden=hiddens,
                **index_inputs(runner, GraphKey(Mode.CHAIN, 2), [Lane(lease, 0, 1)]),
            )  # fmt: skip
        assert made == tiny.chain(tokens, hiddens, 2)
