"""Words that a command cannot read: code 2, one sentence, and one object on stdout with --json."""

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from circuit import options
from circuit.backends import BACKENDS
from circuit.bench.text import NotPrompts, read_prompts
from circuit.cli import app
from circuit.generate import NoPrompt, NotText, _text, summary
from circuit.report import NoSuchPath, carry_out

ROOT = Path(__file__).parent.parent


def told(*words, code=2, **given):
    """The object that a command prints as it ends with `code`."""
    done = CliRunner().invoke(app, [*map(str, words), "--json"], **given)
    found = json.loads(done.stdout)
    assert done.exit_code == code == found["exit_code"] and found["error"]["hint"]
    assert "Traceback" not in done.stderr and found["error"]["says"] in done.stderr
    return found["error"]["says"]


def test_options_that_cannot_be_read_are_told_as_an_object(tmp_path):
    assert "--max-tokens" in told("generate", tmp_path, "-p", "a", "-n", 0)
    assert "--prompt" in told("generate", tmp_path)
    assert "--frown" in told("show", tmp_path, "--frown")
    assert "nonsense" in told("nonsense")
    done = CliRunner().invoke(app, ["show", "--help", "--json"])
    assert done.exit_code == 0 and "launches" in done.stdout


def test_digits_that_are_no_numbers_are_refused(tmp_path):
    out = tmp_path / "o"
    for option in ("--batch", "--trees", "--archs"):
        assert f"{option} is '²'" in told("compile", tmp_path, "-o", out, option, "²")
    with pytest.raises(options.BadOption), pytest.MonkeyPatch.context() as patch:
        patch.setenv("CIRCUIT_THREADS", "²")
        options.threads()


def test_names_that_lead_nowhere_are_told(tmp_path):
    out = ("-o", tmp_path / "o")
    assert "~nobody/m does not exist" in told("compile", "~nobody/m", *out)
    assert "~nobody/h does not exist" in told("compile", "demo", *out, "--draft", "~nobody/h")
    done = CliRunner().invoke(app, ["generate", "/tmp/no\udcff", "-p", "a", "--json"])
    assert "no\udcff does not exist" in json.loads(done.stdout)["error"]["says"]


def test_levers_and_trees_that_cannot_be_read_are_wrong_usage(tmp_path):
    base = ("generate", tmp_path, "-p", "a")
    assert "trim" in told(*base, "--lever", "trim=most")
    assert "ladder" in told(*base, "--lever", "ladder=x")
    assert "tree shape" in told(*base, "--tree", "5")
    assert "MTP_CATCHUP" in told(*base, env={"CIRCUIT_MTP_CATCHUP": "2"})


def test_options_that_contradict_each_other_are_refused(tmp_path):
    base = ("generate", tmp_path, "-p", "a")
    assert told(*base, "--no-draft", "--drafts", 2).startswith("--drafts is 2: --no-draft")
    assert told(*base, "--no-draft", "--tree", "auto").startswith("--tree is 'auto': --no-draft")
    twice = told(*base, "--lever", "trim=keep", "--lever", "trim = refeed")
    assert twice == "--lever is 'trim = refeed': trim is keep as well."
    assert "which texts" in told("bench", tmp_path, "--prompts", 3)
    assert "which texts" in told("bench", tmp_path, "--tree", "auto")
    assert "tree shape" in told("bench", tmp_path, "--text", tmp_path, "--tree", "5")
    with pytest.raises(options.BadOption, match="C\\+\\+ kernels run on no GPU"):
        BACKENDS["cpp"]((80,))


@pytest.mark.parametrize("value", ["-1", "0", "4", "99", "1.5", "nan", "", "٣٣"])
def test_numbers_out_of_range_are_one_sentence_and_a_hint(tmp_path, value):
    words = ["generate", str(tmp_path), "-p", "a", f"--drafts={value}"]
    done = CliRunner().invoke(app, words)
    sentence, hint = done.stderr.splitlines()
    assert done.exit_code == 2 and done.stdout == ""
    assert sentence.startswith("error: Invalid value for '--drafts'")
    assert hint.startswith("  hint: `") and hint.endswith("generate --help` lists what it takes.")


def test_a_list_of_prompts_that_is_no_file_is_told(tmp_path):
    with pytest.raises(NotPrompts, match="it is no file"):
        read_prompts(tmp_path, None)
    with pytest.raises(NoSuchPath):
        read_prompts(tmp_path / "no", None)


@pytest.mark.parametrize("text", ["ab\udcff", "ab\ud800"])
def test_halves_of_characters_are_no_prompt(text):
    with pytest.raises(NotText, match="byte 2"):
        _text(text)


def test_bytes_on_stdin_that_are_no_text_are_refused(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"ab\xff"), "utf-8"))
    with pytest.raises(NotText, match="byte 2"):
        _text("-")


