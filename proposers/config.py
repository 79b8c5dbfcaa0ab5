"""What a draft head is: the contract it states and the sizes of its
block, read from plain mappings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from enum import Enum
from typing import Any, TypeVar, get_type_hints

from proposers.errors import HeadRefused


class ConcatOrder(Enum):
    """Which half of the first projection's input is the token's embedding."""

    EMBED_HIDDEN = "embed_hidden"
    HIDDEN_EMBED = "hidden_embed"


class StreamPoint(Enum):
    """A place where a residual stream is read: before or after the norm that ends it."""

    PRE_NORM = "pre_norm"
    POST_NORM = "post_norm"

    @property
    def output(self) -> str:
        """The name of the target's output that holds its hidden rows at this point."""
        return "hidden" if self is StreamPoint.PRE_NORM else "hidden_normed"


class NormForm(Enum):
    """How a stored norm weight is used."""

    PLAIN = "w"
    ONE_PLUS = "1+w"

    @property
    def offset(self) -> float:
        """What is added to the stored weight."""
        return 1.0 if self is NormForm.ONE_PLUS else 0.0


class Sharing(Enum):
    """Whose table a head reads."""

    TARGET = "target"
    OWN = "own"


@dataclass(frozen=True)
class Contract:
    """What a head and its target agree on; nothing here is guessed from tensor values.

    `target_hidden`: where the target's stream is read for rows with true hiddens. `recycle`: where
    the head's own stream is read for the next draft. `rope_offset`: rotary position of a row minus
    its pair key. `partial_rotary`: the share of a head's columns that is rotated. `pos0_mask`: the
    embedding of the row of pair key 0 is zero. `layer_id_base` counts from 0 at the first decoder
    layer.
    """

    concat_order: ConcatOrder = ConcatOrder.EMBED_HIDDEN
    pos0_mask: bool = False
    target_hidden: StreamPoint = StreamPoint.PRE_NORM
    recycle: StreamPoint = StreamPoint.PRE_NORM
    logits_norm: bool = True
    rope_offset: int = 1
    embedding: Sharing = Sharing.TARGET
    lm_head: Sharing = Sharing.TARGET
    layer_id_base: int = 0
    norm_form: NormForm = NormForm.PLAIN
    gated_attention: bool = False
    qk_norm: bool = False
    partial_rotary: float = 1.0

    def problems(self) -> list[str]:
        """What no head of this contract can be run with, as sentences."""
        found = []
        if self.rope_offset != 1:
            found.append(f"rope_offset is {self.rope_offset}; rows are rotated by pair key + 1")
        if self.layer_id_base != 0:
            found.append(f"layer_id_base is {self.layer_id_base}; layers are counted from 0")
        if not 0 < self.partial_rotary <= 1:
            found.append(f"partial_rotary is {self.partial_rotary}, not in (0, 1]")
        return found

    def plain(self) -> dict[str, object]:
        """The fields as JSON values."""
        return {k: v.value if isinstance(v, Enum) else v for k, v in asdict(self).items()}


QWEN35 = Contract(
    norm_form=NormForm.ONE_PLUS, gated_attention=True, qk_norm=True, partial_rotary=0.25
)  # Qwen3-Next, Qwen3.5


@dataclass(frozen=True)
class HeadConfig:
    """Sizes of a one-layer head. `vocab_size` rows are scored; ids are of `target_vocab_size`.

    `rope_theta` is the base of the head's own rotary frequencies; 0 stands for the target's tables.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    vocab_size: int
    target_vocab_size: int
    rope_theta: float = 0.0

    def problems(self) -> list[str]:
        """Contradictions between the sizes, as sentences."""
        found = [
            f"{f.name} is {getattr(self, f.name)}, which is not positive"
            for f in fields(self)
            if f.default is MISSING and not getattr(self, f.name) > 0
        ]
        if self.rope_theta < 0:
            found.append(f"rope_theta is {self.rope_theta}, which is negative")
        if not found and self.num_attention_heads % self.num_key_value_heads:
            found.append(f"{self.num_attention_heads} query heads cannot share "
                         f"{self.num_key_value_heads} key-value heads evenly")  # fmt: skip
        if self.vocab_size > self.target_vocab_size:
            found.append(
                f"{self.vocab_size} ids are scored, of a vocabulary of {self.target_vocab_size}"
            )
        return found

    def plain(self) -> dict[str, object]:
        """The fields as JSON values."""
        return asdict(self)


Record = TypeVar("Record", Contract, HeadConfig)


def read_record(kind: type[Record], values: Mapping[str, Any], path: object) -> Record:
    """The record `kind` with the fields of `values`; an unknown field or
    value is HeadRefused, all at once.
    """
    types = get_type_hints(kind)
    known = {f.name: f for f in fields(kind)}
    what = "contract" if kind is Contract else "config"
    problems = [f"its {what} has an unknown field {name!r}" for name in values if name not in known]
    problems += [f"its {what} lacks {name}" for name, f in known.items()
                 if f.default is MISSING and name not in values]  # fmt: skip
    given: dict[str, Any] = {}
    for name in known.keys() & values.keys():
        try:
            given[name] = _typed(types[name], values[name])
        except ValueError:
            problems.append(f"{name} is {values[name]!r}, not {_choices(types[name])}")
    if not problems:
        record = kind(**given)
        problems = record.problems()
    if problems:
        raise HeadRefused(path=path, problem="; ".join(sorted(problems)))
    return record


def _typed(wanted: type, value: Any) -> Any:
    """`value` as a `wanted`; ValueError if it is none."""
    if issubclass(wanted, Enum):
        return wanted(value)
    if wanted is float and type(value) is int:
        return float(value)
    if type(value) is not wanted:
        raise ValueError(value)
    return value


def _choices(wanted: type) -> str:
    if issubclass(wanted, Enum):
        return "one of " + ", ".join(member.value for member in wanted)
    return f"a {wanted.__name__}"
