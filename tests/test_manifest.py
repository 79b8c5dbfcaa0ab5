"""Any manifest, however it was changed and signed anew, loads as it
stands or is refused in one sentence: nothing is guessed, nothing crashes.
"""

import copy
import json
import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import VERIFY_2, binding

from codegen.artifact import DeviceMismatch, Replaced, load_artifact
from codegen.backend_cpp import CppBackend
from codegen.compile import CompileOptions
from codegen.manifest import (
    MANIFEST,
    WEIGHTS,
    FileChanged,
    NotAnArtifact,
    RecordUnfit,
    SchemaMismatch,
    canonical,
    manifest_digest,
    read_manifest,
)
from codegen.packed_file import header_digest
from codegen.save import compile_artifact
from codegen.store import file_digest
from ir.key import DECODE

SHA = "0" * 64
ODD = st.sampled_from([
    None, True, False, 0, -1, 1.5, 2**31, 2**63, 10**400, "", ".", "..", "../../etc/passwd",
    "/etc/passwd", "a//b", "a\\b", "a\nb", "\0", "\ud800", "x" * 3000, SHA, "DECODE", "DECODE_1",
    "VERIFY_0", "VERIFY_-2", "VERIFY_02", "f32[1,2]", "f32[0]", "f32[-1,2]", "f99[2]", "f32[2",
    "f32[99999999999,99999999999]", [], {}, [1], {"a": 1}, [[]],
])  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory, kernel_folder):
    return compile_artifact(
        tmp_path_factory.mktemp("manifest") / "art", {"target": (binding(), (DECODE, VERIFY_2))},
        CppBackend(), CompileOptions(store=kernel_folder), recorded={"a": [1]},
        extras={"tokenizer.json": b"{}"},
    )  # fmt: skip


@pytest.fixture(scope="module")
def right(folder):
    return json.loads((folder / MANIFEST).read_bytes())


@pytest.fixture
def spoiled(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "copy")


def sign(folder, record):
    """Writes `record` as the manifest of `folder`, with the digest that fits it."""
    record["digest"] = manifest_digest(record)
    (folder / MANIFEST).write_bytes(canonical(record))


def places(value, path=()):
    """The path of every field, at every depth."""
    for name, inner in value.items() if type(value) is dict else ():
        yield (*path, name)
        yield from places(inner, (*path, name))


@st.composite
def changes(draw, right):
    """The manifest with one to three fields dropped, added, renamed or set to something odd."""
    record = copy.deepcopy(right)
    for _ in range(draw(st.integers(1, 3))):
        found = [p for p in places(record) if p[0] != "digest"]
        if not found:
            break
        *path, last = draw(st.sampled_from(found))
        inside = record
        for name in path:
            inside = inside[name]
        how = draw(st.sampled_from(["drop", "set", "add", "rename"]))
        if how == "drop":
            del inside[last]
        elif how == "set":
            inside[last] = draw(ODD)
        else:
            name = str(draw(ODD))
            inside[name] = draw(ODD) if how == "add" else inside.pop(last)
    return record


def test_a_changed_manifest_loads_as_it_stands_or_is_refused(folder, right):
    refusals = (RecordUnfit, SchemaMismatch, FileChanged, DeviceMismatch, NotAnArtifact)

    @given(changes(right))
    def attempt(record):
        sign(folder, record)
        try:
            artifact = load_artifact(folder)
            for part in artifact.parts.values():
                assert all(part.plan(k).key == k and part.graph_text(k) for k in part.keys)
                assert all(t.nbytes for t in part.states.values()) and part.context >= 0
                assert {part.weight(*w.rsplit("@", 1)).nbytes for w in part.record["weights"]}
        except refusals as error:
            assert error.sentence and error.advice and "\n" not in error.sentence
            assert len(error.sentence) < 1000
        else:
            assert json.loads(json.dumps(artifact.manifest)) == json.loads(json.dumps(record))

    try:
        attempt()
    finally:
        sign(folder, right)
    assert load_artifact(folder).manifest == right


