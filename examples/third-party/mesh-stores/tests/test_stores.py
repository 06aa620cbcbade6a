"""The kind is declared as it should be, its own store keeps the contract, and users find both."""

import json
import subprocess
import sysconfig
from pathlib import Path

import pytest
from mesh_stores import STORES, Store, open_store
from mesh_stores._folder import FOLDER
from mesh_stores.testing import StoreConformance

from mesh_core import PluginError
from mesh_core.plugins import ProbeResult
from mesh_core.testing import KindConformance, installed_plugins

MESH = Path(sysconfig.get_path("scripts"), "mesh")


class TestStores(KindConformance):
    kind = STORES


class TestFolder(StoreConformance):
    plugin = FOLDER
    distribution = "mesh-stores"


class Forgetful:
    def __init__(self, location: str) -> None:
        self.location = location

    def save(self, name: str, data: bytes) -> None:
        pass

    def load(self, name: str) -> bytes:
        return b""


def test_the_suite_fails_for_a_store_that_loses_data() -> None:
    store: Store = Forgetful("")
    with pytest.raises(AssertionError):
        StoreConformance().test_returns_what_was_saved(store)
    with pytest.raises(pytest.fail.Exception):
        StoreConformance().test_a_name_without_anything_is_a_key_error(store)


def test_a_store_is_opened_by_name(tmp_path: Path) -> None:
    store = open_store(f"folder:{tmp_path}")
    store.save("step 1", b"weights")
    assert open_store(f"folder:{tmp_path}").load("step 1") == b"weights"
    with pytest.raises(PluginError, match=r"no store is called 'foldr'; did you mean 'folder'\?"):
        open_store("foldr:/")


def test_a_store_that_cannot_work_here_says_why() -> None:
    plugin = STORES.descriptor(
        name="tape",
        api_version=1,
        create=Forgetful,
        probe=lambda: ProbeResult.no("no tape drive", remedy="buy one"),
    )
    with installed_plugins(plugin), pytest.raises(OSError, match=r"no tape drive\. Try: buy one"):
        open_store("tape:0")


def test_mesh_plugins_lists_stores_with_their_capabilities() -> None:
    done = subprocess.run([MESH, "plugins", "--json"], capture_output=True, text=True, timeout=30, check=True)
    (folder,) = (each for each in json.loads(done.stdout)["plugins"] if each["kind"] == "store")
    assert (folder["name"], folder["status"], folder["capabilities"]) == (
        "folder",
        "available",
        {"durable": True},
    )
