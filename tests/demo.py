"""The demo model's file for tests: from the user's cache, fetched into it when absent."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from circuit.fetch import fetch_demo
from circuit.models.checkpoint import Checkpoint, load_target


@cache
def demo_file() -> Path:
    """The path of SmolLM2-135M-Instruct.Q4_1.gguf, its SHA-256 checked."""
    return fetch_demo()


@cache
def demo() -> Checkpoint:
    """The loaded demo checkpoint; shared, so tests do not write to its tensors."""
    return load_target(demo_file())