def test_letters_that_stdout_lacks_are_written_by_their_numbers(monkeypatch):
    out = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdout", out)
    action = lambda screen: (screen.stream("é"), {"text": "é"})[1]  # noqa: E731
    assert carry_out(action, as_json=False, debug=False) == 0
    assert carry_out(action, as_json=True, debug=False) == 0
    out.seek(0)
    assert out.read() == '\\xe9{"text": "\\u00e9"}\n'


def test_a_compiler_named_by_blanks_is_none(monkeypatch):
    monkeypatch.setenv("CXX", "  ")
    assert options.compiler() is None


def circuit(*words, **given):
    """The process of a command, with pipes for what it prints."""
    return subprocess.Popen(
        [sys.executable, "-m", "circuit", *map(str, words)], cwd=ROOT, text=True,
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **given},
    )  # fmt: skip


def heed():
    """Undoes what a shell does to jobs in the background, which ignore interrupts from birth."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize(
    ("number", "code", "kind"),
    [(signal.SIGINT, 130, "Interrupted"), (signal.SIGTERM, 143, "Terminated")],
)
def test_a_signal_is_told_and_a_second_one_does_not_disturb_the_end(tmp_path, number, code, kind):
    script = (
        "import sys, time\nfrom circuit.report import carry_out\n"
        "def action(screen):\n"
        "    try:\n"
        "        print('ready', file=sys.stderr, flush=True); time.sleep(60)\n"
        "    finally:\n"
        "        print('cleaning', file=sys.stderr, flush=True); time.sleep(0.5)\n"
        "        open(sys.argv[1], 'w').write('clean')\n"
        "sys.exit(carry_out(action, as_json=True, debug=False))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "end")], cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=heed,
    )  # fmt: skip
    for line in process.stderr:
        if line.strip() in ("ready", "cleaning"):
            process.send_signal(number)
        if line.strip() == "cleaning":
            break
    out, err = process.communicate()
    assert process.returncode == code and (tmp_path / "end").read_text() == "clean"
    found = json.loads(out)
    assert found["exit_code"] == code and found["error"]["kind"] == kind
    assert "nothing is left half-written" in err and "Traceback" not in err


def test_an_interrupt_that_becomes_another_error_is_still_one():
    def action(_screen):
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise ImportError("numpy failed to import") from None

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert carry_out(action, as_json=False, debug=False) == 130
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_interrupt_of_the_first_imports_is_one_sentence(tmp_path):
    (tmp_path / "typer.py").write_text("raise KeyboardInterrupt\n")
    path = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    script = "import sys; sys.path.insert(0, sys.argv.pop(1))\n"
    script += "from circuit.__main__ import main; main()"
    words = [sys.executable, "-c", script, str(tmp_path), "fetch", "--json"]
    done = subprocess.run(words, cwd=ROOT, env=path, capture_output=True, text=True)
    assert done.returncode == 130 and "Traceback" not in done.stderr
    assert json.loads(done.stdout)["exit_code"] == 130


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no device that is full")
def test_a_stdout_that_takes_nothing_is_told_on_stderr(tmp_path):
    with open("/dev/full", "wb") as full:
        for words in (("generate", "--json"), ("show", tmp_path / "no", "--json")):
            process = circuit(*words, stdout=full)
            err = process.communicate()[1]
            assert process.returncode == 2 and "Traceback" not in err and "ignored" not in err


@pytest.mark.parametrize("closed", ["0<&-", "1>&-", "2>&-", "0<&- 1>&- 2>&-"])
def test_closed_streams_are_no_fault_of_the_program(tmp_path, closed):
    words = f'exec "{sys.executable}" -m circuit show "{tmp_path}/no" --json {closed}'
    done = subprocess.run(["sh", "-c", words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stdout == "" if "1>" in closed else json.loads(done.stdout)["exit_code"] == 2
    assert "error" not in done.stderr if "2>" in closed else "does not exist" in done.stderr


def test_a_closed_stdin_is_an_empty_prompt(monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(NoPrompt):
        _text("-")


def test_readers_who_leave_are_not_complained_about():
    words = f'set -o pipefail; "{sys.executable}" -m circuit show --help | true'
    done = subprocess.run(["bash", "-c", words], cwd=ROOT, capture_output=True, text=True)
    assert done.stderr == ""


def test_the_last_line_of_a_text_says_why_it_is_short():
    record = {"token_ids": [2], "tokens_per_second": 0.0, "drafts": 0, "finish": "stop"}
    assert summary(record) == (
        "[1 tokens, 0.0 per second; the text ended at once: --chat asks as a user would]"
    )
    record |= {"token_ids": [5, 6, 7], "finish": "context"}
    assert "the context of the artifact is full" in summary(record)
    assert summary(record | {"finish": "length"}) == "[3 tokens, 0.0 per second]"
