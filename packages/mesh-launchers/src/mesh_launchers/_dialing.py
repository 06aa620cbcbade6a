"""Hosts that connect to the script, because nobody can connect to them.

DIA-1: hosts are identified by their names, in whatever order they connect: each has its place in its mesh.
"""

from __future__ import annotations

import functools
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from mesh_core import HostMesh, attach_to_workers
from mesh_launchers._errors import LaunchError

_PORT = re.compile("[0-9]{1,5}")
_LISTEN_S = 1.0
_LOOK_S = 0.02
_COME_S = 60.0
"""A host that can connect to the script but has not done so after this time will not."""


def check_dial(dial: str) -> None:
    """Raise if hosts cannot connect to that address."""
    host, colon, port = dial.rpartition(":")
    # Hosts are told it as a word of a line.
    is_word = host and host.isprintable() and " " not in host
    if not colon or not is_word or _PORT.fullmatch(port) is None or not 0 < int(port) < 1 << 16:
        raise ValueError(
            "dial must be HOST:PORT, an address of the script's machine as its hosts reach it and a port that is free here, "
            f"such as 'login1:26700', got {dial[:80]!r}"
        )


def listening(dial: str) -> str:
    """Return where to listen so that hosts can connect to that address."""
    host, _, port = dial.rpartition(":")
    return f"[::]:{port}" if ":" in host else f"0.0.0.0:{port}"


def free_address(dial: str) -> str:
    """Return an address like `dial`, with a port that is free now."""
    host = dial.rpartition(":")[0]
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind(("", 0))
        return f"{host}:{probe.getsockname()[1]}"


def wait_listening(whole: HostMesh, dial: str) -> None:
    """Wait until the process listens for hosts, which starts after ``attach_to_workers`` returns; raise if it cannot."""
    host, _, port = dial.rpartition(":")
    here = "::1" if ":" in host else "127.0.0.1"
    while True:
        try:
            socket.create_connection((here, int(port)), timeout=_LISTEN_S).close()
        except OSError:
            with suppress(TimeoutError):
                whole.initialized.get(timeout=_LOOK_S)
        else:
            return


def in_order(whole: HostMesh, names: Sequence[str]) -> HostMesh:
    """Return hosts in the order of these names; they have connected in another (DIA-1)."""
    places = {name: at for at, name in enumerate(whole.names)}
    ones = [whole.slice(hosts=slice(places[each], places[each] + 1)) for each in names]
    return functools.reduce(HostMesh.join, ones)


class Dialed:
    """Hosts that are expected to connect, all at one address."""

    def __init__(self, dial: str, meshes: Mapping[str, Sequence[str]], credentials: Path) -> None:
        self._dial = dial
        self._meshes = meshes
        """The names of the hosts of each mesh."""
        listen = listening(dial)
        count = sum(map(len, meshes.values()))
        self._whole = attach_to_workers(listen=listen, expect=count, credentials=credentials)

    def wait(self, changed: threading.Condition, look: Callable[[], bool]) -> dict[str, HostMesh]:
        """Return the meshes, once all hosts have connected.

        Args:
            changed: notified when the state of a host changes; held by the caller.
            look: returns whether all hosts run; raises if one has failed.
        """

        def come(_: object) -> None:
            with changed:
                changed.notify_all()

        ready = self._whole.initialized
        ready.add_done_callback(come)
        late: float | None = None
        while not ready.done():
            if late is None and look():
                late = time.monotonic() + _COME_S
            if late is not None and time.monotonic() > late:
                raise LaunchError(
                    f"all hosts can connect to {self._dial}, and not all have come after {_COME_S:g} s: is that this script's machine? "
                    "job.logs() has what they say"
                )
            changed.wait(None if late is None else max(0.0, late - time.monotonic()))
        changed.release()
        try:
            ready.get()
        finally:
            changed.acquire()
        return {mesh: in_order(self._whole, names) for mesh, names in self._meshes.items()}

    @property
    def whole(self) -> HostMesh:
        """All of them, in the order in which they connected."""
        return self._whole
