"""Single elements of block formats in Triton code; products read whole tiles of blocks instead."""

from __future__ import annotations

from typing import TYPE_CHECKING

from codegen.expr import Expr, idiv, imod
from codegen.lower import Operand
from ir.format import BLOCK, Format, TensorType

if TYPE_CHECKING:
    from codegen.tiles import TileWriter


def block_element(
    w: TileWriter, operand: Operand, index: tuple[Expr, ...], mask: str
) -> str:  # fmt: skip
    """Text of one element of a block format in f32, from quants and scales that lie apart."""
    row, column = index
    name, format = operand.name, operand.type.format

    def load(stem: str, per: int) -> str:
        shape = (*operand.type.shape[:-1], -(-operand.type.shape[-1] // per))
        part = Operand(stem, "", TensorType(shape, format))
        return w.load(w.address(part, (row, idiv(column, per))), mask)

    scale = f"{load(f'{name}_scale', BLOCK)}.to(tl.float32)"
    if format is Format.Q8_0:
        return f"({load(name, 1)}.to(tl.float32) * {scale})"
    byte, half = load(name, 2), w.value(imod(column, 2))
    quant = f"(({byte}.to(tl.int32) >> ({half}) * 4) & 15).to(tl.float32)"
    if format is Format.Q4_0:
        return f"(({quant} - 8.0) * {scale})"
    return f"({quant} * {scale} + {load(f'{name}_least', BLOCK)}.to(tl.float32))"
