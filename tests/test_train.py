"""Training runs the head's own graph: steps, gradients, acceptance,
resumption, and what keeps prompts out.
"""

import os
import random
import signal
from dataclasses import replace

import heads
import numpy as np
import pytest
import torch

from circuit.train import asked, errors, loop, loss, optimiser, prompts, run, texts, writing
from circuit.train.columns import Columns, draft_ids, frequencies
from circuit.train.loss import Emphasis, Lesson, Teacher, divergence
from circuit.train.measure import acceptance, walk
from circuit.train.seen import seen
from circuit.train.unroll import Batch, Unroller
from proposers.mtp_binding import bind_head
from proposers.options import DraftOptions, head_keys

OPTIONS = DraftOptions(48, head_keys(batches=(2,), chunk=8))


@pytest.fixture(scope="module", params=["llama", "qwen3.5"])
def tiny(request):
    return heads.make_head(request.param)


def text(length, start, seed=0, greedy=True):
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, heads.VOCAB, (length,), generator=draw, dtype=torch.int32)
    return texts.Written(ids, torch.randn(length - 1, heads.HIDDEN, generator=draw), start, greedy)


def unroller(tiny):
    return Unroller(bind_head(tiny.weights, tiny.side, OPTIONS))


def learned(tiny):
    return {n: t.float() for n, t in tiny.weights.tensors.items()}


# The steps
# ------------------------------------------------------------------------------------------


def test_each_chain_is_the_one_of_run_time(tiny):
    """True rows up to a chain's beginning, then its own rows: what propose does after a refeed."""
    given = [text(9, 3), text(13, 5, seed=1)]
    seen = {}

    def visit(step):
        for chain, (t, key) in enumerate(zip(step.text.tolist(), step.key.tolist())):
            seen[t, key, step.number] = step.logits[chain]
        return torch.ones_like(step.right)

    unroller(tiny).run(learned(tiny), Batch.of(given), 3, visit)
    expected = 0
    for number, one in enumerate(given):
        for key in range(one.start - 1, len(one.ids) - 2):
            tokens, hiddens = one.ids[1 : key + 2].tolist(), one.hidden[: key + 1].double()
            for step in range(min(3, len(one.ids) - 2 - key)):
                x, final, _, _ = tiny.run(tokens, hiddens)
                torch.testing.assert_close(
                    seen[number, key, step].double(), tiny.logits(final[-1]), atol=2e-4, rtol=2e-4
                )
                recycled = x if tiny.weights.contract.recycle.value == "pre_norm" else final
                tokens = [*tokens, int(one.ids[key + 2 + step])]
                hiddens = torch.cat([hiddens, recycled[-1:]])
                expected += 1
    assert len(seen) == expected


def test_only_chains_that_are_asked_for_go_on(tiny):
    given, numbers = text(12, 4), []

    def visit(step):
        numbers.append((step.number, step.key.tolist()))
        return step.key % 2 == step.number % 2

    unroller(tiny).run(learned(tiny), Batch.of([given]), 3, visit)
    assert numbers == [(0, [3, 4, 5, 6, 7, 8, 9]), (1, [4, 6, 8])]


def test_gradients_reach_every_weight_through_every_step(tiny):
    weights = {n: t.requires_grad_() for n, t in learned(tiny).items()}
    given = Batch.of([text(12, 4), text(10, 2, seed=3)])

    def visit(step):
        losses.append(step.logits.square().mean())
        return torch.ones_like(step.right)

    for steps in (1, 2, 3):
        losses = []
        unroller(tiny).run(weights, given, steps, visit)
        assert len(losses) == steps
        losses[-1].backward()
        assert all(t.grad.abs().max() > 0 for t in weights.values())


