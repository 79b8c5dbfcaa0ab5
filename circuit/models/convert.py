"""The weights of a target in the formats that a build asks for."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

import torch

from circuit.models.errors import CheckpointError
from ir.format import BLOCK, Format, TensorType
from ir.quantize import stored_as
from ir.tensor import PackedTensor

Stored = torch.Tensor | PackedTensor


class WeightsUnfit(CheckpointError):
    says = "{name} has {columns} columns, which {format} cannot hold"
    hint = "block formats hold rows in groups of 32; choose --weights native, bf16 or f32"


class WeightOption(Enum):
    """What matrices are stored as in an artifact; vectors are always f32."""

    NATIVE = "native"  # as in the file; f16, which no kernel reads, becomes f32
    F32 = "f32"
    BF16 = "bf16"
    Q8_0 = "q8_0"

    def format(self, have: Format) -> Format:
        """The format of a matrix that is stored as `have`."""
        if self is WeightOption.NATIVE:
            return Format.F32 if have is Format.F16 else have
        return Format(self.value)


def converted(tensors: Mapping[str, Stored], option: WeightOption) -> dict[str, Stored]:
    """The weights with matrices in the format of `option`; names that
    share a tensor go on sharing it.

    bf16 rounds to nearest even; q8_0 is what a GGUF writer makes of the same numbers.
    """
    made: dict[int, tuple[Stored, Stored]] = {}  # the value is kept, so that its id stays its own
    out = {}
    for name, value in tensors.items():
        if id(value) not in made:
            made[id(value)] = value, _convert(name, value, option)
        out[name] = made[id(value)][1]
    return out


def _convert(name: str, value: Stored, option: WeightOption) -> Stored:
    if value.ndim == 1:
        return stored_as(value, Format.F32)
    format = option.format(TensorType.of(value).format)
    if format.is_block and value.shape[-1] % BLOCK:
        raise WeightsUnfit(name=name, columns=value.shape[-1], format=format.value)
    return stored_as(value, format)
