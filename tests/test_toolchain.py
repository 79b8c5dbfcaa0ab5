"""Finding a compiler, building side by side, and what happens when neither works."""

import ctypes
import errno
import os
import subprocess
import sys

import pytest

from codegen import toolchain
from codegen.store import (
    SCRATCH,
    CannotWrite,
    DiskFull,
    KernelStore,
    digest_of,
    write_atomically,
    writing,
)
from codegen.toolchain import (
    CompilerFailed,
    CompilerUnusable,
    NoCompiler,
    compile_objects,
    find_compiler,
    link_library,
)

FLAGS = ["-O1", "-fPIC"]
UNITS = {
    "one": '#include "shared.h"\nextern "C" int one() { return BASE + 1; }\n',
    "two": (
        '#include "shared.h"\nextern "C" int one(); extern "C" int two() { return one() + BASE; }\n'
    ),
}
HEADERS = {"shared.h": "#define BASE 40\n"}


def build(folder, units=UNITS, headers=HEADERS, report=lambda *_: None):
    store = KernelStore(folder)
    compiler = find_compiler()
    objects = compile_objects(compiler, units, FLAGS, headers, store, report)
    return link_library(compiler, "library.so", objects, [], store)


def test_units_see_each_other_in_one_library(tmp_path):
    library = ctypes.CDLL(str(build(tmp_path)))
    assert (library.one(), library.two()) == (41, 81)


def test_the_same_units_give_the_same_bytes_anywhere(tmp_path):
    one, two = build(tmp_path / "here"), build(tmp_path / "there" / "deeper")
    assert one.read_bytes() == two.read_bytes() and one.name == two.name


def test_what_the_store_has_is_not_built_again(tmp_path, monkeypatch):
    first = build(tmp_path)
    monkeypatch.setattr(toolchain, "_start", lambda *_: pytest.fail("a compiler was started"))
    told = []
    assert build(tmp_path, report=lambda *r: told.append(r)) == first
    assert told == [("compile kernels", 2, 2)]


@pytest.mark.parametrize(
    "change",
    [
        {"headers": {"shared.h": "#define BASE 41\n"}},
        {"units": {**UNITS, "one": UNITS["one"] + " "}},
    ],
    ids=["header", "unit"],
)
def test_a_changed_part_is_another_library(tmp_path, change):
    assert build(tmp_path) != build(tmp_path, **change)


def test_a_broken_unit_is_named_with_the_compilers_own_words(tmp_path):
    with pytest.raises(CompilerFailed, match=r"unit bad: bad.cpp:1:.*error") as caught:
        build(tmp_path, units={"bad": "int f() { return undeclared; }\n"})
    assert "CXX" in caught.value.advice
    assert list(tmp_path.rglob("*.o")) == []


def test_an_interrupt_ends_the_compilers_and_leaves_no_folder(tmp_path):
    started = []

    def interrupt(_stage, _done, _total):
        if started:
            raise KeyboardInterrupt

    slow = "#include <regex>\n" + "\n".join(
        f"std::regex r{i}(const char* s) {{ return std::regex(s); }}" for i in range(200)
    )
    real = toolchain._start

    def remember(*arguments):
        started.append(real(*arguments))
        return started[-1]

    toolchain._start, units = remember, {"slow": slow, "quick": "int quick;\n"}
    try:
        with pytest.raises(KeyboardInterrupt):
            build(tmp_path, units=units, report=interrupt)
    finally:
        toolchain._start = real
    assert all(process.poll() is not None for process in started)
    assert [p for p in tmp_path.iterdir() if p.name.startswith(SCRATCH)] == []


def test_a_named_compiler_that_is_none_is_refused():
    with pytest.raises(CompilerUnusable, match=r"no-such-compiler .* no such program"):
        find_compiler("no-such-compiler -x")
    with pytest.raises(CompilerUnusable, match="gives no version"):
        find_compiler("false")


def test_without_any_compiler_the_hint_offers_the_wheel(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(toolchain.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(NoCompiler, match=r"c\+\+, g\+\+, clang\+\+, ziglang") as caught:
        find_compiler()
    assert "pip install ziglang" in caught.value.advice


def test_a_compiler_on_the_path_comes_before_the_wheel():
    assert find_compiler().command[0] in ("c++", "g++", "clang++")
    assert find_compiler().version == find_compiler("c++").version


def test_files_appear_whole_or_not_at_all(tmp_path):
    path = tmp_path / "deep" / "file"
    write_atomically(path, b"one")
    assert path.read_bytes() == b"one" and os.listdir(path.parent) == ["file"]
    with pytest.raises(CannotWrite):
        write_atomically(path / "below", b"two")
    assert path.read_bytes() == b"one"


def test_a_full_disk_is_one_sentence():
    said = "the disk is full while x is written"
    with pytest.raises(DiskFull, match=said), writing("x"):  # noqa: SIM117
        with open("/dev/full", "wb", buffering=0) as full:
            full.write(b"1")
    with pytest.raises(CannotWrite, match="x cannot be written"), writing("x"):
        raise PermissionError(errno.EACCES, "Permission denied")


def test_a_limit_on_file_size_leaves_nothing_half_written(tmp_path):
    script = (
        "import resource, pathlib, sys\n"
        "from codegen.store import DiskFull, write_atomically\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "try: write_atomically(pathlib.Path(sys.argv[1]), bytes(5000))\n"
        "except DiskFull as full: print(full.sentence)\n"
    )
    answer = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "file")], capture_output=True, text=True
    )
    assert answer.stdout.startswith("the disk is full") and list(tmp_path.iterdir()) == []


def test_parts_of_a_digest_do_not_run_together():
    assert digest_of("ab", "c") != digest_of("a", "bc") != digest_of("abc")
    assert digest_of("ab", b"c") == digest_of("ab", "c")
