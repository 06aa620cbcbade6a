"""What a host does for its processes: it removes what the dead among them have begun to write."""

from dataclasses import dataclass
from pathlib import Path

from mesh_core.extensions import Proc
from mesh_snapshots._files import parts_of

Address = tuple[int, int, int]


@dataclass(frozen=True)
class Here:
    """A message to the host: the sender takes snapshots in this folder."""

    folder: str


class Sweeper:
    """Knows where the processes of its host write. Used by the extension's thread only."""

    def __init__(self) -> None:
        self._folders: dict[Address, str] = {}

    def hear(self, message: Here, sender: Proc) -> None:
        """Note where a process writes."""
        self._folders[sender.address] = message.folder

    def sweep(self, address: Address) -> None:
        """Remove what a process has left unfinished that has ended."""
        folder = self._folders.pop(address, None)
        if folder is not None and Path(folder).is_dir():
            for path in parts_of(folder, address):
                path.unlink(missing_ok=True)
