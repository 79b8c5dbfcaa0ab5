"""The weights that training begins from: the target's last layer behind
a linear guess of the next hidden.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from circuit.models.config import TargetConfig
from circuit.models.target import EMBEDDING, NORM
from circuit.train.texts import Written
from ir.ops import rms_norm
from ir.tensor import PackedTensor, unpacked
from proposers.config import Contract, HeadConfig

LAYER = "mtp.layers.0."
QUIET, RIDGE, TEXTS = 0.1, 1e-3, 600
Stored = Mapping[str, "torch.Tensor | PackedTensor"]


def head_contract(config: TargetConfig) -> Contract:
    """The contract of a head for a target of this family."""
    return Contract(qk_norm=config.qk_norm)


def head_config(config: TargetConfig, scored: int) -> HeadConfig:
    """The sizes of a head whose block is one layer of the target and that scores `scored` ids."""
    return HeadConfig(
        hidden_size=config.hidden_size, intermediate_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads, head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps, vocab_size=scored, target_vocab_size=config.vocab_size,
    )  # fmt: skip


def start_weights(
    config: TargetConfig, tensors: Stored, texts: Sequence[Written]
) -> dict[str, torch.Tensor]:
    """Weights by name, f32. The stream is scaled to one, which the
    norms that read it do not notice.

    `mtp.fc` is the ridge regression from token and hidden onto the next hidden; the layer's two
    outputs are made small beside it. Hiddens are scaled per column, because a few columns dwarf the
    others.
    """
    block = f"model.layers.{config.num_hidden_layers - 1}."
    names = [
        "input_layernorm", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj",
        "mlp.down_proj", *(f"self_attn.{p}_proj" for p in "qkvo"),
        *(f"self_attn.{p}_norm" for p in ("qk" if config.qk_norm else "")),
    ]  # fmt: skip
    weights = {
        f"{LAYER}{n}.weight": unpacked(tensors[f"{block}{n}.weight"]).float().clone() for n in names
    }
    sample = [t for t in texts[:TEXTS] if len(t.hidden) > 1]
    hidden = torch.cat([t.hidden for t in sample]).float()
    size = hidden.square().mean(-1).sqrt().median()
    columns = size / hidden.std(0).clamp(min=1e-6)
    weights["mtp.pre_fc_norm_embedding.weight"] = torch.ones(config.hidden_size)
    weights["mtp.pre_fc_norm_hidden.weight"] = columns
    weights["mtp.norm.weight"] = unpacked(tensors[NORM]).float().clone()
    table = unpacked(tensors[EMBEDDING])
    weights["mtp.fc.weight"] = _ridge(sample, table, columns, config.rms_norm_eps) / size
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        weights[f"{LAYER}{name}.weight"] *= QUIET / size
    return weights


def _ridge(
    texts: Sequence[Written], table: torch.Tensor, columns: torch.Tensor, eps: float
) -> torch.Tensor:
    """The matrix [h, 2h] that takes normed token p + 1 and normed
    hidden p nearest to hidden p + 1.
    """
    width = table.shape[1]
    gram = torch.zeros(2 * width, 2 * width, dtype=torch.float64)
    cross = torch.zeros(2 * width, width, dtype=torch.float64)
    for text in texts:
        hidden, ids = text.hidden.float(), text.ids[1:-1].long()
        e = rms_norm(table[ids].float(), torch.ones(width), eps=eps)
        pair = torch.cat([e, rms_norm(hidden[:-1], columns, eps=eps)], -1).double()
        gram += pair.T @ pair
        cross += pair.T @ hidden[1:].double()
    gram += torch.eye(2 * width, dtype=torch.float64) * gram.diagonal().mean() * RIDGE
    return torch.linalg.solve(gram, cross).T.float().contiguous()
