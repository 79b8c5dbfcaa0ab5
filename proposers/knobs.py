"""The knobs of older engines, each as the lever that has its meaning now.

Older engines read them in three ways, which is where scripts go wrong: some by value, some by
presence (where `=0` switches *on*), some as exactly `1` (where anything else is silently off). Here
all three are strict: what an older engine would have taken for something else is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from proposers.errors import LeverRefused


class Reading(Enum):
    """How an older engine read a knob."""

    VALUE = "value"  # the text is the lever's value
    PRESENCE = "presence"  # being there is what counts
    EXACTLY_ONE = "exactly 1"


@dataclass(frozen=True)
class Knob:
    """A knob's reading, and the levers that it sets; None stands for the knob's own text."""

    reading: Reading
    levers: Mapping[str, str | None]
    otherwise: Mapping[str, str] | None = None  # of EXACTLY_ONE, when it is 0


def _value(lever: str) -> Knob:
    return Knob(Reading.VALUE, {lever: None})


def _presence(**levers: str) -> Knob:
    return Knob(Reading.PRESENCE, levers)


KNOBS: dict[str, Knob] = {
    "MTP_K_LADDER": _value("ladder"),
    "NO_MTP_K_LADDER": _presence(ladder="off"),
    "MTP_STATIC_RUNG": _presence(static_rung="on"),
    "MTP_MAX_SEQS": _value("max_sequences"),
    "MTP_DRAFT_CONF": _value("draft_clamp"),
    "MTP_SHADOW_TOPK": _value("shadow_topk"),
    "MTP_ACCEPT_DEBUG": _presence(acceptance_log="on"),
    "MTP_CATCHUP": Knob(Reading.EXACTLY_ONE, {"catchup": "on"}, {"catchup": "off"}),
    "MTP_REFEED_ACCEPTED": Knob(Reading.EXACTLY_ONE, {"trim": "refeed"}, {"trim": "default"}),
    "MTP_REFEED_SHIFT": _value("refeed_shift"),
    "MTP_REFEED_DEBUG": Knob(Reading.EXACTLY_ONE, {"fingerprints": "on"}, {"fingerprints": "off"}),
    "MTP_GATE_REPROBE": _value("gate_reprobe"),
    "MTP_GATE_REFRESH": _value("gate_refresh"),
    "SPEC_ENTRY_PIN": _value("entry_pin"),
    "MTP_DCUT_RATIO": _value("depth_cut_ratio"),
    "MTP_DCUT_MAX_SEQS": _value("depth_cut_sequences"),
    "NO_MTP_DCUT": _presence(depth_cut="off"),
    "NO_MTP_BATCH_VERIFY": _presence(batch_verify="off"),
    "NO_MTP_BATCH_BOOTSTRAP": _presence(batch_bootstrap="off"),
    "NO_MTP_DRAFTER_CONTEXT": Knob(
        Reading.EXACTLY_ONE, {"drafter_prefill": "off", "drafter_carry": "off"}, {}
    ),
    "NO_CANONICAL_VERIFY_KEY": _presence(canonical_key="off"),
    "CANONICAL_KEY_MIN_WIDTH": _value("canonical_width"),
}


def levers_of_knobs(given: Mapping[str, str]) -> dict[str, str]:
    """Lever -> text for knobs named by their suffix; contradictions and bad values are refused."""
    levers: dict[str, str] = {}
    for suffix, text in given.items():
        knob = KNOBS.get(suffix)
        if knob is None:
            raise LeverRefused(name=suffix, value=text, wanted=f"one of {', '.join(KNOBS)}")
        for name, value in _meant(suffix, knob, text.strip()).items():
            if levers.setdefault(name, value) != value:
                raise LeverRefused(
                    name=suffix, value=text, wanted=f"in agreement with {name} {levers[name]}"
                )
    return levers


def _meant(suffix: str, knob: Knob, text: str) -> dict[str, str]:
    """The levers that one knob sets."""
    if knob.reading is Reading.VALUE:
        return {name: text for name in knob.levers}  # noqa: C420
    if text == "1":
        return dict(knob.levers)
    if knob.reading is Reading.EXACTLY_ONE and text == "0":
        return dict(knob.otherwise or {})
    wanted = "1 or 0" if knob.reading is Reading.EXACTLY_ONE else "1, or left out to switch it off"
    raise LeverRefused(name=suffix, value=text, wanted=wanted)
