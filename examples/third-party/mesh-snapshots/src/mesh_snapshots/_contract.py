"""The contract: what a writer does, what its descriptor says, and the kind that makes both known to Mesh."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from mesh_core import Future
from mesh_core.plugins import Plugin, PluginKind


class Writer(Protocol):
    """Writes files while the program goes on."""

    def write(self, path: str, data: bytes) -> Future[None]:
        """Begin to write a file, and return at once. It is called on one thread of a process at a time.

        The file appears under ``path`` whole or not at all, also where the process is killed meanwhile; one that was there is
        replaced. What is written before it is whole may be left behind in ``path + ".part"``. The future is done when the file
        is there, and raises an :class:`OSError` where it could not be written.
        """
        ...


@dataclass(frozen=True)
class WriterCapabilities:
    """What a writer can do on this machine."""

    durable: bool
    """Whether a file is on the disk, and not only on its way there, when the future is done."""
    takes_lock: bool
    """Whether it takes the interpreter's lock while it writes, and so holds up the actors of its process."""


@dataclass(frozen=True, kw_only=True)
class WriterPlugin(Plugin[WriterCapabilities]):
    """A way to write snapshots; ``create()`` makes a writer, one for each process."""

    create: Callable[[], Writer]


WRITERS: Final = PluginKind(
    word="snapshot writer",
    group="mesh.snapshot_writers",
    hook="mesh_register_snapshot_writers",
    descriptor=WriterPlugin,
    api_version=1,
    capabilities=WriterCapabilities,
    owner="mesh-snapshots",
)
