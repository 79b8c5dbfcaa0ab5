"""Tiny random draft heads, each with an oracle built from the
transformers package's own classes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import DynamicCache, LlamaConfig
from transformers.modeling_layers import MtpLayer
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5DecoderLayer,
    Qwen3_5RMSNorm,
    Qwen3_5TextRotaryEmbedding,
)

from proposers.config import QWEN35, Contract, HeadConfig
from proposers.mtp_binding import TargetSide
from proposers.weights import HeadWeights

VOCAB, SCORED, HIDDEN, CONTEXT = 97, 41, 32, 64
COMMON = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
    "max_position_embeddings": CONTEXT, "attn_implementation": "eager",
}  # fmt: skip
NAMES = {
    "enorm": "mtp.pre_fc_norm_embedding", "hnorm": "mtp.pre_fc_norm_hidden", "eh_proj": "mtp.fc",
    "mtp_block": "mtp.layers.0", "post_norm": "mtp.norm",
}  # fmt: skip


def configurations() -> dict[str, tuple]:
    """Family -> its config, layer, norm and rotary classes, and the contract of its heads."""
    llama = LlamaConfig(
        **COMMON, head_dim=12, rope_parameters={"rope_type": "default", "rope_theta": 1e4}
    )
    qwen = Qwen3_5TextConfig(
        **COMMON, head_dim=16, layer_types=["full_attention"],
        rope_parameters={"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25,
                         "mrope_section": [1, 1, 0]},
    )  # fmt: skip
    return {
        "llama": (llama, LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding, Contract()),
        "qwen3.5": (
            qwen, Qwen3_5DecoderLayer, Qwen3_5RMSNorm, Qwen3_5TextRotaryEmbedding, QWEN35,
        ),
    }  # fmt: skip


@dataclass
class TinyHead:
    """A head's weights, the target side that it borrows from, and its oracle in float64."""

    weights: HeadWeights
    side: TargetSide
    layer: MtpLayer
    rotary: torch.nn.Module

    def run(self, tokens, hiddens, positions=None, *, learn=False):
        """Streams before and after the final norm [t, n] and keys, values
        [g, t, d] of dense causal rows.

        Row i takes token i and hidden i, at position i + 1 unless told otherwise.
        """
        contract, count = self.weights.contract, len(tokens)
        positions = list(range(1, count + 1)) if positions is None else positions
        e = self.side.embedding.double()[torch.tensor(tokens)][None]
        if contract.pos0_mask:
            e[0, torch.tensor(positions) == 1] = 0
        h = torch.as_tensor(hiddens).double()[None]
        where = torch.tensor([positions])
        mask = torch.full((count, count), float("-inf"), dtype=torch.float64).triu(1)[None, None]
        cache = DynamicCache()
        angles = self.rotary(h, where)
        with torch.set_grad_enabled(learn):
            x = self.layer(e, h, angles, mask, where, cache)[0]
            final = self.final_norm(x)
        return x, final, cache.layers[0].keys[0], cache.layers[0].values[0]

    def chain(self, tokens, hiddens, count):
        """`count` greedy drafts after true rows, each from the row before it, as target ids."""
        tokens, hiddens, drafts = list(tokens), torch.as_tensor(hiddens).double(), []
        for _ in range(count):
            x, final, _, _ = self.run(tokens, hiddens)
            drafts.append(self.best(final[-1]))
            recycled = x if self.weights.contract.recycle.value == "pre_norm" else final
            tokens.append(drafts[-1])
            hiddens = torch.cat([hiddens, recycled[-1:]])
        return drafts

    def logits(self, final):
        """Logits of the scored ids for rows after the final norm."""
        ids = self.weights.draft_ids
        table = self.side.lm_head if ids is None else self.side.lm_head[ids.long()]
        return final @ table.double().T

    def best(self, final):
        """The target id of the first largest logit."""
        column = int(self.logits(final).argmax())
        ids = self.weights.draft_ids
        return column if ids is None else int(ids[column])


def make_head(family: str = "llama", *, mapped: bool = True, seed: int = 0, **contract) -> TinyHead:
    """A head with every weight random; `mapped` scores some ids only;
    `contract` changes its fields.
    """
    config, layer_class, norm_class, rotary_class, base = configurations()[family]
    base = replace(base, **contract)
    config.mtp_hidden_states_first = base.concat_order.value == "hidden_embed"
    torch.manual_seed(seed)
    layer = MtpLayer(config, layer_class, norm_class, 0).eval()
    for name, weight in layer.named_parameters():
        around = 1.0 if "norm" in name and family == "llama" else 0.0
        torch.nn.init.normal_(weight, around, 0.2)
    tensors = {renamed(name): t.clone() for name, t in layer.state_dict().items()}
    ids = torch.randperm(VOCAB)[:SCORED].sort().values.to(torch.int32) if mapped else None
    sizes = HeadConfig(
        HIDDEN, config.intermediate_size, config.num_attention_heads, config.num_key_value_heads,
        config.head_dim, config.rms_norm_eps, SCORED if mapped else VOCAB, VOCAB,
        rope_theta=1e6 if family == "qwen3.5" else 0.0,
    )  # fmt: skip
    rotary = rotary_class(config)
    frequencies = 1e4 ** -(torch.arange(0, 12, 2).double() / 12)
    angles = torch.outer(torch.arange(CONTEXT).double(), frequencies)
    side = TargetSide(
        torch.randn(VOCAB, HIDDEN), torch.randn(VOCAB, HIDDEN),
        {"rope.cos": angles.cos().float(), "rope.sin": angles.sin().float()},
    )  # fmt: skip
    weights = HeadWeights(Path("tiny"), base, sizes, tensors, ids, {"seed": seed})
    head = TinyHead(weights, side, layer.double(), rotary)
    head.final_norm = layer.post_norm
    layer.use_post_norm = False
    return head


def renamed(name: str) -> str:
    """The name of an oracle's tensor in a head's file."""
    first, _, rest = name.partition(".")
    return f"{NAMES[first]}.{rest}"


def save_qwen_folder(head: TinyHead, folder: Path, layers: int = 1, **changes) -> Path:
    """A checkpoint folder as Qwen3.5 releases are laid out: sizes in
    text_config, `mtp.*` in a shard.
    """
    folder.mkdir(parents=True, exist_ok=True)
    sizes = head.weights.config
    text = {
        "hidden_size": sizes.hidden_size, "intermediate_size": sizes.intermediate_size,
        "num_attention_heads": sizes.num_attention_heads,
        "num_key_value_heads": sizes.num_key_value_heads, "head_dim": sizes.head_dim,
        "rms_norm_eps": sizes.rms_norm_eps, "vocab_size": VOCAB, "mtp_num_hidden_layers": layers,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25,
        },
    } | changes  # fmt: skip
    config = {"model_type": "qwen3_5", "text_config": text}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = dict(head.weights.tensors)
    for index in range(1, layers):
        tensors |= {n.replace("layers.0", f"layers.{index}"): t + 0.01 * index
                    for n, t in head.weights.tensors.items() if ".layers.0." in n}  # fmt: skip
    save_file(tensors, folder / "mtp.safetensors")
    save_file({"model.norm.weight": torch.ones(HIDDEN)}, folder / "model.safetensors")
    weight_map = dict.fromkeys(tensors, "mtp.safetensors") | {
        "model.norm.weight": "model.safetensors"
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder
