"""Holds the machines of one `Network`: they exist as long as this process does, and it as long as its owner.

    python keeper.py OWNER_PID < a socket

Each line it reads is a request in JSON, each it writes the answer:

    {"do": "boot", "name": "host0", "hosts": "10.77.0.1 host0\\n"}    {"pid": 4711}
    {"do": "signal", "pid": 4711, "signal": 9}                       {}
    {"do": "off", "pid": 4711}                                       {}

A machine is a process in namespaces of its own, the first of its processes ("init"). The kernel ends all processes of
a machine when that one ends, and takes the network back when none is left. It dies with this process; this one ends
when its owner does, or closes the socket, whatever killed it. So nothing is left that a later run had to remove.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import namespaces

LIMIT = 10.0
"""A machine answers at once, unless this one is badly overloaded."""


class Keeper:
    """The machines, by the number of their first process."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._machines: dict[int, socket.socket] = {}

    def serve(self, owner: int) -> None:
        """Answer requests until the owner has ended or closed the socket."""
        poll = select.poll()
        poll.register(owner, select.POLLIN)
        poll.register(self._control, select.POLLIN)
        received = b""
        while True:
            ready = {fd for fd, _ in poll.poll()}
            # A process that the owner forked may hold the other end of the socket beyond the owner's death.
            if owner in ready or not (data := self._control.recv(65536)):
                return
            *lines, received = (received + data).split(b"\n")
            for line in lines:
                self._control.sendall(json.dumps(self._answer(json.loads(line))).encode() + b"\n")

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            match request["do"]:
                case "boot":
                    return {"pid": self._boot(request["name"], request["hosts"])}
                case "signal":
                    self._signal(request["pid"], request["signal"])
                case "off":
                    self._off(request["pid"])
            return {}
        except OSError as error:
            return {"error": str(error)}

    def _boot(self, name: str, hosts: str) -> int:
        ours, theirs = socket.socketpair()
        home = os.open("/proc/self/ns/pid", os.O_RDONLY)
        try:
            namespaces.unshare(namespaces.NEWPID)
            pid = os.fork()
            if pid == 0:
                self._be_machine(theirs, name, hosts)
            namespaces.join(home, namespaces.NEWPID)
        finally:
            os.close(home)
            theirs.close()
        ours.settimeout(LIMIT)
        if (answer := ours.recv(1000)) != b"ready":
            ours.close()
            os.waitpid(pid, 0)
            raise OSError(f"{name} did not boot: {answer.decode()}")
        self._machines[pid] = ours
        return pid

    def _be_machine(self, control: socket.socket, name: str, hosts: str) -> None:
        status = 1
        try:
            namespaces.die_with_parent()
            # Inherited ends would keep other machines alive beyond this program.
            for other in [self._control, *self._machines.values()]:
                other.close()
            try:
                furnish(name, hosts)
            except OSError as error:
                control.sendall(str(error).encode())
            else:
                control.sendall(b"ready")
                run_machine(control)
                status = 0
        finally:
            os._exit(status)

    def _signal(self, pid: int, number: int) -> None:
        self._machines[pid].sendall(bytes([number]))
        if self._machines[pid].recv(1) != bytes([number]):
            raise OSError(f"the machine of process {pid} has ended")

    def _off(self, pid: int) -> None:
        self._machines.pop(pid).close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        # It ends when the last process of the machine is gone.
        os.waitpid(pid, 0)

    def close(self) -> None:
        """End all machines."""
        for pid in list(self._machines):
            self._off(pid)


def furnish(name: str, hosts: str) -> None:
    """Give the calling process, the first of a machine, what it has for itself."""
    namespaces.unshare(namespaces.MACHINE & ~namespaces.NEWPID)
    socket.sethostname(name)
    namespaces.keep_mounts_to_ourselves()
    namespaces.mount("proc", "/proc", "proc")
    namespaces.mount("tmpfs", "/dev/shm", "tmpfs", "mode=1777")
    # Sockets of one machine's processes are not another's, though both have a process 7.
    namespaces.mount("tmpfs", "/run", "tmpfs", "mode=755")
    Path("/run/user/0").mkdir(parents=True, mode=0o700)
    known = Path("/run/hosts")
    known.write_text(hosts)
    namespaces.bind(str(known), "/etc/hosts")
    for each in ("all", "default"):
        # Addresses are usable at once, and outlive an interface that is down for a while.
        Path(f"/proc/sys/net/ipv6/conf/{each}/accept_dad").write_text("0")
        Path(f"/proc/sys/net/ipv6/conf/{each}/keep_addr_on_down").write_text("1")


def run_machine(control: socket.socket) -> None:
    """Bury orphans, and send signals to all other processes of this machine at once, until the keeper goes."""
    woken, wake = os.pipe()
    os.set_blocking(woken, False)
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    poll = select.poll()
    poll.register(woken, select.POLLIN)
    poll.register(control, select.POLLIN)
    while True:
        ready = {fd for fd, _ in poll.poll()}
        if woken in ready:
            os.read(woken, 4096)
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
        if control.fileno() in ready:
            if not (number := control.recv(1)):
                return
            # All at once: the kernel lets no process fork meanwhile, and spares only the first process.
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, number[0])
            control.sendall(number)


def main() -> None:
    """Keep machines until the owner goes."""
    try:
        owner = os.pidfd_open(int(sys.argv[1]))
    except ProcessLookupError:
        return  # it was quicker
    keeper = Keeper(socket.socket(fileno=0))
    # An owner that is killed while it waits for an answer takes none.
    with contextlib.closing(keeper), contextlib.suppress(ConnectionError):
        keeper.serve(owner)


if __name__ == "__main__":
    main()
