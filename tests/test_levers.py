"""Levers: every name and value is read strictly, wherever it comes from."""

from dataclasses import fields
from pathlib import Path

import pytest

from circuit.options import BadOption, levers
from proposers.errors import LeverRefused
from proposers.knobs import KNOBS, Reading, levers_of_knobs
from proposers.levers import Depth, MaskScope, ModelLevers, TrimPolicy
from proposers.rules.errors import BadLadder
from proposers.rules.gate import GateMode

BAD = {
    "trim": ["none", ""], "catchup": ["yes", "2"], "refeed_shift": ["-5", "5", "1.0", "x"],
    "drafter_prefill": ["true"], "drafter_carry": ["-1"], "target_hidden": ["norm"],
    "recycle": ["pre"], "draft_stop": ["0", "1", "nan", "-0.5", "half"],
    "draft_clamp": ["1", "-0.1", "nan"], "mask_scope": ["all"], "gate": ["on"],
    "gate_reprobe": ["0", "1.5"], "gate_refresh": ["0"], "entry_pin": ["-1"], "depth": ["auto"],
    "goal": ["speed"], "static_rung": ["maybe"], "max_sequences": ["-1", "129"],
    "depth_cut": ["2"], "depth_cut_ratio": ["1.1", "nan"], "depth_cut_sequences": ["0"],
    "batch_verify": ["no"], "batch_bootstrap": ["no"], "canonical_key": ["no"],
    "canonical_width": ["-1"], "acceptance_log": ["yes"], "shadow_topk": ["9", "-1"],
    "fingerprints": ["yes"],
}  # fmt: skip
GOOD = {
    "trim": "refeed", "catchup": "on", "refeed_shift": "-1", "drafter_prefill": "0",
    "drafter_carry": "off", "target_hidden": "post_norm", "recycle": "pre_norm",
    "draft_stop": "0.5", "draft_clamp": "0.99", "mask_scope": "every", "gate": "auto",
    "gate_reprobe": "64", "gate_refresh": "100", "entry_pin": "0", "depth": "cost",
    "goal": "energy", "ladder": "2:3,9:1", "static_rung": "1", "max_sequences": "128",
    "depth_cut": "off", "depth_cut_ratio": "0.5", "depth_cut_sequences": "4",
    "batch_verify": "off", "batch_bootstrap": "off", "canonical_key": "off",
    "canonical_width": "0", "acceptance_log": "on", "shadow_topk": "8", "fingerprints": "on",
}  # fmt: skip


def test_every_lever_has_a_good_and_a_bad_value():
    names = {f.name for f in fields(ModelLevers)}
    assert GOOD.keys() == names == BAD.keys() | {"ladder"}
    read = ModelLevers.parse(GOOD)
    assert all(getattr(read, n) != getattr(ModelLevers(), n) for n in names - {"catchup"})
    assert (read.stop_rule.threshold, read.gate_settings.reprobe) == (0.5, 64)
    assert read.cut_rule.max_sequences == 4 and not read.canonical_rule.enabled


@pytest.mark.parametrize("name, text", [(n, t) for n, texts in BAD.items() for t in texts])
def test_a_bad_value_is_refused_with_what_is_allowed(name, text):
    with pytest.raises(LeverRefused) as caught:
        ModelLevers.parse({name: text})
    reader = next(f for f in fields(ModelLevers) if f.name == name).metadata["reader"]
    assert caught.value.facts["wanted"] == reader.allowed and name in str(caught.value)


def test_levers_that_do_not_fit_each_other_and_names_that_are_none():
    with pytest.raises(LeverRefused, match="refeed needs"):
        ModelLevers(trim=TrimPolicy.REFEED, catchup=False)
    with pytest.raises(LeverRefused, match="no lever speed; the levers are trim, catchup"):
        ModelLevers.parse({"speed": "1"})
    with pytest.raises(BadLadder):
        ModelLevers.parse({"ladder": "4:3,x"})
    assert not ModelLevers.parse({"ladder": "off"}).ladder.enabled


# The older knobs ----------------------------------------------------------------------------

