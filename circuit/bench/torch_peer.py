"""The peers `eager` and `torch.compile`: the graph of a binding as
plain torch, over a static cache.

The graph is the one that is compiled here too; only the paged cache is replaced, op by op, by what
a torch user writes: one contiguous cache per layer and `scaled_dot_product_attention` under a mask.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import torch.fx
from torch.nn.functional import scaled_dot_product_attention

from ir.binding import Binding
from ir.graph import Graph, GraphKey, Mode, Role, op_of
from ir.ops.attention import attention, kv_write, slot_at
from ir.tensor import unpacked

INDEX_INPUTS = ("ids", "positions", "row_sequence", "indices", "tables", "last_row")


def static_slots(tables: Any, row_sequence: Any, indices: Any) -> Any:
    """Place of each row in a contiguous cache: its number in the sequence."""
    return indices


def static_write(cache: torch.Tensor, k: Any, v: Any, slots: Any) -> torch.Tensor:
    """The cache [2, g, L, d] with key and value of each row stored at its place."""
    cache[0].index_copy_(1, slots, k.transpose(0, 1))
    cache[1].index_copy_(1, slots, v.transpose(0, 1))
    return cache


def static_attention(
    q: Any, cache: torch.Tensor, tables: Any, row_sequence: Any, indices: Any, *, scale: float
) -> Any:
    """Attention of q [m, h, d] over the contiguous cache, each row up to its own place."""
    seen = torch.arange(cache.shape[2], device=q.device) <= indices[:, None]
    out = scaled_dot_product_attention(
        q.transpose(0, 1)[None], cache[0][None], cache[1][None],
        attn_mask=seen, scale=scale, enable_gqa=True,
    )  # fmt: skip
    return out[0].transpose(0, 1)


STATIC = {slot_at: static_slots, kv_write: static_write, attention: static_attention}


def serves(key: GraphKey) -> bool:
    """True for the programs of one sequence; a contiguous cache holds no more."""
    return key.mode in (Mode.DECODE, Mode.VERIFY, Mode.PREFILL, Mode.CHAIN)


class TorchProgram:
    """One program of a binding with f32 weights, called with i32 and
    f32 arrays as every runner is.
    """

    def __init__(
        self, binding: Binding, key: GraphKey, weights: Mapping[str, torch.Tensor], context: int,
        compiled: bool,
    ) -> None:  # fmt: skip
        graph = binding.graph(key)
        self._inputs = [s.name for s in graph.slots.values() if s.role is Role.INPUT]
        module = torch_module(graph, weights, context).eval()
        self._call: Callable[..., dict[str, torch.Tensor]] = module
        if compiled:
            self._call = torch.compile(module, mode="max-autotune", fullgraph=True, dynamic=False)

    def __call__(self, feed: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
        """The outputs of one step; keys and values stay in the module's cache."""
        tensors = [
            torch.from_numpy(feed[n]).long() if n in INDEX_INPUTS else torch.from_numpy(feed[n])
            for n in self._inputs
        ]
        with torch.inference_mode():
            return self._call(*tensors)


def float_weights(binding: Binding) -> dict[str, torch.Tensor]:
    """Every weight in f32, tables of ids as int64; what is one tensor in the binding stays one."""
    made: dict[int, torch.Tensor] = {}
    for value in binding.weights.values():
        if id(value) not in made:
            plain = unpacked(value)
            made[id(value)] = plain.float() if plain.is_floating_point() else plain.long()
    return {name: made[id(value)] for name, value in binding.weights.items()}


def torch_module(
    graph: Graph, weights: Mapping[str, torch.Tensor], context: int, *,
    cache: torch.dtype = torch.float32, device: torch.device | None = None,
    instead: Mapping[Any, Callable[..., Any]] = MappingProxyType({}),
) -> torch.fx.GraphModule:  # fmt: skip
    """The graph as a module: weights and caches are buffers, ops are their
    bodies or what stands `instead`.
    """
    root, made = torch.nn.Module(), torch.fx.Graph()
    env: dict[torch.fx.Node, torch.fx.Node] = {}
    for number, node in enumerate(graph.fx.nodes):
        if node.op == "placeholder":
            slot, name = graph.slots[node.name], f"buffer_{number}"
            if slot.role is Role.INPUT:
                env[node] = made.placeholder(node.name)
                continue
            if slot.role is Role.WEIGHT:
                value = weights[slot.name]
            else:
                _, _, heads, _, width = slot.type.shape
                value = torch.zeros(2, heads, context, width, dtype=cache, device=device)
            root.register_buffer(name, value)
            env[node] = made.get_attr(name)
        elif node.op == "call_function":
            op = op_of(node)
            target = instead.get(op) or STATIC.get(op, op.body)
            env[node] = made.call_function(target, tuple(env[a] for a in node.args), node.kwargs)
        else:
            made.output({name: env[value] for name, value in node.args[0].items()})
    made.lint()
    return torch.fx.GraphModule(root, made)
