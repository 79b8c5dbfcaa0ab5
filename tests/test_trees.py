"""Trees of drafts: what a verify keeps; text, cache and drafter are those of plain decoding."""

import checkpoints
import heads
import numpy as np
import pytest
import torch
from native import native_runners
from test_engine import CONTEXT, PROMPT, Script, run
from test_target import loaded

from circuit.engine.engine import Engine
from circuit.engine.errors import NoDraftHead, TreeTooWide
from circuit.engine.sampling import Sampling
from circuit.engine.tree import grown, kept_path
from circuit.models.target import target_binding, target_keys, target_side
from ir import ops
from ir.key import GraphKey, Mode
from proposers.base import Drafts, ProposeRequest
from proposers.levers import ModelLevers, TrimPolicy
from proposers.mtp_binding import bind_head, make_mtp_head
from proposers.mtp_program import CACHE
from proposers.mtp_steps import best_of
from proposers.options import DraftOptions, head_keys
from proposers.rules.tree_growth import parse_tree
from proposers.rules.tree_shape import TreeShape
from runners.eager import EagerRunner
from runners.rows import Lane, index_inputs

SHAPES = ["2", "4", "2,2", "1,1,1", "1,2,2,2", "1,1,1,1,1,1,1", "auto:4", "auto"]
OPTIONS = DraftOptions(CONTEXT, head_keys(batches=(), chunk=8, spine=3), sequences=2)


class Ranking(Script):
    """Drafts the text that is known to follow at a scripted rank of each depth (0: at none)."""

    def propose(self, request, state):
        ranks = self.rights[len(self.calls) % len(self.rights)]
        known = self.text[request.position + 1 : request.position + 1 + request.num_drafts]
        self.calls.append((request.position, request.num_drafts, request.ranks))
        lists = []
        for token, rank in zip(known, ranks, strict=False):
            ids = [(token + offset) % 97 for offset in (1, 2, 3, 4)]
            if rank:
                ids[rank - 1] = token
            lists.append(tuple(ids[: request.ranks]))
        return Drafts(tuple(ids[0] for ids in lists), ranks=tuple(lists))


@pytest.fixture(scope="module")
def target():
    """A target in float64 with programs for trees."""
    keys = target_keys(batches=(), chunk=8, trees=(4, 8))
    binding = target_binding(
        *loaded(checkpoints.make_model("llama", seed=3)), CONTEXT, keys, sequences=2
    )
    return EagerRunner(binding, double=True, context=CONTEXT)


@pytest.fixture(scope="module")
def plain(target):
    """The greedy text after the prompt, to the end of the context."""
    return run(Engine(target), 100).tokens


def head_on(target, **levers):
    """A head, in float64, over the same target, and its own oracle."""
    config, tensors = loaded(checkpoints.make_model("llama", seed=3))
    tiny, side = heads.make_head(), target_side(config, tensors, CONTEXT)
    steps = torch.outer(
        torch.arange(CONTEXT).double(), 1e4 ** -(torch.arange(0, 12, 2) / 12).double()
    )
    rope = {"rope.cos": steps.cos().float(), "rope.sin": steps.sin().float()}
    tiny.side = type(side)(side.embedding, side.lm_head, rope)
    head = make_mtp_head(tiny.weights, tiny.side, OPTIONS, levers=ModelLevers(**levers))
    head.set_circuit_draft(EagerRunner(head.circuit_draft(OPTIONS, head.levers), double=True))
    return Engine(target, head), tiny, head


# What a verify keeps
# ------------------------------------------------------------------------------------------


def test_hedges_are_the_next_choices_of_each_depth_and_the_last_ones_make_room():
    drafts = Drafts((10, 20), ranks=((10, 11, 12), (20, 21)))
    rows = grown(5, drafts, TreeShape.parse("3,2,2"), 8)
    assert [(r.token, r.depth, r.parent, r.rank) for r in rows] == [
        (5, 0, 0, 1), (10, 1, 0, 1), (20, 2, 1, 1), (11, 1, 0, 2), (12, 1, 0, 3), (21, 2, 1, 2),
    ]  # fmt: skip
    assert grown(5, drafts, TreeShape.parse("3,2,2"), 4) == rows[:4]
    assert [r.token for r in grown(5, drafts, TreeShape.parse("3,2,2"), 2)] == [5, 10]
    assert [r.token for r in grown(5, drafts, TreeShape.parse("1"), 8)] == [5, 10]