@pytest.mark.parametrize("own", [0, 1, 2])
@pytest.mark.parametrize(("heads_", "groups"), [(6, 2), (4, 4)])
def test_attention_of_chains_and_its_gradients(own, heads_, groups):
    """Against the softmax over a row's true rows and its own, written out in float64."""
    draw = torch.Generator().manual_seed(own)
    at = (torch.tensor([0, 0, 1, 1, 1]), torch.tensor([2, 6, 0, 4, 5]))
    shapes = [(5, heads_, 8), (2, 16, groups, 8), (2, 16, groups, 8), *[(5, groups, 8)] * (2 * own)]
    given = [torch.randn(s, generator=draw, dtype=torch.float64).requires_grad_() for s in shapes]
    q, keys, values, *rest = given
    expected = []
    for row, (text, index) in enumerate(zip(*(x.tolist() for x in at))):
        k, v = (
            torch.cat([true[text, : index + 1], *(x[row][None] for x in rest[part::2])])
            .repeat_interleave(heads_ // groups, 1)
            for part, true in enumerate((keys, values))
        )
        scores = torch.einsum("hd,nhd->hn", q[row], k) * 0.3
        expected.append(torch.einsum("hn,nhd->hd", scores.softmax(-1), v))
    expected = torch.stack(expected)
    asked = torch.randn(expected.shape, generator=draw, dtype=torch.float64)
    wanted = torch.autograd.grad(expected, given, asked)
    plain = [t.detach().float().requires_grad_() for t in given]
    mine = seen(*plain[:3], at, 0.3, list(zip(plain[3::2], plain[4::2])))
    torch.testing.assert_close(mine.double(), expected, atol=1e-5, rtol=1e-5)
    for found, exact in zip(torch.autograd.grad(mine, plain, asked.float()), wanted, strict=True):
        torch.testing.assert_close(found.double(), exact, atol=1e-5, rtol=1e-4)


# What is learned
# ------------------------------------------------------------------------------------


def test_divergence_is_the_cross_entropy_and_so_is_its_gradient(monkeypatch):
    monkeypatch.setattr(loss, "ROWS", 2)  # rows are taken a few at a time
    logits = torch.randn(5, 7, requires_grad=True)
    wanted = torch.randn(5, 7).softmax(-1)
    mine = divergence(logits, wanted, torch.arange(1, 6) / 4)
    mine.backward()
    other = logits.detach().clone().requires_grad_()
    plain = -(wanted * other.log_softmax(-1) * torch.arange(1, 6)[:, None] / 4).sum()
    plain.backward()
    torch.testing.assert_close(mine, plain)
    torch.testing.assert_close(logits.grad, other.grad)


def test_a_strict_teacher_insists_on_its_first_choice():
    teacher = Teacher(torch.ones(4), 1e-5, torch.randn(9, 4))
    hidden = torch.randn(3, 4)
    soft, hard = teacher.distribution(hidden), teacher.strict().distribution(hidden)
    choice = torch.nn.functional.one_hot(soft.argmax(-1), 9)
    torch.testing.assert_close(hard, 0.5 * soft + 0.5 * choice)


def lesson_of(tiny, batch):
    rows = tiny.side.lm_head[tiny.weights.draft_ids.long()]
    return Lesson(Teacher(torch.ones(heads.HIDDEN), 1e-5, rows), batch)


def test_a_lesson_counts_rows_and_follows_right_drafts_only(tiny):
    batch = Batch.of([text(12, 4), text(10, 2, seed=3)])
    lesson = lesson_of(tiny, batch)
    unroller(tiny).run(learned(tiny), batch, 3, lesson)
    assert lesson.rows == lesson.counts[0][0] == (12 - 4 - 1) + (10 - 2 - 1)
    assert lesson.counts[1][0] <= lesson.counts[0][1] and lesson.counts[2][0] <= lesson.counts[1][1]


def test_rows_weigh_less_after_a_token_that_was_foretold(tiny):
    """Against the weights counted by hand, of a text that the head itself continues at places."""
    one = text(14, 4)
    for at in (6, 9, 10):
        one.ids[at] = tiny.chain(one.ids[1:at].tolist(), one.hidden[: at - 1], 1)[0]
    batch = Batch.of([one])
    rows = tiny.side.lm_head[tiny.weights.draft_ids.long()]
    teacher = Teacher(torch.ones(heads.HIDDEN), 1e-5, rows)
    lesson, seen = Lesson(teacher, batch, emphasis=Emphasis(inside=0.2)), []

    def visit(step):
        seen.append(step)
        return lesson(step)

    unroller(tiny).run(learned(tiny), batch, 1, visit)
    right = seen[0].right.tolist()
    weights = torch.tensor([0.2 if before else 1.0 for before in [False, *right[:-1]]])
    assert sum(right) >= 3 and not all(right)
    wanted = teacher.distribution(batch.hidden[0, seen[0].key + 1])
    expected = -(wanted * seen[0].logits.log_softmax(-1)).sum(-1) @ weights / weights.sum()
    torch.testing.assert_close(lesson.loss, expected)


def test_updates_lower_the_loss(tiny):
    batch = Batch.of([text(24, 4, seed=s) for s in range(4)])
    mine = optimiser.Optimiser(learned(tiny), optimiser.Rates(matrices=1e-2, vectors=1e-2))
    losses = []
    for _ in range(25):
        lesson = lesson_of(tiny, batch)
        unroller(tiny).run(mine.weights, batch, 1, lesson)
        lesson.loss.backward()
        mine.update(1.0)
        losses.append(lesson.loss.item())
    assert losses[-1] < 0.8 * losses[0]


def test_orthogonal_keeps_directions_and_evens_out_sizes():
    matrix = torch.randn(24, 16, generator=torch.Generator().manual_seed(0))
    matrix = matrix @ torch.diag(torch.logspace(-1, 1, 16))
    made = optimiser.orthogonal(matrix)
    sizes = torch.linalg.svdvals(made)
    assert sizes.min() > 0.3 and sizes.max() < 1.4
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    assert (u.T @ made @ v.T).diagonal().min() > 0.3


def test_what_is_shipped_is_the_mean_with_the_averages_put_aside(tiny):
    mine = optimiser.Optimiser({"w": torch.tensor([1.0])}, optimiser.Rates())
    mine.average["w"] = torch.tensor([4.0])
    assert mine.shipped()["w"] == 4
    mine.put_aside()
    mine.average["w"] = torch.tensor([6.0])
    other = optimiser.Optimiser({"w": torch.tensor([0.0])}, optimiser.Rates())
    other.restore(mine.stored(), 3)
    assert mine.shipped()["w"] == other.shipped()["w"] == 5


def test_an_average_is_put_aside_once_in_a_run(tiny, tmp_path, monkeypatch):
    steps, put = [], optimiser.Optimiser.put_aside
    monkeypatch.setattr(
        optimiser.Optimiser, "put_aside", lambda self: steps.append(self.step) or put(self)
    )
    made = training(tiny, tmp_path)
    made.run(lambda step: None)
    assert steps == [11] and made.optimiser.count == 1
    last = made.optimiser.average["mtp.fc.weight"]
    assert not torch.equal(made.learned()["mtp.fc.weight"], last.bfloat16())


# Acceptance
# -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("right", "checks", "taken"),
    [
        ("000000 000000 000000", 5, [0, 0, 0]),
        ("111111 111111 111111", 2, [2, 1, 1]),
        ("101010 111111 000000", 3, [2, 1, 0]),
        ("010101 000000 111111", 3, [2, 0, 0]),
    ],
)
def test_walk_is_what_an_engine_would_do(right, checks, taken):
    table = torch.tensor([[c == "1" for c in row] for row in right.split()])
    assert walk(table, 0, 7) == (checks, taken)


