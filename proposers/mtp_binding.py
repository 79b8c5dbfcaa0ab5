"""A loaded head and what it borrows of its target, as a binding and as a proposer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ir.binding import DraftBinding
from ir.format import BLOCK, Format, TensorType
from ir.ops.attention import BLOCK_ROWS
from ir.quantize import stored_as
from ir.tensor import PackedTensor, unpacked
from proposers.blocks.rows import blocks_for
from proposers.config import Contract, Sharing
from proposers.errors import HeadRefused
from proposers.levers import ModelLevers
from proposers.mtp import MtpHead
from proposers.mtp_program import CACHE, DRAFT_IDS, EMBEDDING, HEAD, mtp_program
from proposers.options import DraftOptions
from proposers.weights import EMBEDDING as OWN_EMBEDDING
from proposers.weights import HEAD as OWN_HEAD
from proposers.weights import HeadWeights
from runners.eager import EagerRunner

Stored = torch.Tensor | PackedTensor


@dataclass(frozen=True)
class TargetSide:
    """What a head may borrow: tables [vocab, n] as the target stores
    them, rotary tables [context, r].

    A target with tied embeddings has one object under both names.
    """

    embedding: Stored
    lm_head: Stored
    rope: Mapping[str, torch.Tensor]

    @property
    def vocab_size(self) -> int:
        """Ids of the target."""
        return self.embedding.shape[0]

    @property
    def hidden_size(self) -> int:
        """Width of the target's stream."""
        return self.embedding.shape[1]


def own_format(side: TargetSide) -> Format:
    """What a head's own matrices are stored as beside this target: q8_0
    beside blocks, else its format.
    """
    have = TensorType.of(side.lm_head).format
    if have.is_block:
        return Format.Q8_0
    return have if have in (Format.BF16, Format.F32) else Format.F32


def cache_format(format: Format) -> Format:
    """The format of keys and values beside weights of `format`."""
    return Format.F16 if format.is_block else Format.BF16 if format is Format.BF16 else Format.F32


def bind_head(
    weights: HeadWeights, side: TargetSide, options: DraftOptions, contract: Contract | None = None,
    format: Format | None = None,
) -> DraftBinding:  # fmt: skip
    """The head's programs over its weights: matrices in `format`
    (None: `own_format`), vectors in f32.

    The rows of the target's lm_head that the head scores are gathered here, in the format they are
    stored in. HeadRefused if head and target do not fit each other.
    """
    contract, config = contract or weights.contract, weights.config
    _check_fit(weights, side)
    format = own_format(side) if format is None else format
    context = blocks_for(options.max_context) * BLOCK_ROWS
    bound = {n: _in_format(weights, n, t, format) for n, t in weights.tensors.items()}
    bound |= _tables(weights, side, bound, contract) | _rotary(weights, side, contract, context)
    blocks = 1 + options.cached_sequences * blocks_for(context)
    cache = (blocks, 2, config.num_key_value_heads, BLOCK_ROWS, config.head_dim)
    return DraftBinding(
        name="draft",
        program=mtp_program(
            contract, config, context, mapped=DRAFT_IDS in bound, tied=HEAD not in bound,
            working=options.working,
        ),
        weights=bound,
        states={CACHE: TensorType(cache, cache_format(format))},
        keys=options.keys,
        unmodelled=weights.unmodelled,
        contract=contract.plain(),
        vocab=config.vocab_size,
        hidden=config.hidden_size,
    )  # fmt: skip


