"""What `gpu.py` measures: a head of the 8B class and the demo's target,
with random weights made on the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from circuit.models.config import Family, RopeSpec, TargetConfig
from circuit.models.target import EMBEDDING, HEAD, NORM, target_binding
from codegen.compile import Compiled
from ir.binding import Binding, DraftBinding
from ir.format import Format
from ir.graph import DECODE, GraphKey, Mode
from ir.interpret import merged_rows
from ir.quantize import stored_as
from ir.tensor import PackedTensor
from proposers.config import Contract, HeadConfig
from proposers.mtp_binding import TargetSide, bind_head
from proposers.options import DraftOptions
from proposers.weights import HeadWeights, expected_shapes
from runners.cuda_graph import CudaGraphRunner
from runners.launcher import TritonRunner, interpreting

VERIFY_4 = GraphKey(Mode.VERIFY, 4)


@dataclass(frozen=True)
class Subject:
    """One model to measure: its binding, and which of its programs
    are also given to torch.compile.
    """

    name: str
    binding: Binding
    hidden: int  # width of the hidden input; 0 for a target
    peers: tuple[GraphKey, ...]


def vectors_and_matrices(shapes: Mapping[str, tuple[int, ...]], device: torch.device) -> dict:
    """Random weights: norms near one, rows of matrices of length near one, in bf16."""
    made = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, device=device, dtype=torch.bfloat16)
        made[name] = noise * 0.1 + 1 if len(shape) == 1 else noise / shape[-1] ** 0.5
    return made


def head(device: torch.device, tiny: bool) -> Subject:
    """A head beside a target of the 8B class: hidden 4096, FFN 12288, 32
    heads on 8, 32768 of 151936 ids.
    """
    context = 64 if tiny else 4096
    sizes = (
        (64, 96, 4, 2, 16, 1e-6, 48, 97) if tiny else (4096, 12288, 32, 8, 128, 1e-6, 32768, 151936)
    )
    config, contract = HeadConfig(*sizes, rope_theta=1e6), Contract(qk_norm=True)
    tensors = vectors_and_matrices(expected_shapes(contract, config), device)
    table = (config.target_vocab_size, config.hidden_size)
    embedding = vectors_and_matrices({"t": table}, device)["t"]
    ids = torch.arange(config.vocab_size, dtype=torch.int32, device=device) * 2
    weights = HeadWeights(Path("random"), contract, config, tensors, ids)
    keys = (DECODE, VERIFY_4, GraphKey(Mode.BATCH, 4), GraphKey(Mode.BATCH, 16),
            GraphKey(Mode.CHAIN, 3),
            GraphKey(Mode.PREFILL, 32 if tiny else 256))  # fmt: skip
    side = TargetSide(embedding, embedding, {})
    binding = bind_head(
        weights,
        side,
        DraftOptions(context, keys, Format.BF16, sequences=16 if tiny else 4),
        format=Format.BF16,
    )
    assert isinstance(binding, DraftBinding)
    return Subject(
        "8B-class head", on_device(binding, device), config.hidden_size, (DECODE, VERIFY_4)
    )


def demo(device: torch.device, tiny: bool) -> Subject:
    """The demo's target: 30 layers, hidden 576, FFN 1536, 9 heads
    on 3, 49152 ids; Q4_1 and Q8_0.
    """
    context, layers = (64, 2) if tiny else (2048, 30)
    sizes = (64, 96, 97, 4, 2, 16) if tiny else (576, 1536, 49152, 9, 3, 64)
    n, ffn, vocab, heads, groups, dim = sizes
    config = TargetConfig(
        family=Family.LLAMA, hidden_size=n, intermediate_size=ffn, vocab_size=vocab,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=groups,
        head_dim=dim,
        rms_norm_eps=1e-5, rope=RopeSpec(1e5), max_position_embeddings=context,
        tie_word_embeddings=True,
    )  # fmt: skip
    shapes = {
        "self_attn.q_proj": (heads * dim, n), "self_attn.k_proj": (groups * dim, n),
        "self_attn.v_proj": (groups * dim, n), "self_attn.o_proj": (n, heads * dim),
        "mlp.gate_proj": (ffn, n), "mlp.up_proj": (ffn, n), "mlp.down_proj": (n, ffn),
    }  # fmt: skip
    first = {k: stored_as(torch.randn(s) / s[1] ** 0.5, Format.Q4_1) for k, s in shapes.items()}
    embedding = stored_as(torch.randn(vocab, n) * 0.5, Format.Q8_0)
    tensors: dict = {EMBEDDING: embedding, HEAD: embedding, NORM: torch.ones(n)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        for k, w in first.items():
            tensors[f"{prefix}.{k}.weight"] = PackedTensor(w.format, w.shape, w.data.clone())
        for k in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{k}.weight"] = torch.ones(n)
    keys = (DECODE, VERIFY_4, GraphKey(Mode.PREFILL, 32 if tiny else 256))
    binding = target_binding(
        config, tensors, context, keys, working=Format.BF16, sequences=16 if tiny else 4
    )
    return Subject("demo target", on_device(binding, device), 0, (DECODE,))


def on_device(binding: Binding, device: torch.device) -> Binding:
    """The binding with its weights on `device`; what is one tensor stays one."""
    moved: dict[int, object] = {}

    def there(value):
        if id(value) not in moved:
            packed = isinstance(value, PackedTensor)
            moved[id(value)] = (
                PackedTensor(value.format, value.shape, value.data.to(device))
                if packed
                else value.to(device)
            )
        return moved[id(value)]

    fields = {f: getattr(binding, f) for f in binding.__dataclass_fields__}
    return type(binding)(**{**fields, "weights": {n: there(v) for n, v in binding.weights.items()}})


class MemoryPart:
    """A compiled binding where a part of an artifact is wanted,
    without writing gigabytes to a disk.
    """

    def __init__(self, compiled: Compiled) -> None:
        self._compiled = compiled
        self.binding = compiled.binding.name
        self.keys = tuple(compiled.plans)
        self.states = dict(compiled.binding.states)
        self.context, self.memory = compiled.context, compiled.memory()
        self.digest = next(iter(compiled.plans.values())).digest
        self._uses = {use.id: use for use in compiled.weights}

    def plan(self, key: GraphKey):
        """The plan of `key`."""
        return self._compiled.plans[key]

    def built(self, name: str) -> Path:
        """The path of a generated module."""
        return self._compiled.built[name]

    def weight_bytes(self, name: str, layout: str, device: torch.device) -> torch.Tensor:
        """A packed weight on the device, uint8."""
        use = self._uses[f"{name}@{layout}"]
        weights, merged = self._compiled.binding.weights, use.slot.merged
        value = merged_rows(merged, weights) if merged else weights[use.slot.name]
        if isinstance(value, PackedTensor):
            return torch.from_numpy(self._compiled.packer.pack(value, layout)).to(device)
        return value.contiguous().reshape(-1).view(torch.uint8)


class _Direct:
    """Takes weights from the device's own memory."""

    def _weight(self, buffer) -> torch.Tensor:
        return self.part.weight_bytes(buffer.name, buffer.layout, self.device)


class DirectGraphs(_Direct, CudaGraphRunner):
    """Captured graphs over weights that are on the device already."""


class DirectLaunches(_Direct, TritonRunner):
    """Single launches over weights that are on the device already."""


def runner_of(compiled: Compiled) -> TritonRunner:
    """Captured graphs on a device, single launches under the interpreter."""
    return (DirectLaunches if interpreting() else DirectGraphs)(MemoryPart(compiled))
