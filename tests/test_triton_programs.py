"""Whole programs through the Triton backend: every key of a tiny target
and head, compiled into an artifact.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from programs import target_config
from triton_case import device

from circuit.compare import clear_rows, no_worse_than_eager
from circuit.feed import feed
from circuit.models.target import EMBEDDING, HEAD, target_binding, target_keys, target_side
from circuit.scenario import Script, _rows, walk
from codegen.artifact import load_artifact
from codegen.backend_triton import TritonBackend
from codegen.compile import CompileOptions
from codegen.save import compile_artifact
from ir.format import Format
from ir.graph import DECODE, GraphKey, Mode
from ir.quantize import stored_as
from proposers.config import QWEN35, Contract, HeadConfig
from proposers.mtp_binding import bind_head
from proposers.options import DraftOptions, head_keys
from proposers.weights import HeadWeights, expected_shapes
from runners.eager import EagerRunner
from runners.launcher import TritonRunner, interpreting
from runners.rows import Lane, index_inputs

CONTEXT, SEED = 64, 3
SIZES = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 97}


def drawn(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """A random weight: rows of length near one, vectors near one."""
    values = torch.randn(shape, generator=generator)
    return values * 0.1 + 1 if len(shape) == 1 else values / shape[-1] ** 0.5


def target_tensors(config, format: Format) -> dict:
    """Random weights of a tiny target, its matrices in `format`."""
    generator = torch.Generator().manual_seed(SEED)
    n, f, d = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_attention_heads * d, config.num_key_value_heads * d
    shapes = {EMBEDDING: (config.vocab_size, n), "model.norm.weight": (n,)}
    for layer in range(config.num_hidden_layers):
        named = {
            "self_attn.q_proj": (q, n), "self_attn.k_proj": (kv, n), "self_attn.v_proj": (kv, n),
            "self_attn.o_proj": (n, q), "mlp.gate_proj": (f, n), "mlp.up_proj": (f, n),
            "mlp.down_proj": (n, f), "input_layernorm": (n,), "post_attention_layernorm": (n,),
        }  # fmt: skip
        shapes |= {f"model.layers.{layer}.{k}.weight": s for k, s in named.items()}
    drawn_ = {name: drawn(shape, generator) for name, shape in shapes.items()}
    kept = {n: t if t.ndim == 1 else stored_as(t, format) for n, t in drawn_.items()}
    return {**kept, HEAD: kept[EMBEDDING]}


def head_weights(contract: Contract, config, ids: torch.Tensor) -> HeadWeights:
    """A random head of the target with `config`, which scores the target's `ids`."""
    generator = torch.Generator().manual_seed(SEED + 1)
    sizes = HeadConfig(
        config.hidden_size, 64, 4, 2, 16, 1e-6, len(ids), config.vocab_size, 1e4
    )  # fmt: skip
    tensors = {
        name: drawn(shape, generator) for name, shape in expected_shapes(contract, sizes).items()
    }
    return HeadWeights(Path("head"), contract, sizes, tensors, ids)


def bindings(format: Format, working: Format, contract: Contract | None = None, layers: int = 1):
    """A target's binding and a head's."""
    config, contract = target_config(num_hidden_layers=layers, **SIZES), contract or Contract()
    tensors = target_tensors(config, format)
    keys = target_keys(batches=(4, 9), chunk=32)
    target = target_binding(config, tensors, CONTEXT, keys, working=working)
    side = target_side(config, tensors, CONTEXT)
    ids = torch.arange(1, 90, 2, dtype=torch.int32)
    options = DraftOptions(CONTEXT, head_keys(batches=(4,), chunk=32, chain=3), working)
    return target, bind_head(head_weights(contract, config, ids), side, options)


def compiled(path: Path, working: Format, parts: dict, wanted: set[GraphKey] | None = None):
    """The artifact of `parts` at `path`, of their `wanted` keys."""
    options = CompileOptions(store=path / "store")
    named = {
        name: (b, [k for k in b.keys if wanted is None or k in wanted]) for name, b in parts.items()
    }
    out = compile_artifact(
        path / "out", named, TritonBackend(working), options, recorded={}, extras={}
    )
    return load_artifact(out)


def script(binding, hidden: int = 0) -> Script:
    """A text for a walk; with `hidden`, rows of a target's stream as well."""
    random = np.random.default_rng(SEED)
    ids = random.integers(0, 97, 64)
    rows = random.standard_normal((64, hidden)).astype(np.float32) if hidden else None
    return Script(ids, rows, 1 if hidden else 0)


def compare(seen, eager, oracle) -> int:
    """Compares one program's outputs and rows; the count of numbers compared."""
    compared = 0
    for name, values in seen.outputs.items():
        if values.dtype.kind == "i":
            continue
        assert no_worse_than_eager(values, eager.outputs[name], oracle.outputs[name]), (
            f"{seen.key} {name}"
        )
        compared += values.size
    for name, rows in seen.stored.items():
        assert no_worse_than_eager(rows, eager.stored[name], oracle.stored[name]), (
            f"{seen.key} {name}"
        )
        compared += rows.size
    if "tokens" in seen.outputs:
        sure = clear_rows(oracle.outputs["logits"], seen.outputs["logits"])
        assert (seen.outputs["tokens"] == oracle.outputs["tokens"])[sure].all()
    return compared


KEYS = "DECODE VERIFY_4 BATCH_4 BATCH_9 PREFILL_32 CHAIN_3"
FEW = "DECODE VERIFY_3 PREFILL_32"


