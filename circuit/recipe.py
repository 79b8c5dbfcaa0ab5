"""What an artifact records of its making: origin, choices,
configurations. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, is_dataclass
from enum import Enum, EnumType
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from circuit.models.config import TargetConfig, config_problems
from codegen.manifest import shown
from proposers.config import Contract, HeadConfig

TARGET = "target"
WEIGHTS = ("native", "f32", "bf16", "q8_0")
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

    def problems(self) -> list[str]:
        """What cannot be meant, as sentences."""
        found = [] if self.weights in WEIGHTS else [f"there are no weights in {self.weights}"]
        if min(self.context, self.chunk, *self.batches, *self.trees) < 1:
            found.append("a context, a chunk and a width are not below 1")
        return found


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
        """The record whose JSON values are `values`; ValueError if a field is missing, unknown, of
        another type, or cannot be meant.
        """
        recipe = _value(Recipe, values, "options")
        problems = config_problems(recipe.config)
        problems += [p for head in recipe.heads for p in head.contract.problems()]
        problems += [p for head in recipe.heads for p in head.config.problems()]
        problems += recipe.choices.problems()
        if problems:
            raise ValueError("; ".join(problems))
        return recipe


def _plain(value: Any) -> Any:
    """`value` with enums, tuples and records as JSON has them."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else value


def _value(wanted: Any, value: Any, where: str) -> Any:
    """What `value`, of JSON, stands for where a field is annotated as `wanted`."""
    if get_origin(wanted) in (Union, UnionType):
        if value is None:
            return None
        wanted = next(kind for kind in get_args(wanted) if kind is not NoneType)
    if get_origin(wanted) is tuple and type(value) is list:
        return tuple(_value(get_args(wanted)[0], item, where) for item in value)
    if is_dataclass(wanted) and type(value) is dict:
        return _record(wanted, value, where)
    if isinstance(wanted, EnumType) and value in [member.value for member in wanted]:
        return wanted(value)
    if type(value) is wanted:
        return value
    if wanted is float and type(value) is int:
        return float(value)
    name = "list" if get_origin(wanted) else wanted.__name__
    raise ValueError(f"{where} is {shown(value)}, not a{'n' * (name == 'int')} {name}")


def _record(kind: Any, values: dict[str, Any], where: str) -> Any:
    types = get_type_hints(kind)
    if lacking := types.keys() - values.keys():
        raise ValueError(f"{where} lacks {min(lacking)}")
    if unknown := values.keys() - types.keys():
        raise ValueError(f"{where} has an unknown field {shown(min(unknown))}")
    return kind(**{name: _value(types[name], v, f"{where}.{name}") for name, v in values.items()})
