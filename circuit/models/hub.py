"""A hub id as a source: the needed files of a repository, through `huggingface_hub`."""

from __future__ import annotations

from pathlib import Path

from circuit.models.errors import HubUnavailable

PATTERNS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model.safetensors.index.json",
    "*.safetensors",
)


def snapshot(source: str) -> Path:
    """The local folder with the checkpoint `source` (`owner/name`), fetched unless cached."""
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import (
            GatedRepoError,
            HfHubHTTPError,
            HFValidationError,
            LocalEntryNotFoundError,
            RepositoryNotFoundError,
        )
    except ImportError:
        raise HubUnavailable(
            source=source,
            why="the package huggingface_hub is not installed",
            advice="pip install huggingface_hub, or give a local folder.",
        ) from None
    try:
        return Path(snapshot_download(source, allow_patterns=list(PATTERNS)))
    except GatedRepoError as error:
        raise HubUnavailable(
            source=source,
            why="its owner must grant access first",
            advice="Ask for access on its page and log in.",
        ) from error
    except RepositoryNotFoundError as error:
        raise HubUnavailable(
            source=source,
            why="no such repository can be seen",
            advice="Check the spelling; a local path must exist.",
        ) from error
    except LocalEntryNotFoundError as error:
        raise HubUnavailable(
            source=source,
            why="the hub cannot be reached and the cache has no copy",
            advice="Connect to the network, or give a local folder.",
        ) from error
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise HubUnavailable(
            source=source,
            why=str(error).splitlines()[0],
            advice="Try again later, or give a local folder.",
        ) from error
