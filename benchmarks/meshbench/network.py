"""What several hosts on one machine need: ports nobody has, who listens, how many bytes went out; and their agents."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path

LOOPBACK = "127.0.0.1"
_LISTEN = "0A"  # as /proc/net/tcp writes the state
_NET = Path("/proc/net")


def free_ports(count: int) -> list[int]:
    """Ports of the loopback address that nobody listens on; another program may still be quicker to take one.

    Example:
        >>> len(set(free_ports(3)))
        3
    """
    with ExitStack() as held:  # all at once, so that none is given twice
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((LOOPBACK, 0))
        return [each.getsockname()[1] for each in sockets]


def listening(ports: Iterable[int]) -> set[int]:
    """Those of `ports` on which somebody listens; nobody is connected to for that.

    Example:
        >>> with socket.socket() as server:
        ...     server.bind((LOOPBACK, 0))
        ...     server.listen()
        ...     port = server.getsockname()[1]
        ...     listening([port]) == {port}
        True
    """
    found = set()
    for name in ("tcp", "tcp6"):
        path = _NET / name
        for line in path.read_text().splitlines()[1:] if path.exists() else ():
            _, local, _, state, *_ = line.split()
            if state == _LISTEN:
                found.add(int(local.rpartition(":")[2], 16))
    return found & set(ports)


def octets_sent() -> int:
    """Bytes that this machine's IP has sent so far, loopback and headers included; Unix sockets are not in it.

    Example:
        >>> octets_sent() >= 0
        True
    """
    lines = [line.split() for line in (_NET / "netstat").read_text().splitlines()]
    names, values = (line for line in lines if line[0] == "IpExt:")
    return int(dict(zip(names, values, strict=True))["OutOctets"])


class Agents:
    """Processes that serve as hosts, one a command; started together, waited for, ended together."""

    def __init__(
        self, commands: Sequence[Sequence[str]], ports: Sequence[int], *, timeout: float = 120.0
    ) -> None:
        self._running = [subprocess.Popen(command, stdin=subprocess.DEVNULL) for command in commands]
        give_up = time.monotonic() + timeout
        try:
            while len(ready := listening(ports)) < len(ports):
                ended = [each.args for each in self._running if each.poll() is not None]
                if ended:
                    raise RuntimeError(f"{len(ended)} of {len(commands)} agents have ended: {ended[0]!r}")
                if time.monotonic() > give_up:
                    raise RuntimeError(f"{len(ready)} of {len(ports)} agents listen after {timeout:.0f} s")
                time.sleep(0.02)
        except BaseException:
            self.end(at_once=True)
            raise

    def pids(self) -> list[int]:
        """Their process ids, in the order of the commands."""
        return [each.pid for each in self._running]

    def end(self, *, at_once: bool = False, grace: float = 10.0) -> None:
        """Ask them to end, wait, and end those that do not."""
        if not at_once:
            for each in self._running:
                each.terminate()
        give_up = time.monotonic() + (0.0 if at_once else grace)
        for each in self._running:
            try:
                each.wait(max(give_up - time.monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                each.kill()
                each.wait()
