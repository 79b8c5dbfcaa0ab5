"""Texts that step together are the texts alone, whoever comes and goes; counts are exact."""

from types import SimpleNamespace

import checkpoints
import heads
import numpy as np
import pytest
from native import native_runners
from test_engine import CONTEXT, PROMPT, Script
from test_target import loaded

from circuit.engine import together as module
from circuit.engine.engine import Engine
from circuit.engine.sampling import Sampling
from circuit.engine.statistics import Finish
from circuit.engine.together import Together
from circuit.models.target import target_binding, target_keys, target_side
from proposers.base import Drafts, ProposeRequest
from proposers.errors import BadRequest
from proposers.levers import Depth, ModelLevers, TrimPolicy
from proposers.mtp_binding import make_mtp_head
from proposers.options import DraftOptions, head_keys
from runners.eager import EagerRunner

TARGET_KEYS = target_keys(batches=(2, 4, 8), chunk=8)
HEAD = DraftOptions(CONTEXT, head_keys(batches=(2, 4, 8), chunk=8, chain=3), sequences=6)


def tiny_head(config, tensors):
    """A head that borrows the target's tables."""
    tiny = heads.make_head()
    side = target_side(config, tensors, CONTEXT)
    tiny.side = type(side)(side.embedding, side.lm_head, tiny.side.rope)
    return tiny


@pytest.fixture(scope="module", params=["eager", "compiled"])
def made(request, tmp_path_factory, kernel_folder):
    """A target's runner, a head's runner, and the head."""
    model = checkpoints.make_model("llama", seed=3, num_hidden_layers=1, intermediate_size=64)
    config, tensors = loaded(model)
    target = target_binding(config, tensors, CONTEXT, TARGET_KEYS, sequences=6)
    tiny = tiny_head(config, tensors)
    draft = make_mtp_head(tiny.weights, tiny.side, HEAD).circuit_draft(HEAD, ModelLevers())
    if request.param == "compiled":
        folder = tmp_path_factory.mktemp("together")
        runners = native_runners(folder, kernel_folder, {"t": target, "d": draft}, blocks=25)
        found = runners["t"], runners["d"]
    else:
        found = (EagerRunner(target, double=True, context=CONTEXT),
                 EagerRunner(draft, double=True, context=CONTEXT))  # fmt: skip
    yield *found, tiny
    for runner in found:
        assert runner.pool.owners == 0
        runner.close()


def engine_of(made, **levers):
    target, draft, tiny = made
    head = make_mtp_head(tiny.weights, tiny.side, HEAD, levers=ModelLevers(**levers))
    head.set_circuit_draft(draft)
    return Engine(target, head), head


def prompts(count, seed=1):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, heads.VOCAB, int(n)).tolist() for n in rng.integers(2, 15, count)]


def alone(made, prompt, count, **options):
    generation = Engine(made[0]).generate(prompt, count, **options)
    list(generation)
    return generation.tokens


def drive(together):
    """Runs to the end; the width of every step of two or more."""
    return [step for _, step in together.run()]


@pytest.mark.parametrize("levers", [
    {}, {"trim": TrimPolicy.KEEP}, {"draft_stop": 0.3},
    {"depth": Depth.FIXED, "depth_cut_ratio": 0.25}, {"depth": Depth.COST},
    {"canonical_width": 0}, {"max_sequences": 3}, {"batch_verify": False},
    {"batch_bootstrap": False}, {"draft_clamp": 0.2},
    {"depth": Depth.FIXED, "depth_cut": False, "shadow_topk": 2},
], ids=str)  # fmt: skip
def test_each_text_is_the_one_it_is_alone(made, levers):
    engine, head = engine_of(made, **levers)
    given = prompts(5)
    with Together(engine) as together:
        texts = [together.add(p, 9 + i, drafts=3, lookup=i == 2) for i, p in enumerate(given)]
        drive(together)
        for i, (prompt, text) in enumerate(zip(given, texts)):
            assert text.tokens == alone(made, prompt, 9 + i), i
            assert text.statistics.finish is Finish.LENGTH
        assert not together.live
    assert made[0].pool.owners == made[1].pool.owners == 0
    head.set_circuit_draft(None)


