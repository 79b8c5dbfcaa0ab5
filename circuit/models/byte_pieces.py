"""The bytes that each id of a tokenizer stands for, read from its vocabulary and decoder."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from circuit.models.errors import TokenizerRefused

BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
SPACE_MARK = "\u2581"


@dataclass(frozen=True)
class Pieces:
    """Bytes by id, worked out when first asked for; an id that the tokenizer lacks stands for none.

    `strip_first_space` tells that the tokenizer puts a space before a text, which decoding drops.
    """

    texts: tuple[str | None, ...]
    added: Mapping[int, str]
    read: Callable[[str], bytes]
    count: int
    strip_first_space: bool
    known: dict[int, bytes] = field(default_factory=dict, repr=False)

    def __getitem__(self, token: int) -> bytes:
        piece = self.known.get(token)
        if piece is None:
            text = self.texts[token]
            if token in self.added:
                piece = self.added[token].encode("utf-8")
            else:
                piece = b"" if text is None else self.read(text)
            self.known[token] = piece
        return piece


def piece_bytes(path: Path, backend, spec: Mapping[str, object], vocab_size: int) -> Pieces:
    """The pieces of `backend`, whose parsed tokenizer.json is `spec`.

    Raises TokenizerRefused when an id does not fit `vocab_size`, or the decoder is not one whose
    ids stand for fixed bytes.
    """
    read, strip = _reading(path, spec.get("decoder"))
    vocab = backend.get_vocab(with_added_tokens=True)
    highest = max(vocab.values(), default=-1)
    if highest >= vocab_size:
        why = f"its highest id is {highest} and the model has {vocab_size} rows of embedding"
        raise TokenizerRefused(path=path, why=why)
    texts: list[str | None] = [None] * vocab_size
    for text, token in vocab.items():
        texts[token] = text
    added = {token: entry.content for token, entry in backend.get_added_tokens_decoder().items()}
    return Pieces(tuple(texts), added, read, len(vocab), strip)


def _reading(path: Path, decoder: Mapping | None):
    """How a vocabulary entry is read as bytes, and whether a first space is dropped."""
    kind = (decoder or {}).get("type")
    if kind == "ByteLevel":
        return byte_level_bytes, False
    if kind == "Metaspace":
        return marked_bytes, decoder.get("prepend_scheme", "always") != "never"
    steps = [step.get("type") for step in (decoder or {}).get("decoders", ())]
    if kind == "Sequence" and set(steps) <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
        return marked_bytes, "Strip" in steps
    if kind == "Sequence" and set(steps) == {"ByteLevel"}:
        return byte_level_bytes, False
    raise TokenizerRefused(path=path, why=f"its decoder is {kind} {steps or ''}".rstrip())


def byte_level_bytes(text: str) -> bytes:
    """The bytes of a byte-level entry, in which each character stands for one byte."""
    table = byte_of_character()
    try:
        return bytes(table[character] for character in text)
    except KeyError:
        return text.encode("utf-8")


def marked_bytes(text: str) -> bytes:
    """The bytes of an entry that marks spaces by U+2581 and spells a lone byte as <0x41>."""
    lone = BYTE_PIECE.fullmatch(text)
    return bytes([int(lone[1], 16)]) if lone else text.replace(SPACE_MARK, " ").encode("utf-8")


@cache
def byte_of_character() -> dict[str, int]:
    """The byte of each character in byte-level BPE.

    Printable Latin-1 characters stand for themselves; the other bytes take the characters from
    U+0100 on, in order.
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(plain)]
    table = {chr(byte): byte for byte in plain}
    table.update((chr(0x100 + place), byte) for place, byte in enumerate(others))
    return table
