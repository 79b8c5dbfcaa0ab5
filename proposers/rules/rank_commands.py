"""Commands that the leading rank of a sharded model sends to its workers, as 32-bit words, and what
they answer: every rank runs the same propose and the same verify.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum

from proposers.rules.errors import BadRankWords
from proposers.rules.ladder import MOST_SEQUENCES

MOST_ROWS = 32  # of one sequence in a verify
_WORD = 1 << 32


class Code(IntEnum):
    """The first word of a command."""

    VERIFY_K2 = 0xFFFFFFF2
    MTP_PROPOSE = 0xFFFFFFF5
    VERIFY_KGAMMA = 0xFFFFFFF6
    VERIFY_BATCH = 0xFFFFFFF9


class ProposePayload(Enum):
    """Words after the code of a propose: sources disagree on the last one."""

    DOCUMENTED = 3  # last token, position, number of drafts
    WITH_HIDDEN_ROW = 4  # and the row of the newest saved hidden, as engines send it


@dataclass(frozen=True)
class Wire:
    """What both ends agree on: the propose's payload, and the sequences of a batched verify."""

    propose_payload: ProposePayload = ProposePayload.WITH_HIDDEN_ROW
    most_sequences: int = MOST_SEQUENCES


@dataclass(frozen=True)
class MtpPropose:
    """Draft `num_drafts` tokens after `last_token`, which stands at `position`.

    `hidden_row` is the row of the newest saved hidden; None where the payload has no such word.
    """

    last_token: int
    position: int
    num_drafts: int
    hidden_row: int | None = None


@dataclass(frozen=True)
class VerifyPair:
    """Verify the newest token and one draft; the answer is whether the draft was accepted."""

    tokens: tuple[int, int]


@dataclass(frozen=True)
class VerifyBlock:
    """Verify 2 to 32 rows of one sequence; the answer is how many of its tokens are committed."""

    tokens: tuple[int, ...]


@dataclass(frozen=True)
class VerifyBatch:
    """Verify equally many rows of several sequences; each answers its committed count."""

    slots: tuple[int, ...]
    tokens: tuple[tuple[int, ...], ...]


Verify = VerifyPair | VerifyBlock | VerifyBatch


def encode(command: MtpPropose | Verify, wire: Wire | None = None) -> tuple[int, ...]:
    """The words of a command; BadRankWords if the other end would refuse them."""
    wire = wire or Wire()
    if isinstance(command, MtpPropose):
        row = () if command.hidden_row is None else (command.hidden_row,)
        payload = (command.last_token, command.position, command.num_drafts, *row)
        words = (int(Code.MTP_PROPOSE), *payload)
    elif isinstance(command, VerifyPair):
        words = (int(Code.VERIFY_K2), *command.tokens)
    elif isinstance(command, VerifyBlock):
        words = (int(Code.VERIFY_KGAMMA), len(command.tokens), *command.tokens)
    else:
        counts = [len(tokens) for tokens in command.tokens]
        flat = [token for tokens in command.tokens for token in tokens]
        words = (int(Code.VERIFY_BATCH), len(command.slots), *counts[:1], *command.slots, *flat)
        if len(counts) != len(command.slots) or len(set(counts)) > 1:
            problem = f"its {len(command.slots)} slots have {counts} rows"
            raise BadRankWords(words=words, problem=problem)
    decode(words, wire)
    return words


def decode(words: Sequence[int], wire: Wire | None = None) -> MtpPropose | Verify:
    """The command of its words, none missing and none left over; else BadRankWords."""
    wire = wire or Wire()
    if not all(0 <= word < _WORD for word in words):
        raise BadRankWords(words=words, problem="a word is not of 32 bits")
    if not words or words[0] not in list(Code):
        raise BadRankWords(words=words, problem="its first word is no command")
    code, payload = Code(words[0]), tuple(words[1:])
    if code is Code.MTP_PROPOSE:
        _counted(words, 1 + wire.propose_payload.value)
        return MtpPropose(*payload)
    if code is Code.VERIFY_K2:
        _counted(words, 3)
        return VerifyPair(payload)
    if code is Code.VERIFY_KGAMMA:
        rows = _between(words, payload[:1], "rows", MOST_ROWS)
        _counted(words, 2 + rows)
        return VerifyBlock(payload[1:])
    count = _between(words, payload[:1], "sequences", wire.most_sequences)
    rows = _between(words, payload[1:2], "rows", MOST_ROWS)
    _counted(words, 3 + count + count * rows)
    slots, tokens = payload[2 : 2 + count], payload[2 + count :]
    if len(set(slots)) != count:
        raise BadRankWords(words=words, problem="a slot occurs twice")
    return VerifyBatch(slots, tuple(tokens[at : at + rows] for at in range(0, len(tokens), rows)))


def committed_of(command: Verify, verdict: Sequence[int]) -> tuple[int, ...] | None:
    """Tokens that each sequence commits, its newest token counted; None: the verify failed.

    A pair is answered by the accept bit. A failed batch is answered by zeros only: it commits
    nothing anywhere, so that a zero among other words is no verdict.
    """
    if isinstance(command, VerifyPair):
        _verdict(verdict, 1, range(2))
        return (1 + verdict[0],)
    if isinstance(command, VerifyBlock):
        _verdict(verdict, 1, range(1, len(command.tokens) + 1))
        return tuple(verdict)
    if len(verdict) == len(command.slots) and not any(verdict):
        return None
    _verdict(verdict, len(command.slots), range(1, len(command.tokens[0]) + 1))
    return tuple(verdict)


def worker_length(length_after: int, rows: int, committed: int) -> int:
    """The length that a worker sets after a verify of `rows` rows left its sequence at
    `length_after`: the rows that were not committed are taken back.
    """
    assert 1 <= committed <= rows <= length_after
    return length_after - rows + committed


def _counted(words: Sequence[int], count: int) -> None:
    """Refuses a command of another number of words."""
    if len(words) != count:
        raise BadRankWords(words=words, problem=f"it has {len(words)} words, not {count}")


def _between(words: Sequence[int], given: Sequence[int], what: str, most: int) -> int:
    """The count that a word gives, from 2 to `most`."""
    if not given or not 2 <= given[0] <= most:
        raise BadRankWords(words=words, problem=f"it is not of 2 to {most} {what}")
    return given[0]


def _verdict(words: Sequence[int], count: int, allowed: range) -> None:
    """Refuses a verdict of another number of words, or with a word out of its range."""
    if len(words) != count or any(word not in allowed for word in words):
        raise BadRankWords(
            words=words,
            problem=f"a verdict is {count} words of {allowed.start} to {allowed.stop - 1}",
        )
