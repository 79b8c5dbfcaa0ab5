"""The switches of drafting, in one frozen record that is parsed once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any

from proposers.config import Contract, StreamPoint
from proposers.errors import LeverRefused, UnknownLever
from proposers.lever_readers import ladder, member_of, number, read, switch, whole
from proposers.rules.cost import Goal
from proposers.rules.depth_cut import DepthCut
from proposers.rules.draft_stop import DraftStop
from proposers.rules.gate import GateMode, GateSettings
from proposers.rules.ladder import Ladder
from proposers.rules.verify_key import CanonicalRule


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
    KEEP = "keep"  # rows 0..a stay; after a full acceptance the row never made is fed: no gap

    def dropped(self, drafted: int, accepted: int) -> int:
        """Rows to cut of the `drafted` newest ones."""
        if self is TrimPolicy.DEFAULT:
            return drafted - accepted
        if self is TrimPolicy.REFEED:
            return min(drafted, drafted - accepted + max(accepted - 1, 0))
        if self is TrimPolicy.KEEP:
            return max(drafted - 1 - accepted, 0)
        return drafted - 1


class MaskScope(Enum):
    """What one grammar mask of a request limits; masks by position limit their own draft each."""

    FIRST = "first"  # the next token only: later ones are of grammar states that it is not for
    EVERY = "every"  # every draft


class Depth(Enum):
    """How many drafts a step verifies, of those that the request allows."""

    WORTH = "worth"  # those whose chances are worth their rows, of each chain anew
    FIXED = "fixed"  # all of them
    COST = "cost"  # what gives most for its cost, as measured while running


@dataclass(frozen=True)
class ModelLevers:
    """Settings of drafting. `target_hidden` and `recycle` replace the contract's choice when given.

    Rows: `catchup` feeds steps without drafts to the drafter; `refeed_shift` moves the labels of
    fed hiddens (0 is right; others show that it is); `drafter_prefill` and `drafter_carry` build
    its context from the prompt and keep it between turns.
    Chains: `draft_stop` ends one after a draft below that probability; `draft_clamp` drops one
    whose least probability is below it; `mask_scope` is what one grammar mask limits.
    Steps: `gate` leaves drafts out while that is faster; `depth`, with `goal`, chooses their number
    by cost. Batches: `ladder`, `static_rung`, `max_sequences` (0: the model's default), the cut of
    unlikely drafts, the order of a batched verify. Logs: `acceptance_log`, `shadow_topk` ranks of
    the drafter's choices, `fingerprints` of fed hiddens.
    """

    trim: TrimPolicy = field(default=TrimPolicy.KV_EXACT, metadata=read(member_of(TrimPolicy)))
    catchup: bool = field(default=True, metadata=read(switch))
    refeed_shift: int = field(default=0, metadata=read(whole(-4, 4)))
    drafter_prefill: bool = field(default=True, metadata=read(switch))
    drafter_carry: bool = field(default=True, metadata=read(switch))
    target_hidden: StreamPoint | None = field(default=None, metadata=read(member_of(StreamPoint)))
    recycle: StreamPoint | None = field(default=None, metadata=read(member_of(StreamPoint)))
    draft_stop: float | None = field(
        default=None, metadata=read(number(0, 1, inside=True, off=True))
    )
    draft_clamp: float = field(default=0.0, metadata=read(number(0, 0.99)))
    mask_scope: MaskScope = field(default=MaskScope.FIRST, metadata=read(member_of(MaskScope)))
    gate: GateMode = field(default=GateMode.FORCE, metadata=read(member_of(GateMode)))
    gate_reprobe: int = field(default=256, metadata=read(whole(1, 1 << 20)))
    gate_refresh: int = field(default=1024, metadata=read(whole(1, 1 << 20)))
    entry_pin: int = field(default=8, metadata=read(whole(0, 1 << 20)))
    depth: Depth = field(default=Depth.WORTH, metadata=read(member_of(Depth)))
    goal: Goal = field(default=Goal.LATENCY, metadata=read(member_of(Goal)))
    ladder: Ladder = field(default=Ladder(), metadata=read(ladder()))
    static_rung: bool = field(default=False, metadata=read(switch))
    max_sequences: int = field(default=0, metadata=read(whole(0, 128)))
    depth_cut: bool = field(default=True, metadata=read(switch))
    depth_cut_ratio: float = field(default=0.75, metadata=read(number(0, 1)))
    depth_cut_sequences: int = field(default=8, metadata=read(whole(1, 128)))
    batch_verify: bool = field(default=True, metadata=read(switch))
    batch_bootstrap: bool = field(default=True, metadata=read(switch))
    canonical_key: bool = field(default=True, metadata=read(switch))
    canonical_width: int = field(default=8, metadata=read(whole(0, 128)))
    acceptance_log: bool = field(default=False, metadata=read(switch))
    shadow_topk: int = field(default=0, metadata=read(whole(0, 8)))
    fingerprints: bool = field(default=False, metadata=read(switch))

    def __post_init__(self) -> None:
        if self.trim is TrimPolicy.REFEED and not self.catchup:
            raise LeverRefused(
                name="catchup", value="off", wanted="on, as trim refeed needs what it feeds"
            )

    def resolve(self, contract: Contract) -> Contract:
        """The contract with the levers' choices in it."""
        return replace(
            contract,
            target_hidden=self.target_hidden or contract.target_hidden,
            recycle=self.recycle or contract.recycle,
        )

    @property
    def stop_rule(self) -> DraftStop | None:
        """The rule that ends chains early; None: chains are whole."""
        return None if self.draft_stop is None else DraftStop(self.draft_stop)

    @property
    def gate_settings(self) -> GateSettings:
        """The gate's cadence."""
        return GateSettings(self.gate_reprobe, self.gate_refresh, self.entry_pin)

    @property
    def cut_rule(self) -> DepthCut:
        """The rule by which a batch leaves out unlikely drafts."""
        return DepthCut(self.depth_cut_ratio, self.depth_cut_sequences, self.depth_cut)

    @property
    def canonical_rule(self) -> CanonicalRule:
        """The rule by which a batch lays its depths onto slots."""
        return CanonicalRule(self.canonical_key, self.canonical_width)

    @staticmethod
    def parse(values: Mapping[str, Any]) -> ModelLevers:
        """The levers named in `values`; an unknown name or value is LeverRefused.

        A value is text, or what TOML makes of it: a number or a truth value.
        """
        readers = {f.name: f.metadata["reader"] for f in fields(ModelLevers)}
        given = {}
        for name, value in values.items():
            if name not in readers:
                raise UnknownLever(name=name, known=", ".join(readers))
            text = ("on" if value else "off") if isinstance(value, bool) else str(value)
            try:
                given[name] = readers[name].read(text)
            except ValueError as error:
                wanted = readers[name].allowed
                raise LeverRefused(name=name, value=value, wanted=wanted) from error
        return ModelLevers(**given)
