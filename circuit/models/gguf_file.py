"""A strict reader of GGUF headers: metadata and where each tensor lies, every bound checked.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little endian).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from circuit.models import stored
from circuit.models.errors import BadGguf, BadMagic, DuplicateKey, TruncatedGguf
from circuit.models.stored import MappedFile, StoredTensor

MAGIC = b"GGUF"
SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
STRING, ARRAY = 8, 9
READ_FORMATS = {
    0: stored.F32,
    1: stored.F16,
    2: stored.Q4_0,
    3: stored.Q4_1,
    8: stored.Q8_0,
    30: stored.BF16,
}
OTHER_FORMATS = {
    6: "Q5_0",
    7: "Q5_1",
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
}
MAX_DIMS = 4


@dataclass(frozen=True)
class GgufHeader:
    """The metadata of a GGUF file, by key, and its tensors, by the file's own names."""

    path: Path
    metadata: dict[str, object]
    tensors: dict[str, StoredTensor]
    file: MappedFile


class _Cursor:
    """A reading position that refuses to leave the file."""

    def __init__(self, file: MappedFile):
        self.file, self.at = file, 0

    def take(self, count: int, what: str) -> memoryview:
        """The next `count` bytes; raises TruncatedGguf when the file ends before them."""
        end = self.at + count
        if end > self.file.size:
            raise TruncatedGguf(path=self.file.path, what=what, need=end, have=self.file.size)
        piece = memoryview(self.file.map)[self.at : end]
        self.at = end
        return piece

    def scalar(self, code: str, what: str) -> object:
        """The next little-endian value of struct type `code`."""
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code), what))[0]

    def string(self, what: str) -> str:
        """The next length-prefixed UTF-8 string."""
        raw = bytes(self.take(self.scalar("Q", what), what))
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise BadGguf(
                path=self.file.path, why=f"{what} is not UTF-8 ({error.reason})"
            ) from None

    def value(self, kind: int, what: str) -> object:
        """The next metadata value of GGUF type `kind`."""
        if kind in SCALARS:
            return self.scalar(SCALARS[kind], what)
        if kind == STRING:
            return self.string(what)
        if kind != ARRAY:
            raise BadGguf(path=self.file.path, why=f"{what} has the unknown value type {kind}")
        item, count = self.scalar("I", what), self.scalar("Q", what)
        if item == STRING:
            return [self.string(what) for _ in range(count)]
        if item not in SCALARS:
            raise BadGguf(path=self.file.path, why=f"{what} is an array of the unknown type {item}")
        code = SCALARS[item]
        raw = self.take(count * struct.calcsize("<" + code), what)
        return list(struct.unpack(f"<{count}{code}", raw))


def read_gguf(path: Path) -> GgufHeader:
    """The header of the GGUF file at `path`; raises BadMagic,
    TruncatedGguf, DuplicateKey, BadGguf.
    """
    file = MappedFile(path)
    cursor = _Cursor(file)
    magic = bytes(file.map[:4])
    if magic != MAGIC:
        raise BadMagic(path=path, found=magic if magic else "nothing (the file is empty)")
    cursor.take(4, "the magic")
    version = cursor.scalar("I", "the version")
    if version not in (2, 3):
        swapped = version and version & 0xFFFF == 0
        raise BadGguf(path=path, why="it is big endian" if swapped else f"its version is {version}")
    tensor_count, key_count = cursor.scalar("Q", "the counts"), cursor.scalar("Q", "the counts")
    metadata: dict[str, object] = {}
    for _ in range(key_count):
        key = cursor.string("a metadata key")
        if key in metadata:
            raise DuplicateKey(path=path, key=f"the metadata key {key}")
        metadata[key] = cursor.value(cursor.scalar("I", key), f"the metadata value of {key}")
    records = [_tensor_record(cursor) for _ in range(tensor_count)]
    return GgufHeader(path, metadata, _place(cursor, metadata, records), file)


def _tensor_record(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """Name, shape (outermost first), type number and offset of the next tensor."""
    name = cursor.string("a tensor name")
    dims = cursor.scalar("I", f"the dimensions of {name}")
    if not 1 <= dims <= MAX_DIMS:
        raise BadGguf(path=cursor.file.path, why=f"{name} has {dims} dimensions")
    shape = tuple(reversed([cursor.scalar("Q", f"the shape of {name}") for _ in range(dims)]))
    return name, shape, cursor.scalar("I", f"the type of {name}"), cursor.scalar("Q", name)


def _place(cursor: _Cursor, metadata: dict, records: list) -> dict[str, StoredTensor]:
    """The tensors with absolute offsets; each lies inside the file,
    aligned, apart from the others.
    """
    path, size = cursor.file.path, cursor.file.size
    align = metadata.get("general.alignment", 32)
    if not isinstance(align, int) or align < 8 or align & (align - 1):
        raise BadGguf(
            path=path, why=f"general.alignment is {align!r}, not a power of two from 8 on"
        )
    start = -(-cursor.at // align) * align
    tensors: dict[str, StoredTensor] = {}
    for name, shape, number, offset in records:
        if name in tensors:
            raise DuplicateKey(path=path, key=f"the tensor {name}")
        if offset % align:
            raise BadGguf(path=path, why=f"{name} begins at {offset}, not a multiple of {align}")
        layout = READ_FORMATS.get(number)
        if layout is None:
            spelled = OTHER_FORMATS.get(number, f"type {number}")
            tensors[name] = StoredTensor(name, None, spelled, shape, path, start + offset, 0)
            continue
        if shape[-1] % layout.block:
            raise BadGguf(
                path=path,
                why=f"{name} has rows of {shape[-1]} numbers, which {layout.name} "
                f"cannot divide into blocks of {layout.block}",
            )
        nbytes = layout.nbytes(shape)
        if start + offset + nbytes > size:
            raise TruncatedGguf(
                path=path, what=f"tensor {name}", need=start + offset + nbytes, have=size
            )
        tensors[name] = StoredTensor(name, layout, layout.name, shape, path, start + offset, nbytes)
    _refuse_overlaps(path, tensors)
    return tensors


def _refuse_overlaps(path: Path, tensors: dict[str, StoredTensor]) -> None:
    """Raises BadGguf when two tensors share bytes."""
    placed = sorted((t for t in tensors.values() if t.nbytes), key=lambda t: t.offset)
    for before, after in pairwise(placed):
        if before.offset + before.nbytes > after.offset:
            raise BadGguf(path=path, why=f"{before.name} and {after.name} share bytes")
