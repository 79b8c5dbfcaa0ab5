"""From a program written in ops to a TRACED graph."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch.fx

from ir.errors import UnknownState, UnknownWeight
from ir.graph import Graph, GraphKey, Level, Role, Slot
from ir.tensor import Format, TensorType

_OWN_FOLDER = str(Path(__file__).parent)


class _OpTracer(torch.fx.Tracer):
    """Records ops with the source line that called them."""

    def create_node(self, *args: object, **kwargs: object) -> torch.fx.Node:
        node = super().create_node(*args, **kwargs)
        node.meta["origin"] = _caller()
        return node


def _caller() -> str:
    """`folder/file.py:line` of the nearest frame outside `ir` and `torch`: the program's line."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_OWN_FOLDER) and "/torch/" not in name and name.endswith(".py"):
            path = Path(name)
            return f"{path.parent.name}/{path.name}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


class Scope:
    """What a program sees while it is traced: its inputs, weights, states and outputs by name.

    A weight or state asked for twice is one placeholder; the handle that a STATE op returns takes
    the place of the state when it is asked for again, so order is plain data flow.
    """

    def __init__(
        self,
        key: GraphKey,
        weight_type: Callable[[str], TensorType],
        state_type: Callable[[str], TensorType],
    ) -> None:
        self.key = key
        self._weight_type = weight_type
        self._state_type = state_type
        self._tracer = _OpTracer()
        self._tracer.graph = torch.fx.Graph(tracer_cls=_OpTracer)
        self._slots: dict[str, Slot] = {}
        self._handles: dict[tuple[Role, str], torch.fx.Proxy] = {}
        self._outputs: dict[str, torch.fx.Proxy] = {}

    def _placeholder(self, role: Role, name: str, type_: TensorType) -> torch.fx.Proxy:
        proxy = self._tracer.create_proxy("placeholder", name.replace(".", "_"), (), {})
        proxy.node.meta["type"] = type_
        self._slots[proxy.node.name] = Slot(role, name, type_)
        self._handles[role, name] = proxy
        return proxy

    def input(self, name: str, *shape: int, format: Format = Format.I32) -> torch.fx.Proxy:
        """The static input buffer `name` of `shape` (index buffers are i32)."""
        known = self._handles.get((Role.INPUT, name))
        return known if known is not None else self._placeholder(
            Role.INPUT, name, TensorType(shape, format)
        )  # fmt: skip

    def weight(self, name: str) -> torch.fx.Proxy:
        """The weight `name` of the binding; an unknown name is an error."""
        known = self._handles.get((Role.WEIGHT, name))
        return known if known is not None else self._placeholder(
            Role.WEIGHT, name, self._weight_type(name)
        )  # fmt: skip

    def state(self, name: str) -> torch.fx.Proxy:
        """The newest handle of state `name`."""
        known = self._handles.get((Role.STATE, name))
        return known if known is not None else self._placeholder(
            Role.STATE, name, self._state_type(name)
        )  # fmt: skip

    def update(self, name: str, handle: torch.fx.Proxy) -> None:
        """Makes `handle`, returned by a STATE op, the newest one of state `name`."""
        self._handles[Role.STATE, name] = handle

    def output(self, name: str, value: torch.fx.Proxy) -> None:
        """Binds `value` to the output buffer `name`."""
        assert name not in self._outputs, f"output {name} is bound twice"
        self._outputs[name] = value

    def graph(self) -> Graph:
        """The TRACED graph of all that was called since the scope was made."""
        fx = self._tracer.graph
        fx.output({name: proxy.node for name, proxy in self._outputs.items()})
        return Graph(self.key, fx, self._slots, Level.TRACED, ("trace",))


Program = Callable[[Scope], None]


def trace(
    program: Program,
    key: GraphKey,
    weights: Mapping[str, TensorType],
    states: Mapping[str, TensorType],
    name: str = "program",
) -> Graph:
    """The TRACED graph of `program` for `key` over weights and states of the given types."""

    def weight_type(wanted: str) -> TensorType:
        if wanted not in weights:
            raise UnknownWeight(binding=name, name=wanted, known=", ".join(weights))
        return weights[wanted]

    def state_type(wanted: str) -> TensorType:
        if wanted not in states:
            raise UnknownState(binding=name, name=wanted, known=", ".join(states))
        return states[wanted]

    scope = Scope(key, weight_type, state_type)
    program(scope)
    return scope.graph()