def set_at(path, value):
    """A change of the field at the dotted `path`."""

    def change(record):
        *inside, last = path.split("/")
        for name in inside:
            record = record[name]
        if value is ...:
            del record[last]
        else:
            record[last] = value

    return change


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("parts", ..., "there is no parts"),
        ("files", ..., "there is no files"),
        ("options", ..., "there is no options"),
        ("weights", ..., "there is no weights"),
        ("parts", {}, "parts is empty"),
        ("parts", [], "parts is [], not an object"),
        ("parts/target", 3, "parts.target is 3, not an object"),
        ("parts/target/facts", ..., "there is no parts.target.facts"),
        ("parts/target/facts/isa", 3, "parts.target.facts.isa is 3, not a text"),
        ("parts/target/spin", 3, "parts.target.spin is not a field"),
        ("spin", 3, "spin is not a field"),
        ("parts/target/context", True, "parts.target.context is True, not a whole number"),
        ("parts/target/context", 64.0, "parts.target.context is 64.0, not a whole number"),
        ("parts/target/context", 2**40, f"context is {2**40}, not a whole number from 0 to"),
        ("parts/target/plans/FRY_2", SHA, "a name in parts.target.plans is FRY_2, not the key"),
        ("parts/target/plans/DECODE", SHA, "but its plan is 000"),
        ("parts/target/digest", "AB", "parts.target.digest is AB, not a SHA-256"),
        ("parts/target/states/layers.0.kv", "f32[2", "states.layers.0.kv is f32[2, not the type"),
        ("parts/target/memory/arena", -1, "memory.arena is -1, not a whole number"),
        ("files/..%2Fx", SHA, None),
        ("weights/bytes", 10**30, "weights.bytes is 1000"),
        ("schema", 2.0, "schema is 2.0, not a whole number from 2 to 2"),
    ],
)
def test_every_field_has_a_rule(spoiled, right, path, value, said):
    record = copy.deepcopy(right)
    set_at(path, value)(record)
    sign(spoiled, record)
    with pytest.raises(RecordUnfit if said else FileChanged) as caught:
        load_artifact(spoiled)
    assert said is None or said in caught.value.sentence
    assert "compile the model again" in caught.value.advice


@pytest.mark.parametrize(
    "name",
    ["../x", "/etc/passwd", "a/../../x", "a//b", ".", "a\\b", "a\nb", "x" * 256, "a/" * 200 + "x"],
)
def test_no_file_outside_the_folder_is_looked_at(spoiled, right, name):
    record = copy.deepcopy(right)
    record["files"][name] = SHA
    sign(spoiled, record)
    with pytest.raises(RecordUnfit, match="not the path of a file inside the artifact"):
        load_artifact(spoiled)
    record["files"].pop(name)
    record["parts"][name] = record["parts"]["target"]
    sign(spoiled, record)
    with pytest.raises(RecordUnfit, match="not the name of a part"):
        load_artifact(spoiled)


def test_many_problems_are_counted_and_three_are_said(spoiled, right):
    record = copy.deepcopy(right)
    record["parts"]["target"] = {}
    sign(spoiled, record)
    with pytest.raises(RecordUnfit, match="; and 8 more"):
        load_artifact(spoiled)


@pytest.mark.parametrize(
    "text",
    ['{"schema": 2, "schema": 2}', '{"schema": NaN}', "\ufeff{}", '{"schema": 2, "digest": "x"}'],
)
def test_what_is_not_strict_json_is_no_manifest(tmp_path, text):
    (tmp_path / MANIFEST).write_text(text, "utf-8")
    with pytest.raises((NotAnArtifact, FileChanged)):
        read_manifest(tmp_path)


def signed_plan(folder, right, change):
    """A plan changed, with every digest above it made to fit."""
    record, file = copy.deepcopy(right), folder / "target/plans/DECODE.json"
    plan = json.loads(file.read_bytes())
    change(plan)
    file.write_text(json.dumps(plan))
    digest = file_digest(file)
    record["files"]["target/plans/DECODE.json"] = digest
    record["parts"]["target"]["plans"]["DECODE"] = digest
    sign(folder, record)


