"""Inputs of a program from rows of sequences: what `check` and
`bench` give to every runner alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ir.format import TensorType
from ir.key import GraphKey, Mode

Feed = dict[str, np.ndarray]

EVERY_ID = -1  # a word of a grammar mask that forbids nothing: the token is that of the logits


@dataclass(frozen=True)
class Row:
    """A row of a program: its token, its number in its sequence, and
    (heads) the hidden it continues.

    `offset` is the rotary position minus the row's number, `parent` the row of the program that a
    row of a TREE continues.
    """

    token: int
    index: int
    hidden: np.ndarray | None = None
    offset: int = 0
    parent: int = 0


def feed(
    key: GraphKey, types: Mapping[str, TensorType], rows: Sequence[Row],
    tables: Sequence[np.ndarray],
) -> Feed:  # fmt: skip
    """The inputs of `key`, of `types`, for `rows` over the block tables of their sequences.

    Row i belongs to sequence i of a BATCH and to the only sequence elsewhere. Missing rows up to
    the program's count are padding (index -1).
    """
    count = types["ids"].shape[0]
    assert len(rows) <= count, f"{len(rows)} rows do not fit {key}"
    made = {n: np.zeros(t.shape, "f4" if t.format.is_float else "i4") for n, t in types.items()}
    made["indices"][:] = -1
    for at, row in enumerate(rows):
        made["ids"][at] = row.token
        made["indices"][at] = row.index
        made["positions"][at] = row.index + row.offset
        if "parents" in made:
            made["parents"][at] = row.parent
        if row.hidden is not None:
            made["hidden"][at] = row.hidden
    width = types["tables"].shape[1]
    for at, table in enumerate(tables):
        made["tables"][at, : min(width, len(table))] = table[:width]
    if key.mode is Mode.BATCH:
        made["row_sequence"][:] = np.arange(count)
    if "bitmask" in made:
        made["bitmask"][:] = EVERY_ID
    if "last_row" in made:
        made["last_row"][0] = len(rows) - 1
    return made


def in_order(keys: Iterable[GraphKey]) -> list[GraphKey]:
    """Keys by mode, in the order in which modes are declared, then by rows."""
    modes = list(Mode)
    return sorted(keys, key=lambda key: (modes.index(key.mode), key.rows))


def parse_keys(given: str | None) -> frozenset[GraphKey] | None:
    """The keys that a comma-separated option names; None where it names none."""
    from circuit.options import BadOption

    if given is None:
        return None
    found = set()
    for word in filter(None, (w.strip() for w in given.upper().split(","))):
        try:
            found.add(GraphKey.parse(word))
        except (KeyError, ValueError) as error:
            raise BadOption(
                name="--keys", given=given, problem=f"{word} is not a key",
                advice="Keys are DECODE, VERIFY_2, BATCH_4, PREFILL_256, TREE_6, CHAIN_3, ...",
            ) from error  # fmt: skip
    return frozenset(found)