def test_texts_join_and_leave_between_any_two_steps(made):
    engine, head = engine_of(made)
    given, rng = prompts(9, seed=4), np.random.default_rng(0)
    with Together(engine) as together:
        texts, waiting = [], list(enumerate(given))
        while waiting or together.live:
            if waiting and len(together.live) < 4 and rng.random() < 0.7:
                i, prompt = waiting.pop(0)
                sampling = Sampling(1.0, top_p=0.9, seed=i) if i % 2 else Sampling()
                options = {"drafts": i % 4, "sampling": sampling, "stop": {7, 30}}
                texts.append((prompt, together.add(prompt, 12, **options), options))
            if len(texts) == 4 and texts[1][1] in together.live:
                texts[1][1].close()  # its reader has left
            together.step()
        for prompt, text, options in texts:
            whole = alone(made, prompt, 12, **{**options, "drafts": 0})
            assert text.tokens == whole[: len(text.tokens)]
            assert len(text.tokens) == len(whole) or text.statistics.finish is Finish.CLOSED
    assert made[0].pool.owners == made[1].pool.owners == 0
    head.set_circuit_draft(None)


def test_rows_of_several_sequences_are_the_rows_alone(made):
    """Three, one and four rows in one step of eight, byte for byte where programs are compiled."""
    target = Engine(made[0]).target
    leases = [made[0].pool.lease() for _ in range(6)]
    ids = [PROMPT[:3], [9], [4, 8, 15, 16]]
    for lease, start in zip(leases, [2, 5, 7, 2, 5, 7]):
        target.prompt(lease, PROMPT[:start], keep_hidden=False)
    single = [
        [np.array(x) for x in (s.tokens, s.logits, s.hidden)]
        for s in (target.rows(lease, part) for lease, part in zip(leases[:3], ids))
    ]
    several = target.rows_of(list(zip(leases[3:], ids)))
    for one, other in zip(single, several):
        for a, b in zip(one, (other.tokens, other.logits, other.hidden)):
            np.testing.assert_allclose(a, b, atol=1e-12)
            assert made[0].kind == "eager" or a.tobytes() == np.array(b, a.dtype).tobytes()
    for lease, again in zip(leases[:3], leases[3:]):
        assert lease.rows == again.rows
        for name in made[0].pool.types:
            np.testing.assert_allclose(lease.read(name), again.read(name), atol=1e-12)
    for lease in leases:
        lease.close()


def test_waiting_rows_of_all_sequences_are_written_in_the_step_of_their_first_drafts(made):
    _, head = engine_of(made)
    steps, step = [], head.runner.step
    head.runner.step = lambda key, **inputs: (steps.append(str(key)), step(key, **inputs))[1]
    rng = np.random.default_rng(3)
    hiddens = rng.normal(size=(12, heads.HIDDEN)).astype(np.float32)
    states = [head.alloc_state() for _ in range(6)]
    for i, state in enumerate(states):
        head.prefill_drafter([0, 5, 6], hiddens[:3], state)
        waiting = (i % 3) + 1
        head.catchup_batch([[7] * waiting], [hiddens[2 : 2 + waiting]], [3], [state])

    requests = [
        ProposeRequest(9, hiddens[3 + i % 3], 4 + i % 3, 2, want_logprobs=True) for i in range(6)
    ]
    steps.clear()
    one_by_one = [head.propose(r, s) for r, s in zip(requests[3:], states[3:])]
    steps.clear()
    made_together = head.propose_batch(requests[:2], states[:2])
    assert steps == ["BATCH_8", "BATCH_2"]  # 1 + 2 waiting rows and two newest, then two drafts
    assert [d.tokens for d in made_together] == [d.tokens for d in one_by_one[:2]]
    for a, b in zip(made_together, one_by_one):
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)
    del head.runner.step
    for state in states:
        head.free_state(state)
    head.set_circuit_draft(None)


def scripted(made, rights, count=4):
    """An engine over scripts: one per text, found by the state of its sequence."""
    texts = [alone(made, p, 25) for p in prompts(count)]

    class Several(Script):
        """Each text's script, by the newest token's place in it."""

        def propose(self, request, state):
            for prompt, text in zip(prompts(count), texts):
                whole = [*prompt, *text]
                at = request.position
                if at < len(whole) and whole[at] == request.last_token and state.text is text:
                    script = Script(whole, rights)
                    return script.propose(request, state)
            raise BadRequest(proposer="Script", problem="it knows no such text")

        def after_verify(self, num_accepted, state):
            self.calls.append(num_accepted)

    return Several([], rights), texts


def texts_in_order(script, texts):
    """Each state that `script` allocates is of the next text."""
    states = iter(texts)

    def alloc_state():
        state = Script([], []).alloc_state()
        state.text = next(states)
        return state

    script.alloc_state = alloc_state


