"""Draft heads from files: what is written is read, and every mismatch is one clear error."""

import json
from dataclasses import replace

import heads
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from proposers.base import ProposeRequest
from proposers.config import QWEN35, NormForm, Sharing
from proposers.errors import HeadRefused
from proposers.levers import ModelLevers, TrimPolicy
from proposers.mtp_binding import TargetSide, bind_head, make_mtp_head
from proposers.options import DraftOptions, head_keys
from proposers.weights import FORMAT, load_head, read_safetensors, save_head

OPTIONS = DraftOptions(heads.CONTEXT, head_keys(batches=(2,), chunk=8))


def refusal(path):
    """The sentence with which a head is refused."""
    with pytest.raises(HeadRefused) as caught:
        load_head(path)
    assert caught.value.facts["path"] == path and caught.value.advice
    return caught.value.facts["problem"]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "head.safetensors"
    save_head(path, [heads.make_head("qwen3.5").weights])
    return path


def rewrite(path, metadata=None, tensors=None):
    """Changes metadata and tensors of a file; None removes an entry."""
    found, kept = read_safetensors(path)
    for target, changes in ((found, metadata or {}), (kept, tensors or {})):
        for name, value in changes.items():
            if value is None:
                target.pop(name)
            else:
                target[name] = value
    save_file(kept, str(path), metadata=found)
    return path


def drafts(weights, side):
    head = make_mtp_head(weights, side, OPTIONS)
    hidden = np.linspace(-1, 1, heads.HIDDEN).astype(np.float32)
    return head.propose(ProposeRequest(5, hidden, 1, 3), head.alloc_state()).tokens


@pytest.mark.parametrize("family", ["llama", "qwen3.5"])
def test_a_saved_head_drafts_as_before(tmp_path, family):
    tiny = heads.make_head(family)
    save_head(tmp_path / "head.safetensors", [tiny.weights])
    [loaded] = load_head(tmp_path / "head.safetensors")
    assert loaded.contract == tiny.weights.contract and loaded.config == tiny.weights.config
    assert loaded.recipe == {"seed": 0} and loaded.unmodelled == ()
    assert drafts(loaded, tiny.side) == drafts(tiny.weights, tiny.side)


def test_several_modules_in_one_file(tmp_path):
    tinies = [heads.make_head(seed=seed) for seed in range(3)]
    path = tmp_path / "head.safetensors"
    shared = [replace(t.weights, draft_ids=tinies[0].weights.draft_ids) for t in tinies]
    save_head(path, shared)
    loaded = load_head(path)
    assert [drafts(w, tinies[0].side) for w in loaded] == [
        drafts(w, tinies[0].side) for w in shared
    ]
    rewrite(path, tensors={"modules.7.mtp.norm.weight": torch.ones(heads.HIDDEN)})
    assert refusal(path) == "modules.7.mtp.norm.weight belong to no module"


def test_a_folder_as_releases_are_laid_out(tmp_path):
    tiny = heads.make_head("qwen3.5", mapped=False)
    [loaded] = load_head(heads.save_qwen_folder(tiny, tmp_path / "model"))
    assert loaded.contract == QWEN35 and loaded.config == tiny.weights.config
    assert drafts(loaded, tiny.side) == drafts(tiny.weights, tiny.side)


def test_a_folder_with_several_layers_shares_what_is_not_a_layer(tmp_path):
    tiny = heads.make_head("qwen3.5", mapped=False)
    first, second = load_head(heads.save_qwen_folder(tiny, tmp_path / "model", layers=2))
    name = "mtp.layers.0.self_attn.o_proj.weight"
    assert torch.equal(second.tensors[name], first.tensors[name] + 0.01)
    assert torch.equal(second.tensors["mtp.fc.weight"], first.tensors["mtp.fc.weight"])


def test_own_tables_are_bound(tmp_path):
    tiny = heads.make_head("llama", embedding=Sharing.OWN, lm_head=Sharing.OWN)
    own = torch.randn(heads.VOCAB, heads.HIDDEN), torch.randn(heads.SCORED, heads.HIDDEN)
    tiny.weights.tensors.update({"mtp.embed_tokens.weight": own[0], "mtp.lm_head.weight": own[1]})
    save_head(tmp_path / "h.safetensors", [tiny.weights])
    binding = bind_head(load_head(tmp_path / "h.safetensors")[0], tiny.side, OPTIONS)
    assert torch.equal(binding.weights["embed_tokens.weight"], own[0])
    assert torch.equal(binding.weights["lm_head.weight"], own[1])
    assert not any(name.startswith("mtp.embed") for name in binding.weights)