def test_acceptance_is_that_of_a_replayed_chain(tiny):
    """Each check proposes with the oracle over true rows; what it accepts is counted by hand."""
    given = [text(16, 3, seed=s) for s in range(3)]
    for number, one in enumerate(given):  # a text that the head itself continues now and then
        for at in range(5 + number, 15, 3):
            drafts = tiny.chain(one.ids[1:at].tolist(), one.hidden[: at - 1], 2)
            one.ids[at : at + 2] = torch.tensor(drafts[: min(2, 16 - at)], dtype=torch.int32)
    checks, taken = 0, [0, 0, 0]
    for one in given:
        key = one.start - 1
        while key + 2 < 16:
            drafts = tiny.chain(one.ids[1 : key + 2].tolist(), one.hidden[: key + 1], 3)
            count = 0
            while count < 3 and key + 2 + count < 16 and drafts[count] == one.ids[key + 2 + count]:
                taken[count] += 1
                count += 1
            checks, key = checks + 1, key + count + 1
    found = acceptance(unroller(tiny), learned(tiny), given, 3)
    assert (found.checks, list(found.accepted)) == (checks, taken) and taken[0] > 0
    assert found.tokens_per_step == pytest.approx(1 + sum(taken) / checks)


# Runs
# -----------------------------------------------------------------------------------------------

PLAN = run.Plan("tiny", "0" * 64, 5, 100, 12, heads.SCORED, 30, 32, 5e-3)


