"""The commands: one object on stdout, one sentence for each bad input,
exit codes, nothing half-written.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from checkpoints import edit_json, make_model
from cli_models import tiny_head, tiny_model
from gguf_files import write_gguf
from typer.testing import CliRunner

from circuit.cli import app
from codegen.manifest import MANIFEST, WEIGHTS, canonical, manifest_digest

ROOT = Path(__file__).parent.parent
KEYS = ("text", "token_ids", "seconds", "tokens_per_second", "steps", "accepted_per_position",
        "mean_accepted_length", "plan_digest")  # fmt: skip


def run(*words: object, stdin: str | None = None):
    """The finished command: `exit_code`, `stdout`, `stderr`."""
    return CliRunner().invoke(app, [str(w) for w in words], input=stdin)


def result(*words: object) -> dict:
    """The object that a command prints with --json, which succeeds and prints nothing else."""
    done = run(*words, "--json")
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout)


def refusal(*words: object, code: int) -> str:
    """What a command says when it fails with `code`: a sentence and
    a hint, the same with --json.
    """
    done = run(*words)
    lines = done.stderr.splitlines()
    said = next(line for line in lines if line.startswith("error: "))
    assert done.exit_code == code, done.stderr
    assert "Traceback" not in done.stderr
    assert any(line.strip().startswith("hint: ") for line in lines)
    again = run(*words, "--json")
    told = json.loads(again.stdout)
    assert again.exit_code == code == told["exit_code"]
    assert told["error"]["says"].splitlines()[0] == said.removeprefix("error: ")
    return said


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """A cache of the tests' own, which their compiles share."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CIRCUIT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """A folder with a tiny model `model` and a head `head.safetensors` for it."""
    folder = tmp_path_factory.mktemp("models")
    tiny_model(folder / "model")
    tiny_head(folder / "head.safetensors")
    return folder


@pytest.fixture(scope="module")
def artifact(models, tmp_path_factory) -> Path:
    """The tiny model and its head, compiled by the command."""
    out = tmp_path_factory.mktemp("compiled") / "artifact"
    made = result(
        "compile", models / "model", "--draft", models / "head.safetensors", "-o", out,
        "--batch", "2", "--context", "64",
    )  # fmt: skip
    assert made["path"] == str(out)
    assert made["parts"]["draft"]["launches"]["DECODE"] <= 9
    return out


@pytest.fixture
def copy(artifact, tmp_path) -> Path:
    """A copy of the artifact that a test may spoil."""
    return Path(shutil.copytree(artifact, tmp_path / "copy"))


