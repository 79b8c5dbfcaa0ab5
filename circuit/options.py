"""Settings from the environment, read at the edge and nowhere else."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """The folder for downloads: $CIRCUIT_CACHE, else ~/.cache/circuit; it need not exist."""
    given = os.environ.get("CIRCUIT_CACHE")
    return Path(given).expanduser() if given else Path.home() / ".cache" / "circuit"
