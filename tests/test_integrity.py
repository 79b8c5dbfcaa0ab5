"""Damaged folders: each kind of damage is one error that names
the culprit, before anything runs.
"""

import json
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from circuit.models.checkpoint import load_target
from circuit.models.errors import (
    BadJson,
    CheckpointError,
    DuplicateKey,
    MisshapenTensor,
    MissingTensor,
    NotAModel,
    NotFinite,
    PathMissing,
    ShardBroken,
    ShardMissing,
    ShardUnsafe,
    TensorNotInShard,
    TensorsUnfit,
    TiedHeadDiffers,
    UnexpectedTensor,
    UnknownFormat,
    Unreadable,
)
from ir.errors import CircuitError
from tests.checkpoints import edit_json, edit_tensors, make_model, save_folder

INDEX = "model.safetensors.index.json"
QUERY = "model.layers.1.self_attn.q_proj.weight"


def refusal(folder, kind):
    """The message of the refusal, which has exactly the class `kind` and gives a hint."""
    with pytest.raises(CircuitError) as caught:
        load_target(folder)
    assert type(caught.value) is kind, caught.value
    assert "\n  hint: " in str(caught.value)
    return str(caught.value)


@pytest.fixture
def single(tmp_path):
    return save_folder(make_model("llama"), tmp_path / "single")


@pytest.fixture
def sharded(tmp_path):
    return save_folder(make_model("llama"), tmp_path / "sharded", shards=3)


def shards_of(folder):
    return sorted(folder.glob("*.safetensors"))


def test_paths_that_are_no_model(tmp_path):
    assert "nowhere.gguf does not exist" in refusal(tmp_path / "nowhere.gguf", PathMissing)
    assert "has no config.json" in refusal(tmp_path, NotAModel)
    (tmp_path / "text").write_text("hello")
    assert "does not begin as a GGUF file" in refusal(tmp_path / "text", NotAModel)
    (tmp_path / "empty").touch()
    refusal(tmp_path / "empty", NotAModel)


def test_what_cannot_be_read_is_one_error(single):
    (single / "config.json").unlink()
    (single / "config.json").symlink_to(single / "config.json")
    refusal(single / "config.json", PathMissing)
    os.mkfifo(single / "pipe")
    assert "neither a file nor a folder" in refusal(single / "pipe", NotAModel)


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may read every file")
def test_a_file_without_permission(single):
    (single / "model.safetensors").chmod(0)
    assert "cannot be read: Permission denied" in refusal(single, Unreadable)


def test_pickled_weights_are_not_opened(single):
    (single / "model.safetensors").unlink()
    assert "neither model.safetensors nor" in refusal(single, NotAModel)
    torch.save({}, single / "pytorch_model.bin")
    assert "pickled weights" in refusal(single, NotAModel)


def test_broken_json_is_named(single):
    (single / "config.json").write_text('{"model_type": "llama",')
    assert "config.json is not valid JSON" in refusal(single, BadJson)
    (single / "config.json").write_text("[1]")
    assert "it is not an object" in refusal(single, BadJson)
    (single / "config.json").write_text('{"model_type": "llama", "model_type": "qwen2"}')
    assert "model_type is given twice" in refusal(single, DuplicateKey)


def test_a_shard_that_is_not_there(sharded):
    """B63: one of 3 mapped shards not there."""
    gone = shards_of(sharded)[1]
    gone.unlink()
    assert gone.name in refusal(sharded, ShardMissing)


