"""Tiny checkpoints with tokenizers, and a draft head for them, as the commands take them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from checkpoints import make_model, save_folder
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from proposers.config import Contract, HeadConfig
from proposers.weights import HeadWeights, expected_shapes, save_head

VOCAB, HIDDEN, SCORED = 288, 64, 120
SPECIAL = ("<pad>", "<s>", "</s>")
TEMPLATE = "{% for m in messages %}<s>{{ m['content'] }}</s>{% endfor %}"


def tiny_model(folder: Path, **changes: object) -> Path:
    """A random llama checkpoint in `folder`, with a tokenizer of
    single bytes and a chat template.
    """
    model = make_model(
        "llama", vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=96, tied=True, **changes
    )
    save_folder(model, folder)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {word: i for i, word in enumerate([*SPECIAL, *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder


def tiny_head(path: Path, *, hidden: int = HIDDEN, vocab: int = VOCAB) -> Path:
    """A random draft head for `tiny_model` at `path`, or one for
    another hidden size or vocabulary.
    """
    config = HeadConfig(
        hidden_size=hidden, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, rms_norm_eps=1e-5, vocab_size=SCORED, target_vocab_size=vocab,
    )  # fmt: skip
    torch.manual_seed(1)
    tensors = {
        name: torch.randn(shape) * 0.2 if len(shape) > 1 else 1 + 0.1 * torch.randn(shape)
        for name, shape in expected_shapes(Contract(), config).items()
    }
    ids = torch.randperm(vocab)[:SCORED].sort().values.int()
    save_head(path, [HeadWeights(path, Contract(), config, tensors, ids, {"made": "by a test"})])
    return path