def test_a_path_is_cut_at_the_token_that_stops_the_text():
    drafts = Drafts((10, 20), ranks=((10, 11), (20, 21)))
    rows = grown(5, drafts, TreeShape.parse("2,2"), 8)
    picks = {0: 10, 1: 21, 2: 7, 3: 8, 4: 30}
    whole = kept_path(rows, picks.__getitem__, set().__contains__)
    assert (whole.rows, whole.tokens, whole.accepted, whole.branched) == (
        (0, 1, 4), (10, 21, 30), 2, True,
    )  # fmt: skip
    cut = kept_path(rows, picks.__getitem__, {10}.__contains__)
    assert (cut.rows, cut.tokens, cut.accepted, cut.branched) == ((0,), (10,), 1, False)
    none = kept_path(rows, {0: 99}.__getitem__, set().__contains__)
    assert (none.rows, none.tokens, none.accepted, none.branched) == ((0,), (99,), 0, False)


def test_tokens_of_a_step_are_the_exact_number_that_the_script_gives(target, plain):
    """A first choice goes on, a hedge ends the walk, a miss too; near the end trees are cut."""
    script = Ranking(PROMPT + plain, [[1, 2, 1], [2, 1, 1], [0, 1, 1], [1, 1, 1], [1, 1, 0]])
    generation = Engine(target, script).generate(PROMPT, 27, tree=TreeShape.parse("2,2,1"))
    steps = list(generation)
    assert generation.tokens == plain[:27]
    assert [len(s.tokens) for s in steps] == [1] + [3, 2, 1, 4, 3] * 2
    assert [s.accepted for s in steps[1:]] == [2, 1, 0, 3, 2] * 2
    assert script.calls[0] == (len(PROMPT), 3, 2, 2) and generation.statistics.branched == 4
    assert generation.statistics.drafted == [10, 10, 9]
    assert generation.statistics.accepted == [8, 6, 2]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_tree_never_changes_the_text_and_leaves_the_drafter_exact(target, plain, shape):
    engine, tiny, head = head_on(target)
    generation = engine.generate(PROMPT, 100, tree=parse_tree(shape))
    for count, _ in enumerate(generation):
        if count % 8 == 7:  # the rows that the text makes, with the hiddens of plain decoding
            state, position = generation.drafting.state, generation.lease.rows
            generation.drafting.keep_up(position)
            head._flush(state)
            assert head.last_pair_key(state) == position - 2
            with target.pool.lease() as lease:
                text = PROMPT + generation.tokens
                hiddens = engine.target.prompt(lease, text[:position], keep_hidden=True).hidden
            exact = tiny.run(text[1:position], hiddens[: position - 1])
            np.testing.assert_allclose(state.lease.read(CACHE), torch.stack(exact[2:]), atol=1e-4)
    assert generation.tokens == plain
    assert target.pool.owners == head.runner.pool.owners == 0
    counted = generation.statistics
    assert sum(counted.accepted) + counted.steps == len(plain) - 1


@pytest.mark.parametrize("policy", TrimPolicy)
def test_trees_under_every_trim_policy(target, plain, policy):
    engine, _, _ = head_on(target, trim=policy)
    assert run(engine, 100, tree=TreeShape.parse("3,2,1")).tokens == plain


def test_what_cannot_be_a_tree_step_is_refused(target):
    engine, _, _ = head_on(target)
    with pytest.raises(NoDraftHead, match="2 drafts per step"):
        Engine(target).generate(PROMPT, 5, tree=TreeShape.parse("2,2"))
    narrow = EagerRunner(
        target_binding(
            *loaded(checkpoints.make_model("llama", seed=3)), CONTEXT,
            target_keys(batches=(), chunk=8, trees=(4,)),
        )
    )  # fmt: skip
    with pytest.raises(TreeTooWide, match="a tree of 5 rows is asked for, at most 4"):
        Engine(narrow, engine.proposer).generate(PROMPT, 5, tree=TreeShape.parse("2,2"))


# The compiled pair
# ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair(tmp_path_factory, kernel_folder):
    """A compiled target with trees, a compiled head with spines, and the head as loaded."""
    model = checkpoints.make_model("llama", seed=3, intermediate_size=64, num_hidden_layers=1)
    config, tensors = loaded(model)
    keys = target_keys(batches=(), chunk=8, trees=(4, 8))
    target = target_binding(config, tensors, CONTEXT, keys, sequences=2)
    tiny, side = heads.make_head(), target_side(config, tensors, CONTEXT)
    tiny.side = type(side)(side.embedding, side.lm_head, tiny.side.rope)
    bindings = {"target": target, "draft": bind_head(tiny.weights, tiny.side, OPTIONS)}
    made = native_runners(tmp_path_factory.mktemp("trees"), kernel_folder, bindings, blocks=9)
    yield made["target"], made["draft"], tiny
    made["target"].close()
    made["draft"].close()


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, top_p=0.95, seed=11)])
@pytest.mark.parametrize("shape", SHAPES)
def test_compiled_trees_give_the_text_of_plain_decoding(pair, shape, sampling):
    target, runner, tiny = pair
    alone = list(Engine(target).generate(PROMPT, 100, sampling=sampling))
    head = make_mtp_head(tiny.weights, tiny.side, OPTIONS)
    head.set_circuit_draft(runner)
    tree = parse_tree(shape)
    drafted = Engine(target, head).generate(PROMPT, 100, tree=tree, sampling=sampling)
    assert [t for s in drafted for t in s.tokens] == [t for s in alone for t in s.tokens]
    assert runner.pool.owners == target.pool.owners == 0
    head.set_circuit_draft(None)


