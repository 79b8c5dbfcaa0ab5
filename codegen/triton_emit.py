"""From a lowered region to the text of a Triton kernel with the record by which it is launched."""

from __future__ import annotations

import math
from collections.abc import Callable

from codegen.kernel import Kernel
from codegen.lower import Lowered, Operand
from codegen.triton_body import body
from codegen.triton_cache import attention, kv_write
from codegen.triton_holes import Draft, render
from codegen.triton_linear import linear
from codegen.triton_schedule import TritonSchedule
from codegen.triton_tiles import attention_tiles, in_tiles
from ir.format import BLOCK, Format

POINTER_TYPES = {
    Format.F32: "fp32", Format.F16: "fp16", Format.BF16: "bf16", Format.I32: "i32",
    Format.I64: "i64", Format.U8: "u8", Format.BOOL: "u8",
    Format.Q8_0: "i8", Format.Q4_0: "u8", Format.Q4_1: "u8",
}  # fmt: skip
EMITTERS: dict[str, Callable[[Lowered, TritonSchedule], Draft]] = {
    "linear": linear, "attention": attention, "tree_attention": attention, "kv_write": kv_write,
}  # fmt: skip


def pieces(operand: Operand) -> list[tuple[str, int, str]]:
    """(parameter name, byte offset, element type) of the parts of a buffer that kernels read."""
    type_ = operand.type
    if not type_.format.is_block:
        return [(operand.name, 0, POINTER_TYPES[type_.format])]
    count = math.prod(type_.shape)
    quants = count if type_.format is Format.Q8_0 else count // 2
    parts = [
        (operand.name, 0, POINTER_TYPES[type_.format]),
        (f"{operand.name}_scale", quants, "fp16"),
    ]
    if type_.format is Format.Q4_1:
        parts.append((f"{operand.name}_least", quants + count // BLOCK * 2, "fp16"))
    return parts


def emit(lowered: Lowered, schedule: TritonSchedule) -> Kernel:
    """The kernel of a region, with the record by which it is launched."""
    name = None if lowered.anchor is None else lowered.anchor.target.name
    tiles = in_tiles(lowered) and schedule.rows > 0
    write = attention_tiles if tiles else EMITTERS[name] if name else body
    draft = write(lowered, schedule)
    parameters, names = [], []
    for number, operand in enumerate((*lowered.reads, *lowered.writes)):
        for piece, offset, type_ in pieces(operand):
            names.append(piece)
            parameters.append((number, offset, type_))
    if draft.scratch_bytes:
        names.append("scratch")
        parameters.append((len(lowered.reads) + len(lowered.writes), 0, "fp32"))
    if draft.counters:
        names.append("counters")
        parameters.append((-1, 0, "i32"))
    text = render(draft.template, parameters=", ".join(names), label=lowered.label, **draft.holes)
    lines = [line.rstrip() for line in text.splitlines()]
    source = "\n".join(line for line in lines if line) + "\n"
    record = (
        f'KERNELS["@KERNEL@"] = (\n    @KERNEL@, {draft.grid}, {draft.warps}, {draft.stages}, '
        f"{draft.counters},\n    {tuple(parameters)},\n)\n"
    )
    return Kernel.of(name or "body", f"{source}\n\n{record}", draft.scratch_bytes)