def buffers(plan, space):
    return [b for b in plan["buffers"] if b[0] == space]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda p: p.pop("key"), "it cannot be read (KeyError)"),
        (lambda p: p.update(key="VERIFY_2"), "it is of VERIFY_2"),
        (lambda p: p.update(arena_bytes=2**40), "arena is smaller than"),
        (lambda p: p["launches"][0][1].append(9999), "there is no buffer 9999"),
        (lambda p: p["launches"][0][1].append("x"), "there is no buffer 'x'"),
        (lambda p: p["outputs"][0].__setitem__(1, -1), "there is no buffer -1"),
        (lambda p: buffers(p, "arena")[0].__setitem__(4, 2**20), "arena"),
        (lambda p: buffers(p, "arena")[0].__setitem__(4, -64), "arena"),
        (lambda p: buffers(p, "input")[0].__setitem__(2, "f32[9999999]"), "does not fit"),
        (lambda p: buffers(p, "state")[0].__setitem__(2, "f32[99,2,1,16,32]"), "does not fit"),
        (lambda p: buffers(p, "weight")[0].__setitem__(1, "spare"), "weight spare"),
        (lambda p: buffers(p, "weight")[0].__setitem__(2, "f32[9999,9999]"), "does not fit"),
    ],
)
def test_a_plan_names_only_what_its_part_has(spoiled, right, change, said):
    signed_plan(spoiled, right, change)
    part = load_artifact(spoiled).part("target")
    with pytest.raises(RecordUnfit) as caught:
        part.plan(part.keys[0])
    assert said in caught.value.sentence and "target/plans/DECODE.json" in caught.value.sentence


@pytest.mark.parametrize(
    ("header", "said"),
    [
        (b"[]", "it is not an object"),
        (b"{", "cannot be read"),
        (b'{"a": 3}', "a has no place"),
        (b'{"a": {"data_offsets": [0, 99999999]}}', "outside the file"),
        (b'{"a": {"data_offsets": [64, 0]}}', "outside the file"),
        (b'{"a": {"data_offsets": [-8, 0]}}', "outside the file"),
        (b"{}", "which it does not hold"),
        (None, "it is said to end at byte"),
    ],
)
def test_a_weights_file_has_what_the_parts_name(spoiled, right, header, said):
    file, record = spoiled / WEIGHTS, copy.deepcopy(right)
    data = bytearray(file.read_bytes())
    size = int.from_bytes(data[:8], "little")
    if header is None:
        data[:8] = b"\xff" * 8
    else:
        data[8 : 8 + size] = header.ljust(size)
    file.write_bytes(data)
    record["weights"]["header"] = header_digest(file)
    sign(spoiled, record)
    with pytest.raises(RecordUnfit) as caught:
        load_artifact(spoiled)
    assert said in caught.value.sentence and WEIGHTS in caught.value.sentence


def test_what_has_changed_after_loading_is_not_read(spoiled):
    part = load_artifact(spoiled).part("target")
    for name in ("plans/DECODE.json", "graphs/DECODE.txt"):
        (spoiled / "target" / name).write_text("{}")
    for read in (part.plan, part.graph_text):
        with pytest.raises(FileChanged, match="DECODE"):
            read(part.keys[0])
    shutil.rmtree(spoiled)
    with pytest.raises(FileChanged, match="is missing"):
        part.plan(part.keys[0])


def test_an_artifact_that_is_replaced_while_it_is_loaded_is_not_mixed(spoiled, monkeypatch):
    from codegen import artifact

    other = shutil.copytree(spoiled, spoiled.with_name("other"))
    check = artifact._check_files

    def late(*given):
        check(*given)
        shutil.rmtree(spoiled)
        other.rename(spoiled)

    monkeypatch.setattr(artifact, "_check_files", late)
    with pytest.raises(Replaced):
        load_artifact(spoiled)
    monkeypatch.setattr(artifact, "_check_files", lambda *given: shutil.rmtree(spoiled))
    with pytest.raises(Replaced):
        load_artifact(spoiled)
