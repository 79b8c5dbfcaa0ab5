"""Finding a compiler, building side by side, and what happens when neither works."""

import ctypes
import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from codegen import toolchain
from codegen.store import (
    SCRATCH,
    CannotWrite,
    DiskFull,
    KernelStore,
    StoreUnwritable,
    digest_of,
    scratch,
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


def test_what_is_no_file_is_never_replaced_by_one(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_atomically(tmp_path / "pipe", b"one")
    assert os.read(reader, 9) == b"one" and (tmp_path / "pipe").is_fifo()
    os.close(reader)
    link = tmp_path / "link"
    link.symlink_to("file")
    write_atomically(link, b"two")
    assert link.is_symlink() and (tmp_path / "file").read_bytes() == b"two"
    with pytest.raises(CannotWrite, match="Is a directory"):
        write_atomically(tmp_path, b"three")
    mask = os.umask(0o022)
    os.umask(mask)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o666 & ~mask


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


def compiler_that(folder, text):
    """A compiler that says its version and then does as `text`, a shell script, says; `$o` names
    what it is to make.
    """
    path = folder / "a compiler"
    script = '[ "$1" = --version ] && { echo odd 1.0; exit 0; }\n'
    script += 'while [ $# -gt 0 ]; do [ "$1" = -o ] && o=$2; shift; done\n'
    path.write_text(f"#!/bin/sh\n{script}{text}\n")
    path.chmod(0o755)
    return find_compiler(str(path))


@pytest.mark.parametrize(
    ("text", "error", "said"),
    [
        ("echo begins; echo boom >&2; exit 3", CompilerFailed, "boom"),
        ("exit 4", CompilerFailed, "exit code 4"),
        ("kill -9 $$", CompilerFailed, "it was ended by SIGKILL"),
        ("kill -XFSZ $$", DiskFull, "one.o"),
        ("echo 'cannot: No space left on device'; exit 1", DiskFull, "No space left on device"),
        ("exit 0", CompilerFailed, "makes no file that this machine can use"),
        (": > $o", CompilerFailed, "makes no file that this machine can use"),
        ("echo junk > $o", CompilerFailed, "makes no file that this machine can use"),
        ("printf '\\377\\001\\033[2J'; exit 1", CompilerFailed, r"\ufffd\x01\x1b[2J"),
    ],
)
def test_a_broken_compiler_is_one_sentence_and_nothing_is_kept(tmp_path, text, error, said):
    compiler, store = compiler_that(tmp_path, text), KernelStore(tmp_path / "store")
    with pytest.raises(error) as caught:
        compile_objects(compiler, {"one": ""}, [], {}, store, lambda *_: None)
    assert said in caught.value.sentence and caught.value.sentence.isprintable()
    assert list(store.root.iterdir()) == []


def test_a_file_that_cannot_be_executed_is_no_compiler(tmp_path):
    path = tmp_path / "c++"
    path.write_bytes(b"\x7fELF" + bytes(60))
    path.chmod(0o755)
    with pytest.raises(CompilerUnusable, match="Exec format error"):
        find_compiler(str(path))
    compiler = toolchain.Compiler((str(path),), "as it was before")
    with pytest.raises(CompilerUnusable, match="Exec format error"):
        compile_objects(compiler, UNITS, FLAGS, HEADERS, KernelStore(tmp_path), lambda *_: None)


def test_a_compiler_is_named_from_the_folder_of_the_caller(tmp_path, monkeypatch):
    compiler_that(tmp_path, "exit 0")
    monkeypatch.chdir(tmp_path)
    assert find_compiler("./a compiler").command == (str(tmp_path / "a compiler"),)


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="there is no /proc")
def test_what_a_compiler_has_started_ends_with_it(tmp_path):
    compiler = compiler_that(tmp_path, "sleep 600 & echo $! > pid; wait")
    pids = []

    def look(_seconds):
        found = [p.read_text() for p in tmp_path.rglob("pid")]
        if found and found[0].strip():
            pids.append(int(found[0]))
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(toolchain.time, "sleep", look)
        compile_objects(compiler, {"one": ""}, [], {}, KernelStore(tmp_path), lambda *_: None)
    state = Path(f"/proc/{pids[0]}/stat")
    for _ in range(3000):  # until the system has come to end it; its parent may not have noticed
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.01)
    pytest.fail("it goes on")


@pytest.mark.parametrize("spoil", [lambda data: data[:50], lambda data: b"", lambda data: b"junk"])
def test_a_kernel_that_was_cut_short_or_replaced_is_built_again(tmp_path, spoil):
    first = build(tmp_path)
    right = first.read_bytes()
    for path in (first, *tmp_path.rglob("*.o")):
        path.write_bytes(spoil(path.read_bytes()))
    again = build(tmp_path)
    assert again == first and again.read_bytes() == right
    assert ctypes.CDLL(str(again)).two() == 81


def test_a_store_that_is_full_is_read_without_being_written(tmp_path, monkeypatch):
    first = build(tmp_path)
    monkeypatch.setattr(toolchain, "scratch", lambda _: pytest.fail("something was written"))
    assert build(tmp_path) == first


def test_a_store_that_cannot_be_written_names_the_variable(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreUnwritable, match="Not a directory") as caught:
        KernelStore(tmp_path / "file" / "kernels")
    assert "CIRCUIT_CACHE" in caught.value.advice


def test_what_a_dead_process_left_is_swept_and_what_a_live_one_holds_is_not(tmp_path):
    dead, other = tmp_path / f"{SCRATCH}dead", tmp_path / "mine"
    dead.mkdir()
    other.mkdir()
    with scratch(tmp_path) as young:
        assert dead.exists() and young.is_dir()  # it may be one that is just being made
    with scratch(tmp_path) as held:
        (held / "file").write_text("x")
        for folder in (dead, held, other):
            os.utime(folder, (0, 0))
        with scratch(tmp_path):
            assert held.is_dir() and not dead.exists()
    assert list(tmp_path.iterdir()) == [other]
