"""Words that a command cannot read: code 2, one sentence, and one object on stdout with --json."""

import io
import json
import sys

import pytest
from typer.testing import CliRunner

from circuit import options
from circuit.cli import app
from circuit.generate import NotText, _text
from circuit.report import carry_out


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
