"""GGUF files: packed weights in the model's own order, and one
named error for each kind of damage.
"""

import re

import gguf
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from circuit.models.checkpoint import SourceKind, load_target
from circuit.models.config import Family, RopeKind
from circuit.models.errors import (
    BadGguf,
    BadMagic,
    CheckpointError,
    ConfigRefused,
    DuplicateKey,
    MisshapenTensor,
    MissingTensor,
    NotFinite,
    TokenizerMissing,
    TruncatedGguf,
    UnexpectedTensor,
    UnknownArchitecture,
    UnknownFormat,
)
from circuit.models.weights import half_split_rows
from ir.errors import CircuitError
from ir.tensor import PackedTensor, unpacked
from tests.checkpoints import make_model
from tests.gguf_files import interleave, write_gguf

WIDE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}
FAMILIES = ["llama", "llama-bias", "llama-mha", "mistral", "qwen2", "qwen3"]


def tiny(family="llama", **changes):
    """A tiny model whose rows are multiples of a block."""
    return make_model(family, **{**WIDE, **changes, **({"head_dim": 16})})


def refusal(path, kind):
    """The message of the refusal, which has exactly the class `kind` and gives a hint."""
    with pytest.raises(CircuitError) as caught:
        load_target(path)
    assert type(caught.value) is kind, caught.value
    assert "\n  hint: " in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_f32_weights_come_back_in_the_models_order(tmp_path, family, tied):
    model = tiny(family, tied=tied)
    write_gguf(model, tmp_path / "m.gguf")
    checkpoint = load_target(tmp_path / "m.gguf")
    state = model.state_dict()
    assert sorted(checkpoint.tensors) == sorted(state)
    for name, tensor in checkpoint.tensors.items():
        assert torch.equal(tensor, state[name]), name
    assert checkpoint.config.tie_word_embeddings is tied
    assert checkpoint.provenance.kind is SourceKind.GGUF


