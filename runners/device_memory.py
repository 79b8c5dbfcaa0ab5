"""Memory of a device: typed views of raw bytes, states of the KV pool, and staging of inputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ir.format import Format, TensorType

ALIGNMENT = 256


def shaped(raw: torch.Tensor, type_: TensorType) -> torch.Tensor:
    """The first bytes of `raw` (uint8) as a tensor of `type_`."""
    assert not type_.format.is_block
    dtype = torch.uint8 if type_.format is Format.BOOL else type_.format.dtype
    return raw[: type_.nbytes].view(dtype).reshape(type_.shape)


def host_bits(tensor: torch.Tensor) -> np.ndarray:
    """A host copy; bf16 as its 16 bits (uint16)."""
    if tensor.dtype is not torch.bfloat16:
        return tensor.cpu().numpy().copy()
    return tensor.view(torch.int16).cpu().numpy().view(np.uint16).copy()


class DeviceState:
    """A state of the KV pool on a device; reading an index gives a host
    copy, writing takes host values.
    """

    def __init__(self, type_: TensorType, device: torch.device) -> None:
        self.type = type_
        self.tensor = torch.zeros(type_.shape, dtype=type_.format.dtype, device=device)

    def __getitem__(self, index: Any) -> np.ndarray:
        return host_bits(self.tensor[index])

    def __setitem__(self, index: Any, values: Any) -> None:
        self.tensor[index] = as_tensor(values, self.type).to(self.tensor)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """A host copy of the whole state."""
        return host_bits(self.tensor) if dtype is None else host_bits(self.tensor).astype(dtype)

    def move_row(self, source: tuple[int, int], target: tuple[int, int]) -> None:
        """Copies keys and values of one row (block, line) onto another, on the device."""
        (old, old_line), (new, new_line) = source, target
        self.tensor[new, :, :, new_line] = self.tensor[old, :, :, old_line]

    def raw(self) -> torch.Tensor:
        """All bytes, uint8."""
        return self.tensor.reshape(-1).view(torch.uint8)


class StagedInputs:
    """The inputs of one program: one region on the device, filled by one copy from the host.

    Host regions take turns, so that a step may be prepared while the copies of earlier ones are
    still due.
    """

    TURNS = 4

    def __init__(self, types: dict[str, TensorType], device: torch.device) -> None:
        self.types = types
        self.spans: dict[str, int] = {}
        at = 0
        for name, type_ in types.items():
            self.spans[name] = at
            at += -(-type_.nbytes // ALIGNMENT) * ALIGNMENT
        on_device = device.type == "cuda"
        size = max(at, ALIGNMENT)
        self.device = torch.zeros(size, dtype=torch.uint8, device=device)
        self._host = [
            torch.zeros(size, dtype=torch.uint8, pin_memory=on_device) for _ in range(self.TURNS)
        ]
        self._copied = [torch.cuda.Event() if on_device else None for _ in self._host]
        self._turn = 0

    def raw(self, name: str) -> torch.Tensor:
        """The device bytes of an input, uint8."""
        at = self.spans[name]
        return self.device[at : at + self.types[name].nbytes]

    def value(self, name: str) -> torch.Tensor:
        """An input on the device."""
        return shaped(self.raw(name), self.types[name])

    def write(self, given: dict[str, Any]) -> None:
        """Enqueues the copy of host values, and of tensors that are on a device already."""
        turn = self._turn = (self._turn + 1) % self.TURNS
        event, host = self._copied[turn], self._host[turn]
        if event is not None:
            event.synchronize()
        resident = {}
        for name, value in given.items():
            if isinstance(value, torch.Tensor) and value.is_cuda:
                resident[name] = value
                continue
            at, type_ = self.spans[name], self.types[name]
            shaped(host[at : at + type_.nbytes], type_).copy_(as_tensor(value, type_))
        self.device.copy_(host, non_blocking=True)
        if event is not None:
            event.record()
        for name, value in resident.items():
            self.value(name).copy_(value)

    def pad(self) -> None:
        """Makes every row a padding row: indices -1, everything else 0."""
        self.device.zero_()
        for name in self.types.keys() & {"indices"}:
            self.value(name).fill_(-1)


def as_tensor(value: Any, type_: TensorType) -> torch.Tensor:
    """A host value as a tensor; uint16 values are the bits of bf16 ones."""
    if isinstance(value, torch.Tensor):
        return value
    array = np.array(value)
    if type_.format is Format.BF16 and array.dtype == np.uint16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