@pytest.mark.parametrize("part", ["a byte", "half"])
def test_a_shard_that_is_cut_short(sharded, part):
    """B63: the last shard short by a byte, then by half."""
    last = shards_of(sharded)[-1]
    raw = last.read_bytes()
    last.write_bytes(raw[:-1] if part == "a byte" else raw[: len(raw) // 2])
    said = refusal(sharded, ShardBroken)
    assert last.name in said and f"the file has {last.stat().st_size}" in said


def test_a_header_that_claims_more_than_the_file(single):
    """B63: a header claiming more than the file holds; a length, a tensor, a surplus."""
    path = single / "model.safetensors"
    raw = path.read_bytes()
    path.write_bytes((1 << 40).to_bytes(8, "little") + raw[8:])
    assert f"claims {1 << 40} bytes" in refusal(single, ShardBroken)
    path.write_bytes(raw[:5])
    assert "it has 5 bytes" in refusal(single, ShardBroken)
    path.write_bytes(raw + b"\0")
    assert "its header accounts for" in refusal(single, ShardBroken)


def rewrite_header(path, change):
    """Applies `change` to the parsed header of a safetensors file, leaving the data as it is."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("shape", [31, 32], "needs 3968 bytes and has 4096"),
        ("data_offsets", [4096, 0], "impossible shape or place"),
        ("data_offsets", [0], "malformed"),
        ("shape", [-1, 32], "impossible shape or place"),
        ("dtype", None, "is stored as None"),
    ],
)
def test_a_header_record_that_contradicts_itself(single, field, value, said):
    path = single / "model.safetensors"
    rewrite_header(path, lambda header: header[QUERY].__setitem__(field, value))
    assert said in refusal(single, UnknownFormat if field == "dtype" else ShardBroken)


def test_tensors_that_share_bytes(single):
    def share(header):
        header["model.norm.weight"]["data_offsets"] = header[
            "model.layers.0.input_layernorm.weight"
        ]["data_offsets"]

    rewrite_header(single / "model.safetensors", share)
    assert "is next" in refusal(single, ShardBroken)


def test_a_repeated_name_in_a_header(single):
    path = single / "model.safetensors"
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = raw[8 : 8 + length].rstrip()
    text = (
        header[:-1]
        + b',"model.norm.weight":'
        + json.dumps(json.loads(header)["model.norm.weight"]).encode()
        + b"}"
    )
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])
    assert "model.norm.weight is given twice" in refusal(single, DuplicateKey)


def test_leftover_and_surplus_shards_are_skipped_with_a_note(sharded):
    """B63: a leftover shard repeating names, and MTP tensors in a file the map does not mention."""
    whole = load_target(sharded).tensors
    save_file({"model.norm.weight": torch.full((32,), 9.0)}, sharded / "model-old.safetensors")
    save_file({"mtp.fc.weight": torch.zeros(2, 2)}, sharded / "mtp.safetensors")
    again = load_target(sharded)
    assert again.notes == (
        "model-old.safetensors is not named by the index; skipped",
        "mtp.safetensors is not named by the index; skipped",
    )
    assert torch.equal(again.tensors["model.norm.weight"], whole["model.norm.weight"])


def test_the_index_decides_between_two_copies(sharded):
    """B63: a mapped shard that repeats a tensor of another does not win."""
    mapping = json.loads((sharded / INDEX).read_text())["weight_map"]
    norm = load_target(sharded).tensors["model.norm.weight"].clone()
    other = next(name for name in mapping.values() if name != mapping["model.norm.weight"])
    edit_tensors(sharded / other, model__norm__weight=torch.full((32,), 9.0))
    again = load_target(sharded)
    assert torch.equal(again.tensors["model.norm.weight"], norm)
    assert f"{other} repeats model.norm.weight" in again.notes[0]


def test_a_mapped_tensor_absent_from_its_shard(sharded):
    """B63: a mapped tensor absent from its shard."""
    mapping = json.loads((sharded / INDEX).read_text())["weight_map"]
    edit_tensors(sharded / mapping[QUERY], **{QUERY.replace(".", "__"): None})
    said = refusal(sharded, TensorNotInShard)
    assert QUERY in said and mapping[QUERY] in said


@pytest.mark.parametrize(
    "shard",
    ["../x.safetensors", "/etc/passwd", "a/b.safetensors", "..", "..\\x.safetensors", "", 3, None],
)
def test_no_file_outside_the_folder_is_opened(sharded, shard):
    """B63: `..` in a path."""
    edit_json(sharded / INDEX, weight_map={"model.norm.weight": shard})
    assert repr(shard) in refusal(sharded, ShardUnsafe)


def test_an_index_without_a_map(sharded):
    edit_json(sharded / INDEX, weight_map=...)
    assert "it has no weight_map" in refusal(sharded, BadJson)


@pytest.mark.parametrize(
    "name",
    [
        "lm_head.weight",
        "model.embed_tokens.weight",
        "model.norm.weight",
        "model.layers.0.input_layernorm.weight",
        QUERY,
    ],
)
def test_a_dropped_tensor_is_named(single, name):
    """B25: a missing weight never keeps an initial value."""
    edit_tensors(single / "model.safetensors", **{name.replace(".", "__"): None})
    assert f"{name} [" in refusal(single, MissingTensor)


def test_a_misnamed_key_is_named_on_both_sides(single):
    """B25: misname a key; add a key nobody needs."""
    tensors = load_file(single / "model.safetensors")
    tensors["model.layers.1.self_attn.query.weight"] = tensors.pop(QUERY)
    save_file(tensors, single / "model.safetensors")
    said = refusal(single, TensorsUnfit)
    assert f"{QUERY} [32, 32] is missing" in said
    assert "model.layers.1.self_attn.query.weight has no place in this model" in said


def test_a_key_nobody_needs_is_refused_and_a_recomputed_buffer_is_not(single):
    """B25: add a key nobody needs."""
    path = single / "model.safetensors"
    edit_tensors(path, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(4))
    assert len(load_target(single).tensors) == 2 * 9 + 3
    edit_tensors(path, model__layers__2__mlp__up_proj__weight=torch.ones(48, 32))
    assert "model.layers.2.mlp.up_proj.weight has no place" in refusal(single, UnexpectedTensor)


def test_stray_scales_and_codes_are_never_read_as_numbers(single):
    """B26: the stored type and the presence of a scale decide; int8 codes in a float slot raise."""
    path = single / "model.safetensors"
    edit_tensors(path, **{QUERY.replace(".", "__") + "_scale": torch.ones(1)})
    assert f"{QUERY}_scale has no place" in refusal(single, UnexpectedTensor)
    edit_tensors(
        path,
        **{
            QUERY.replace(".", "__") + "_scale": None,
            QUERY.replace(".", "__"): torch.full((32, 32), 127, dtype=torch.int8),
        },
    )
    assert f"{QUERY} is stored as I8" in refusal(single, UnknownFormat)
    edit_tensors(path, **{QUERY.replace(".", "__"): torch.ones(32, 32).to(torch.float8_e4m3fn)})
    assert f"{QUERY} is stored as F8_E4M3" in refusal(single, UnknownFormat)


@pytest.mark.parametrize(
    "changes",
    [{"vocab_size": 96}, {"intermediate_size": 64}, {"num_key_value_heads": 4}, {"head_dim": 16}],
)
def test_shapes_must_be_those_of_the_configuration(single, changes):
    edit_json(single / "config.json", **changes)
    assert "; the configuration gives [" in refusal(single, MisshapenTensor)


@pytest.mark.parametrize("layers", [1, 3])
def test_layers_must_be_as_many_as_configured(single, layers):
    edit_json(single / "config.json", num_hidden_layers=layers)
    refusal(single, UnexpectedTensor if layers == 1 else MissingTensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_finite_is_refused(tmp_path, dtype, value):
    folder = save_folder(make_model("llama"), tmp_path, dtype=dtype)
    weight = load_file(folder / "model.safetensors")[QUERY]
    weight[7, 11] = weight[31, 31] = value
    edit_tensors(folder / "model.safetensors", **{QUERY.replace(".", "__"): weight})
    assert f"{QUERY} holds 2 value(s) that are NaN or infinite" in refusal(folder, NotFinite)
    assert load_target(folder, values=False).tensors[QUERY][7, 11].isfinite().item() is False


def test_the_largest_finite_values_are_accepted(tmp_path):
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        folder = save_folder(make_model("llama"), tmp_path / str(dtype), dtype=dtype)
        weight = torch.full((32,), torch.finfo(dtype).max, dtype=dtype)
        edit_tensors(folder / "model.safetensors", model__norm__weight=-weight)
        assert torch.equal(load_target(folder).tensors["model.norm.weight"], -weight)


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A folder that is whole before and after each example, and the bytes of its one shard."""
    folder = save_folder(make_model("llama"), tmp_path_factory.mktemp("kept"))
    return folder, (folder / "model.safetensors").read_bytes()


def loads_with(kept, content):
    """Whether the kept folder loads with `content` as its shard;
    only CheckpointError may escape.
    """
    folder, whole = kept
    path = folder / "model.safetensors"
    path.write_bytes(content)
    try:
        return load_target(folder) is not None
    except CheckpointError:
        return False
    finally:
        path.write_bytes(whole)


@settings(max_examples=40, deadline=None)
@given(share=st.floats(0, 1, exclude_max=True))
def test_a_file_cut_anywhere_is_refused(kept, share):
    assert loads_with(kept, kept[1])
    assert not loads_with(kept, kept[1][: int(share * len(kept[1]))])


@settings(max_examples=60, deadline=None)
@given(bit=st.integers(0, 7), data=st.data())
def test_a_flipped_header_bit_never_escapes_as_another_error(kept, bit, data):
    raw = bytearray(kept[1])
    raw[data.draw(st.integers(0, 7 + int.from_bytes(raw[:8], "little")))] ^= 1 << bit
    loads_with(kept, bytes(raw))


def test_tied_with_only_one_stored_has_one_storage(tmp_path):
    """B62: only the embedding stored and tied: one storage under both names, counted once."""
    folder = save_folder(make_model("llama", tied=True), tmp_path)
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    tensors = load_target(folder).tensors
    assert tensors["lm_head.weight"] is tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"][3, 4] = 5.0
    assert tensors["model.embed_tokens.weight"][3, 4] == 5.0
    assert tensors.nbytes == sum(t.nbytes for n, t in tensors.items() if n != "lm_head.weight")


def test_not_tied_and_no_head_is_an_error(tmp_path):
    """B62: only the embedding stored and not tied."""
    folder = save_folder(make_model("llama", tied=True), tmp_path)
    edit_json(folder / "config.json", tie_word_embeddings=False)
    assert "lm_head.weight [97, 32] is missing" in refusal(folder, MissingTensor)


@pytest.mark.parametrize("shards", [1, 3])
def test_both_stored_and_tied(tmp_path, shards):
    """B62: both stored, equal: one storage; unequal: an error. With and without a shard map."""
    folder = save_folder(make_model("llama"), tmp_path, shards=shards)
    edit_json(folder / "config.json", tie_word_embeddings=True)
    assert "lm_head.weight with unequal values" in refusal(folder, TiedHeadDiffers)
    for path in shards_of(folder):
        held = load_file(path)
        if "model.embed_tokens.weight" in held:
            embedding = held["model.embed_tokens.weight"]
    for path in shards_of(folder):
        if "lm_head.weight" in load_file(path):
            edit_tensors(path, lm_head__weight=embedding.clone())
    tensors = load_target(folder).tensors
    assert tensors["lm_head.weight"] is tensors["model.embed_tokens.weight"]
    assert torch.equal(tensors["lm_head.weight"], embedding)


def test_untied_pair_has_two_storages(single):
    """B62: both stored and not tied."""
    tensors = load_target(single).tensors
    assert tensors["lm_head.weight"].data_ptr() != tensors["model.embed_tokens.weight"].data_ptr()
