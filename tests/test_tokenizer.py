"""Tokenization equal to llama.cpp's, decoding by bytes, streaming (case B52), chat templates."""

import dataclasses
import json
import threading
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers

from circuit.models.byte_pieces import byte_of_character
from circuit.models.errors import TextRefused, TokenizerRefused
from circuit.models.gguf_file import read_gguf
from circuit.models.tokenizer import Tokenizer
from circuit.models.tokenizer_gguf import PRE_TYPES, tokenizer_from_gguf
from tests.demo import demo, demo_file

GOLDEN = Path(__file__).parent / "golden"
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<repo_name>", "<empty_output>"]
PIECES = [
    "'s",
    "'LL",
    " \t\n\r\u00a0\u2003\u0085\u200b",
    "0٣½Ⅷ",
    "日本語",
    "العربية",
    "e\u0301",
    "👩‍👩‍👧🏳️‍🌈",
    "\x00\x04\x1d",
    "=>({;:",
    "import os",
    *SPECIAL,
]
texts = st.lists(st.text(max_size=8) | st.sampled_from(PIECES), max_size=6).map("".join)


@cache
def demo_metadata():
    """The metadata of the demo file."""
    return read_gguf(demo_file()).metadata


@cache
def with_pre(pre):
    """The demo file's vocabulary under another pre-tokenizer."""
    found = {**demo_metadata(), "tokenizer.ggml.pre": pre}
    found.pop("tokenizer.ggml.add_bos_token")
    return tokenizer_from_gguf(demo_file(), found, demo().config)


@pytest.fixture(scope="module")
def llama():
    """llama.cpp's own tokenizer of the demo file; the test is skipped where it is not installed."""
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    model = llama_cpp.Llama(str(demo_file()), vocab_only=True, verbose=False)
    yield model
    model.close()


def test_golden_files_cover_every_kind_of_pre_tokenizer():
    kinds = {json.loads(path.read_text())["pre"] for path in GOLDEN.glob("tokens_*.json")}
    assert {PRE_TYPES[kind] for kind in kinds} == set(PRE_TYPES.values())


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "llama-bpe", "qwen2"])
def test_ids_equal_llama_cpp(pre):
    """Digits, code, white space, emoji, CJK, Arabic, control characters, special tokens."""
    rows = json.loads((GOLDEN / f"tokens_{pre}.json").read_text())["rows"]
    assert len(rows) >= 300
    tokenizer = with_pre(pre)
    wrong = [
        text
        for text, special, plain in rows
        if tokenizer.encode(text) != special or tokenizer.encode(text, parse_special=False) != plain
    ]
    assert wrong == []


@settings(max_examples=300, deadline=None)
@given(text=texts, parse_special=st.booleans())
def test_drawn_texts_equal_llama_cpp(llama, text, parse_special):
    theirs = llama.tokenize(text.encode(), add_bos=False, special=parse_special)
    assert demo().tokenizer.encode(text, parse_special=parse_special) == theirs


def test_begin_and_end_tokens_are_added_where_the_file_says():
    assert demo().tokenizer.encode("a", add_special=True) == demo().tokenizer.encode("a")
    assert with_pre("llama-bpe").encode("a", add_special=True) == [
        1,
        *with_pre("llama-bpe").encode("a"),
    ]
    found = {
        **demo_metadata(),
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": True,
    }
    both = tokenizer_from_gguf(demo_file(), found, demo().config)
    assert both.encode("a", add_special=True) == [1, *both.encode("a"), 2]


def test_qwen_texts_are_composed_first():
    assert with_pre("qwen2").encode("e\u0301") == with_pre("qwen2").encode("\u00e9")
    assert with_pre("llama-bpe").encode("e\u0301") != with_pre("llama-bpe").encode("\u00e9")


