"""The switches of drafting, in one frozen record that is parsed once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from enum import Enum

from proposers.config import Contract, StreamPoint
from proposers.errors import LeverRefused


class TrimPolicy(Enum):
    """Which drafter rows of k drafts survive a verify that accepted a of them.

    Row 0 is exact (a real token, a true hidden); rows 1..a hold a right token with the head's own
    hidden.
    """

    DEFAULT = "default"  # rows 0..a-1 stay as they are: one pair key is lost in each step
    REFEED = "refeed"  # row 0 stays if a > 0; the others are fed again through catchup_drafter
    KV_EXACT = (
        "kv_exact"  # row 0 stays; accepted rows are fed again with true hiddens: no gap, no guess
    )

    def dropped(self, drafted: int, accepted: int) -> int:
        """Rows to cut of the `drafted` newest ones."""
        if self is TrimPolicy.DEFAULT:
            return drafted - accepted
        if self is TrimPolicy.REFEED:
            return min(drafted, drafted - accepted + max(accepted - 1, 0))
        return drafted - 1


@dataclass(frozen=True)
class ModelLevers:
    """Settings of drafting. `target_hidden` and `recycle` replace
    the contract's choice when given.
    """

    trim: TrimPolicy = TrimPolicy.KV_EXACT
    drafter_prefill: bool = True
    target_hidden: StreamPoint | None = None
    recycle: StreamPoint | None = None

    def resolve(self, contract: Contract) -> Contract:
        """The contract with the levers' choices in it."""
        return replace(
            contract,
            target_hidden=self.target_hidden or contract.target_hidden,
            recycle=self.recycle or contract.recycle,
        )

    @staticmethod
    def parse(values: Mapping[str, str]) -> ModelLevers:
        """The levers named in `values`; an unknown name or value is LeverRefused."""
        kinds: dict[str, type] = {
            "trim": TrimPolicy, "drafter_prefill": bool,
            "target_hidden": StreamPoint, "recycle": StreamPoint,
        }  # fmt: skip
        assert kinds.keys() == {f.name for f in fields(ModelLevers)}
        given = {}
        for name, value in values.items():
            if name not in kinds:
                raise LeverRefused(name=name, value=value, wanted=f"one of {', '.join(kinds)}")
            given[name] = _parsed(name, value, kinds[name])
        return ModelLevers(**given)


def _parsed(name: str, value: str, kind: type) -> object:
    choices = {"1": True, "on": True, "0": False, "off": False}
    if kind is not bool:
        choices = {member.value: member for member in kind}
    if value not in choices:
        raise LeverRefused(name=name, value=value, wanted=f"one of {', '.join(choices)}")
    return choices[value]
