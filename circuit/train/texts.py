"""Texts with the target's hiddens: in memory, and as shards in a folder."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from circuit.train.errors import BrokenRun
from codegen.store import write_atomically

SHARD = "texts-{:04d}.safetensors"
OPENING = 48


@dataclass(frozen=True)
class Written:
    """One text: `ids` [n], the hiddens [n - 1, h] of all its rows but
    the last, where the answer begins.

    `greedy`: every token of the answer is the target's first choice.
    """

    ids: torch.Tensor
    hidden: torch.Tensor
    start: int
    greedy: bool

    @property
    def answer(self) -> int:
        """Tokens of the answer."""
        return len(self.ids) - self.start


class Openings:
    """What texts open with: an answer that opens as one before it teaches next to nothing more."""

    def __init__(self, texts: Iterable[Written] = ()) -> None:
        self._known = {self._of(text) for text in texts}

    def add(self, text: Written) -> bool:
        """True if no text before opened so; this one is known from now on."""
        before = len(self._known)
        self._known.add(self._of(text))
        return len(self._known) > before

    @staticmethod
    def _of(text: Written) -> bytes:
        """The first tokens of the answer; of a shorter one the whole text, prompt included."""
        opening = text.ids[text.start : text.start + OPENING]
        return (opening if len(opening) == OPENING else text.ids).numpy().tobytes()


def shards(folder: Path) -> list[Path]:
    """The shards in `folder`, in order; the first gap ends the list."""
    found: list[Path] = []
    while (path := folder / SHARD.format(len(found))).is_file():
        found.append(path)
    return found


def save_shard(path: Path, texts: Sequence[Written], asked: int = 0) -> None:
    """Writes `texts` as one file, hiddens in bf16; the file is whole or not there.

    `asked` is how many requests of the list had been given when they were written.
    """
    tensors = {
        "ids": torch.cat([t.ids.to(torch.int32) for t in texts]),
        "hidden": torch.cat([t.hidden.bfloat16() for t in texts]),
        "lengths": torch.tensor([len(t.ids) for t in texts], dtype=torch.int32),
        "starts": torch.tensor([t.start for t in texts], dtype=torch.int32),
        "greedy": torch.tensor([t.greedy for t in texts], dtype=torch.uint8),
        "asked": torch.tensor([asked]),
    }
    write_atomically(path, save(tensors))


def read_shard(path: Path) -> tuple[list[Written], int]:
    """The texts of a shard and its count of requests; BrokenRun if it is none."""
    try:
        t = load_file(path)
        table = zip(t["lengths"].tolist(), t["starts"].tolist(), t["greedy"].tolist(), strict=True)
        asked = int(t["asked"])
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise BrokenRun(path=path, problem=error) from error
    texts: list[Written] = []
    at = row = 0
    for length, start, greedy in table:
        ids, hidden = t["ids"][at : at + length], t["hidden"][row : row + length - 1]
        texts.append(Written(ids, hidden, start, bool(greedy)))
        at, row = at + length, row + length - 1
    return texts, asked
