"""Block formats are written byte for byte as the `gguf` package writes them, and read back."""

import numpy as np
import pytest
import torch

from ir.format import Format
from ir.quantize import quantized, stored_as
from ir.tensor import PackedTensor

gguf = pytest.importorskip("gguf")
BLOCK_FORMATS = [Format.Q8_0, Format.Q4_0, Format.Q4_1]


def reference(values: torch.Tensor, format: Format) -> np.ndarray:
    """The bytes of `values` by the `gguf` package."""
    kind = gguf.GGMLQuantizationType[format.name]
    return gguf.quants.quantize(values.numpy(), kind)


@pytest.mark.parametrize("format", BLOCK_FORMATS)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 300.0])
def test_bytes_are_those_of_gguf(format, scale):
    values = torch.randn(37, 96, generator=torch.Generator().manual_seed(3)) * scale
    values[5] = 0
    values[6, :32] = -1.5
    packed = quantized(values, format)
    assert np.array_equal(packed.data.numpy(), reference(values, format))
    kind = gguf.GGMLQuantizationType[format.name]
    assert np.array_equal(
        packed.dequantize().numpy(), gguf.quants.dequantize(packed.data.numpy(), kind)
    )


def test_halves_round_away_from_zero_as_in_gguf_files():
    values = torch.zeros(1, 32)
    values[0, :6] = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -2.5])
    assert np.array_equal(
        quantized(values, Format.Q8_0).data.numpy(), reference(values, Format.Q8_0)
    )
    assert quantized(values, Format.Q8_0).dequantize()[0, :6].tolist() == [127, 1, 2, 3, -1, -3]


def test_a_value_stored_so_already_is_itself():
    plain = torch.randn(4, 32)
    assert stored_as(plain, Format.F32) is plain
    packed = stored_as(plain, Format.Q8_0)
    assert isinstance(packed, PackedTensor) and stored_as(packed, Format.Q8_0) is packed
    assert stored_as(packed, Format.BF16).dtype == torch.bfloat16
