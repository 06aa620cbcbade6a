"""The store that comes with the package: a file for each name in a folder."""

import os
from collections.abc import Iterable
from pathlib import Path

from mesh_core.plugins import ProbeResult, hookimpl
from mesh_stores._contract import StoreCapabilities, StorePlugin


class FolderStore:
    """A file for each name."""

    def __init__(self, location: str) -> None:
        self._root = Path(location)
        self._root.mkdir(parents=True, exist_ok=True)

    def save(self, name: str, data: bytes) -> None:
        """Write a new file and rename it, so that readers never see half of it."""
        part = self._root / f".{name}.{os.getpid()}.part"
        part.write_bytes(data)
        part.replace(self._root / name)

    def load(self, name: str) -> bytes:
        """Read the file."""
        try:
            return (self._root / name).read_bytes()
        except FileNotFoundError:
            raise KeyError(name) from None


def _probe() -> ProbeResult[StoreCapabilities]:
    return ProbeResult.yes(StoreCapabilities(durable=True))


FOLDER = StorePlugin(
    name="folder", api_version=1, create=FolderStore, probe=_probe, summary="a file for each checkpoint"
)


@hookimpl
def mesh_register_stores() -> Iterable[StorePlugin]:
    """The folder."""
    yield FOLDER
