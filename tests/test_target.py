"""The target in ops against the transformers classes, and its programs against each other."""

from dataclasses import replace

import checkpoints
import numpy as np
import pytest
import torch

from circuit.engine.target import Target
from circuit.models.convert import WeightOption, WeightsUnfit, converted
from circuit.models.hf_config import config_from_json
from circuit.models.target import EMBEDDING, HEAD, target_binding, target_keys, target_side
from ir.binding import Binding
from ir.format import Format, TensorType
from ir.key import DECODE, GraphKey, Mode
from ir.tensor import unpacked
from runners.eager import EagerRunner
from runners.rows import Lane, index_inputs, padded

CONTEXT = 64
KEYS = target_keys(batches=(2, 4), chunk=8)


def loaded(model):
    """Configuration and weights of a transformers model, as a checkpoint would give them."""
    config = config_from_json("config.json", model.config.to_dict(), generation={})
    tensors = dict(model.state_dict())
    if config.tie_word_embeddings:
        tensors[HEAD] = tensors[EMBEDDING]
    return config, tensors


def bound(model, **options) -> Binding:
    return target_binding(*loaded(model), CONTEXT, KEYS, **options)


def reference(model, ids):
    """Logits [t, v] and the last layer's output before the final
    norm [t, n], in the model's dtype.
    """
    kept = []
    hook = model.model.layers[-1].register_forward_hook(
        lambda _, __, out: kept.append(out[0] if isinstance(out, tuple) else out)
    )
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0]
    hook.remove()
    return logits.numpy(), kept[0].reshape(len(ids), -1).numpy()


def text(length, seed=1):
    return np.random.default_rng(seed).integers(3, 97, length).tolist()


def by_rows(target: Target, lease, ids, widths):
    """Logits and hiddens of `ids`, computed in steps of the given widths."""
    logits, hiddens, at = [], [], 0
    for width in widths:
        scored = target.rows(lease, ids[at : at + width])
        assert scored.tokens == scored.logits.argmax(-1).tolist()
        logits.append(np.array(scored.logits))
        hiddens.append(np.array(scored.hidden))
        at += width
    return np.concatenate(logits), np.concatenate(hiddens)


CASES = [
    ("llama", "none", False, {}),
    ("llama", "llama3", True, {}),
    ("llama-mha", "linear", False, {}),
    ("llama-bias", "none", True, {}),
    ("mistral", "none", False, {}),
    ("qwen2", "yarn", True, {}),
    ("qwen2", "none", False, {"num_key_value_heads": 1}),
    ("qwen3", "none", True, {}),
    ("qwen3", "yarn", False, {}),
]


@pytest.mark.parametrize("family, rope, tied, changes", CASES)
def test_logits_and_hiddens_are_those_of_transformers(family, rope, tied, changes):
    model = checkpoints.make_model(family, rope=rope, tied=tied, **changes)
    ids = text(21)
    wanted_logits, wanted_hidden = reference(model.double(), ids)
    model.float()
    for double, tolerance in ((True, 1e-5), (False, 2e-4)):
        with EagerRunner(bound(model), double=double, context=CONTEXT) as runner:
            with runner.pool.lease() as lease:
                target = Target(runner)
                logits, hidden = by_rows(target, lease, ids, [1, 2, 3, 4, 1, 4, 4, 2])
            with runner.pool.lease() as lease:
                scored = target.prompt(lease, ids, keep_hidden=True)
        # Rotary angles are rounded to f32 in one place each, which is what the oracle's 1e-5
        # allows.
        np.testing.assert_allclose(logits, wanted_logits, atol=tolerance, rtol=tolerance)
        np.testing.assert_allclose(hidden, wanted_hidden, atol=tolerance, rtol=tolerance)
        np.testing.assert_allclose(scored.hidden, wanted_hidden, atol=tolerance, rtol=tolerance)
        np.testing.assert_allclose(
            scored.logits[0], wanted_logits[-1], atol=tolerance, rtol=tolerance
        )


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_every_program_computes_the_same_rows(family):
    """The f64 oracle: decode, verify, prompt chunks and batches of
    sequences agree, cache rows included.
    """
    runner = EagerRunner(bound(checkpoints.make_model(family)), double=True)
    target, ids = Target(runner), text(19)
    ways = {"decode": [1] * 19, "verify": [4, 3, 2, 4, 3, 2, 1], "prompt": None}
    logits, caches = {}, {}
    for name, widths in ways.items():
        with runner.pool.lease() as lease:
            if widths is None:
                target.prompt(lease, ids[:-1], keep_hidden=False)
                logits[name] = np.array(target.rows(lease, ids[-1:]).logits[-1])
            else:
                logits[name] = by_rows(target, lease, ids, widths)[0][-1]
            caches[name] = {state: lease.read(state) for state in runner.pool.types}
    for name in ways:
        np.testing.assert_allclose(logits[name], logits["decode"], atol=1e-12)
        for state, rows in caches[name].items():
            np.testing.assert_allclose(rows, caches["decode"][state], atol=1e-12)


