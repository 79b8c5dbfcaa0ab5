"""Compiles every Triton kernel of programs of real sizes ahead of
time; prints what each uses, as JSON.

Run as a program of its own, since kernels are not compiled in a process whose Triton interprets
them.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import programs

from circuit.models.target import EMBEDDING, NORM, cache_states, target_program
from codegen.aot import compile_kernel, load_unit, sums_along_k, usage
from codegen.backend_triton import TritonBackend
from codegen.kernel import Kernel
from codegen.lower import lower
from codegen.schedules import ScheduleBook
from ir.graph import Graph, GraphKey
from ir.ops import attention, merge_heads, rms_norm, rope, split_heads
from ir.passes.manager import run_pipeline
from ir.tensor import Format, TensorType
from ir.tracing import Scope, trace
from proposers import mtp_program
from proposers.config import Contract, HeadConfig

ARCHS = (80, 90, 100)
PRELUDE = "import triton\nimport triton.language as tl\n\nKERNELS = {}\n\n\n"


def rotary(context: int, pairs: int) -> dict[str, TensorType]:
    """Types of the rotary tables."""
    table = TensorType((context, pairs), Format.F32)
    return {"rope.cos": table, "rope.sin": table}


def head(key: GraphKey, context: int = 4096) -> Graph:
    """A head beside a target of the 8B class: bf16, 32 heads on 8, 32768 of 151936 ids scored."""
    c = HeadConfig(4096, 12288, 32, 8, 128, 1e-6, 32768, 151936)
    contract = Contract(qk_norm=True)
    n, norm = c.hidden_size, TensorType((c.hidden_size,), Format.F32)
    weights = {
        mtp_program.EMBEDDING: TensorType((c.target_vocab_size, n), Format.BF16),
        mtp_program.HEAD: TensorType((c.vocab_size, n), Format.BF16),
        mtp_program.DRAFT_IDS: TensorType((c.vocab_size,), Format.I32),
        "mtp.fc.weight": TensorType((n, 2 * n), Format.BF16),
        "mtp.pre_fc_norm_embedding.weight": norm, "mtp.pre_fc_norm_hidden.weight": norm,
        "mtp.norm.weight": norm, **rotary(context, 64),
        **programs.block_types(mtp_program.LAYER, c, Format.BF16, qk_norm=True),
    }  # fmt: skip
    states = cache_states(1, 8, 128, Format.BF16, 1 + 8 * context // 16)
    program = mtp_program.mtp_program(contract, c, context, mapped=True, working=Format.BF16)
    return trace(program, key, weights, states, "draft")


def target(key: GraphKey, context: int = 2048) -> Graph:
    """The demo's target, two of its thirty equal layers: Q4_1, 9
    heads on 3, Q8_0 embedding, tied.
    """
    c = programs.target_config(
        hidden_size=576, intermediate_size=1536, vocab_size=49152, num_attention_heads=9,
        num_key_value_heads=3, head_dim=64, tie_word_embeddings=True,
    )  # fmt: skip
    weights = {
        EMBEDDING: TensorType((49152, 576), Format.Q8_0), NORM: TensorType((576,), Format.F32),
        **rotary(context, 32),
    }  # fmt: skip
    for layer in range(2):
        weights |= programs.block_types(f"model.layers.{layer}", c, Format.Q4_1)
    states = cache_states(2, 3, 64, Format.F16, 1 + 16 * context // 16)
    return trace(target_program(c, context, Format.BF16), key, weights, states, "target")


def attended(key: GraphKey, context: int = 4096) -> Graph:
    """Attention of 32 heads of 128 columns on 8 in bf16, its queries normed and turned."""
    rows, heads, dim = key.rows, 32, 128

    def program(s: Scope) -> None:
        at = (s.input("tables", 1, context // 16), s.input("row_sequence", rows))
        q = split_heads(s.input("q", rows, heads * dim, format=Format.BF16), heads=heads)
        q = rms_norm(q, s.weight("norm"), eps=1e-6)
        q = rope(q, s.input("positions", rows), s.weight("rope.cos"), s.weight("rope.sin"))
        y = attention(q, s.state("kv"), *at, s.input("indices", rows), scale=dim**-0.5)
        s.output("y", merge_heads(y))

    weights = {"norm": TensorType((dim,), Format.F32), **rotary(context, 64)}
    kv = TensorType((1 + context // 16, 2, 8, 16, dim), Format.BF16)
    return trace(program, key, weights, {"kv": kv}, "attended")


MODELS = {"head": head, "target": target, "attended": attended}
KEYS = {
    "head": ("DECODE", "VERIFY_4", "BATCH_16", "PREFILL_256", "SPINE_1"),
    "target": ("DECODE", "VERIFY_4", "BATCH_8", "PREFILL_256", "TREE_8"),
    "attended": ("PREFILL_256",),
}


def kernels(model: str) -> Iterator[tuple[str, Kernel]]:
    """(region label, kernel) of every distinct kernel of a model's keys."""
    backend, seen = TritonBackend(), set()
    for text in KEYS[model]:
        graph = run_pipeline(MODELS[model](GraphKey.parse(text)), backend.pass_facts())
        for region in graph.regions():
            lowered = lower(graph, region)
            assert not backend.problems(lowered)
            kernel = backend.emit(lowered, ScheduleBook().choose(lowered, backend), {})
            if kernel.name not in seen:
                seen.add(kernel.name)
                yield f"{text} {lowered.label}", kernel


def main(model: str) -> None:
    """Prints one JSON list: label, and usage per arch, of every kernel of `model`."""
    made = list(kernels(model))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "unit.py"
        path.write_text(PRELUDE + "\n\n".join(k.source for _, k in made))
        records = load_unit(path).KERNELS
        found = []
        for label, k in made:
            for arch in ARCHS:
                compiled = compile_kernel(records[k.name], arch)
                used = asdict(usage(compiled, k.name, arch))
                found.append({"label": label, "sums": sums_along_k(compiled), **used})
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
