"""Commands between the ranks of a sharded model: their words, verdicts and lengths."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proposers.rules.errors import BadRankWords
from proposers.rules.rank_commands import (
    Code,
    MtpPropose,
    ProposePayload,
    VerifyBatch,
    VerifyBlock,
    VerifyPair,
    Wire,
    committed_of,
    decode,
    encode,
    worker_length,
)

WORDS = st.integers(0, 2**32 - 1)
BATCH = VerifyBatch((4, 0), ((7, 8, 9), (5, 6, 2)))
DOCUMENTED = Wire(ProposePayload.DOCUMENTED)


@pytest.mark.parametrize(
    "command, words",
    [
        (MtpPropose(7, 30, 3, 29), [0xFFFFFFF5, 7, 30, 3, 29]),
        (VerifyPair((7, 8)), [0xFFFFFFF2, 7, 8]),
        (VerifyBlock((7, 8, 9)), [0xFFFFFFF6, 3, 7, 8, 9]),
        (BATCH, [0xFFFFFFF9, 2, 3, 4, 0, 7, 8, 9, 5, 6, 2]),
    ],
)
def test_words_of_each_command(command, words):
    assert list(encode(command)) == words and decode(words) == command


def test_a_propose_of_three_words_and_of_four():
    """Written descriptions name three words, engines send the hidden's row as a fourth."""
    short, whole = MtpPropose(7, 30, 3), MtpPropose(7, 30, 3, 29)
    assert encode(short, DOCUMENTED) == (0xFFFFFFF5, 7, 30, 3)
    assert decode(encode(short, DOCUMENTED), DOCUMENTED) == short
    assert decode(encode(whole), Wire(ProposePayload.WITH_HIDDEN_ROW)) == whole
    for command, wire, said in ((whole, DOCUMENTED, "5 words, not 4"),
                                (short, Wire(), "4 words, not 5")):  # fmt: skip
        with pytest.raises(BadRankWords, match=said):
            encode(command, wire)


@pytest.mark.parametrize(
    "words, said",
    [
        ([], "no command"), ([0xFFFFFFF3, 1, 2], "no command"), ([7, 8], "no command"),
        ([0xFFFFFFF2, 1], "2 words, not 3"), ([0xFFFFFFF2, 1, 2, 3], "4 words, not 3"),
        ([0xFFFFFFF2, 1, -1], "32 bits"), ([0xFFFFFFF2, 1, 2**32], "32 bits"),
        ([0xFFFFFFF6], "2 to 32 rows"), ([0xFFFFFFF6, 1, 5], "2 to 32 rows"),
        ([0xFFFFFFF6, 33, *range(33)], "2 to 32 rows"), ([0xFFFFFFF6, 3, 1, 2], "4 words, not 5"),
        ([0xFFFFFFF9, 1, 2, 0, 5, 6], "2 to 4 sequences"), ([0xFFFFFFF9], "2 to 4 sequences"),
        ([0xFFFFFFF9, 5, 2, *range(15)], "2 to 4 sequences"), ([0xFFFFFFF9, 2], "2 to 32 rows"),
        ([0xFFFFFFF9, 2, 1, 0, 1, 5, 6], "2 to 32 rows"),
        ([0xFFFFFFF9, 2, 2, 0, 1, 5, 6, 7], "8 words, not 9"),
        ([0xFFFFFFF9, 2, 2, 1, 1, 5, 6, 7, 8], "a slot occurs twice"),
    ],
)  # fmt: skip
def test_words_that_are_no_command_are_refused(words, said):
    with pytest.raises(BadRankWords, match=said):
        decode(words, Wire(most_sequences=4))


@pytest.mark.parametrize("tokens", [(), ((5, 6), (7, 8, 9)), ((5, 6, 7), (8, 9))])
def test_uneven_rows_are_not_sent(tokens):
    with pytest.raises(BadRankWords):
        encode(VerifyBatch((0, 1), tokens))


@given(st.one_of(
    st.builds(MtpPropose, WORDS, WORDS, WORDS, WORDS),
    st.builds(VerifyPair, st.tuples(WORDS, WORDS)),
    st.builds(VerifyBlock, st.lists(WORDS, min_size=2, max_size=32).map(tuple)),
    st.integers(2, 5).flatmap(lambda rows: st.lists(
        st.tuples(WORDS, st.tuples(*[WORDS] * rows)), min_size=2, max_size=5,
        unique_by=lambda pair: pair[0],
    )).map(lambda pairs: VerifyBatch(*map(tuple, zip(*pairs)))),
))  # fmt: skip
def test_every_command_reads_back(command):
    words = encode(command)
    assert decode(words) == command and words[0] in list(Code)
    with pytest.raises(BadRankWords):
        decode(words[:-1])
    with pytest.raises(BadRankWords):
        decode((*words, 0))


@pytest.mark.parametrize(
    "command, verdict, committed",
    [
        (VerifyPair((7, 8)), [0], (1,)), (VerifyPair((7, 8)), [1], (2,)),
        (VerifyBlock((7, 8, 9)), [1], (1,)), (VerifyBlock((7, 8, 9)), [3], (3,)),
        (BATCH, [3, 1], (3, 1)), (BATCH, [0, 0], None),
    ],
)  # fmt: skip
def test_what_a_verdict_commits(command, verdict, committed):
    assert committed_of(command, verdict) == committed


@pytest.mark.parametrize(
    "command, verdict",
    [
        (VerifyPair((7, 8)), [2]), (VerifyPair((7, 8)), []), (VerifyPair((7, 8)), [1, 1]),
        (VerifyBlock((7, 8, 9)), [0]), (VerifyBlock((7, 8, 9)), [4]),
        (BATCH, [0, 1]), (BATCH, [3, 0]), (BATCH, [4, 1]), (BATCH, [0]), (BATCH, [1, 1, 1]),
    ],
)  # fmt: skip
def test_words_that_are_no_verdict_are_refused(command, verdict):
    with pytest.raises(BadRankWords, match="a verdict is"):
        committed_of(command, verdict)


@pytest.mark.parametrize("committed, length", [(1, 31), (2, 32), (4, 34)])
def test_a_worker_takes_back_what_was_not_committed(committed, length):
    """30 rows and a verify of 4: the worker stands at 34 when the verdict comes."""
    assert worker_length(34, 4, committed) == length