MEANT = {
    "MTP_K_LADDER": ("4:2", {"ladder": "4:2"}), "NO_MTP_K_LADDER": ("1", {"ladder": "off"}),
    "MTP_STATIC_RUNG": ("1", {"static_rung": "on"}), "MTP_MAX_SEQS": ("8", {"max_sequences": "8"}),
    "MTP_DRAFT_CONF": ("0.4", {"draft_clamp": "0.4"}),
    "MTP_SHADOW_TOPK": ("0", {"shadow_topk": "0"}),
    "MTP_ACCEPT_DEBUG": ("1", {"acceptance_log": "on"}), "MTP_CATCHUP": ("0", {"catchup": "off"}),
    "MTP_REFEED_ACCEPTED": ("1", {"trim": "refeed"}),
    "MTP_REFEED_SHIFT": ("1", {"refeed_shift": "1"}),
    "MTP_REFEED_DEBUG": ("1", {"fingerprints": "on"}),
    "MTP_GATE_REPROBE": ("64", {"gate_reprobe": "64"}),
    "MTP_GATE_REFRESH": ("9", {"gate_refresh": "9"}), "SPEC_ENTRY_PIN": ("0", {"entry_pin": "0"}),
    "MTP_DCUT_RATIO": ("0.5", {"depth_cut_ratio": "0.5"}),
    "MTP_DCUT_MAX_SEQS": ("4", {"depth_cut_sequences": "4"}),
    "NO_MTP_DCUT": ("1", {"depth_cut": "off"}),
    "NO_MTP_BATCH_VERIFY": ("1", {"batch_verify": "off"}),
    "NO_MTP_BATCH_BOOTSTRAP": ("1", {"batch_bootstrap": "off"}),
    "NO_MTP_DRAFTER_CONTEXT": ("1", {"drafter_prefill": "off", "drafter_carry": "off"}),
    "NO_CANONICAL_VERIFY_KEY": ("1", {"canonical_key": "off"}),
    "CANONICAL_KEY_MIN_WIDTH": ("3", {"canonical_width": "3"}),
}  # fmt: skip


def test_every_knob_has_its_meaning():
    assert MEANT.keys() == KNOBS.keys()
    for suffix, (text, wanted) in MEANT.items():
        meant = levers_of_knobs({suffix: text})
        assert meant == wanted
        ModelLevers.parse(meant)


@pytest.mark.parametrize("suffix", [k for k in KNOBS if KNOBS[k].reading is not Reading.VALUE])
def test_what_older_engines_read_in_silence_is_refused(suffix):
    """`=0` switched a knob of presence on, and `=yes` left one of exactly 1 off."""
    presence = KNOBS[suffix].reading is Reading.PRESENCE
    for text in ("yes", "", "true", *(["0"] if presence else [])):
        with pytest.raises(LeverRefused, match=suffix):
            levers_of_knobs({suffix: text})
    if not presence:
        levers_of_knobs({suffix: "0"})


def test_knobs_that_contradict_each_other():
    with pytest.raises(LeverRefused, match="in agreement with ladder"):
        levers_of_knobs({"MTP_K_LADDER": "4:2", "NO_MTP_K_LADDER": "1"})
    with pytest.raises(LeverRefused, match="refeed needs"):
        ModelLevers.parse(levers_of_knobs({"MTP_CATCHUP": "0", "MTP_REFEED_ACCEPTED": "1"}))
    with pytest.raises(LeverRefused, match="one of MTP_K_LADDER"):
        levers_of_knobs({"MTP_EP_PROPOSE": "1"})


# Where levers come from -----------------------------------------------------------------------


def test_the_command_line_wins_over_the_file_and_that_over_the_environment(tmp_path):
    file = tmp_path / "levers.toml"
    file.write_text("[levers]\ndraft_stop = 0.25\ngate_reprobe = 7\ncatchup = false\n")
    variables = {"CIRCUIT_DRAFT_STOP": "0.125", "CIRCUIT_SHADOW_TOPK": "2",
                 "CIRCUIT_MTP_ACCEPT_DEBUG": "1", "CIRCUIT_TRIM": "default", "HOME": "x",
                 "CIRCUIT_MTP_EP_PROPOSE": "1"}  # fmt: skip
    read = levers(["mask_scope = every", "gate_reprobe=8"], file, variables)
    assert (read.draft_stop, read.shadow_topk, read.acceptance_log) == (0.25, 2, True)
    assert (read.gate_reprobe, read.catchup, read.mask_scope) == (8, False, MaskScope.EVERY)
    assert read.trim is TrimPolicy.DEFAULT
    assert (read.depth, read.gate) == (Depth.WORTH, GateMode.FORCE)
    assert levers(environment={}) == ModelLevers()


def test_sources_that_cannot_be_used(tmp_path):
    file = tmp_path / "levers.toml"
    for text, said in (("levers = 3", "holds levers"), ("[gates]\n", "holds gates"), ("[", "TOML")):
        file.write_text(text)
        with pytest.raises(BadOption, match=said):
            levers(file=file, environment={})
    with pytest.raises(BadOption, match="cannot be read"):
        levers(file=tmp_path / "none.toml", environment={})
    with pytest.raises(BadOption, match="name=value"):
        levers(["trim"], environment={})
    with pytest.raises(BadOption, match="an older knob says ladder off"):
        levers(environment={"CIRCUIT_LADDER": "4:2", "CIRCUIT_NO_MTP_K_LADDER": "1"})
    same = {"CIRCUIT_LADDER": "4:2", "CIRCUIT_MTP_K_LADDER": "4:2"}
    assert levers(environment=same).ladder.pinned


def test_the_page_of_levers_names_them_all():
    page = (Path(__file__).parent.parent / "docs" / "levers.md").read_text()
    assert all(f"`{f.name}`" in page for f in fields(ModelLevers))
    assert all(f"`{suffix}`" in page for suffix in KNOBS)
