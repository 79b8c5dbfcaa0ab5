"""What programs of a head are wanted."""

from __future__ import annotations

from dataclasses import dataclass

from ir.format import Format
from ir.key import DECODE, GraphKey, Mode


def head_keys(
    *, batches: tuple[int, ...] = (2, 4, 8, 16), chunk: int = 256, chain: int = 4, spine: int = 0
) -> tuple[GraphKey, ...]:
    """The programs of a head: one step, extend by 2 to 4 rows, `batches`, prompt chunks, chains,
    a step under a grammar mask, and spines of trees.
    """
    verify = tuple(GraphKey(Mode.VERIFY, rows) for rows in (2, 3, 4))
    batch = tuple(GraphKey(Mode.BATCH, rows) for rows in batches)
    chains = tuple(GraphKey(Mode.CHAIN, steps) for steps in range(1, chain + 1))
    spines = tuple(GraphKey(Mode.SPINE, steps) for steps in range(1, spine + 1))
    masked = GraphKey(Mode.MASKED, 1)
    return (DECODE, *verify, *batch, GraphKey(Mode.PREFILL, chunk), *chains, masked, *spines)


@dataclass(frozen=True)
class DraftOptions:
    """The programs to make of a head: keys, context in rows, working
    format, sequences that share the cache.

    `sequences` None stands for the widest BATCH of `keys`.
    """

    max_context: int
    keys: tuple[GraphKey, ...] = head_keys()
    working: Format = Format.F32
    sequences: int | None = None

    @property
    def cached_sequences(self) -> int:
        """Contexts that fit the cache at once."""
        if self.sequences is not None:
            return self.sequences
        return max((key.rows for key in self.keys if key.mode is Mode.BATCH), default=1)
