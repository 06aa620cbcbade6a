"""The conformance suite that an author of a store subclasses."""

from pathlib import Path

import pytest

from mesh_core.testing import PluginConformance
from mesh_stores._contract import STORES, Store


class StoreConformance(PluginConformance):
    """What holds for a store: what holds for every plugin, and the promises of :class:`~mesh_stores.Store`."""

    kind = STORES

    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        """A new store; override this if the location is not a folder."""
        assert isinstance(self.plugin, STORES.descriptor)
        return self.plugin.create(str(tmp_path))

    def test_returns_what_was_saved(self, store: Store) -> None:
        """Any bytes, and none."""
        for data in (b"", b"\0\xff" * 1000):
            store.save("a", data)
            assert store.load("a") == data

    def test_names_are_kept_apart(self, store: Store) -> None:
        """Saving under one name leaves the others."""
        store.save("a", b"1")
        store.save("b", b"2")
        assert (store.load("a"), store.load("b")) == (b"1", b"2")

    def test_a_name_without_anything_is_a_key_error(self, store: Store) -> None:
        """Loading never returns something that nobody has saved."""
        with pytest.raises(KeyError):
            store.load("never")