def test_counts_by_width_and_a_propose_that_fails(made, caplog):
    script, texts = scripted(made, [[True, True, False]])
    script.levers = ModelLevers(depth_cut=False)
    engine = Engine(made[0], script)
    texts_in_order(script, texts)
    with Together(engine) as together:
        made_texts = [together.add(p, 22, drafts=3) for p in prompts(4)]
        for _ in range(3):
            together.step()
        known, script.propose = script.propose, lambda *_: (_ for _ in ()).throw(
            BadRequest(proposer="Script", problem="it is tired")
        )
        together.step()
        script.propose = known
        drive(together)
    assert "it is tired" in caplog.text
    for text, whole in zip(made_texts, texts):
        assert text.tokens == whole[:22]
        counted = text.statistics
        assert set(counted.widths.widths) <= {1, 2, 3, 4}
        four = counted.widths.widths[4]
        assert four.accepted == [7, 6, 0]  # the last step has room for one draft
        assert counted.steps == 8 and counted.mean_accepted_length == 21 / 8


def test_drafts_of_all_texts_are_verified_as_far_as_they_are_worth_their_rows(made, monkeypatch):
    """A row costs half of what the step costs: only drafts that hold nearly always are verified."""
    script, texts = scripted(made, [[True, True, True]])
    engine, now = Engine(made[0], script), [0.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    rows_of, propose = engine.target.rows_of, script.propose

    def timed(wanted):
        now[0] += 1.0 + 0.5 * sum(len(ids) - 1 for _, ids in wanted)
        return rows_of(wanted)

    def sure_of_some(request, state):
        made_drafts = propose(request, state)
        first = -0.001 if state.text in texts[:2] else -2.0
        return Drafts(made_drafts.tokens, (first, -2.0, -2.0)[: len(made_drafts.tokens)])

    monkeypatch.setattr(engine.target, "rows_of", timed)
    script.propose = sure_of_some
    texts_in_order(script, texts)
    with Together(engine) as together:
        given = [together.add(p, 22, drafts=3) for p in prompts(4)]
        together.step()
        widths = []
        for _ in range(6):
            widths.append([s.drafted for _, s in together.step()])
        assert widths[0] == [3, 3, 3, 3]  # nothing is known yet
        assert widths[-1] == [1, 1, 0, 0]
        drive(together)
    assert [t.tokens for t in given] == [whole[:22] for whole in texts]


def test_an_error_ends_the_texts_of_its_dispatch_only(made, monkeypatch):
    engine, head = engine_of(made, max_sequences=2)
    with Together(engine) as together:
        texts = [together.add(p, 9, drafts=2) for p in prompts(4)]
        together.step()
        rows_of, count = engine.target.rows_of, iter(range(9))
        broken = lambda wanted: rows_of(wanted) if next(count) else 1 / 0  # noqa: E731
        monkeypatch.setattr(engine.target, "rows_of", broken)
        with pytest.raises(ZeroDivisionError):
            together.step()
        monkeypatch.undo()
        assert [t.statistics.finish for t in texts] == [Finish.CLOSED] * 2 + [None] * 2
        drive(together)
        for prompt, text in list(zip(prompts(4), texts))[2:]:
            assert text.tokens == alone(made, prompt, 9)
    assert made[0].pool.owners == made[1].pool.owners == 0
    head.set_circuit_draft(None)


@pytest.mark.parametrize("depth, width, order, drafts", [
    (Depth.FIXED, 8, [0, 1, 2, 3, 4, 5, 6, 7], [1, 3, 1, 3, 1, 1, 1, 1]),  # falling with the texts
    (Depth.FIXED, 7, [1, 3, 5, 0, 2, 4, 6], [3, 3, 3, 1, 1, 1, 1]),  # deepest first, each its own
    (Depth.WORTH, 8, [1, 3, 5, 7, 0, 2, 4, 6], [3, 3, 3, 3, 1, 1, 1, 1]),  # chosen text by text
])  # fmt: skip
def test_depths_are_laid_onto_the_whole_batch_and_not_onto_its_parts(depth, width, order, drafts):
    """Parts of four texts would be too narrow for an order of their own to be the canonical one."""
    head = SimpleNamespace(levers=ModelLevers(depth=depth))
    together = Together(SimpleNamespace(proposer=head, target=SimpleNamespace(together=9)))
    made = {at: (7,) * (3 if at % 2 else 1) for at in range(width)}
    parts = list(together._dispatches(list(range(width)), made))
    assert [text for part in parts for text in part] == order
    assert [len(made[text]) for text in order] == drafts
    assert all(sum(len(made[text]) + 1 for text in part) <= 9 for part in parts) and len(parts) > 1


def test_the_cap_and_its_source():
    from proposers.rules.ladder import CapSource

    class Alone:
        proposer = None

    assert (Together(Alone()).cap, Together(Alone()).source) == (32, CapSource.ENGINE_DEFAULT)