def test_help_imports_nothing_heavy():
    code = (
        "import sys, runpy; sys.argv = ['circuit', '--help']\n"
        "try: runpy.run_module('circuit.cli', run_name='__main__')\n"
        "except SystemExit: pass\n"
        "print([m for m in ('torch', 'numpy', 'jinja2', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"
    for name in ("fetch", "compile", "generate", "check", "bench", "show", "train"):
        assert name in done.stdout


def test_generate_with_a_compiled_artifact_imports_no_torch(artifact):
    code = (
        "import sys; from circuit.cli import app\n"
        "try: app(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "print('torch' in sys.modules)"
    )
    words = ["generate", str(artifact), "--prompt", "ab", "--max-tokens", "4"]
    done = subprocess.run(
        [sys.executable, "-c", code, *words], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "False"


def test_usage_errors_have_code_2(models, artifact, tmp_path):
    assert run("compile").exit_code == 2
    assert run("generate", artifact).exit_code == 2
    assert run("nonsense").exit_code == 2
    assert "does not exist" in refusal(
        "compile", tmp_path / "no.gguf", "-o", tmp_path / "o", code=2
    )
    assert "does not exist" in refusal("generate", tmp_path / "no", "--prompt", "a", code=2)
    assert "does not exist" in refusal(
        "compile",
        models / "model",
        "--draft",
        tmp_path / "no.safetensors",
        "-o",
        tmp_path / "o",
        code=2,
    )
    assert "--batch" in refusal(
        "compile", models / "model", "-o", tmp_path / "o", "--batch", "x", code=2
    )
    assert "made for 128 tokens" in refusal(
        "compile", models / "model", "-o", tmp_path / "o", "--context", "4096", code=2
    )
    assert "no peer" in refusal("bench", artifact, "--peers", "vllm", code=2)
    assert "not a key" in refusal("bench", artifact, "--keys", "SING", code=2)
    assert "level" in refusal("show", artifact, "--level", "best", code=2)
    assert "no part has this program" in refusal("show", artifact, "--key", "BATCH_9", code=2)
    assert "empty" in refusal("generate", artifact, "--prompt", "", code=2)
    assert "--trees" in refusal(
        "compile", models / "model", "-o", tmp_path / "o", "--trees", "9", code=2
    )
    assert not (tmp_path / "o").exists()


def test_what_is_not_a_model_is_refused(tmp_path):
    text = tmp_path / "notes.txt"
    text.write_text("not a model")
    assert "is not a model" in refusal("compile", text, "-o", tmp_path / "o", code=2)
    (tmp_path / "empty").mkdir()
    assert "no config.json" in refusal("compile", tmp_path / "empty", "-o", tmp_path / "o", code=2)


def test_a_truncated_gguf_is_refused(tmp_path):
    write_gguf(make_model("llama"), tmp_path / "whole.gguf")
    whole = (tmp_path / "whole.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(whole[: len(whole) * 2 // 3])
    assert "truncated" in refusal("compile", cut, "-o", tmp_path / "o", code=1)
    assert list(tmp_path.glob("o*")) == []


def test_unknown_architectures_and_keys_are_refused_by_name(tmp_path):
    folder = tiny_model(tmp_path / "model")
    edit_json(folder / "config.json", spin_factor=3)
    assert "spin_factor" in run("compile", folder, "-o", tmp_path / "o").stderr
    edit_json(
        folder / "config.json", spin_factor=..., architectures=["GptForAll"], model_type="gpt"
    )
    assert "gpt" in refusal("compile", folder, "-o", tmp_path / "o", code=1).lower()


def test_heads_of_another_size_are_refused(models, tmp_path):
    wide = tiny_head(tmp_path / "wide.safetensors", hidden=96)
    other = tiny_head(tmp_path / "other.safetensors", vocab=300)
    base = ("compile", models / "model", "-o", tmp_path / "o", "--draft")
    assert "hidden size of 96" in refusal(*base, wide, code=1)
    assert "vocabulary of 300" in refusal(*base, other, code=1)
    (tmp_path / "broken.safetensors").write_bytes(b"\x10")
    assert "safetensors" in refusal(*base, tmp_path / "broken.safetensors", code=1)
    assert list(tmp_path.glob("*o")) == []


def test_an_artifact_of_another_processor_is_refused(copy):
    manifest = json.loads((copy / MANIFEST).read_text())
    manifest["parts"]["target"]["facts"]["isa"] += " avx9000"
    manifest["digest"] = manifest_digest(manifest)
    (copy / MANIFEST).write_bytes(canonical(manifest))
    assert "no avx9000" in refusal("generate", copy, "--prompt", "a", code=1)


@pytest.mark.parametrize("name", [MANIFEST, "target/plans/DECODE.json", "tokenizer.json", WEIGHTS])
def test_an_artifact_that_was_edited_is_refused(copy, name):
    path = copy / name
    data = bytearray(path.read_bytes())
    data[20 if name == WEIGHTS else len(data) // 2] ^= 1
    path.write_bytes(data)
    done = run("generate", copy, "--prompt", "a")
    assert done.exit_code in (1, 2)
    assert "error: " in done.stderr and "hint: " in done.stderr and "Traceback" not in done.stderr


def test_a_changed_weight_is_found_by_check(copy):
    path = copy / WEIGHTS
    data = bytearray(path.read_bytes())
    data[-200] ^= 1
    path.write_bytes(data)
    assert WEIGHTS in refusal("check", copy, code=1)


def test_a_folder_that_is_no_artifact_is_neither_read_nor_replaced(models, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    said = refusal("compile", models / "model", "-o", tmp_path / "mine", code=2)
    assert "not replaced" in said
    assert (tmp_path / "mine" / "letter.txt").read_text() == "dear"
    refusal("show", tmp_path / "mine", code=1)


def test_without_a_compiler_the_hint_names_one(models, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", str(tmp_path / "no-such-compiler"))
    base = ("compile", models / "model", "-o", tmp_path / "o")
    assert "no-such-compiler" in refusal(*base, code=1)
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    done = run(*base)
    assert done.exit_code == 1 and "C++17 compiler" in done.stderr and "ziglang" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_nothing(models, tmp_path, monkeypatch):
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    out = tmp_path / "sub" / "o"
    base = ("compile", models / "model", "-o", out, "--batch", "", "--context", "64")
    assert "full" in refusal(*base, code=1)
    assert list(out.parent.iterdir()) == []


def heed_interrupts() -> None:
    """Undoes what a shell does to jobs in the background, which ignore interrupts from birth."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_a_compile_that_is_interrupted_leaves_nothing(models, tmp_path):
    out = tmp_path / "o"
    process = subprocess.Popen(
        [sys.executable, "-m", "circuit.cli", "compile", str(models / "model"), "-o", str(out)],
        cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
        preexec_fn=heed_interrupts,
        env={**os.environ, "CIRCUIT_CACHE": str(tmp_path / "cache")},
    )  # fmt: skip
    for line in process.stderr:
        if "compile kernels" in line:
            break
    os.killpg(process.pid, signal.SIGINT)
    said = process.stderr.read()
    assert process.wait() == 130
    assert "Interrupted" in said and "Traceback" not in said
    assert [p.name for p in tmp_path.iterdir()] == ["cache"]


def test_a_termination_leaves_nothing(models, tmp_path):
    out = tmp_path / "o"
    process = subprocess.Popen(
        [sys.executable, "-m", "circuit.cli", "compile", str(models / "model"), "-o", str(out)],
        cwd=ROOT, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "CIRCUIT_CACHE": str(tmp_path / "cache")},
    )  # fmt: skip
    for line in process.stderr:
        if "trace and fuse" in line:
            break
    process.terminate()
    process.stderr.read()
    assert process.wait() == 143
    assert list(tmp_path.glob("*o*")) == []


def test_debug_shows_the_traceback(tmp_path):
    done = run("compile", tmp_path / "no.gguf", "-o", tmp_path / "o", "--debug")
    assert "Traceback" in done.stderr and "error: " in done.stderr


def test_generate_says_what_it_did(artifact):
    base = ("generate", artifact, "--prompt", "hello", "--max-tokens", "24", "--ignore-eos")
    drafted = result(*base)
    assert set(KEYS) <= drafted.keys()
    assert len(drafted["token_ids"]) == 24
    assert len(drafted["plan_digest"]) == 64
    assert len(drafted["accepted_per_position"]) == 3
    plain = result(*base, "--no-draft")
    assert plain["steps"] == 23 and plain["accepted_per_position"] == []
    assert plain["token_ids"] == drafted["token_ids"]
    assert result(*base, "--drafts", "2")["token_ids"] == plain["token_ids"]
    streamed = run(*base)
    assert streamed.stdout == drafted["text"] + "\n"
    assert "24 tokens" in streamed.stderr


def test_levers_are_given_by_name_and_by_file_and_never_change_the_text(artifact, tmp_path):
    base = ("generate", artifact, "--prompt", "hello", "--max-tokens", "24", "--ignore-eos")
    plain = result(*base)
    assert list(plain["pace"]) == ["worth"] and "shadow_topk" not in plain
    assert "pace" not in result(*base, "--no-draft")
    counted = plain["acceptance_by_width"]["1"]
    assert counted["steps"] == plain["steps"]
    assert counted["per_position"] == plain["accepted_per_position"]
    file = tmp_path / "levers.toml"
    file.write_text('[levers]\ngate = "auto"\ngate_refresh = 4\ndepth = "cost"\n')
    for words in (
        ("--lever", "draft_stop=0.5", "--lever", "shadow_topk=2"), ("--levers", file),
        ("--lever", "trim=keep"), ("--lever", "ladder=1:1"), ("--lever", "draft_clamp=0.9"),
    ):  # fmt: skip
        record = result(*base, *words)
        assert record["token_ids"] == plain["token_ids"]
        paced = ["gate", "costs"] if file in words else ["worth"]
        assert list(record["pace"]) == paced
        assert ("shadow_topk" in record) is ("shadow_topk=2" in words)
    assert "draft_stop is '2'" in refusal(*base, "--lever", "draft_stop=2", code=2)
    fixed = refusal(*base, "--lever", "recycle=post_norm", code=1)
    assert "compiled to recycle its pre_norm hidden" in fixed
    said = run(*base, "--lever", "acceptance_log=on").stderr
    assert "1 sequences:" in said and "tokens per step" in said


def test_generate_reads_stdin_and_chats(artifact):
    words = ("generate", artifact, "--max-tokens", "4", "--json")
    piped = json.loads(run(*words, "--prompt", "-", stdin="hello").stdout)
    assert piped["prompt_tokens"] == 5
    assert piped["token_ids"] == json.loads(run(*words, "--prompt", "hello").stdout)["token_ids"]
    chatted = json.loads(run(*words, "--prompt", "hello", "--chat").stdout)
    assert chatted["prompt_tokens"] == 7


def test_eager_generation_writes_the_same_text(artifact):
    base = ("generate", artifact, "--prompt", "hello", "--max-tokens", "12", "--ignore-eos")
    assert result(*base, "--eager")["token_ids"] == result(*base)["token_ids"]


def test_eager_generation_needs_the_same_checkpoint(models, tmp_path):
    folder = tiny_model(tmp_path / "model")
    out = tmp_path / "o"
    result("compile", folder, "-o", out, "--batch", "", "--context", "64")
    tiny_model(folder, seed=7)
    said = refusal("generate", out, "--prompt", "a", "--eager", code=1)
    assert "was compiled from weights" in said


def test_check_compares_every_program_and_sees_planted_faults(artifact):
    found = result("check", artifact)
    assert found["passed"] and found["problems"] == []
    assert found["compared"]["programs"] == len(found["programs"]) == 9 + 15
    assert found["compared"]["tokens"] >= 16 and found["compared"]["numbers"] > 10_000
    assert found["compared"]["equal_rows"] >= 2 * (32 + 2 + 3 + 4)
    assert all(all(seen.values()) for seen in found["faults"].values())
    planted = {n: {f.partition(", ")[2] for f in seen} for n, seen in found["faults"].items()}
    assert planted == {"target": {"DECODE"}, "draft": {"DECODE", "CHAIN_4", "SPINE_4"}}
    assert {(p["part"], p["key"]) for p in found["programs"]} >= {
        ("target", "VERIFY_4"), ("target", "PREFILL_256"), ("draft", "CHAIN_3"),
        ("draft", "BATCH_2"),
    }  # fmt: skip


def test_check_does_not_pass_on_a_thin_run(artifact):
    done = run("check", artifact, "--keys", "DECODE", "--json")
    found = json.loads(done.stdout)
    assert done.exit_code == 1 and not found["passed"]
    assert any("left out" in p for p in found["problems"])
    assert any("too thin" in p for p in found["problems"])


def test_show_draws_every_program(artifact, tmp_path):
    text = run("show", artifact).stdout
    assert "CHAIN_4" in text and "launches" in text
    shown = result("show", artifact, "--key", "verify_2")
    assert len(shown["parts"]["draft"]["list"]) == shown["parts"]["draft"]["launches"]
    svg = tmp_path / "a.svg"
    assert result("show", artifact, "--format", "svg", "-o", svg)["out"] == str(svg)
    titles = [t.text for t in ElementTree.parse(svg).iter("{http://www.w3.org/2000/svg}title")]
    assert any("linear" in t for t in titles)
    page = run("show", artifact, "--format", "html").stdout
    assert page.startswith("<!doctype html>") and page.count("<svg") == 1
    for level in ("traced", "typed", "fused", "ordered"):
        graph = run("show", artifact, "--level", level, "--part", "draft").stdout
        assert "def DECODE(" in graph and "linear" in graph
    drawn = run("show", artifact, "--level", "fused", "--format", "svg").stdout
    assert "draft DECODE · fused" in drawn and "target DECODE · fused" in drawn
    page = run("show", artifact, "--level", "typed", "--part", "draft", "--format", "html").stdout
    assert page.count("<svg") == 1 and "def DECODE(" in page


def test_bench_prints_rows_as_promised(artifact):
    found = result(
        "bench", artifact, "--peers", "eager", "--runs", "3", "--keys", "DECODE,VERIFY_2,CHAIN_2"
    )
    assert {"rows", "read_bandwidth_gbs", "machine"} <= found.keys()
    names = {(r["peer"], r["key"], r["rows"]) for r in found["rows"]}
    assert {
        ("circuit", "DECODE", 1),
        ("eager", "VERIFY_2", 2),
        ("circuit", "draft CHAIN_2", 2),
    } <= names
    for row in found["rows"]:
        assert list(row) == [
            "peer",
            "weights",
            "key",
            "rows",
            "ms_median",
            "ms_min",
            "ms_max",
            "runs",
        ]
        assert 0 < row["ms_min"] <= row["ms_median"] <= row["ms_max"] and row["runs"] == 3
    assert found["read_bandwidth_gbs"] > 0


def test_bench_writes_texts_with_and_without_drafts(artifact, tmp_path):
    prompts = tmp_path / "prompts.json"
    prompts.write_text(json.dumps(["one", "two"]))
    found = result("bench", artifact, "--text", prompts, "--peers", "eager", "-n", "12")
    assert found["with_drafts"]["equal_texts"] == 2
    assert found["with_drafts_and_lookup"]["equal_texts"] == 2
    sides = [(row["drafts"], row["lookup"], row["tree"]) for row in found["rows"]]
    assert sides == [(0, False, ""), (3, False, ""), (3, True, ""), (3, False, "auto:4")]
    assert found["with_tree_auto:4"]["equal_texts"] == 2
    prompts.write_text("{}")
    assert "list of texts" in refusal("bench", artifact, "--text", prompts, code=2)


def test_trees_give_the_same_text_and_are_counted(artifact):
    words = ("generate", artifact, "--prompt", "one two three", "-n", "24", "--no-lookup")
    plain = result(*words, "--no-draft")
    for tree in ("2,2,1", "auto", "auto:4"):
        found = result(*words, "--tree", tree)
        assert found["token_ids"] == plain["token_ids"] and found["tree"] == tree
        assert found["branched_steps"] >= 0
    assert "tree" not in result(*words, "--tree", "off")
    assert "is refused" in refusal(*words, "--tree", "5", code=2)
