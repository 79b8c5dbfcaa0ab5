"""The engine of an artifact without its compiled programs: the same
graphs, interpreted with torch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from circuit import options
from circuit.bindings import eager_heads, rebind
from circuit.engine.engine import Engine
from circuit.loaded import Loaded, whole_head
from circuit.recipe import TARGET
from proposers.levers import ModelLevers
from runners.eager import EagerRunner


def eager_engine(
    loaded: Loaded, threads: int | None, levers: ModelLevers, *, draft: bool = True
) -> tuple[Engine, Callable[[], None]]:
    """An engine over the programs as written, and the call that frees it.

    The weights are read again from the checkpoint that the artifact records, and must be those it
    was compiled from.
    """
    torch.set_num_threads(options.threads(threads))
    bound = rebind(loaded.artifact)
    context = loaded.artifact.part(TARGET).context
    target = EagerRunner(bound.bindings[TARGET], blocks=1 + context // 16, context=context)
    modules = eager_heads(bound, levers) if draft else []
    return Engine(target, whole_head(modules)), target.close