@cache
def lost_bytes():
    """The bytes that the demo vocabulary has no token for."""
    tokenizer = demo().tokenizer
    pieces = [tokenizer.piece(i) for i in range(len(tokenizer))]
    return frozenset(range(256)) - {piece[0] for piece in pieces if len(piece) == 1}


@settings(max_examples=200, deadline=None)
@given(text=texts)
def test_decoding_undoes_encoding_but_for_bytes_without_a_token(text):
    tokenizer = demo().tokenizer
    kept = bytes(b for b in text.encode() if b not in lost_bytes()).decode("utf-8", "replace")
    assert tokenizer.decode(tokenizer.encode(text)) == kept
    assert tokenizer.decode(tokenizer.encode(text, parse_special=False)) == kept


def test_special_tokens_are_skipped_on_request_only():
    tokenizer = demo().tokenizer
    ids = tokenizer.encode("<|im_start|>user\nHi<|im_end|>")
    assert tokenizer.decode(ids, skip_special=True) == "user\nHi"
    assert tokenizer.stream().push(*ids) == "user\nHi"
    assert tokenizer.stream(skip_special=False).push(*ids) == "<|im_start|>user\nHi<|im_end|>"
    assert len(tokenizer.special_ids) == 17


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_a_stream_adds_up_however_it_is_cut(data):
    """B52: the deltas add up to the full decoding, and no delta ends in half a character."""
    tokenizer = demo().tokenizer
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=30))
    stream, parts = tokenizer.stream(skip_special=False), []
    at = 0
    while at < len(ids):
        step = data.draw(st.integers(1, 5))
        parts.append(stream.push(*ids[at : at + step]))
        at += step
    parts.append(stream.finish())
    assert "".join(parts) == tokenizer.decode(ids)
    assert tokenizer.decode(ids) == b"".join(map(tokenizer.piece, ids)).decode("utf-8", "replace")


def byte_ids(raw):
    """One id of the demo vocabulary for each byte of `raw`."""
    tokenizer = demo().tokenizer
    single = {tokenizer.piece(i): i for i in range(len(tokenizer)) if len(tokenizer.piece(i)) == 1}
    return [single[bytes([byte])] for byte in raw]


@pytest.mark.parametrize("cuts", range(32))
def test_split_characters_in_each_of_the_ways_to_cut_them(cuts):
    """B52: the bytes of A€é in each of the 32 ways to cut them into blocks."""
    ids, blocks = byte_ids("A€é".encode()), [[]]
    for index, token in enumerate(ids):
        blocks[-1].append(token)
        if cuts >> index & 1:
            blocks.append([])
    stream = demo().tokenizer.stream()
    deltas = [stream.push(*block) for block in blocks] + [stream.finish()]
    assert "".join(deltas) == "A€é"
    assert not any("\ufffd" in delta for delta in deltas)


def test_a_stream_that_ends_within_a_character():
    """B52: a stream ending after 226, 130 gives U+FFFD once, at the end."""
    stream = demo().tokenizer.stream()
    assert [stream.push(token) for token in byte_ids(b"A\xe2\x82")] == ["A", "", ""]
    assert stream.finish() == "\ufffd"
    stream = demo().tokenizer.stream()
    assert stream.push(*byte_ids("中".encode() + b"\xe2\x82")) == "中"
    assert stream.push(*byte_ids(b"\xac")) == "€" and stream.finish() == ""


def test_half_a_surrogate_pair_is_refused():
    with pytest.raises(TextRefused, match="at character 2"):
        demo().tokenizer.encode("ab\ud83d")


def test_a_tokenizer_survives_its_own_json():
    tokenizer = demo().tokenizer
    again = Tokenizer.from_json(Path("tokenizer.json"), tokenizer.to_json(), demo().config)
    for text in ("Hello 123\u001d.", *PIECES):
        assert again.encode(text) == tokenizer.encode(text)
    assert again.to_json() == tokenizer.to_json()


