"""Hub ids: the cached copy is used without a network, and each obstacle is one error."""

import shutil
import sys

import pytest

from circuit.models.checkpoint import SourceKind, load_target
from circuit.models.errors import HubUnavailable, PathMissing
from tests.checkpoints import make_model, save_folder

hub = pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")


@pytest.fixture
def offline(tmp_path, monkeypatch):
    """An empty hub cache, and no network."""
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def put_in_cache(cache, owner_and_name, folder):
    """Moves a checkpoint's folder to where the hub's own client keeps that repository."""
    repository = cache / ("models--" + owner_and_name.replace("/", "--"))
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    (repository / "snapshots").mkdir()
    shutil.move(folder, repository / "snapshots" / ("0" * 40))


def test_a_cached_repository_loads_without_a_network(tmp_path, offline):
    folder = save_folder(make_model("qwen3"), tmp_path / "made")
    put_in_cache(offline, "owner/tiny", folder)
    checkpoint = load_target("owner/tiny")
    assert checkpoint.provenance.kind is SourceKind.HUB
    assert checkpoint.provenance.source == "owner/tiny"
    assert checkpoint.config.qk_norm and len(checkpoint.tensors) == 2 * 11 + 3


def test_a_repository_that_is_not_cached_cannot_be_reached(offline):
    with pytest.raises(
        HubUnavailable, match="owner/absent cannot be fetched from the hub"
    ) as caught:
        load_target("owner/absent")
    assert "the hub cannot be reached" in str(caught.value)
    assert "\n  hint: Connect to the network" in str(caught.value)


def test_a_name_the_hub_forbids_is_refused(offline):
    with pytest.raises(HubUnavailable, match="Cannot have -- or") as caught:
        load_target("owner/a--b")
    assert str(caught.value).count("\n") == 1


def test_without_the_client_the_error_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(HubUnavailable, match="package huggingface_hub is not installed"):
        load_target("owner/absent")


@pytest.mark.parametrize("source", ["a/b/c", "./a", "owner/", "models/x.gguf", "a b/c", "name"])
def test_what_is_no_hub_id_is_a_missing_path(source):
    with pytest.raises(PathMissing):
        load_target(source)
