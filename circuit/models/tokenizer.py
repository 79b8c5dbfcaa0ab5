"""Text to ids and back, exactly as the checkpoint's own tokenizer does it."""

from __future__ import annotations

import codecs
import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from circuit.models import chat
from circuit.models.byte_pieces import Pieces, piece_bytes
from circuit.models.config import TargetConfig
from circuit.models.errors import TextRefused, TokenizerRefused


class Tokenizer:
    """A tokenizer over the Rust `tokenizers` backend, with decoding by bytes.

    Every id stands for a fixed string of bytes, so decoding a sequence is joining bytes, and a
    stream of ids gives the same text as the whole sequence however it is cut.
    """

    def __init__(self, backend, pieces: Pieces, config: TargetConfig):
        backend.no_truncation()
        backend.no_padding()
        self._backend, self._pieces = backend, pieces
        self._encoding = threading.Lock()  # parsing of special tokens is a switch of the backend
        self.chat_template = config.chat_template
        self.bos_token_id, self.eos_token_ids = config.bos_token_id, config.eos_token_ids
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)

    @property
    def strips_first_space(self) -> bool:
        """Whether decoding drops the space that encoding puts before a text."""
        return self._pieces.strip_first_space

    @classmethod
    def from_json(cls, path: Path, text: str, config: TargetConfig) -> Tokenizer:
        """The tokenizer that `text`, the contents of a tokenizer.json at `path`, describes."""
        from tokenizers import Tokenizer as Backend

        try:
            backend = Backend.from_str(text)
            spec = json.loads(text)
        except Exception as error:  # the backend raises bare Exception for every malformed file
            raise TokenizerRefused(path=path, why=str(error)) from error
        return cls(backend, piece_bytes(path, backend, spec, config.vocab_size), config)

    def to_json(self) -> str:
        """The text of a tokenizer.json from which `from_json` makes this tokenizer again."""
        return self._backend.to_str()

    def __len__(self) -> int:
        """The number of ids, special ones included."""
        return self._pieces.count

    def encode(
        self, text: str, *, add_special: bool = False, parse_special: bool = True
    ) -> list[int]:
        """The ids of `text`; `add_special` adds what the checkpoint puts around a text (as bos).

        With `parse_special` off, the spelling of a special token is encoded as ordinary text.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise TextRefused(index=error.start) from None
        with self._encoding:
            self._backend.encode_special_tokens = not parse_special
            return self._backend.encode(text, add_special_tokens=add_special).ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD."""
        stream = self.stream(skip_special=skip_special)
        return stream.push(*ids) + stream.finish()

    def stream(self, *, skip_special: bool = True) -> TextStream:
        """A new incremental decoder."""
        return TextStream(self, skip_special)

    def piece(self, token: int) -> bytes:
        """The bytes that `token` stands for."""
        return self._pieces[token]

    def chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        **variables: object,
    ) -> str:
        """The prompt that the checkpoint's chat template makes of `messages`."""
        names = {
            "bos_token": self._spelled(self.bos_token_id),
            "eos_token": self._spelled(next(iter(self.eos_token_ids), None)),
        }
        return chat.render(
            self.chat_template,
            messages,
            add_generation_prompt=add_generation_prompt,
            **{**names, **variables},
        )

    def encode_chat(
        self, messages: Sequence[Mapping[str, object]], **variables: object
    ) -> list[int]:
        """The ids of the chat prompt; the template itself writes every special token."""
        return self.encode(self.chat(messages, **variables))

    def _spelled(self, token: int | None) -> str:
        return "" if token is None else self._pieces[token].decode("utf-8", "replace")


class TextStream:
    """Turns ids into text as they come; never gives out half of a character.

    Bytes of an unfinished character wait for the next id; `finish` gives U+FFFD for them if none
    comes. The parts add up to what `Tokenizer.decode` gives for all ids.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool):
        self._tokenizer, self._skip = tokenizer, skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._at_start = tokenizer.strips_first_space

    def push(self, *ids: int) -> str:
        """The text that `ids` complete."""
        parts = []
        for token in ids:
            special = token in self._tokenizer.special_ids
            if special and self._skip:
                continue
            raw = self._tokenizer.piece(token)
            first, self._at_start = self._at_start and not special, self._at_start and not raw
            parts.append(raw.removeprefix(b" ") if first else raw)
        return self._utf8.decode(b"".join(parts))

    def finish(self) -> str:
        """The text of what is still waiting."""
        return self._utf8.decode(b"", final=True)