def training(tiny, folder, plan=PLAN):
    rows = tiny.side.lm_head[tiny.weights.draft_ids.long()]
    ids = tiny.weights.draft_ids
    made = loop.Training(
        plan, folder, unroller(tiny), Teacher(torch.ones(heads.HIDDEN), 1e-5, rows),
        Columns(ids, torch.arange(heads.VOCAB), plan.seed),
        optimiser.Optimiser(learned(tiny), optimiser.Rates(matrices=plan.learning_rate)),
        run.Progress(), [text(12 + s % 5, 3 + s % 4, seed=s, greedy=s % 3 > 0) for s in range(11)],
        [text(14, 4, seed=100)],
    )  # fmt: skip
    if (saved := run.load_state(folder)) is not None:
        made.optimiser.restore(saved[0], saved[1].step)
        made.progress = saved[1]
    return made


@pytest.mark.parametrize("stop", [1, 5, 9, 11])
def test_an_interrupted_run_ends_as_an_uninterrupted_one(tiny, tmp_path, stop):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for folder in (whole, parts):
        run.open_run(folder, PLAN, resume=False)
    training(tiny, whole).run(lambda step: None)

    def interrupt(step):
        if step == stop:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        training(tiny, parts).run(interrupt)
    run.open_run(parts, PLAN, resume=True)
    training(tiny, parts).run(lambda step: None)
    ends = [run.load_state(folder) for folder in (whole, parts)]
    assert ends[0][1].step == ends[1][1].step == 12 and ends[0][1].rows == ends[1][1].rows
    for name, tensor in ends[0][0].items():
        assert torch.equal(tensor, ends[1][0][name]), name


@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)]
)
def test_a_signal_waits_for_the_end_of_an_update(tiny, tmp_path, monkeypatch, number, error):
    update = optimiser.Optimiser.update

    def struck(self, share):
        if self.step == 1:
            os.kill(os.getpid(), number)
        update(self, share)

    monkeypatch.setattr(optimiser.Optimiser, "update", struck)
    before = signal.getsignal(number)
    with pytest.raises(error):
        training(tiny, tmp_path).run(lambda step: None)
    assert run.load_state(tmp_path)[1].step == 2 and signal.getsignal(number) is before


def test_a_run_is_not_begun_twice_nor_resumed_as_another(tmp_path):
    with pytest.raises(errors.NothingToResume):
        run.open_run(tmp_path, PLAN, resume=True)
    run.open_run(tmp_path, PLAN, resume=False)
    with pytest.raises(errors.AlreadyBegun):
        run.open_run(tmp_path, PLAN, resume=False)
    with pytest.raises(errors.OtherRun, match="seed 5, not 6"):
        run.open_run(tmp_path, replace(PLAN, seed=6), resume=True)
    (tmp_path / run.STATE).write_bytes(b"broken")
    with pytest.raises(errors.BrokenRun):
        run.load_state(tmp_path)


def test_epochs_hold_every_text_once_in_an_order_of_their_own():
    given = [text(10 + s % 7, 4, seed=s) for s in range(40)]
    first, again, second = (loop.batches(given, 50, 1, epoch) for epoch in (0, 0, 1))
    assert [[id(t) for t in b] for b in first] == [[id(t) for t in b] for b in again]
    assert [[id(t) for t in b] for b in first] != [[id(t) for t in b] for b in second]
    seen = [id(t) for b in first for t in b]
    assert len(seen) == len(set(seen)) >= 38
    assert all(sum(t.answer for t in b) < 50 + 17 for b in first)


def test_shards_give_back_what_was_written(tmp_path):
    given = [text(9, 3, seed=1), text(5, 2, seed=2, greedy=False)]
    path = tmp_path / texts.SHARD.format(0)
    texts.save_shard(path, given, 7)
    assert texts.shards(tmp_path) == [path]
    read, asked = texts.read_shard(path)
    assert asked == 7
    for mine, theirs in zip(given, read, strict=True):
        assert torch.equal(mine.ids, theirs.ids) and mine.start == theirs.start
        assert torch.equal(mine.hidden.bfloat16(), theirs.hidden) and mine.greedy == theirs.greedy
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(errors.BrokenRun):
        texts.read_shard(path)


# Prompts
# --------------------------------------------------------------------------------------------


def test_prompts_are_seeded_and_varied():
    made = [[prompts.request(r) for _ in range(400)] for r in (random.Random(1), random.Random(1))]
    assert made[0] == made[1] and len(set(made[0])) > 350
    assert not any("{" in p for p in made[0])
    openings = {prompts.opening(random.Random(s)) for s in range(200)}
    assert len(openings) > 120 and all(openings)


