"""Whole models: logits and hiddens equal to transformers' for every family and rope kind."""

import dataclasses

import numpy as np
import pytest
import torch

from circuit.models.checkpoint import load_target
from circuit.models.config import RopeSpec
from circuit.models.target import target_binding
from ir.key import DECODE, GraphKey, Mode
from runners.eager import EagerRunner
from runners.rows import Lane, index_inputs
from tests.checkpoints import FAMILIES, ROPES, make_model, save_folder
from tests.demo import demo
from tests.gguf_files import write_gguf

CONTEXT, START, LENGTH = 128, 90, 30
VERIFY_4 = GraphKey(Mode.VERIFY, 4)
STEPS = [GraphKey(Mode.PREFILL, 16), VERIFY_4, DECODE, VERIFY_4, VERIFY_4, DECODE]
IDS = np.random.default_rng(0).integers(0, 97, LENGTH)


def our_outputs(config, tensors, ids=IDS, start=START):
    """Logits by row number and all hiddens, over a prompt chunk and steps of 4, 1, 4, 4, 1 rows."""
    logits, hiddens, at = {}, [], 0
    keys = tuple(dict.fromkeys(STEPS))
    binding = target_binding(config, tensors, CONTEXT, keys=keys, sequences=1)
    with EagerRunner(binding, context=CONTEXT) as runner, runner.pool.lease() as lease:
        for key in STEPS:
            lease.append(key.rows)
            inputs = index_inputs(runner, key, [Lane(lease, at, start + at, key.rows)])
            inputs["ids"] = ids[at : at + key.rows].astype(np.int32)
            if key.mode is Mode.PREFILL:
                inputs["last_row"] = np.array([key.rows - 1], np.int32)
            out = runner.step(key, **inputs)
            hiddens.append(runner.read(out["hidden"]))
            rows = runner.read(out["logits"])
            at += key.rows
            logits.update({at - len(rows) + i: row for i, row in enumerate(rows)})
            assert [int(t) for t in out["tokens"]] == [int(row.argmax()) for row in rows]
    assert at == LENGTH
    return logits, np.concatenate(hiddens)


def their_outputs(model, ids=IDS, start=START):
    """Logits [m, v] and the residual stream before the final norm
    [m, n] of a transformers model.
    """
    seen = []
    hook = model.model.norm.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        ids = torch.as_tensor(ids)[None]
        positions = torch.arange(start, start + ids.shape[1])[None]
        logits = model(ids, position_ids=positions, use_cache=False).logits[0]
    hook.remove()
    return logits.numpy(), seen[0][0].numpy()


def distance(ours, theirs):
    """The largest difference over the logits of all rows that ours has, relative to their scale."""
    (logits, hidden), (their_logits, their_hidden) = ours, theirs
    rows = sorted(logits)
    mine = np.stack([logits[row] for row in rows])
    assert np.isfinite(mine).all() and np.isfinite(hidden).all()
    gaps = (mine - their_logits[rows], hidden - their_hidden)
    return max(
        abs(gap).max() / abs(whole).max() for gap, whole in zip(gaps, (their_logits, their_hidden))
    )


def sized(family, **changes):
    """A tiny model with four heads of 16 (or what its family fixes) and a hidden size of 64."""
    own = FAMILIES[family][2]
    return make_model(
        family,
        hidden_size=64,
        num_attention_heads=4,
        intermediate_size=96,
        **({} if "head_dim" in own else {"head_dim": 16}),
        **changes,
    )


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(tmp_path, family, rope):
    model = sized(family, rope=rope, tied=family in ("llama", "qwen3"))
    checkpoint = load_target(save_folder(model, tmp_path, shards=2))
    outputs = our_outputs(checkpoint.config, checkpoint.tensors)
    assert distance(outputs, their_outputs(model)) < 5e-6


@pytest.mark.parametrize("rope", ROPES)
def test_another_rope_is_seen_in_the_logits(tmp_path, rope):
    """The comparison detects a fault: the same weights under another rope are far away."""
    model = sized("llama", rope=rope)
    checkpoint = load_target(save_folder(model, tmp_path))
    other = RopeSpec(300.0) if rope == "none" else RopeSpec(checkpoint.config.rope.theta)
    changed = dataclasses.replace(checkpoint.config, rope=other)
    assert distance(our_outputs(changed, checkpoint.tensors), their_outputs(model)) > 5e-3


@pytest.mark.parametrize("family", ["llama", "llama-bias", "qwen2", "qwen3"])
def test_logits_from_a_gguf_file_equal_transformers(tmp_path, family):
    """Interleaved rows come back in order: a wrong order of q and k changes every logit."""
    model = sized(family)
    write_gguf(model, tmp_path / "m.gguf")
    checkpoint = load_target(tmp_path / "m.gguf")
    wanted = their_outputs(model)
    assert distance(our_outputs(checkpoint.config, checkpoint.tensors), wanted) < 5e-6
    if checkpoint.interleaved:
        stored = dataclasses.replace(checkpoint, interleaved={})
        assert distance(our_outputs(checkpoint.config, stored.tensors), wanted) > 5e-3


def test_rope_divisors_of_a_gguf_file_act_as_llama3_scaling(tmp_path):
    """A llama3 model's file has divisors of the frequencies in place of the scaling parameters."""
    model = sized("llama", rope="llama3")
    plain = 1.0 / 500000.0 ** (torch.arange(0, 16, 2) / 16)
    divisors = (plain / model.model.rotary_emb.inv_freq).numpy()
    assert divisors.max() == pytest.approx(8.0) and divisors.min() == 1.0
    write_gguf(
        model,
        tmp_path / "m.gguf",
        tensors=lambda arrays: arrays.update({"rope_freqs.weight": divisors}),
    )
    checkpoint = load_target(tmp_path / "m.gguf")
    outputs = our_outputs(checkpoint.config, checkpoint.tensors)
    assert distance(outputs, their_outputs(model)) < 5e-6


def test_the_demo_file_says_what_transformers_says():
    """The five likeliest next ids and their logits, from
    transformers in float64 on these weights.
    """
    checkpoint = demo()
    ids = checkpoint.tokenizer.encode("The capital of France is the city of")
    key = GraphKey(Mode.PREFILL, len(ids))
    binding = target_binding(checkpoint.config, checkpoint.tensors, 16, keys=(key,), sequences=1)
    with EagerRunner(binding, context=16) as runner, runner.pool.lease() as lease:
        lease.append(len(ids))
        inputs = index_inputs(runner, key, [Lane(lease, 0, 0, len(ids))])
        out = runner.step(key, ids=np.array(ids, np.int32), last_row=[len(ids) - 1], **inputs)
        logits = runner.read(out["logits"])[0]
    best = np.argsort(-logits)[:5]
    assert [checkpoint.tokenizer.decode([i]) for i in best[:2]] == [" Paris", " London"]
    assert best.tolist() == [7042, 4528, 5145, 2250, 625]
    wanted = [14.71461, 9.50226, 8.74384, 8.67571, 8.66618]
    assert logits[best] == pytest.approx(wanted, abs=4e-3)