def test_threads_do_not_disturb_each_others_special_tokens():
    tokenizer, wrong = demo().tokenizer, []

    def encode(parse_special):
        wanted = [2] if parse_special else tokenizer.encode("<|im_end|>", parse_special=False)
        wrong.extend(
            1
            for _ in range(300)
            if tokenizer.encode("<|im_end|>", parse_special=parse_special) != wanted
        )

    threads = [threading.Thread(target=encode, args=(flag,)) for flag in (True, False, True, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def marked_backend(decoder):
    """A tokenizer that marks spaces and falls back to bytes, as sentencepiece models do."""
    vocab = {"<unk>": 0, **{f"<0x{b:02X}>": b + 1 for b in range(256)}}
    vocab |= {"▁": 257, "a": 258, "b": 259, "▁a": 260, "▁▁": 261}
    backend = Backend(
        models.BPE(
            vocab, [("▁", "a"), ("▁", "▁")], unk_token="<unk>", byte_fallback=True, fuse_unk=True
        )
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoder
    return backend


SENTENCEPIECE = decoders.Sequence(
    [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
)


@settings(max_examples=100, deadline=None)
@given(text=st.text("ab é日😀", min_size=1, max_size=12))
def test_marked_vocabularies_decode_as_their_backend_does(text):
    config = dataclasses.replace(demo().config, vocab_size=262)
    for decoder in (SENTENCEPIECE, decoders.Metaspace(prepend_scheme="always")):
        backend = marked_backend(decoder)
        tokenizer = Tokenizer.from_json(Path("t"), backend.to_str(), config)
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        if decoder is SENTENCEPIECE:
            assert backend.decode(ids, skip_special_tokens=False) == text


def test_tokenizers_that_do_not_fit_are_refused():
    config = dataclasses.replace(demo().config, vocab_size=261)
    with pytest.raises(TokenizerRefused, match="its highest id is 261 and the model has 261 rows"):
        Tokenizer.from_json(Path("t"), marked_backend(SENTENCEPIECE).to_str(), config)
    config = dataclasses.replace(config, vocab_size=300)
    with pytest.raises(TokenizerRefused, match="its decoder is WordPiece"):
        Tokenizer.from_json(Path("t"), marked_backend(decoders.WordPiece()).to_str(), config)
    with pytest.raises(TokenizerRefused):
        Tokenizer.from_json(Path("t"), "{}", config)
    padded = Tokenizer.from_json(Path("t"), marked_backend(SENTENCEPIECE).to_str(), config)
    assert len(padded) == 262 and padded.decode([258, 299]) == "a"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tokenizer.ggml.model": "llama"}, "its model is 'llama', not gpt2"),
        ({"tokenizer.ggml.pre": "default"}, "its pre-tokenizer is 'default'; known: gpt-2, smollm"),
        ({"tokenizer.ggml.add_space_prefix": True}, "it puts a space before a text"),
        ({"tokenizer.ggml.merges": ["a b c"]}, "its merges are absent or not pairs"),
        ({"tokenizer.ggml.merges": ["qqqq zzzz"]}, "not exist|out of vocab|OutOfVocab|vocab"),
        ({"tokenizer.ggml.token_type": [1]}, "49152 tokens have 1 types"),
        ({"tokenizer.ggml.tokens": ["a"] * 49152}, "two ids have the same spelling"),
    ],
)
def test_gguf_tokenizers_that_contradict_themselves_are_refused(changes, said):
    with pytest.raises(TokenizerRefused, match=said):
        tokenizer_from_gguf(demo_file(), {**demo_metadata(), **changes}, demo().config)


def test_a_byte_has_one_character():
    table = byte_of_character()
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    assert sorted(table.values()) == list(range(256))
    assert set(table) == set(pre_tokenizers.ByteLevel.alphabet())
    for code in (0x00, 0x20, 0x41, 0x7F):
        ((character, _),) = backend.pre_tokenizer.pre_tokenize_str(chr(code))
        assert table[character] == code
