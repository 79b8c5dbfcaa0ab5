"""A backend answers questions; nobody asks for its name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from codegen.kernel import Kernel
from codegen.plan import Plan
from codegen.schedules import Schedule
from codegen.store import KernelStore
from ir.format import Format, TensorType
from ir.passes.facts import Facts

if TYPE_CHECKING:
    from codegen.lower import Lowered, Operand
    from ir.op import Value

Report = Callable[[str, int, int], None]
"""Told what is being done, how many parts are done, and of how many."""

ROWS = "rows"
"""The layout of a weight as the checkpoint has it: row after row, in its own format."""


def silent(stage: str, done: int, total: int) -> None:
    """A `Report` that tells nobody."""


class Backend(ABC):
    """From regions to kernels, from kernels to binaries, and what the target machine can do."""

    name: str
    working: Format  # what values between regions are stored in
    interleave: int | None = (
        16  # rows of one weight that stand together when weights merge in turns
    )
    argmax_tile: int | None = 128  # width of the tiles that a wide argmax splits into

    @abstractmethod
    def supports(self, weight: Format) -> bool:
        """True if weights of this format are read in place."""

    @abstractmethod
    def activation_format(self, weight: Format) -> Format | None:
        """What the activations that meet weights of this format are
        rounded to (None: not at all).
        """

    @abstractmethod
    def state_format(self, weight: Format) -> Format:
        """What keys and values are stored in when the weights have this format."""

    def pass_facts(self) -> Facts:
        """What the passes ask of the backend."""
        floats = [f for f in Format if f.is_float and self.supports(f)]
        activation = {f: a for f in floats if (a := self.activation_format(f))}
        return Facts(activation, self.interleave, self.argmax_tile)

    @abstractmethod
    def problems(self, lowered: Lowered) -> list[str]:
        """What this backend cannot do of the region, in words; empty when it can be emitted."""

    @abstractmethod
    def schedules(self, lowered: Lowered) -> Iterable[Schedule]:
        """The search space of the region; never empty."""

    @abstractmethod
    def cost(self, lowered: Lowered, schedule: Schedule) -> float:
        """What the cost model expects of the schedule, in seconds; the smallest is the default."""

    @abstractmethod
    def layout(self, lowered: Lowered, operand: Operand) -> str | None:
        """The layout in which the region wants a weight operand; None if it reads any layout.

        It depends on the region's op and the weight's type, never on the number of rows, so that
        one packed copy serves every program. A weight that every region reads in any layout stays
        as it is (ROWS).
        """

    @abstractmethod
    def packed_bytes(self, type: TensorType, layout: str) -> int:
        """Bytes that a weight of `type` takes in `layout`, one that
        `layout()` gave (never ROWS).
        """

    @abstractmethod
    def pack(self, value: Value, layout: str) -> np.ndarray:
        """The weight in `layout`, uint8 [packed_bytes]."""

    @abstractmethod
    def emit(self, lowered: Lowered, schedule: Schedule, layouts: Mapping[str, str]) -> Kernel:
        """The kernel of the region; `layouts` gives each weight
        operand's layout by operand name.
        """

    @abstractmethod
    def unit(self, plan: Plan, kernels: Sequence[Kernel], declared: Sequence[Kernel]) -> str:
        """The translation unit of a plan: defines `kernels` and the plan's entry.

        `declared` are kernels of the plan that an earlier unit of the same program defines.
        """

    @abstractmethod
    def build(
        self, units: Mapping[str, str], store: KernelStore, report: Report = silent
    ) -> dict[str, Path]:
        """File name -> built file, from unit name -> source; what it makes is kept in `store`.

        On the host these are `program.so`, which has the entry of every plan, `int SYMBOL(void
        *const *buffers, Team *team, long long *nanoseconds)` (the clock of each launch, or null; 0
        means done), and `team.so` with `Team *team_create(int threads)` and `void team_destroy(Team
        *)`.
        """

    @abstractmethod
    def sources(self, units: Mapping[str, str]) -> dict[str, str]:
        """File name -> text of everything that `build` reads, to be kept beside what it builds."""

    @abstractmethod
    def facts(self) -> dict[str, str]:
        """The device and the toolchain: recorded in an artifact and compared when it is loaded.

        `machine`, `system` and `abi` must be equal, `isa` (words) must be a part of what the
        machine has; other facts describe the toolchain.
        """
