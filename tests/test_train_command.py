"""`circuit train` from a checkpoint to a head that loads, proposes, and can be gone on with."""

import json
import shutil

import checkpoints
import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from typer.testing import CliRunner

from circuit.cli import app
from circuit.models.checkpoint import load_target
from circuit.models.target import target_side
from circuit.train import command, corpus, run
from circuit.train.prompts import Guard
from circuit.train.texts import shards
from proposers.base import ProposeRequest
from proposers.mtp_binding import make_mtp_head
from proposers.options import DraftOptions, head_keys
from proposers.weights import load_head

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<pad>", "<bos>", "<|end|>", "<|user|>", "<|assistant|>"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny random Llama with a byte tokenizer and a chat template."""
    path = tmp_path_factory.mktemp("model")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: number for number, piece in enumerate([*SPECIAL, *letters])}
    model = checkpoints.make_model(
        "llama", tied=True, seed=4, vocab_size=len(vocabulary), hidden_size=64,
        intermediate_size=96,
        max_position_embeddings=1024,
    )  # fmt: skip
    checkpoints.save_folder(model, path)
    tokenizer = Tokenizer(BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(path / "tokenizer.json"))
    told = {"chat_template": TEMPLATE, "eos_token": "<|end|>", "bos_token": "<bos>"}
    (path / "tokenizer_config.json").write_text(json.dumps(told))
    return path


def arguments(folder, out, *more):
    return [
        "train", str(folder), "-o", str(out), "--tokens", "500", "--steps", "3", "--batch-rows",
        "200",
        "--draft-vocab", "64", "--batch-columns", "48", "--json", *more,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def trained(folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("out") / "head.safetensors"
    result = CliRunner().invoke(app, arguments(folder, out))
    assert result.exit_code == 0, result.stderr
    return out, json.loads(result.stdout)


def test_the_record_and_the_files(trained):
    out, told = trained
    assert told["steps"] == 3 and told["path"] == str(out) and told["bytes"] == out.stat().st_size
    assert len(told["acceptance"]) == 3 and 1 <= told["tokens_per_step"] <= 4
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert not list(out.parent.glob(".*"))


def test_the_head_loads_with_its_recipe_and_proposes(trained, folder):
    head = load_head(trained[0])[0]
    assert all(t.dtype == torch.bfloat16 for t in head.tensors.values())
    assert head.recipe["answer_tokens"] >= 400 and head.recipe["seed"] == 0
    assert head.recipe["prompts"]["asked"] == 0.5 and sum(head.recipe["prompts"].values()) == 1
    assert head.recipe["weights"] == {"mean_of_running_averages_at": [0.85, 1.0]}
    assert head.recipe["sha256"] == load_target(folder).provenance.sha256
    ids = head.draft_ids
    assert len(ids) == 64 and bool((ids[1:] > ids[:-1]).all()) and 2 in ids
    checkpoint = load_target(folder)
    side = target_side(checkpoint.config, checkpoint.tensors, 64)
    proposer = make_mtp_head(head, side, DraftOptions(64, head_keys(batches=(2,), chunk=8)))
    hidden = torch.zeros(64).numpy()
    drafts = proposer.propose(ProposeRequest(7, hidden, 1, 3), proposer.alloc_state())
    assert len(drafts.tokens) == 3 and set(drafts.tokens) <= set(ids.tolist())


def test_a_finished_run_is_not_begun_again_by_accident(trained, folder):
    before = load_head(trained[0])[0]
    again = CliRunner().invoke(app, arguments(folder, trained[0]))
    assert again.exit_code == 2 and "--resume" in again.stderr
    resumed = CliRunner().invoke(app, arguments(folder, trained[0], "--resume"))
    assert resumed.exit_code == 0 and json.loads(resumed.stdout)["steps"] == 3
    after = load_head(trained[0])[0]
    assert all(torch.equal(after.tensors[n], t) for n, t in before.tensors.items())
    assert after.recipe == before.recipe and torch.equal(after.draft_ids, before.draft_ids)


def test_an_interrupted_run_says_so_and_goes_on(trained, folder, tmp_path, monkeypatch):
    """Ctrl-C between steps: exit code 130, no head, and --resume
    gives the head of an unbroken run.
    """
    out = tmp_path / "head.safetensors"
    compiled = trained[0].with_name("head.safetensors.run") / "target"
    shutil.copytree(compiled, tmp_path / "head.safetensors.run" / "target")
    learn = command.Training._learn

    def interrupted(self, batch):
        if self.progress.step == 2:
            raise KeyboardInterrupt
        return learn(self, batch)

    monkeypatch.setattr(command.Training, "_learn", interrupted)
    first = CliRunner().invoke(app, arguments(folder, out))
    assert first.exit_code == 130 and not out.exists()
    assert run.load_state(tmp_path / "head.safetensors.run")[1].step == 2
    monkeypatch.undo()
    second = CliRunner().invoke(app, arguments(folder, out, "--resume"))
    assert second.exit_code == 0, second.stderr
    mine, theirs = (load_head(p)[0].tensors for p in (out, trained[0]))
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_texts_of_an_interrupted_run_are_those_of_an_unbroken_one(
    trained, folder, tmp_path, monkeypatch
):
    """What was being written when it was interrupted is written again from the shards before it."""
    monkeypatch.setattr(corpus, "SHARD_TOKENS", 3000)
    compiled = trained[0].with_name("head.safetensors.run") / "target"

    def texts(name):
        if not (tmp_path / name).exists():
            shutil.copytree(compiled, tmp_path / name / "target")
        wanted = corpus.Wanted(str(folder), tmp_path / name, 9000, 0, None)
        return corpus.corpus(wanted, Guard([]), lambda stage, done, total: None)

    whole = texts("whole")
    save = corpus.save_shard

    def interrupted(path, texts, asked):
        if path.name.endswith("0001.safetensors"):
            raise KeyboardInterrupt
        save(path, texts, asked)

    monkeypatch.setattr(corpus, "save_shard", interrupted)
    with pytest.raises(KeyboardInterrupt):
        texts("parts")
    assert len(shards(tmp_path / "parts")) == 1
    monkeypatch.setattr(corpus, "save_shard", save)
    again = texts("parts")
    assert len(shards(tmp_path / "parts")) == len(shards(tmp_path / "whole")) > 1
    assert [t.ids.tolist() for t in again] == [t.ids.tolist() for t in whole]
    assert all(torch.equal(a.hidden, b.hidden) for a, b in zip(again, whole))


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--resume"], "no training to resume"),
        (["--keep-out", "prompts.txt"], "not a JSON list"),
    ],
)
def test_what_is_refused(folder, tmp_path, monkeypatch, more, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.txt").write_text("no list")
    result = CliRunner().invoke(app, arguments(folder, tmp_path / "head.safetensors", *more))
    assert result.exit_code == 2 and words in result.stderr
    assert not (tmp_path / "head.safetensors").exists()


def test_a_folder_is_no_output(folder, tmp_path):
    result = CliRunner().invoke(app, arguments(folder, tmp_path))
    assert result.exit_code == 2 and "is a folder" in result.stderr


def test_a_missing_library_is_told_before_any_work(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    out = tmp_path / "head.safetensors"
    result = CliRunner().invoke(app, arguments(folder, out))
    assert result.exit_code == 1 and "matplotlib is not installed" in result.stderr
    assert not list(tmp_path.iterdir())
