"""The tokenizer inside a GGUF file: byte-level BPE with the pre-tokenizer that the file names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from circuit.models.byte_pieces import byte_of_character
from circuit.models.config import TargetConfig
from circuit.models.errors import TokenizerMissing, TokenizerRefused
from circuit.models.tokenizer import Tokenizer

CONTROL, UNKNOWN, USER_DEFINED = 3, 2, 4
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class PreType:
    """How text is cut before merging: a pattern (None: the pattern of GPT-2), digits alone or not.

    `whole_words` looks an entire word up before merging; `add_bos` is what holds when the file does
    not say; `compose` brings the text to normal form C first.
    """

    pattern: str | None = None
    single_digits: bool = False
    whole_words: bool = False
    add_bos: bool = False
    compose: bool = False


LLAMA3 = PreType(WORDS + r"\p{N}{1,3}" + REST, whole_words=True, add_bos=True)
PRE_TYPES = {
    "gpt-2": PreType(),
    "smollm": PreType(single_digits=True),
    "llama-bpe": LLAMA3,
    "llama-v3": LLAMA3,
    "llama3": LLAMA3,
    "qwen2": PreType(WORDS + r"\p{N}" + REST, compose=True),
}


def tokenizer_from_gguf(path: Path, found: Mapping[str, object], config: TargetConfig) -> Tokenizer:
    """The tokenizer that the metadata `found` of the file at `path` describes.

    Raises TokenizerMissing without tokenizer keys, TokenizerRefused for another kind than
    byte-level BPE, an unknown pre-tokenizer, or a vocabulary that contradicts itself.
    """
    if "tokenizer.ggml.tokens" not in found:
        raise TokenizerMissing(path=path)
    model, pre = found.get("tokenizer.ggml.model"), found.get("tokenizer.ggml.pre")
    if model != "gpt2":
        raise TokenizerRefused(path=path, why=f"its model is {model!r}, not gpt2 (byte-level BPE)")
    if pre not in PRE_TYPES:
        raise TokenizerRefused(
            path=path, why=f"its pre-tokenizer is {pre!r}; known: {', '.join(PRE_TYPES)}"
        )
    if found.get("tokenizer.ggml.add_space_prefix", False):
        raise TokenizerRefused(
            path=path, why="it puts a space before a text, which byte-level BPE does not do"
        )
    tokens = found["tokenizer.ggml.tokens"]
    if len(set(tokens)) != len(tokens):
        raise TokenizerRefused(path=path, why="two ids have the same spelling")
    kinds = found.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if len(kinds) != len(tokens):
        raise TokenizerRefused(path=path, why=f"{len(tokens)} tokens have {len(kinds)} types")
    backend = _backend(path, tokens, _merges(path, found), PRE_TYPES[pre])
    _add_tokens(backend, tokens, kinds)
    _surround(backend, found, tokens, PRE_TYPES[pre])
    return Tokenizer.from_json(path, backend.to_str(), config)


def _merges(path: Path, found: Mapping[str, object]) -> list[tuple[str, str]]:
    """The merges as pairs; a merge is two pieces with one space between."""
    merges = [tuple(str(line).split(" ")) for line in found.get("tokenizer.ggml.merges", ())]
    if not merges or any(len(pair) != 2 for pair in merges):
        raise TokenizerRefused(path=path, why="its merges are absent or not pairs")
    return merges


def _backend(path: Path, tokens: list[str], merges: list[tuple[str, str]], pre: PreType):
    """The BPE with its pre-tokenizer and decoder, special tokens not yet known."""
    from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    vocab = {token: i for i, token in enumerate(tokens)}
    try:
        backend = Backend(models.BPE(vocab, merges, ignore_merges=pre.whole_words))
    except Exception as error:  # the backend raises bare Exception for every malformed merge
        raise TokenizerRefused(path=path, why=str(error)) from error
    cuts = [pre_tokenizers.Digits(individual_digits=True)] if pre.single_digits else []
    if pre.pattern is not None:
        cuts.append(pre_tokenizers.Split(Regex(pre.pattern), behavior="isolated"))
    cuts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre.pattern is None))
    absent = [character for character in byte_of_character() if character not in vocab]
    if absent:  # a byte without a token is lost, and what stands around it is not merged
        lost = "|".join(map(re.escape, absent))
        cuts.append(pre_tokenizers.Split(Regex(lost), behavior="removed"))
    backend.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    backend.decoder = decoders.ByteLevel()
    if pre.compose:
        backend.normalizer = normalizers.NFC()
    return backend


def _add_tokens(backend, tokens: list[str], kinds: list[int]) -> None:
    """Makes control tokens special, and user-defined ones whole words of ordinary text."""
    from tokenizers import AddedToken

    backend.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, kinds)
            if kind in (CONTROL, UNKNOWN)
        ]
    )
    backend.add_tokens(
        [
            AddedToken(token, special=False, normalized=False)
            for token, kind in zip(tokens, kinds)
            if kind == USER_DEFINED
        ]
    )


def _surround(backend, found: Mapping[str, object], tokens: list[str], pre: PreType) -> None:
    """Makes `add_special` put the begin and end tokens around a text where the file says so."""
    from tokenizers import processors

    template, special = ["$A"], []
    for key, default, place in (("bos", pre.add_bos, 0), ("eos", False, None)):
        token = found.get(f"tokenizer.ggml.{key}_token_id")
        if token is not None and found.get(f"tokenizer.ggml.add_{key}_token", default):
            template.insert(len(template) if place is None else place, tokens[token])
            special.append((tokens[token], token))
    if special:
        backend.post_processor = processors.TemplateProcessing(
            single=" ".join(template), special_tokens=special
        )
