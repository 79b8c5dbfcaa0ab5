"""The GGUF file that peers are timed on holds the numbers of the artifact, byte for byte."""

import gguf
import numpy as np
import pytest
import torch
from gguf_files import write_gguf
from transformers import LlamaConfig, LlamaForCausalLM

from circuit.bench.gguf_copy import gguf_copy
from circuit.models.convert import WeightOption


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(LlamaForCausalLM(config), path, format="Q4_1", embedding="Q8_0")
    return path


def tensors(path):
    return {t.name: t for t in gguf.GGUFReader(path).tensors}


@pytest.mark.parametrize("wanted", [WeightOption.F32, WeightOption.BF16, WeightOption.Q8_0])
def test_matrices_are_converted_and_all_else_is_kept(source, tmp_path, wanted):
    made, given = tensors(gguf_copy(source, wanted, tmp_path, "copy")), tensors(source)
    assert list(made) == list(given)
    for name, tensor in made.items():
        plain = gguf.dequantize(np.array(given[name].data), given[name].tensor_type)
        if len(tensor.shape) == 1:
            assert tensor.tensor_type.name == "F32"
            assert np.array_equal(tensor.data, plain)
            continue
        assert tensor.tensor_type.name == wanted.name
        assert np.array_equal(
            tensor.data.reshape(-1).view(np.uint8),
            gguf.quantize(plain, tensor.tensor_type).reshape(-1).view(np.uint8),
        )
    fields = gguf.GGUFReader(tmp_path / f"copy-{wanted.value}.gguf").fields
    kept = gguf.GGUFReader(source).fields
    assert set(kept) <= set(fields)
    assert fields["llama.block_count"].contents() == 2


def test_a_copy_that_is_there_is_used_again(source, tmp_path):
    first = gguf_copy(source, WeightOption.BF16, tmp_path, "copy")
    stamp = first.stat().st_mtime_ns
    assert gguf_copy(source, WeightOption.BF16, tmp_path, "copy").stat().st_mtime_ns == stamp


def test_a_copy_that_fails_leaves_nothing(source, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gguf.GGUFWriter, "write_tensors_to_file", full)
    with pytest.raises(Exception, match=r"(?i)space"):
        gguf_copy(source, WeightOption.Q8_0, tmp_path, "copy")
    assert list(tmp_path.iterdir()) == []