def test_a_mixture_of_experts_is_loaded_and_refused_when_it_is_built(tmp_path):
    tiny = heads.make_head("qwen3.5", mapped=False)
    folder = heads.save_qwen_folder(tiny, tmp_path / "model")
    tensors = load_file(folder / "mtp.safetensors")
    tensors["mtp.layers.0.mlp.gate.weight"] = torch.randn(4, heads.HIDDEN)
    save_file(tensors, folder / "mtp.safetensors")
    (folder / "model.safetensors.index.json").unlink()
    [loaded] = load_head(folder)
    assert loaded.unmodelled == ("its feed-forward is a mixture of experts",)
    assert bind_head(loaded, tiny.side, OPTIONS).unmodelled == loaded.unmodelled


# Refusals
# -------------------------------------------------------------------------------------------


def test_files_that_are_no_head(tmp_path):
    assert refusal(tmp_path / "none") == "it does not exist"
    (text := tmp_path / "text.safetensors").write_text("not a head")
    assert refusal(text).startswith("it cannot be read as safetensors")
    save_file({"a": torch.ones(2)}, plain := tmp_path / "plain.safetensors")
    assert refusal(plain) == f"its metadata names format none, not {FORMAT}"


def test_a_truncated_file(file):
    file.write_bytes(file.read_bytes()[:-100])
    assert refusal(file).startswith("it cannot be read as safetensors")


@pytest.mark.parametrize("name, value, said", [
    ("contract", None, "its metadata has no readable contract"),
    ("contract", "[", "its metadata has no readable contract"),
    ("config", "[]", "its config is not a JSON object"),
    ("modules", "zero", "its metadata says 'zero' modules"),
    ("modules", "²", "its metadata says '²' modules"),
    ("format", "other/2", f"its metadata names format other/2, not {FORMAT}"),
])  # fmt: skip
def test_metadata_that_cannot_be_read(file, name, value, said):
    assert refusal(rewrite(file, {name: value})) == said


@pytest.mark.parametrize("changes, said", [
    ({"concat_order": "sum"}, "concat_order is 'sum', not one of embed_hidden, hidden_embed"),
    ({"norm_form": "2+w"}, "norm_form is '2+w', not one of w, 1+w"),
    ({"pos0_mask": 1}, "pos0_mask is 1, not a bool"),
    ({"rope_offset": 0}, "rope_offset is 0; rows are rotated by pair key + 1"),
    ({"partial_rotary": 0}, "partial_rotary is 0.0, not in (0, 1]"),
    ({"experts": 8}, "its contract has an unknown field 'experts'"),
    ({"norm_form": "x", "recycle": "y"},
     "norm_form is 'x', not one of w, 1+w; recycle is 'y', not one of pre_norm, post_norm"),
])  # fmt: skip
def test_unknown_contract_values_are_named_all_at_once(file, changes, said):
    contract = json.loads(read_safetensors(file)[0]["contract"]) | changes
    assert refusal(rewrite(file, {"contract": json.dumps(contract)})) == said


@pytest.mark.parametrize("changes, said", [
    ({"hidden_size": 0}, "hidden_size is 0, which is not positive"),
    ({"num_key_value_heads": 3}, "4 query heads cannot share 3 key-value heads evenly"),
    ({"vocab_size": 98}, "98 ids are scored, of a vocabulary of 97"),
    ({"head_dim": "16"}, "head_dim is '16', not a int"),
    ({"layers": 2}, "its config has an unknown field 'layers'"),
])  # fmt: skip
def test_sizes_that_contradict_each_other(file, changes, said):
    config = json.loads(read_safetensors(file)[0]["config"]) | changes
    assert refusal(rewrite(file, {"config": json.dumps(config)})) == said


def test_a_missing_size(file):
    config = json.loads(read_safetensors(file)[0]["config"])
    del config["rms_norm_eps"]
    assert refusal(rewrite(file, {"config": json.dumps(config)})) == "its config lacks rms_norm_eps"