def test_a_batch_is_its_sequences_and_padding_touches_none():
    runner = EagerRunner(bound(checkpoints.make_model("llama")), double=True)
    target = Target(runner)
    prompts = [text(5, 2), text(17, 3), text(9, 4)]
    leases = [runner.pool.lease() for _ in prompts]
    for lease, ids in zip(leases, prompts, strict=True):
        target.prompt(lease, ids, keep_hidden=False)
    key = GraphKey(Mode.BATCH, 4)
    lanes = [Lane(lease, lease.append(1), lease.rows - 1) for lease in leases]
    before = {n: a.copy() for n, a in runner.pool.arrays.items()}
    out = runner.step(
        key, ids=padded(np.array([11, 12, 13], np.int32), 4), **index_inputs(runner, key, lanes)
    )
    for i, (lease, token) in enumerate(zip(leases, (11, 12, 13), strict=True)):
        batched = {state: lease.read(state) for state in runner.pool.types}
        lease.trim(lease.rows - 1)
        alone = target.rows(lease, [token])
        np.testing.assert_allclose(out["logits"][i], alone.logits[0], atol=1e-12)
        for state, rows in batched.items():
            np.testing.assert_allclose(rows, lease.read(state), atol=1e-12)
    held = {block for lease in leases for block in lease.blocks} | {0}
    others = [b for b in range(runner.pool.blocks) if b not in held]
    for name, array in runner.pool.arrays.items():
        assert np.array_equal(array[others], before[name][others])


def test_a_longer_prompt_than_its_chunk_and_a_shorter_one_agree():
    runner = EagerRunner(bound(checkpoints.make_model("qwen2")), double=True)
    target, ids = Target(runner), text(30, 5)
    for length in (1, 3, 4, 5, 8, 9, 16, 30):
        with runner.pool.lease() as lease, runner.pool.lease() as other:
            scored = target.prompt(lease, ids[:length], keep_hidden=True)
            logits, hidden = by_rows(target, other, ids[:length], [1] * length)
            assert scored.hidden.shape == hidden.shape and lease.rows == length
            np.testing.assert_allclose(scored.logits[0], logits[-1], atol=1e-12)
            np.testing.assert_allclose(scored.hidden, hidden, atol=1e-12)


def test_the_normed_hidden_is_the_stream_after_the_final_norm():
    model = checkpoints.make_model("llama")
    binding = bound(model, normed_hidden=True)
    with EagerRunner(binding) as runner, runner.pool.lease() as lease:
        plain = Target(runner).rows(lease, [7]).hidden
        lease.trim(0)
        normed = Target(runner, "hidden_normed").rows(lease, [7]).hidden
    wanted = model.model.norm(torch.tensor(plain)).detach()
    np.testing.assert_allclose(normed, wanted, atol=1e-6)


def test_states_and_keys_of_a_binding():
    binding = target_binding(*loaded(checkpoints.make_model("llama")), 50)
    assert set(map(str, binding.keys)) == {
        "DECODE", "VERIFY_2", "VERIFY_3", "VERIFY_4", "BATCH_2", "BATCH_4", "BATCH_8", "BATCH_16",
        "PREFILL_256",
    }  # fmt: skip
    assert {str(t) for t in binding.states.values()} == {
        "f32[65,2,2,16,8]"
    }  # 16 sequences of 64 rows
    assert binding.weights["rope.cos"].shape == (64, 4)
    graph = binding.graph(DECODE)
    assert set(graph.outputs) == {"hidden", "logits", "tokens"}


def test_weights_are_stored_as_asked():
    config, tensors = loaded(checkpoints.make_model("llama", tied=True))
    tensors["model.norm.weight"] = tensors["model.norm.weight"].bfloat16()
    for option, format, cache in (
        (WeightOption.NATIVE, Format.F32, Format.F32),
        (WeightOption.BF16, Format.BF16, Format.BF16),
        (WeightOption.Q8_0, Format.Q8_0, Format.F16),
    ):
        out = converted({n: t for n, t in tensors.items() if "down" not in n}, option)
        formats = {TensorType.of(t).format for t in out.values() if t.ndim == 2}
        assert formats == {format} and out["model.norm.weight"].dtype == torch.float32
        assert out[EMBEDDING] is out[HEAD]
        binding = target_binding(config, out, CONTEXT, KEYS)
        assert {t.format for t in binding.states.values()} == {
            cache
        } and HEAD not in binding.weights
    half = converted({"w": torch.randn(3, 5).half()}, WeightOption.NATIVE)["w"]
    assert half.dtype == torch.float32
    with pytest.raises(WeightsUnfit, match=r"down_proj.weight has 48 columns, which q8_0"):
        converted(tensors, WeightOption.Q8_0)


@pytest.mark.parametrize("option", [WeightOption.BF16, WeightOption.Q8_0])
def test_converted_weights_run_as_their_own_values(option):
    """A binding over packed weights computes what the same numbers give as f32."""
    model = checkpoints.make_model("llama", intermediate_size=64)
    config, tensors = loaded(model)
    packed = converted(tensors, option)
    plain = {name: unpacked(value).float() for name, value in packed.items()}
    out = []
    for weights in (packed, plain):
        binding = target_binding(config, weights, CONTEXT, KEYS)
        states = {n: replace(t, format=Format.F32) for n, t in binding.states.items()}
        with EagerRunner(replace(binding, states=states)) as runner, runner.pool.lease() as lease:
            out.append(by_rows(Target(runner), lease, text(6), [1, 2, 3])[0])
    np.testing.assert_array_equal(*out)


def test_a_head_borrows_the_targets_own_objects():
    config, tensors = loaded(checkpoints.make_model("llama", tied=True))
    side = target_side(config, tensors, CONTEXT)
    assert side.embedding is side.lm_head is tensors[EMBEDDING]
    assert (side.vocab_size, side.hidden_size) == (97, 32)