@pytest.mark.parametrize(
    ("format", "working", "layers", "chosen"),
    [
        (Format.BF16, Format.BF16, 2, KEYS), (Format.Q8_0, Format.BF16, 1, FEW),
        (Format.F32, Format.F32, 1, FEW),
    ],
)  # fmt: skip
def test_programs_of_a_target_and_a_head_are_no_worse_than_eager(
    format: Format, working: Format, layers: int, chosen: str, tmp_path: Path
) -> None:
    device()
    contract = QWEN35 if format is Format.BF16 else Contract()
    parts = dict(zip(("target", "draft"), bindings(format, working, contract, layers)))
    wanted = {GraphKey.parse(key) for key in chosen.split()}
    artifact = compiled(tmp_path, working, parts, wanted)
    for name, binding in parts.items():
        text = script(binding, 64 if name == "draft" else 0)
        keys = [key for key in binding.keys if key in wanted]
        with (
            TritonRunner(artifact.part(name)) as runner,
            EagerRunner(binding) as eager,
            EagerRunner(binding, double=True) as oracle,
        ):
            walks = [walk(r, text, keys) for r in (runner, eager, oracle)]
            compared = [compare(*seen) for seen in zip(*walks, strict=True)]
            assert len(compared) == len(keys) and sum(compared) > 2000
            assert len(runner.plan(DECODE).launches) <= (9 if name == "draft" else 3 + 6 * layers)


def test_verify_rows_are_the_bytes_of_decode(tmp_path: Path) -> None:
    device()
    target, head = bindings(Format.BF16, Format.BF16)
    keys = {DECODE, *(GraphKey(Mode.VERIFY, rows) for rows in (2, 3, 4))}
    artifact = compiled(tmp_path, Format.BF16, {"target": target, "draft": head}, keys)
    for name, hidden in (("target", 0), ("draft", 64)):
        part = artifact.part(name)
        text = script(part, hidden)
        with TritonRunner(part) as runner:
            with runner.pool.lease() as lease:
                singly = [_rows(runner, text, DECODE, lease, range(i, i + 1)) for i in range(4)]
            for rows in (2, 3, 4):
                with runner.pool.lease() as lease:
                    seen = _rows(runner, text, GraphKey(Mode.VERIFY, rows), lease, range(rows))
                for i in range(rows):
                    for output in seen.outputs:
                        assert np.array_equal(seen.outputs[output][i], singly[i].outputs[output][0])
                    for state, stored in seen.stored.items():
                        assert np.array_equal(stored[:, :, i], singly[i].stored[state][:, :, 0])


def test_a_chain_read_at_once_is_its_outputs(tmp_path: Path) -> None:
    device()
    _, head = bindings(Format.F32, Format.F32)
    key = GraphKey(Mode.CHAIN, 2)
    part = compiled(tmp_path, Format.F32, {"draft": head}, {key}).part("draft")
    with TritonRunner(part) as runner, runner.pool.lease() as lease:
        first = lease.append(2)
        given = {
            "ids": np.array([5], np.int32), "hidden": script(part, 64).hiddens[:1],
            **index_inputs(runner, key, [Lane(lease, first, 1)]),
        }  # fmt: skip
        tokens, logprobs, hidden = runner.run_chain(2, **given)
        last = runner.read(hidden)
        out = runner.step(key, **given)
        for index in range(2):
            assert tokens[index] == runner.read(out[f"tokens.{index}"])[0]
            assert logprobs[index] == runner.read(out[f"logprobs.{index}"])[0]
        assert all(type(token) is int for token in tokens)
        assert np.array_equal(last, runner.read(out["hidden"]))


@pytest.mark.skipif(interpreting(), reason="no CUDA device: nothing to refuse is different there")
def test_a_device_is_used_where_there_is_one(tmp_path: Path) -> None:
    target, _ = bindings(Format.BF16, Format.BF16)
    artifact = compiled(tmp_path, Format.BF16, {"target": target}, {DECODE})
    with TritonRunner(artifact.part("target")) as runner:
        assert runner.device.type == "cuda"


def test_a_masked_step_chooses_from_what_the_mask_allows(tmp_path: Path) -> None:
    """Of every third scored id; the rest of the step has the bytes of DECODE."""
    device()
    _, head = bindings(Format.F32, Format.F32)
    masked, wanted = GraphKey(Mode.MASKED, 1), {DECODE, GraphKey(Mode.MASKED, 1)}
    artifact = compiled(tmp_path, Format.F32, {"draft": head}, wanted)
    allowed, words = np.arange(1, 90, 2)[::3], np.zeros(4, np.uint32)
    for i in allowed:
        words[i // 32] |= np.uint32(1) << np.uint32(i % 32)
    with TritonRunner(artifact.part("draft")) as runner:
        types = runner.inputs(DECODE)
        row = script(head, 64).row(5, 0)
        found = []
        for key, more in ((DECODE, {}), (masked, {"bitmask": words.view(np.int32)[None]})):
            with runner.pool.lease(1) as lease:
                table = lease.table(types["tables"].shape[1])
                given = feed(key, runner.inputs(key), [row], [table]) | more
                out = runner.step(key, **given)
                found.append({n: runner.read(v) for n, v in out.items()})
        assert len(runner.plan(masked).launches) == len(runner.plan(DECODE).launches)
    assert found[0]["logits"].tobytes() == found[1]["logits"].tobytes()
    assert found[1]["tokens"].tolist() == [allowed[found[0]["logits"][0, ::3].argmax()]]
