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
        why, advice, cause = (
            "its owner must grant access first",
            "Ask for access and log in.",
            error,
        )
    except RepositoryNotFoundError as error:
        why, advice, cause = "no such repository can be seen", "Check the spelling.", error
    except LocalEntryNotFoundError as error:
        why = "the hub cannot be reached and the cache has no copy"
        advice, cause = "Connect to the network, or give a local folder.", error
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        why, advice, cause = str(error).splitlines()[0], "Give a local folder.", error
    raise HubUnavailable(source=source, why=why, advice=advice) from cause
