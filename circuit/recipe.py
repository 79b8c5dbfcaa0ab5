"""What an artifact records of its making: origin, choices,
configurations. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from typing import Any

from circuit.models.config import Family, RopeKind, RopeSpec, TargetConfig
from proposers.config import Contract, HeadConfig, read_record

TARGET = "target"
TOKENIZER, HEAD = "tokenizer.json", "head.safetensors"


def draft_part(index: int, count: int) -> str:
    """Name of the part that holds module `index` of a head of `count` modules."""
    return "draft" if count == 1 else f"draft.{index}"


@dataclass(frozen=True)
class Origin:
    """The checkpoint that was compiled: as it was given, where it
    lay, and the digest of its files.
    """

    source: str
    path: str
    sha256: str


@dataclass(frozen=True)
class Choices:
    """What was asked for: the format of the weights, the backend, the
    context in rows, BATCH widths, chunk, rows of the trees that verify drafts of a head.
    """

    weights: str = "native"
    backend: str = "cpp"
    context: int = 2048
    batches: tuple[int, ...] = (2, 4, 8, 16)
    chunk: int = 256
    trees: tuple[int, ...] = (4, 6, 8)


@dataclass(frozen=True)
class HeadRecord:
    """One module of a draft head: what it was agreed on, and its sizes."""

    contract: Contract
    config: HeadConfig


@dataclass(frozen=True)
class Recipe:
    """Everything that the application records in an artifact.
    `head_path` is a folder's, else empty.
    """

    origin: Origin
    choices: Choices
    config: TargetConfig
    heads: tuple[HeadRecord, ...] = ()
    head_path: str = ""
    notes: tuple[str, ...] = field(default=())

    def plain(self) -> dict[str, Any]:
        """The record as JSON values, from which `read` makes it again."""
        return {
            "origin": asdict(self.origin),
            "choices": _plain(asdict(self.choices)),
            "config": _plain(asdict(self.config)),
            "heads": [
                {"contract": h.contract.plain(), "config": h.config.plain()} for h in self.heads
            ],
            "head_path": self.head_path,
            "notes": list(self.notes),
        }

    @staticmethod
    def read(values: Mapping[str, Any]) -> Recipe:
        """The record whose JSON values are `values`."""
        return Recipe(
            origin=Origin(**values["origin"]),
            choices=Choices(**_tuples(values["choices"])),
            config=_config(values["config"]),
            heads=tuple(
                HeadRecord(
                    read_record(Contract, h["contract"], HEAD),
                    read_record(HeadConfig, h["config"], HEAD),
                )
                for h in values["heads"]
            ),
            head_path=values["head_path"],
            notes=tuple(values["notes"]),
        )


def _plain(value: Any) -> Any:
    """`value` with enums, tuples and records as JSON has them."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else value


def _tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}


def _config(values: Mapping[str, Any]) -> TargetConfig:
    rope = RopeSpec(**_tuples(values["rope"]))
    return replace(
        TargetConfig(**_tuples(values) | {"rope": replace(rope, kind=RopeKind(rope.kind))}),
        family=Family(values["family"]),
    )
