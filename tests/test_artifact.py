"""An artifact is whole, the same every time, refused when in doubt, and runs as it was compiled."""

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from tiny import VERIFY_2, binding, without

from codegen import artifact as loading
from codegen import save
from codegen.artifact import (
    DeviceMismatch,
    NoSuchPart,
    ToolchainMismatch,
    WeightMismatch,
    load_artifact,
)
from codegen.backend_cpp import CppBackend
from codegen.compile import CompileOptions, weights_digest
from codegen.manifest import (
    MANIFEST,
    FileChanged,
    NotAnArtifact,
    SchemaMismatch,
    canonical,
    manifest_digest,
)
from codegen.plan import Plan
from codegen.save import OutputOccupied, compile_artifact, staging
from codegen.store import CannotWrite, DiskFull
from ir.errors import Unmodelled
from ir.key import DECODE, GraphKey, Mode

EXTRAS = {"tokenizer.json": b'{"a": 1}'}


@pytest.fixture(scope="module")
def store(kernel_folder):
    return kernel_folder


def build(out, store, **changes):
    keys = changes.pop("keys", (DECODE, VERIFY_2))
    bindings = changes.pop("bindings", None) or {
        "target": (binding(0, "target"), keys), "draft": (binding(1, "draft"), keys),
    }  # fmt: skip
    options = changes.pop("options", CompileOptions(store=store))
    return compile_artifact(
        out, bindings, CppBackend(), options, recorded={"context": 64},
        extras=EXTRAS, **changes,
    )  # fmt: skip


@pytest.fixture(scope="module")
def built(tmp_path_factory, store):
    return build(tmp_path_factory.mktemp("built") / "art", store)


@pytest.fixture
def copy(built, tmp_path):
    return Path(shutil.copytree(built, tmp_path / "copy"))


def contents(folder):
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_the_same_input_gives_the_same_bytes(built, tmp_path):
    again = build(tmp_path / "elsewhere" / "other", tmp_path / "cold")
    assert contents(again) == contents(built)


def test_a_checked_build_gives_the_same_bytes(built, tmp_path, store):
    checked = CompileOptions(store=store, check_meaning=3)
    assert contents(build(tmp_path / "checked", store, options=checked)) == contents(built)


def test_nothing_else_is_left_beside_it(built):
    assert os.listdir(built.parent) == [built.name]


def test_what_was_compiled_is_read_back(built):
    artifact = load_artifact(built, verify=True)
    part = artifact.part("target")
    assert set(part.keys) == {DECODE, VERIFY_2} and part.binding == "target" and part.context == 64
    assert artifact.options == {"context": 64}
    assert artifact.extra("tokenizer.json").read_bytes() == EXTRAS["tokenizer.json"]
    plan = part.plan(VERIFY_2)
    assert plan.digest == part.record["plans"]["VERIFY_2"] and plan.key == VERIFY_2
    assert [o for o, _ in plan.outputs] == ["hidden", "logits", "tokens"]
    assert "VERIFY_2" in part.graph_text(VERIFY_2) and "ops.attention" in part.graph_text(VERIFY_2)
    assert artifact.part("draft").digest == part.digest  # one program, other weights
    assert artifact.part("draft").record["source"] != part.record["source"]
    with pytest.raises(NoSuchPart, match=r"target, draft|draft, target"):
        artifact.part("both")


def test_weights_stand_aligned_and_are_not_copied(built):
    part = load_artifact(built).part("target")
    norm = part.weight("norm", "rows")
    expected = binding(0).weights["norm"].numpy().view(np.uint8)
    assert norm.tobytes() == expected.tobytes()
    assert not norm.flags.writeable and not norm.flags.owndata
    for plan in map(part.plan, part.keys):
        for buffer in plan.buffers:
            if buffer.space.value == "weight":
                assert part.weight(buffer.name, buffer.layout).ctypes.data % 64 == 0


def test_the_weights_file_is_plain_safetensors(built):
    with safe_open(built / "weights.safetensors", "np") as file:
        names = set(file.keys())
        norm = file.get_tensor("target/norm@rows")
    assert norm.tobytes() == load_artifact(built).part("target").weight("norm", "rows").tobytes()
    assert {n.split("/")[0] for n in names} == {"target", "draft"}


def test_equal_weights_of_two_parts_are_stored_once(tmp_path, store):
    one = binding(0, "one")
    out = build(tmp_path / "twin", store, bindings={"a": (one, (DECODE,)), "b": (one, (DECODE,))})
    artifact = load_artifact(out)
    a, b = artifact.part("a"), artifact.part("b")
    assert a.record["weights"] == b.record["weights"]
    assert a.weight("norm", "rows").ctypes.data == b.weight("norm", "rows").ctypes.data


def test_a_weight_serves_every_program_in_one_layout(built):
    part = load_artifact(built).part("target")
    used = {
        (b.name, b.layout)
        for p in map(part.plan, part.keys)
        for b in p.buffers
        if b.space.value == "weight"
    }
    assert len({name for name, _ in used}) == len(used)
    assert {f"{name}@{layout}" for name, layout in used} == set(part.record["weights"])