def make_mtp_head(
    weights: HeadWeights, side: TargetSide, options: DraftOptions, *,
    levers: ModelLevers | None = None, format: Format | None = None,
) -> MtpHead:  # fmt: skip
    """The proposer of a loaded head; until a runner is installed it
    interprets its binding of `options`.
    """

    def bind(options: DraftOptions, contract: Contract) -> DraftBinding:
        return bind_head(weights, side, options, contract, format)

    resolved = (levers or ModelLevers()).resolve(weights.contract)
    binding = bind(options, resolved)
    table = binding.weights.get(EMBEDDING)
    ids = binding.weights.get(DRAFT_IDS, torch.arange(weights.config.vocab_size)).numpy()
    return MtpHead(
        weights.contract, weights.config,
        lambda: EagerRunner(binding, context=blocks_for(options.max_context) * BLOCK_ROWS),
        levers=levers, bind=bind,
        scored_ids=lambda: ids,
        embedding_row=lambda token: (
            unpacked(rows_of(table, torch.tensor([token])))[0].float().numpy()
        ),
    )  # fmt: skip


def rows_of(table: Stored, index: torch.Tensor) -> Stored:
    """Rows `index` of a table, packed if it is."""
    index = index.long()
    return table.rows(index) if isinstance(table, PackedTensor) else table[index].contiguous()


def _check_fit(weights: HeadWeights, side: TargetSide) -> None:
    """Refuses a head of another width or vocabulary."""
    config, problems = weights.config, []
    if config.hidden_size != side.hidden_size:
        problems.append(f"it was made for a hidden size of {config.hidden_size}, "
                        f"the target has {side.hidden_size}")  # fmt: skip
    if config.target_vocab_size != side.vocab_size:
        problems.append(f"it was made for a vocabulary of {config.target_vocab_size} ids, "
                        f"the target has {side.vocab_size}")  # fmt: skip
    if problems:
        raise HeadRefused(path=weights.path, problem="; ".join(problems))


def _in_format(weights: HeadWeights, name: str, tensor: torch.Tensor, format: Format) -> Stored:
    if tensor.ndim == 1:
        return tensor.float()
    if format.is_block and tensor.shape[-1] % BLOCK:
        raise HeadRefused(
            path=weights.path,
            problem=f"{name} has {tensor.shape[-1]} columns, which {format.value} cannot hold",
        )
    return stored_as(tensor, format)


def _tables(
    weights: HeadWeights, side: TargetSide, bound: dict[str, Stored], contract: Contract
) -> dict[str, Stored]:
    """Embedding, lm_head and id map; a full lm_head that is the embedding itself is bound once."""
    config, ids = weights.config, weights.draft_ids
    own, own_head = bound.pop(OWN_EMBEDDING, None), bound.pop(OWN_HEAD, None)
    embedding = own if contract.embedding is Sharing.OWN else side.embedding
    tables: dict[str, Stored] = {EMBEDDING: embedding}
    if contract.lm_head is Sharing.OWN:
        tables[HEAD] = own_head
    elif ids is not None:
        tables[HEAD] = rows_of(side.lm_head, ids)
    elif config.vocab_size < side.vocab_size:
        tables[HEAD] = rows_of(side.lm_head, torch.arange(config.vocab_size))
    elif side.lm_head is not embedding:
        tables[HEAD] = side.lm_head
    if ids is not None:
        tables[DRAFT_IDS] = ids.to(torch.int32)
    return tables


def _rotary(
    weights: HeadWeights, side: TargetSide, contract: Contract, context: int
) -> dict[str, torch.Tensor]:
    """`rope.cos` and `rope.sin` [context, r]: the target's, or of the
    head's own base in f64, rounded once.
    """
    config = weights.config
    pairs = int(config.head_dim * contract.partial_rotary) // 2
    if config.rope_theta:
        steps = torch.arange(pairs, dtype=torch.float64) / pairs
        angles = torch.outer(torch.arange(context, dtype=torch.float64), config.rope_theta**-steps)
        return {"rope.cos": angles.cos().float(), "rope.sin": angles.sin().float()}
    tables = {name: side.rope[name][:context] for name in ("rope.cos", "rope.sin")}
    have = tables["rope.cos"].shape
    if have != (context, pairs):
        raise HeadRefused(
            path=weights.path,
            problem=f"it turns {pairs} pairs over {context} positions, the target's rotary tables "
            f"have {have[1]} over {have[0]}",
        )
    return tables