def bench_prompts():
    import json
    from pathlib import Path

    return json.loads((Path(__file__).parent.parent / "bench" / "prompts.json").read_text("utf-8"))


def test_paraphrases_of_benchmark_prompts_are_refused():
    guard = prompts.Guard(bench_prompts())
    assert guard.refuses("Why is the sky blue during the day but red at sunset?")
    assert guard.refuses("Name the planets in order from the sun.")
    assert not guard.refuses("Why is grass green?") and not guard.refuses("What is the sun?")


def test_the_list_of_requests_is_long_varied_and_holds_no_benchmark_prompt():
    listed, guard = asked.requests(), prompts.Guard(bench_prompts())
    assert len(listed) > 9000 and all(text == text.strip() != "" for text in listed)
    assert len({" ".join(prompts.words(text)) for text in listed}) == len(listed)
    assert not [text for text in listed if guard.refuses(text)]
    assert any("\n" in text for text in listed) and not any("\\n" in text for text in listed)
    begun = [" ".join(prompts.words(text)[:2]) for text in listed]
    assert max(map(begun.count, set(begun))) < 0.02 * len(listed)


def test_each_request_is_asked_once_before_any_is_asked_again(monkeypatch):
    monkeypatch.setattr(asked, "requests", lambda: ("no", *(f"request {n}" for n in range(9))))
    guard = prompts.Guard(["no"])
    mine = asked.Asked(guard, seed=1)
    given = []
    for number in range(27):
        assert mine.again == (number >= 9)
        given.append(mine.next())
    rounds = [given[at : at + 9] for at in (0, 9, 18)]
    assert all(sorted(r) == [f"request {n}" for n in range(9)] for r in rounds)
    assert rounds[0] != rounds[1] != rounds[2]
    later = asked.Asked(guard, seed=1, count=12)
    assert [later.next() for _ in range(15)] == given[12:]
    assert [asked.Asked(guard, seed=2).next() for _ in range(4)] != given[:4]


def test_texts_that_open_alike_are_taken_once():
    def one(prompt, answer):
        ids = torch.tensor([*prompt, *answer], dtype=torch.int32)
        return texts.Written(ids, torch.zeros(len(ids) - 1, 2), len(prompt), True)

    long = list(range(60))
    known = texts.Openings([one([1, 2], long)])
    assert not known.add(one([3], [*long[: texts.OPENING], 90, 91]))
    assert known.add(one([3], [*long[: texts.OPENING - 1], 90, 91]))
    assert known.add(one([1], [5, 6])) and known.add(one([2], [5, 6]))
    assert not known.add(one([1], [5, 6]))


def test_as_many_texts_are_begun_as_the_goal_takes():
    tally = writing.Tally(likely=10.0)
    begun = 0
    while tally.short_of(1000):
        tally.begun += 1
        begun += 1
    assert begun == 103
    tally.ended, tally.tokens = 40, 200  # they turn out to be half as long
    while tally.short_of(1000):
        tally.begun += 1
    assert tally.begun == 206
    assert not writing.Tally(10.0, begun=70, ended=64).short_of(1000)


def test_the_guard_keeps_copies_and_near_copies_out():
    guard = prompts.Guard(
        ["What is the capital of Australia, and how many people live there?", "Who?"]
    )
    assert guard.refuses("what is the capital of AUSTRALIA and how many people live there")
    assert guard.refuses(
        "Please tell me: what is the capital of Australia, and how many live there?"
    )
    assert guard.refuses("who")
    assert not guard.refuses("What is the weather like in Australia?")
    assert not guard.refuses("Who was Plato?")


def test_no_benchmark_prompt_is_made():
    bench = bench_prompts()
    assert len(bench) == len(set(bench)) == 50
    guard, rng = prompts.Guard(bench), random.Random(0)
    made = [p for p in (prompts.request(rng) for _ in range(3000)) if not guard.refuses(p)]
    assert len(made) > 2850
    assert not {" ".join(prompts.words(p)) for p in made} & {
        " ".join(prompts.words(p)) for p in bench
    }


def test_a_circle_is_cut_after_its_first_rounds():
    assert writing.circle(list(range(100))) == 100
    assert writing.circle([*range(50), *[1, 2, 3] * 40]) == 50 + writing.LOOP
    assert writing.circle([7] * 59) == 59