@pytest.mark.parametrize(
    "file",
    [
        "target/plans/DECODE.json", "target/graphs/DECODE.txt", "target/kernels/DECODE.cpp",
        "target/kernels/program.so", "draft/kernels/team.so", "tokenizer.json",
    ],
)  # fmt: skip
def test_a_changed_file_is_named_with_both_digests(copy, file):
    path = copy / file
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(FileChanged, match=rf"{file} in the artifact .* its SHA-256 is") as caught:
        load_artifact(copy)
    assert caught.value.facts["seen"] != caught.value.facts["expected"]
    path.unlink()
    with pytest.raises(FileChanged, match="is missing"):
        load_artifact(copy)


def test_an_edited_manifest_is_refused(copy):
    path = copy / "manifest.json"
    path.write_text(path.read_text().replace('"context": 64', '"context": 65'))
    with pytest.raises(FileChanged, match=r"manifest.json .* its digest is"):
        load_artifact(copy)


def rewritten(folder, change):
    """Changes the manifest and gives it a digest that fits, as
    another machine would have written it.
    """
    path = folder / "manifest.json"
    record = json.loads(path.read_bytes())
    change(record)
    record["digest"] = manifest_digest(record)
    path.write_bytes(canonical(record))


def test_another_schema_is_refused_naming_both(copy):
    rewritten(copy, lambda r: r.update(schema=7))
    with pytest.raises(SchemaMismatch, match="has schema 7, but this version reads schema 2"):
        load_artifact(copy)


@pytest.mark.parametrize(
    ("fact", "value", "sentence"),
    [
        ("machine", "riscv64", "compiled for machine `riscv64`, but this machine has"),
        ("system", "Plan9", "compiled for system `Plan9`"),
        ("isa", "avx2 warp9", "instruction set `avx2 warp9`, but this machine has `no .*warp9`"),
    ],
)
def test_another_device_is_refused_naming_both(copy, fact, value, sentence):
    rewritten(copy, lambda r: r["parts"]["draft"]["facts"].update({fact: value}))
    with pytest.raises(DeviceMismatch, match=sentence):
        load_artifact(copy)


def test_another_toolchain_is_refused_when_asked(built):
    facts = CppBackend().facts()
    load_artifact(built, toolchain=facts)
    with pytest.raises(ToolchainMismatch, match=r"compiler `.*`, but `clang 99` is in use"):
        load_artifact(built, toolchain={**facts, "compiler": "clang 99"})


def test_another_checkpoint_is_refused_when_asked(built):
    right, wrong = (weights_digest(binding(seed).weights) for seed in (0, 5))
    load_artifact(built, sources={"target": right})
    with pytest.raises(WeightMismatch, match=f"from weights {right}, not from {wrong}"):
        load_artifact(built, sources={"target": wrong})


def test_truncated_and_missing_weights_are_refused(copy):
    path = copy / "weights.safetensors"
    size = path.stat().st_size
    os.truncate(path, size - 4096)
    with pytest.raises(FileChanged, match=f"its size is {size - 4096}, recorded is {size}"):
        load_artifact(copy)
    path.unlink()
    with pytest.raises(FileChanged, match=r"weights.safetensors .* its size is missing"):
        load_artifact(copy)


def test_a_changed_weight_is_seen_when_verifying(copy):
    path = copy / "weights.safetensors"
    data = bytearray(path.read_bytes())
    data[-5000] ^= 1
    path.write_bytes(data)
    load_artifact(copy)
    with pytest.raises(FileChanged, match=r"weights.safetensors .* its SHA-256 is"):
        load_artifact(copy, verify=True)
    data[100] ^= 1
    path.write_bytes(data)
    with pytest.raises(FileChanged, match="header's SHA-256"):
        load_artifact(copy)


