"""The weights of an artifact as a GGUF file, byte for byte, so that
llama.cpp can be timed on the very same.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

from circuit.models.convert import Stored, WeightOption, converted
from codegen.store import scratch, sync, writing
from ir.tensor import Format, PackedTensor, TensorType

FILE_TYPES = {WeightOption.F32: 0, WeightOption.Q8_0: 7, WeightOption.BF16: 32}
SKIPPED = ("general.architecture", "general.file_type")


def gguf_copy(source: Path, wanted: WeightOption, folder: Path, name: str) -> Path:
    """The path in `folder` of the GGUF file `source` with its matrices in the format `wanted`.

    Rows are converted as they are for the artifact (GGUF orders the rows of q and k otherwise, and
    conversion is by rows), so the numbers are the same. A file that is there already is not written
    again.
    """
    final = folder / f"{name}-{wanted.value}.gguf"
    if final.is_file():
        return final
    with writing(final), scratch(folder) as room:
        _write(source, wanted, room / final.name)
        sync(room / final.name)
        os.replace(room / final.name, final)
    return final


def _write(source: Path, wanted: WeightOption, path: Path) -> None:
    from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter

    reader = GGUFReader(source)
    writer = GGUFWriter(path, str(reader.fields["general.architecture"].contents()))
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in SKIPPED:
            continue
        kind = field.types[0]
        inner = field.types[-1] if kind == GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), kind, sub_type=inner)
    writer.add_uint32("general.file_type", FILE_TYPES[wanted])
    for tensor in reader.tensors:
        value = converted({tensor.name: _value(tensor)}, wanted)[tensor.name]
        kind = GGMLQuantizationType[TensorType.of(value).format.name]
        writer.add_tensor(tensor.name, _raw(value), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _value(tensor: Any) -> Stored:
    """A tensor of the reader as this package holds it; `shape` there counts from the innermost."""
    shape = tuple(int(d) for d in reversed(tensor.shape))
    format = Format[tensor.tensor_type.name]
    if format.is_block:
        return PackedTensor(format, shape, torch.from_numpy(np.array(tensor.data)))
    plain = torch.from_numpy(np.array(tensor.data))
    return plain.view(torch.bfloat16).reshape(shape) if format is Format.BF16 else plain


def _raw(value: Stored) -> np.ndarray:
    if isinstance(value, PackedTensor):
        return value.data.reshape(value.shape[0], -1).numpy()
    if value.dtype is torch.bfloat16:
        return value.view(torch.uint8).numpy()
    return value.contiguous().numpy()
