"""One function from a source (GGUF file, folder, hub id) to a checked checkpoint."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from circuit.models import chat
from circuit.models.config import TargetConfig
from circuit.models.errors import NotAModel, PathMissing, TokenizerMissing, Unreadable
from circuit.models.folder_source import folder_tensors
from circuit.models.gguf_config import config_from_gguf
from circuit.models.gguf_file import MAGIC, GgufHeader, read_gguf
from circuit.models.gguf_source import canonical_tensors, interleaved_heads
from circuit.models.hf_config import config_from_json
from circuit.models.hub import snapshot
from circuit.models.inventory import check_values, fit, join_tied
from circuit.models.safetensors_file import read_json
from circuit.models.stored import MappedFile, StoredTensor
from circuit.models.tokenizer import Tokenizer
from circuit.models.tokenizer_gguf import tokenizer_from_gguf
from circuit.options import at_home

if TYPE_CHECKING:
    from circuit.models.weights import Weights

HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
Progress = Callable[[int, int], None]
log = logging.getLogger(__name__)


class SourceKind(Enum):
    """What a checkpoint was read from."""

    GGUF = "gguf"
    FOLDER = "folder"
    HUB = "hub"


@dataclass(frozen=True)
class Provenance:
    """Where a checkpoint comes from: the source as given, its kind,
    and the files that were read.
    """

    source: str
    kind: SourceKind
    files: tuple[Path, ...]

    @cached_property
    def sha256(self) -> str:
        """The SHA-256 of the one file, or of the lines `sha256 name` of several, sorted by name."""
        sums = {path.name: _sha256_of(path) for path in self.files}
        if len(sums) == 1:
            return next(iter(sums.values()))
        listing = "".join(f"{sums[name]}  {name}\n" for name in sorted(sums))
        return hashlib.sha256(listing.encode()).hexdigest()


@dataclass(frozen=True)
class Checkpoint:
    """A target as loaded: configuration, weights by canonical name, tokenizer, provenance, notes.

    Header and shapes are checked when it is made; `tensors` and `tokenizer` are built when first
    read. `notes` says what was found and left out.
    """

    config: TargetConfig
    provenance: Provenance
    notes: tuple[str, ...]
    stored: Mapping[str, StoredTensor] = field(repr=False)
    files: Mapping[Path, MappedFile] = field(repr=False)
    interleaved: Mapping[str, int] = field(repr=False)
    make_tokenizer: Callable[[], Tokenizer] = field(repr=False)

    @cached_property
    def tensors(self) -> Weights:
        """Every weight by its canonical name, over the mapped files."""
        from circuit.models.weights import Weights

        return Weights(self.stored, self.files, self.interleaved)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer; raises TokenizerMissing or TokenizerRefused."""
        return self.make_tokenizer()


def load_target(
    source: str | Path, *, values: bool = True, progress: Progress | None = None
) -> Checkpoint:
    """The checked checkpoint at `source`: a GGUF file, a folder, or a hub id `owner/name`.

    `values` reads every weight once and refuses NaN and infinities; `progress(done, total)` follows
    that in bytes. Raises a CheckpointError that names what is wrong; nothing is written.
    """
    path = at_home(source)
    try:
        checkpoint = _read(path, str(source))
        if values:
            check_values(path, checkpoint.stored, checkpoint.files, progress)
    except OSError as error:
        raise Unreadable(path=error.filename or path, why=error.strerror or error) from error
    for note in checkpoint.notes:
        log.info("%s: %s", path, note)
    return checkpoint


def _read(path: Path, source: str) -> Checkpoint:
    """The checkpoint at `path`, or under the hub id `source` when there is no such path."""
    if path.is_file():
        if path.suffix != ".gguf" and not _begins_as_gguf(path):
            raise NotAModel(path=path, why="it does not begin as a GGUF file")
        return _from_gguf(path, source)
    if path.is_dir():
        return _from_folder(path, source, SourceKind.FOLDER)
    if path.exists():
        raise NotAModel(path=path, why="it is neither a file nor a folder")
    if not HUB_ID.fullmatch(source) or path.suffix in (".gguf", ".safetensors"):
        raise PathMissing(path=source)
    return _from_folder(snapshot(source), source, SourceKind.HUB)


def _begins_as_gguf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == MAGIC


def _from_gguf(path: Path, source: str) -> Checkpoint:
    header = read_gguf(path)
    config = config_from_gguf(header)
    return Checkpoint(
        config=config,
        provenance=Provenance(source, SourceKind.GGUF, (path,)),
        notes=(),
        stored=fit(path, config, canonical_tensors(header)),
        files={path: header.file},
        interleaved=interleaved_heads(config),
        make_tokenizer=lambda: _gguf_tokenizer(header, config),
    )


def _gguf_tokenizer(header: GgufHeader, config: TargetConfig) -> Tokenizer:
    return tokenizer_from_gguf(header.path, header.metadata, config)


def _from_folder(folder: Path, source: str, kind: SourceKind) -> Checkpoint:
    if not (folder / "config.json").is_file():
        raise NotAModel(path=folder, why="it has no config.json")
    generation = folder / "generation_config.json"
    config = config_from_json(
        folder / "config.json",
        read_json(folder / "config.json"),
        generation=read_json(generation) if generation.is_file() else {},
        chat_template=chat.template_of_folder(folder),
    )
    found = folder_tensors(folder)
    stored = join_tied(folder, config, fit(folder, config, found.tensors), found.files)
    return Checkpoint(
        config=config,
        provenance=Provenance(source, kind, _read_files(folder, found.files)),
        notes=tuple(found.notes),
        stored=stored,
        files=found.files,
        interleaved={},
        make_tokenizer=lambda: _folder_tokenizer(folder, config),
    )


def _folder_tokenizer(folder: Path, config: TargetConfig) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise TokenizerMissing(path=folder)
    return Tokenizer.from_json(path, path.read_text("utf-8"), config)


def _read_files(folder: Path, shards: Iterable[Path]) -> tuple[Path, ...]:
    """The files of a folder that decide what the model computes."""
    extra = (folder / name for name in ("config.json", "generation_config.json", "tokenizer.json"))
    return tuple(path for path in (*extra, *shards) if path.is_file())


def _sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