def test_tensors_that_do_not_fit_are_listed_together(file):
    rewrite(file, tensors={
        "mtp.norm.weight": None,
        "mtp.extra.weight": torch.ones(3),
        "mtp.fc.weight": torch.ones(heads.HIDDEN, heads.HIDDEN),
        "mtp.layers.0.mlp.up_proj.weight": torch.full((64, heads.HIDDEN), float("nan")),
        "mtp.layers.0.input_layernorm.weight": torch.ones(heads.HIDDEN, dtype=torch.int32),
    })  # fmt: skip
    assert refusal(file).split("; ") == [
        "mtp.norm.weight [32] is missing",
        "mtp.extra.weight has no place in this head",
        "mtp.fc.weight is [32, 32], not [32, 64]",
        "mtp.layers.0.input_layernorm.weight is stored as torch.int32, which is not read",
        "mtp.layers.0.mlp.up_proj.weight holds NaN or an infinity",
    ]


@pytest.mark.parametrize("ids, said", [
    (torch.arange(5, dtype=torch.int32), "draft_ids is torch.int32[5], not int32[41]"),
    (torch.arange(41, dtype=torch.int32) + 60, "draft_ids holds ids outside the vocabulary of 97"),
    (torch.zeros(41, dtype=torch.int32), "draft_ids holds an id twice"),
])  # fmt: skip
def test_a_bad_map_of_ids(file, ids, said):
    assert refusal(rewrite(file, tensors={"draft_ids": ids})) == said


def test_a_head_of_another_target_is_refused():
    tiny = heads.make_head()
    other = TargetSide(torch.randn(96, 40), torch.randn(96, 40), tiny.side.rope)
    with pytest.raises(HeadRefused) as caught:
        bind_head(tiny.weights, other, OPTIONS)
    assert caught.value.facts["problem"] == (
        "it was made for a hidden size of 32, the target has 40; "
        "it was made for a vocabulary of 97 ids, the target has 96"
    )


def test_rotary_tables_of_another_width_are_refused():
    tiny = heads.make_head()
    rope = {name: table[:, :4] for name, table in tiny.side.rope.items()}
    with pytest.raises(HeadRefused, match=r"turns 6 pairs over 64 positions, .* have 4 over 64"):
        bind_head(tiny.weights, TargetSide(tiny.side.embedding, tiny.side.lm_head, rope), OPTIONS)


@pytest.mark.parametrize("changes, said", [
    ({"hidden_size": ...}, "its config lacks hidden_size"),
    (
        {"rope_parameters": {"rope_type": "yarn"}},
        "its rope is scaled by 'yarn', which a head is not",
    ),
    ({"mtp_num_hidden_layers": 0}, "its config.json declares 0 MTP layers"),
    ({"attention_bias": True}, "its attention has biases"),
])  # fmt: skip
def test_folders_that_are_refused(tmp_path, changes, said):
    tiny = heads.make_head("qwen3.5", mapped=False)
    folder = heads.save_qwen_folder(tiny, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    text = config["text_config"] | changes
    config["text_config"] = {name: value for name, value in text.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(config))
    assert refusal(folder) == said


def test_folders_that_lack_files(tmp_path):
    folder = heads.save_qwen_folder(heads.make_head("qwen3.5", mapped=False), tmp_path / "model")
    (folder / "mtp.safetensors").rename(folder / "away")
    assert refusal(folder) == "its index names mtp.safetensors, which is absent"
    (folder / "model.safetensors.index.json").unlink()
    assert refusal(folder) == "no file of it holds an mtp.* tensor"
    config = {"model_type": "gpt2"}
    (folder / "config.json").write_text(json.dumps(config))
    assert refusal(folder).startswith("heads of model type 'gpt2' are not among qwen3_5")
    (folder / "config.json").unlink()
    assert refusal(folder) == "it has no readable config.json"


def test_levers_are_parsed_once_and_never_guessed():
    levers = ModelLevers.parse({"trim": "refeed", "drafter_prefill": "off", "recycle": "post_norm"})
    assert levers.trim is TrimPolicy.REFEED and not levers.drafter_prefill
    resolved = levers.resolve(QWEN35)
    assert resolved.recycle.value == "post_norm" and resolved.norm_form is NormForm.ONE_PLUS
    from proposers.errors import LeverRefused

    for values in ({"trim": "none"}, {"drafter_prefill": "yes"}, {"speed": "1"}):
        with pytest.raises(LeverRefused):
            ModelLevers.parse(values)
