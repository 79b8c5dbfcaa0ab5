"""Folders of safetensors: what is loaded is what the models' own library saved."""

import subprocess
import sys

import pytest
import torch

from circuit.models.checkpoint import SourceKind, load_target
from circuit.models.config import Family, RopeKind
from circuit.models.errors import TokenizerMissing
from tests.checkpoints import FAMILIES, ROPES, make_model, save_folder
from tests.demo import demo_file


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_loaded_tensors_are_the_saved_ones(tmp_path, family, tied, shards):
    model = make_model(family, tied=tied)
    checkpoint = load_target(save_folder(model, tmp_path, shards=shards))
    state = model.state_dict()
    assert sorted(checkpoint.tensors) == sorted(state)
    for name, tensor in checkpoint.tensors.items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, state[name]), name
    assert len(checkpoint.files) == len(list(tmp_path.glob("*.safetensors")))
    assert (len(checkpoint.files) > 1) == (shards > 1)
    assert checkpoint.notes == ()


@pytest.mark.parametrize("family", FAMILIES)
def test_configuration_of_each_family(tmp_path, family):
    model = make_model(family)
    config = load_target(save_folder(model, tmp_path)).config
    theirs = model.config
    for field in (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "vocab_size",
        "rms_norm_eps",
        "max_position_embeddings",
        "bos_token_id",
        "pad_token_id",
        "tie_word_embeddings",
    ):
        assert getattr(config, field) == getattr(theirs, field), field
    attention = model.model.layers[0].self_attn
    assert config.family is Family(theirs.model_type)
    assert config.head_dim == attention.head_dim
    assert config.eos_token_ids == (2,)
    assert config.qkv_bias == (attention.q_proj.bias is not None)
    assert config.o_bias == (attention.o_proj.bias is not None)
    assert config.qk_norm == hasattr(attention, "q_norm")


@pytest.mark.parametrize("rope", ROPES)
def test_configuration_of_each_rope_kind(tmp_path, rope):
    config = load_target(save_folder(make_model("llama", rope=rope), tmp_path)).config
    given = ROPES[rope]
    assert config.rope.kind is RopeKind(rope)
    assert config.rope.theta == given["rope_theta"]
    assert config.rope.factor == given.get("factor", 1.0)
    assert config.rope.original_context == given.get("original_max_position_embeddings", 0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_each_tensor_keeps_its_stored_type(tmp_path, dtype):
    model = make_model("qwen3")
    tensors = load_target(save_folder(model, tmp_path, dtype=dtype)).tensors
    for name, value in model.state_dict().items():
        assert tensors[name].dtype == dtype
        assert torch.equal(tensors[name], value.to(dtype)), name


def test_writing_to_a_loaded_tensor_leaves_the_file_alone(tmp_path):
    folder = save_folder(make_model("llama"), tmp_path)
    before = (folder / "model.safetensors").read_bytes()
    load_target(folder).tensors["model.norm.weight"].zero_()
    assert (folder / "model.safetensors").read_bytes() == before


def test_provenance_changes_with_any_file(tmp_path):
    folder = save_folder(make_model("llama", seed=1), tmp_path / "a")
    other = save_folder(make_model("llama", seed=2), tmp_path / "b")
    again = save_folder(make_model("llama", seed=1), tmp_path / "c")
    sums = [load_target(path).provenance.sha256 for path in (folder, other, again)]
    assert sums[0] == sums[2] != sums[1]
    assert load_target(folder).provenance.kind is SourceKind.FOLDER


def test_generation_config_decides_the_end_ids(tmp_path):
    model = make_model("llama")
    model.generation_config.eos_token_id = [5, 7]
    folder = save_folder(model, tmp_path)
    assert load_target(folder).config.eos_token_ids == (5, 7)
    (folder / "generation_config.json").unlink()
    assert load_target(folder).config.eos_token_ids == (2,)


def test_progress_reaches_the_total_once_per_storage(tmp_path):
    seen = []
    checkpoint = load_target(
        save_folder(make_model("llama", tied=True), tmp_path),
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen[-1] == (checkpoint.tensors.nbytes,) * 2
    assert len(seen) == len(checkpoint.tensors) - 1


def test_configuration_and_tokenizer_come_without_torch():
    """Commands that only read a checkpoint's text side start fast."""
    source = (
        "import sys; from circuit.models.checkpoint import load_target; "
        f"c = load_target({str(demo_file())!r}); ids = c.tokenizer.encode('a'); "
        "heavy = {'torch', 'transformers', 'gguf', 'safetensors', 'huggingface_hub'}; "
        "print(c.config.hidden_size, len(ids), sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, check=True
    )
    assert done.stdout == "576 1 []\n"


def test_a_missing_tokenizer_is_told_when_it_is_asked_for(tmp_path):
    checkpoint = load_target(save_folder(make_model("llama"), tmp_path))
    with pytest.raises(TokenizerMissing, match="has no tokenizer"):
        _ = checkpoint.tokenizer