@pytest.mark.parametrize("pending", [0, 2])
def test_choices_of_compiled_spines_are_those_of_single_steps(pair, pending):
    """The first step, after rows that wait, the steps of a SPINE program, and a second one."""
    _, runner, tiny = pair
    assert runner.widest(Mode.SPINE) == 3
    head = make_mtp_head(tiny.weights, tiny.side, OPTIONS)
    head.set_circuit_draft(runner)
    draw = np.random.default_rng(5)
    hiddens = draw.normal(size=(9, heads.HIDDEN)).astype(np.float32)
    text, found = draw.integers(3, 97, 9).tolist(), []
    for way in ("chain", "spine", "steps"):
        state = head.alloc_state()
        head.prefill_drafter(text[: 7 - pending], hiddens, state)
        if pending:
            keys = list(range(6 - pending, 6))
            tokens = [text[key + 1] for key in keys]
            head.catchup_batch([tokens], [hiddens[keys]], [keys[0] + 1], [state])
        wanted = {} if way == "chain" else {"want_logprobs": True, "ranks": 4}
        request = ProposeRequest(text[7], hiddens[6], 7, 5, **wanted)
        propose = head.propose if way != "steps" else lambda *a: head.propose_stepwise(*a)[0]
        found.append((propose(request, state), state.lease.read(CACHE).tobytes()))
        head.free_state(state)
    (chain, rows), (spine, spine_rows), (steps, step_rows) = found
    assert chain.tokens == spine.tokens == steps.tokens and rows == spine_rows == step_rows
    assert spine.ranks == steps.ranks and len(spine.ranks) == 5
    np.testing.assert_allclose(spine.rank_logprobs, steps.rank_logprobs, atol=1e-4)
    np.testing.assert_allclose(spine.logprobs, steps.logprobs, atol=1e-5)
    head.set_circuit_draft(None)


@pytest.mark.parametrize("depth", [1, 2, 4, 5])
def test_a_stop_ends_a_spine_as_it_ends_single_steps(pair, depth):
    _, runner, tiny = pair
    hidden = np.random.default_rng(5).normal(size=heads.HIDDEN).astype(np.float32)
    request = ProposeRequest(7, hidden, 1, 5, want_logprobs=True, ranks=4)
    whole = make_mtp_head(tiny.weights, tiny.side, OPTIONS)
    whole.set_circuit_draft(runner)
    state = whole.alloc_state()
    shares = np.exp(whole.propose(request, state).logprobs)
    whole.free_state(state)
    whole.set_circuit_draft(None)
    levers = ModelLevers(draft_stop=float(shares[:depth].min()) * 1.001)
    head, found = make_mtp_head(tiny.weights, tiny.side, OPTIONS, levers=levers), []
    head.set_circuit_draft(runner)
    for propose in (head.propose, lambda *a: head.propose_stepwise(*a)[0]):
        state = head.alloc_state()
        made = propose(request, state)
        found.append((made.tokens, made.ranks, len(made.rank_logprobs), state.lease.rows))
        head.free_state(state)
    head.set_circuit_draft(None)
    assert found[0] == found[1]
    assert found[0][2:] == (int(shares[:depth].argmin()) + 1,) * 2


def test_choices_from_logits_are_those_of_the_ops():
    logits = torch.tensor([[1.0, 5, 5, -3, 5, 2, 1]])
    ranks = ops.stood_up(ops.argmax(logits))
    for _ in range(3):
        ranks = ops.next_rank(logits, ranks)
    best, found = best_of(logits[0].numpy(), np.arange(10, 17), 4)
    assert [token - 10 for token in best] == ranks[0].tolist() == [1, 2, 4, 5]
    shares = ops.log_share(logits, ranks, ops.log_mass(logits))
    np.testing.assert_allclose(found, shares[0], atol=1e-5)


def test_a_spine_and_its_chain_store_the_same_rows(pair):
    _, runner, _ = pair
    rows = []
    for mode in (Mode.CHAIN, Mode.SPINE):
        key = GraphKey(mode, 3)
        with runner.pool.lease() as lease:
            lease.append(3)
            inputs = index_inputs(runner, key, [Lane(lease, 0, 1)])
            hidden = np.ones((1, heads.HIDDEN), np.float32)
            out = runner.run_draft(key, ids=np.array([7], np.int32), hidden=hidden, **inputs)
            rows.append((lease.read(CACHE).tobytes(), np.array(out["hidden"]).tobytes()))
    assert rows[0] == rows[1]