@pytest.mark.parametrize("format", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_packed_weights_hold_what_the_gguf_package_reads(tmp_path, family, format):
    model = tiny(family)
    write_gguf(model, tmp_path / "m.gguf", format=format)
    theirs = {
        t.name: torch.from_numpy(gguf.dequantize(t.data, t.tensor_type).copy())
        for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors
    }
    config, tensors = (
        load_target(tmp_path / "m.gguf").config,
        load_target(tmp_path / "m.gguf").tensors,
    )
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[family.upper()], config.num_hidden_layers)
    for name, tensor in tensors.items():
        wanted = theirs[names.get_name(name, try_suffixes=(".weight", ".bias"))]
        if family == "llama" and re.search(r"[qk]_proj", name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            wanted = half_split_rows(wanted, heads)
        assert torch.equal(unpacked(tensor).float(), wanted), name
        packed = wanted.ndim == 2 and format.startswith("Q")
        assert isinstance(tensor, PackedTensor) == packed
        if packed:
            assert tensor.format.value == format.lower()
            assert tensor.data.shape[0] == tensor.shape[0] and tensor.data.is_contiguous()


@given(heads=st.integers(1, 5), pairs=st.integers(1, 9), width=st.integers(1, 3))
def test_half_split_undoes_interleaving(heads, pairs, width):
    rows = torch.arange(heads * pairs * 2 * width).view(heads * pairs * 2, width)
    assert torch.equal(half_split_rows(interleave(rows, heads), heads), rows)
    assert interleave(rows, heads)[1, 0] == rows[pairs, 0]


@pytest.mark.parametrize("family", FAMILIES)
def test_configuration_follows_metadata_and_tensors(tmp_path, family):
    model = tiny(family)
    write_gguf(model, tmp_path / "m.gguf")
    config, attention = load_target(tmp_path / "m.gguf").config, model.model.layers[0].self_attn
    assert config.family is Family("llama" if family == "mistral" else model.config.model_type)
    assert config.rms_norm_eps == model.config.rms_norm_eps == 1e-5
    assert (config.qkv_bias, config.o_bias, config.qk_norm) == (
        attention.q_proj.bias is not None,
        attention.o_proj.bias is not None,
        hasattr(attention, "q_norm"),
    )


def add_yarn(writer):
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_orig_ctx_len(64)


def add_linear(writer):
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(2.0)


def test_rope_scaling_of_each_kind(tmp_path):
    path = tmp_path / "m.gguf"
    write_gguf(tiny(), path, change=add_yarn)
    rope = load_target(path).config.rope
    assert (rope.kind, rope.factor, rope.original_context) == (RopeKind.YARN, 4.0, 64)
    write_gguf(tiny(), path, change=add_linear)
    rope = load_target(path).config.rope
    assert (rope.kind, rope.factor) == (RopeKind.LINEAR, 2.0)
    divisors = torch.arange(1.0, 9.0).numpy()
    write_gguf(tiny(), path, tensors=lambda a: a.update({"rope_freqs.weight": divisors}))
    rope = load_target(path).config.rope
    assert (rope.kind, rope.freq_factors) == (RopeKind.FACTORS, tuple(divisors.tolist()))
    write_gguf(
        tiny(), path, change=add_yarn, tensors=lambda a: a.update({"rope_freqs.weight": divisors})
    )
    assert "rope_freqs.weight and rope scaling yarn are both given" in refusal(path, ConfigRefused)


@pytest.mark.parametrize(
    ("key", "add", "said"),
    [
        ("logit_scale", "float32", "llama.logit_scale is an unknown key"),
        ("expert_count", "uint32", "llama.expert_count is 3; allowed: 0"),
        (
            "attention.sliding_window",
            "uint32",
            "llama.attention.sliding_window is 3; allowed: 0, or",
        ),
        ("attention.scale", "float32", "llama.attention.scale is 3.0; allowed: 1/sqrt(16)"),
        ("rope.scaling.yarn_log_multiplier", "float32", "yarn_log_multiplier is 3.0; allowed: 0.0"),
    ],
)
def test_metadata_that_is_not_modelled_is_refused(tmp_path, key, add, said):
    def change(writer):
        getattr(writer, f"add_{add}")(f"llama.{key}", 3)

    write_gguf(tiny(), tmp_path / "m.gguf", change=change)
    assert said in refusal(tmp_path / "m.gguf", ConfigRefused)


def test_all_problems_are_listed_at_once(tmp_path):
    def change(writer):
        writer.add_uint32("split.count", 3)
        writer.add_string("general.surprise", "x")
        writer.add_bool("tokenizer.ggml.add_sep_token", True)

    write_gguf(tiny(), tmp_path / "m.gguf", change=change)
    said = refusal(tmp_path / "m.gguf", ConfigRefused)
    assert "3 reason(s)" in said and "split.count is 3; allowed: 0, 1" in said
    assert "general.surprise is an unknown key (value 'x')" in said
    assert "tokenizer.ggml.add_sep_token is True; allowed: False" in said


def test_unknown_architecture(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "gpt2")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert "'gpt2', which is not one of llama, qwen2, qwen3" in refusal(
        tmp_path / "m.gguf", UnknownArchitecture
    )


def test_tensors_that_do_not_fit(tmp_path):
    path = tmp_path / "m.gguf"
    zeros = torch.zeros(8, 64).numpy()
    write_gguf(tiny(), path, tensors=lambda a: a.pop("blk.1.attn_k.weight"))
    assert "model.layers.1.self_attn.k_proj.weight [32, 64] is missing" in refusal(
        path, MissingTensor
    )
    write_gguf(tiny(), path, tensors=lambda a: a.update({"blk.1.attn_k.weight": zeros}))
    assert "is [8, 64]; the configuration gives [32, 64]" in refusal(path, MisshapenTensor)
    write_gguf(tiny(), path, tensors=lambda a: a.update({"blk.0.ffn_gate_inp.weight": zeros}))
    assert "blk.0.ffn_gate_inp.weight has no place" in refusal(path, UnexpectedTensor)
    write_gguf(tiny(tied=True), path, tensors=lambda a: a.pop("token_embd.weight"))
    refusal(path, MissingTensor)


def test_a_format_that_is_not_read_is_named(tmp_path):
    path = tmp_path / "m.gguf"
    write_gguf(tiny(), path, format="Q8_0")
    raw = bytearray(path.read_bytes())
    name = b"blk.0.ffn_up.weight"
    at = raw.index(name) + len(name) + 4 + 2 * 8
    assert raw[at : at + 4] == (8).to_bytes(4, "little")
    raw[at : at + 4] = (12).to_bytes(4, "little")
    path.write_bytes(raw)
    assert "model.layers.0.mlp.up_proj.weight is stored as Q4_K" in refusal(path, UnknownFormat)


@pytest.mark.parametrize("format", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_a_value_that_is_not_finite_is_refused(tmp_path, format):
    path = tmp_path / "m.gguf"
    write_gguf(tiny(), path, format=format)
    stored = load_target(path).stored["model.layers.1.mlp.down_proj.weight"]
    size, field = stored.format.size, {"F32": 4}.get(format, 2)
    bits = {"F32": 0x7F800001, "BF16": 0x7F80}.get(format, 0x7C00)
    raw = bytearray(path.read_bytes())
    places = [0, 2] if format == "Q4_1" else [0]
    for place in places:
        damaged = bytearray(raw)
        at = stored.offset + 3 * size + place
        damaged[at : at + field] = bits.to_bytes(field, "little")
        path.write_bytes(damaged)
        said = refusal(path, NotFinite)
        assert "model.layers.1.mlp.down_proj.weight holds 1 value(s)" in said
        what = "minimum" if place else "scale"
        assert (
            f"{what} of a {format.lower()} block" if format[0] == "Q" else format.lower()
        ) in said
        load_target(path, values=False)


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A Q4_1 file that is whole before and after each example, its bytes, and its header's length.

    The padding after the last tensor, which no reader needs, is cut off.
    """
    path = tmp_path_factory.mktemp("kept") / "m.gguf"
    write_gguf(tiny(), path, format="Q4_1")
    stored = load_target(path).stored.values()
    raw = path.read_bytes()[: max(t.offset + t.nbytes for t in stored)]
    path.write_bytes(raw)
    return path, raw, min(t.offset for t in stored)


def test_bad_magic_version_and_order(kept, tmp_path):
    path, raw = tmp_path / "m.gguf", kept[1]
    path.write_bytes(b"<html>" + raw)
    assert "begins with b'<htm', not with GGUF" in refusal(path, BadMagic)
    path.write_bytes(b"")
    assert "the file is empty" in refusal(path, BadMagic)
    for version, said in (
        (1, "its version is 1"),
        (4, "its version is 4"),
        (3 << 24, "big endian"),
    ):
        path.write_bytes(raw[:4] + version.to_bytes(4, "little") + raw[8:])
        assert said in refusal(path, BadGguf)


def test_a_truncated_file_says_what_is_cut(kept, tmp_path):
    path, raw = tmp_path / "m.gguf", kept[1]
    path.write_bytes(raw[:-1])
    assert re.search(
        rf"tensor \S+ needs {len(raw)} bytes and the file has {len(raw) - 1}\.",
        refusal(path, TruncatedGguf),
    )
    path.write_bytes(raw[:30])
    assert "is truncated: a metadata key needs" in refusal(path, TruncatedGguf)
    huge = (1 << 60).to_bytes(8, "little")
    path.write_bytes(raw[:24] + huge + raw[32:])
    refusal(path, TruncatedGguf)


def test_repeated_names(tmp_path):
    path = tmp_path / "m.gguf"
    write_gguf(tiny(), path)
    raw = path.read_bytes()
    path.write_bytes(raw.replace(b"llama.rope.freq_base", b"llama.context_length"))
    assert "llama.context_length is given twice" in refusal(path, DuplicateKey)
    path.write_bytes(raw.replace(b"blk.0.attn_v.weight", b"blk.0.attn_k.weight"))
    assert "blk.0.attn_k.weight is given twice" in refusal(path, DuplicateKey)


@settings(max_examples=40, deadline=None)
@given(share=st.floats(0, 1, exclude_max=True))
def test_a_file_cut_anywhere_is_refused(kept, share):
    path, raw, _ = kept
    try:
        path.write_bytes(raw[: int(share * len(raw))])
        with pytest.raises(CheckpointError) as caught:
            load_target(path)
        assert type(caught.value) in (TruncatedGguf, BadMagic)
    finally:
        path.write_bytes(raw)


@settings(max_examples=80, deadline=None)
@given(bit=st.integers(0, 7), share=st.floats(0, 1, exclude_max=True))
def test_a_flipped_header_bit_never_escapes_as_another_error(kept, bit, share):
    path, raw, header = kept
    damaged = bytearray(raw)
    damaged[int(share * header)] ^= 1 << bit
    try:
        path.write_bytes(damaged)
        load_target(path)
    except CheckpointError:
        pass
    finally:
        path.write_bytes(raw)


def test_a_file_without_tokenizer_says_so_when_asked(kept):
    with pytest.raises(TokenizerMissing):
        _ = load_target(kept[0]).tokenizer