@pytest.mark.parametrize(
    "text",
    [None, "", "{}", "[1]", "not json", '{"schema": 1}', pytest.param("[" * 99999, id="deep")],
)
def test_what_is_no_artifact_is_refused(tmp_path, text):
    if text is not None:
        (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(NotAnArtifact):
        load_artifact(tmp_path)


def test_a_folder_of_another_kind_is_not_replaced(tmp_path, store):
    (tmp_path / "keep.txt").write_text("mine")
    with pytest.raises(OutputOccupied):
        build(tmp_path, store)
    assert contents(tmp_path) == {Path("keep.txt"): b"mine"}


def test_an_artifact_is_replaced_only_by_a_whole_one(copy, store):
    before = contents(copy)

    def fail(stage, done, _total):
        if stage == "pack weights" and done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(copy, store, report=fail, keys=(DECODE,))
    assert contents(copy) == before and os.listdir(copy.parent) == [copy.name]
    build(copy, store, keys=(DECODE,))
    assert load_artifact(copy).part("target").keys == (DECODE,)
    assert os.listdir(copy.parent) == [copy.name]


def test_a_link_stays_and_the_artifact_behind_it_is_replaced(tmp_path):
    real, link = tmp_path / "real" / "art", tmp_path / "link"
    real.mkdir(parents=True)
    link.symlink_to(real)
    for text in ("{}", "[]"):
        with staging(link) as folder:
            (folder / MANIFEST).write_text(text)
        assert link.is_symlink() and (real / MANIFEST).read_text() == text
    assert sorted(os.listdir(tmp_path)) == ["link", "real"] and os.listdir(real.parent) == ["art"]


@pytest.mark.parametrize("system", ["in one step", "in three"])
def test_two_writers_of_one_folder_each_leave_a_whole_one(tmp_path, monkeypatch, system):
    if system == "in three":
        monkeypatch.setattr(save.ctypes, "CDLL", lambda *given, **options: object())
    out = tmp_path / "art"
    with staging(out) as one:
        (one / MANIFEST).write_text("one")
        with staging(out) as two:
            (two / MANIFEST).write_text("two")
            (two / "more").write_text("")
        assert (out / MANIFEST).read_text() == "two"
    assert contents(out) == {Path(MANIFEST): b"one"} and os.listdir(tmp_path) == ["art"]


def test_what_has_come_meanwhile_is_not_replaced(tmp_path):
    out = tmp_path / "art"
    with pytest.raises(OutputOccupied), staging(out) as folder:
        (folder / MANIFEST).write_text("{}")
        out.mkdir()
        (out / "letter.txt").write_text("dear")
    assert contents(tmp_path) == {Path("art/letter.txt"): b"dear"}


def test_a_failed_swap_leaves_the_old_one(tmp_path, monkeypatch):
    out, rename = tmp_path / "art", os.rename
    out.mkdir()
    (out / MANIFEST).write_text("old")

    def refuse(source, target):
        if Path(target) == out and Path(source).name == "new":
            raise PermissionError(errno.EACCES, "Permission denied")
        rename(source, target)

    monkeypatch.setattr(save.ctypes, "CDLL", lambda *given, **options: object())
    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(CannotWrite), staging(out) as folder:
        (folder / MANIFEST).write_text("new")
    assert (out / MANIFEST).read_text() == "old" and os.listdir(tmp_path) == ["art"]


def test_a_link_to_itself_is_one_sentence(tmp_path):
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    with pytest.raises(CannotWrite, match="loop cannot be written: Too many levels"), staging(loop):
        pytest.fail("it was begun")


def test_a_link_to_nothing_gets_what_it_leads_to(tmp_path):
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "deep" / "art")
    with staging(link) as folder:
        (folder / MANIFEST).write_text("{}")
    assert link.is_symlink() and (tmp_path / "deep" / "art" / MANIFEST).read_text() == "{}"


@pytest.mark.parametrize(("code", "error"), [(28, DiskFull), (13, CannotWrite)])
def test_a_disk_that_refuses_leaves_nothing(tmp_path, code, error):
    with pytest.raises(error), staging(tmp_path / "art") as folder:
        (folder / "half").write_text("written")
        raise OSError(code, os.strerror(code))
    assert os.listdir(tmp_path) == []


def test_a_refusal_lists_every_reason_and_writes_nothing(tmp_path, store):
    known = without(binding(), "sliding windows are not modelled", "biases are not modelled")
    keys = (DECODE, GraphKey(Mode.TREE, 8))
    with pytest.raises(Unmodelled) as caught:
        build(tmp_path / "art", store, bindings={"target": (known, keys)})
    for reason in ("3 reason", "sliding windows", "biases", "no program for TREE_8"):
        assert reason in caught.value.sentence
    assert os.listdir(tmp_path) == []


def test_plan_digests_name_no_machine(built, monkeypatch):
    part = load_artifact(built).part("target")
    text = part.plan(DECODE).text()
    assert Plan.parse(text).text() == text
    for fact in ("compiler", "machine", "system"):
        assert part.facts[fact] not in text


def test_what_kernels_include_is_part_of_the_digest(built, tmp_path, store, monkeypatch):
    changed = CppBackend.sources

    def sources(self, units):
        return {name: text + "// changed" for name, text in changed(self, units).items()}

    monkeypatch.setattr(CppBackend, "sources", sources)
    other = load_artifact(build(tmp_path / "art", store, keys=(DECODE,))).part("target")
    same = load_artifact(built).part("target").plan(DECODE)
    assert other.plan(DECODE).launches == same.launches
    assert other.plan(DECODE).digest != same.digest


def test_loading_imports_nothing_heavy(built):
    script = (
        "import sys, pathlib\n"
        "from codegen.artifact import load_artifact\n"
        "from runners.native import NativeRunner\n"
        "part = load_artifact(pathlib.Path(sys.argv[1])).part('target')\n"
        "runner = NativeRunner(part); runner.preload(); runner.close()\n"
        "print(sorted({'torch', 'networkx', 'jinja2', 'safetensors'} & sys.modules.keys()))\n"
    )
    root = Path(loading.__file__).parent.parent
    answer = subprocess.run(
        [sys.executable, "-c", script, str(built)], capture_output=True, text=True, cwd=root
    )
    assert (answer.stdout, answer.stderr) == ("[]\n", "")