def test_the_rate_rises_stays_and_falls():
    plan = replace(PLAN, steps=1000)
    shares = [plan.share(s) for s in (0, 29, 150, 300, 650, 825, 999)]
    np.testing.assert_allclose(shares, [1 / 30, 1, 1, 1, 0.5, 0.25, 0.01])


def test_the_lesson_widens_in_the_course_of_a_run():
    plan = replace(PLAN, steps=1000, batch_columns=3000)
    widths = [plan.width(s, 16384) for s in (0, 599, 600, 879, 880)]
    assert widths == [3000, 3000, 8192, 8192, 16384]
    assert [plan.width(s, 4096) for s in (599, 600, 880)] == [3000, 3000, 4096]


def test_half_of_the_right_chains_go_on_and_weigh_twice(tiny):
    """What is left out at random is missed by no step's weight on the average over seeds."""
    given = Batch.of([text(40, 4, seed=s) for s in range(6)])
    rows = tiny.side.lm_head[tiny.weights.draft_ids.long()]
    teacher = Teacher(torch.ones(heads.HIDDEN), 1e-5, rows)

    class AllRight(Lesson):
        """Takes every draft for right, so that chains are long."""

        def __call__(self, step):
            return super().__call__(replace(step, wanted=step.tokens))

    def taught(followed=1.0, seed=0):
        lesson = AllRight(teacher, given, emphasis=Emphasis(0.5, followed), seed=seed)
        with torch.no_grad():
            unroller(tiny).run(learned(tiny), given, 3, lesson)
        return lesson

    whole, halves = taught(), [taught(0.5, s) for s in range(12)]
    made = [[lesson.counts[j][0] for j in range(3)] for lesson in (whole, *halves)]
    assert all(m[0] == made[0][0] and 0.3 < m[1] / made[0][1] < 0.7 for m in made[1:])
    mean = sum(float(lesson.loss) for lesson in halves) / len(halves)
    assert mean == pytest.approx(float(whole.loss), rel=0.02)


# Columns
# --------------------------------------------------------------------------------------------


def test_columns_hold_the_batch_and_the_frequent_ids():
    counts = torch.arange(100).flip(0)
    ids = torch.arange(0, 100, 2).int()
    columns = Columns(ids, counts, seed=1)
    batch = torch.tensor([[96, 97, 98], [3, 4, 5]])
    picked = columns.pick(batch, 7, 20)
    assert torch.equal(picked, columns.pick(batch, 7, 20)) and len(picked) == 20
    assert set(range(11)) <= set(picked.tolist()) and {48, 49} <= set(picked.tolist())
    assert not torch.equal(picked, columns.pick(batch, 8, 20))
    assert len(columns.pick(batch, 0, 64)) == 50


def test_draft_ids_are_the_most_frequent_and_those_that_must_be_there():
    given = [
        texts.Written(torch.tensor([9, 9, 9, 4, 4, 5, 6, 6]).int(), torch.zeros(7, 2), 3, True)
    ]
    given.append(texts.Written(torch.tensor([6, 4, 9, 2]).int(), torch.zeros(3, 2), 1, False))
    counts = frequencies(given, 12)
    assert counts.tolist() == [0, 0, 1, 0, 2, 1, 2, 0, 0, 2, 0, 0]
    assert draft_ids(counts, 4, {11}).tolist() == [4, 6, 9, 11]


def test_a_lesson_over_columns_is_one_over_a_head_of_these_ids(tiny):
    """Picking columns is the same as a head whose id map holds them alone."""
    batch, picked = Batch.of([text(14, 4)]), torch.tensor([0, 3, 4, 9, 20, 33])
    small = replace(
        tiny.weights, draft_ids=tiny.weights.draft_ids[picked],
        config=replace(tiny.weights.config, vocab_size=len(picked)),
    )  # fmt: skip
    teacher = Teacher(
        torch.ones(heads.HIDDEN), 1e-5, tiny.side.lm_head[tiny.weights.draft_ids.long()]
    )
    lessons = [Lesson(teacher.over(picked), batch) for _ in range(2)]
    unroller(tiny).run(learned(tiny), batch, 3, lessons[0], picked)
    Unroller(bind_head(small, tiny.side, OPTIONS)).run(learned(tiny), batch, 3, lessons[1])
    torch.testing.assert_close(lessons[0].loss, lessons[1].loss)
    assert lessons[0].counts == lessons[1].counts
