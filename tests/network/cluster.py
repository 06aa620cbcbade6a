"""Machines on one computer: each with its own address, processes, shared memory and name, on one switch.

    with Network(3) as network:
        agent = network.hosts[1].start(["mesh", "host", "--listen", "0.0.0.0:7171"])
        network.wire.cut([network.hosts[0]], [network.hosts[1]])
        network.heal()

`keeper.py` holds the machines: all of it is gone when the `with` ends, and when this process is killed. It needs root,
iproute2 and nftables; `missing()` says what is not there.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from namespaces import inside_network
from wire import Wire

HERE = Path(__file__).parent
LIMIT = 30.0
"""What the harness itself waits for takes no longer."""


def wait_until(condition: Callable[[], Any], what: str | Callable[[], str], limit: float = LIMIT) -> Any:
    """Look until a condition is true, and return it; an AssertionError after the limit, which says `what` is wrong by then."""
    end = time.monotonic() + limit
    while not (found := condition()):
        if time.monotonic() > end:
            raise AssertionError(f"after {limit:g} s: {what if isinstance(what, str) else what()}")
        time.sleep(0.005)
    return found


def files_of_jobs(folder: Path) -> list[str]:
    """What is in a folder of jobs but for what stays; folders may vanish meanwhile."""
    return [
        f"{at}/{name}"
        for at, folders, files in os.walk(folder)
        for name in (*folders, *files)
        if name not in (".keys", ".audit.log")
    ]


@functools.cache
def missing() -> str | None:
    """Why there can be no `Network` here, or None: it is tried."""
    if os.geteuid() != 0:
        return "networks are made by root only"
    for tool, package in (("ip", "iproute2"), ("tc", "iproute2"), ("ss", "iproute2"), ("nft", "nftables")):
        if shutil.which(tool) is None:
            return f"there is no {tool} here; it is in the package {package}"
    try:
        with Network(2) as network:
            network.wire.lose(network.hosts, network.hosts, 0.5)
            network.wire.limit(network.hosts[0], up=1_000_000, down=1_000_000)
    except (OSError, RuntimeError) as error:
        return f"this machine makes no networks: {error}"
    return None


class Process(subprocess.Popen[Any]):
    """A process on a machine.

    Signals and `real_pid` are those of the process itself; `pid` is of a helper outside that waits for it and ends in
    the same way.
    """

    real_pid: int
    """Its number as this process sees it; inside of the machine it has another one."""

    def __init__(
        self, machine: int, command: Sequence[str | Path], *, cwd: Path | None, **options: Any
    ) -> None:
        read, write = os.pipe()
        try:
            launcher = [sys.executable, "-S", str(HERE / "launch.py"), str(machine), str(write)]
            words = [str(cwd or Path.cwd()), *map(str, command)]
            passed = (*options.pop("pass_fds", ()), write)
            # A session of its own: Ctrl-C is for the test, which then ends its machines.
            super().__init__([*launcher, *words], pass_fds=passed, start_new_session=True, **options)
            os.close(write)
            write = -1
            reported = self._reported(read)
        finally:
            os.close(read)
            if write >= 0:
                os.close(write)
        if not reported:
            self.communicate()
            raise RuntimeError(f"{command[0]} was not started: the machine is off")
        self.real_pid = int(reported)

    def _reported(self, pipe: int) -> bytes:
        try:
            return os.read(pipe, 100)
        except BaseException:
            # Ctrl-C: nobody else knows of it yet.
            os.kill(self.pid, signal.SIGKILL)
            self.communicate()
            raise

    def send_signal(self, sig: int) -> None:
        """Send a signal to the process, not to its helper."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.real_pid, sig)

    def pause(self) -> None:
        """SIGSTOP; returns when it has stopped."""
        self.send_signal(signal.SIGSTOP)
        wait_until(lambda: stopped([self.real_pid]), f"process {self.real_pid} does not stop")

    def resume(self) -> None:
        """SIGCONT."""
        self.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """Kill it if it has not ended, and close its pipes."""
        self.kill()
        for stream in (self.stdin, self.stdout, self.stderr):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        self.wait()


class Host:
    """One machine of a network."""

    def __init__(self, network: Network, number: int) -> None:
        self.number = number
        self.name = f"host{number}"
        # Not those of the machine that this runs on, and the same in each run.
        self.address = f"10.77.{(number + 1) >> 8}.{(number + 1) & 255}"
        self.address6 = f"fd77::{number + 1:x}"
        self._network = network
        self._pid = 0
        self._processes: list[Process] = []

    def __repr__(self) -> str:
        return f"<{self.name} {self.address}{'' if self.is_on else ', off'}>"

    @property
    def is_on(self) -> bool:
        """Whether the machine runs."""
        return self._pid != 0

    @property
    def machine(self) -> int:
        """Its first process."""
        self._require_on()
        return self._pid

    # Processes.

    def start(
        self,
        command: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        **options: Any,
    ) -> Process:
        """Start a command here; `env` adds to this process's variables, `options` are those of `Popen`."""
        self._require_on()
        # The machine's own folder for sockets; the one of this process is not there.
        variables = {**os.environ, "XDG_RUNTIME_DIR": "/run/user/0", **(env or {})}
        process = Process(self._pid, command, cwd=cwd, env=variables, **options)
        self._processes.append(process)
        return process

    def python(self, *words: str | Path, **options: Any) -> Process:
        """Start this interpreter here: `host.python("-c", "print(1)", stdout=PIPE)`."""
        return self.start([sys.executable, "-u", *words], **options)

    def run(
        self, command: Sequence[str | Path], *, timeout: float = LIMIT, check: bool = True, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a command here to its end; its output is text."""
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
        process = self.start(command, **pipes)
        try:
            out, err = process.communicate(timeout=timeout)
        finally:
            process.close()
            self._processes.remove(process)
        done = subprocess.CompletedProcess(list(map(str, command)), process.returncode, out, err)
        if check and done.returncode != 0:
            raise RuntimeError(f"{done.args} on {self.name} ended with {done.returncode}: {err}")
        return done

    def pids(self) -> list[int]:
        """All processes of the machine, as this process numbers them."""
        if not self.is_on:
            return []
        own = Path(f"/proc/{self._pid}/ns/pid").stat().st_ino
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != self._pid:
                try:
                    if (entry / "ns/pid").stat().st_ino == own:
                        found.append(int(entry.name))
                except OSError:
                    continue  # it has ended since
        return found

    @contextlib.contextmanager
    def network(self) -> Iterator[None]:
        """For this thread, and what it starts: new sockets are this machine's."""
        self._require_on()
        with inside_network(self._pid):
            yield

    def listen(self, port: int = 0) -> socket.socket:
        """A listening TCP socket of this machine, in this process."""
        with self.network():
            return socket.create_server((self.address, port))

    def connect(self, address: tuple[str, int], timeout: float | None = LIMIT) -> socket.socket:
        """A TCP connection from this machine, in this process."""
        with self.network():
            return socket.create_connection(address, timeout)

    # What happens to the machine as a whole.

    def pause(self) -> None:
        """SIGSTOP for all its processes at once, as if the machine was paused; returns when all have stopped.

        Its kernel goes on: what arrives is acknowledged, until the buffers are full.
        """
        self._signal(signal.SIGSTOP)
        wait_until(lambda: stopped(self.pids()), f"the processes of {self.name} do not stop")

    def resume(self) -> None:
        """Let a paused machine go on."""
        self._signal(signal.SIGCONT)

    def kill_all(self) -> None:
        """SIGKILL for all its processes at once; its network stays, so that others see their connections end."""
        self._signal(signal.SIGKILL)
        wait_until(lambda: not self.pids(), f"the processes of {self.name} do not end")

    def power_off(self) -> None:
        """End the machine without a word to the others: nothing of it is on the network from now on."""
        if self.is_on:
            self._network.wire.detach(self)
            pid, self._pid = self._pid, 0
            self._network.ask({"do": "off", "pid": pid})
            self.close()

    def boot(self) -> None:
        """Start the machine, empty; with its address and the faults of its links as before."""
        if not self.is_on:
            self._pid = self._network.boot_machine(self.name)
            self._network.wire.attach(self, self._pid)

    def reset_connections(self, peer: Host | None = None) -> int:
        """Have the kernel reset (RST) its TCP connections, those with a peer or all but its own; how many there were."""
        command = ["ss", "-KHt4", "state", "established", "state", "syn-sent"]
        command += ["dst", peer.address if peer is not None else "10.77.0.0/16"]
        with self.network():
            done = subprocess.run(command, capture_output=True, text=True, check=True)
        return len(done.stdout.splitlines())

    def close(self) -> None:
        """End what was started here."""
        for process in self._processes:
            process.close()
        self._processes.clear()

    def forget(self) -> None:
        """The machine is gone with its network."""
        self._pid = 0

    def _signal(self, number: int) -> None:
        self._require_on()
        self._network.ask({"do": "signal", "pid": self._pid, "signal": int(number)})

    def _require_on(self) -> None:
        if not self.is_on:
            raise RuntimeError(f"{self.name} is off; boot() it first")


class Network:
    """Some machines on one switch; `wire` has the faults of the links between them.

    All of it is made when the context is entered. Nothing of it is seen from outside: neither names nor addresses nor
    rules can meet those of other runs.
    """

    def __init__(self, hosts: int) -> None:
        self.hosts = [Host(self, number) for number in range(hosts)]
        self.wire = Wire(self.hosts)
        self._lock = threading.Lock()
        self._exit = contextlib.ExitStack()
        self._replies: IO[bytes] | None = None
        self._control: socket.socket | None = None

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as undo:
            self._start_keeper(undo)
            self.wire.open(self.boot_machine("switch"))
            undo.callback(self._close_processes)
            for host in self.hosts:
                host.boot()
            self._exit = undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._exit.close()

    def heal(self) -> None:
        """Take all faults away, and let paused machines go on; what is off stays off."""
        self.wire.heal()
        for host in self.hosts:
            if host.is_on:
                host.resume()

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Ask the keeper of the machines for something."""
        with self._lock:
            if self._control is None or self._replies is None:
                raise RuntimeError("the network is not there: use it in its `with`")
            line = b""
            with contextlib.suppress(BrokenPipeError):
                self._control.sendall(json.dumps(request).encode() + b"\n")
                line = self._replies.readline()
        if not line:
            raise RuntimeError("the keeper of the machines has ended, and they with it")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    def boot_machine(self, name: str) -> int:
        """Have a machine made that has no links yet; its first process."""
        known = ["127.0.0.1 localhost", "::1 localhost"]
        known += [f"{host.address} {host.name}" for host in self.hosts]
        return int(self.ask({"do": "boot", "name": name, "hosts": "\n".join(known) + "\n"})["pid"])

    def _start_keeper(self, undo: contextlib.ExitStack) -> None:
        self._control, theirs = socket.socketpair()
        undo.callback(self._forget_keeper)
        undo.callback(self._control.close)
        self._replies = self._control.makefile("rb")
        undo.callback(self._replies.close)
        with theirs:
            keeper = subprocess.Popen(
                [sys.executable, "-S", str(HERE / "keeper.py"), str(os.getpid())],
                stdin=theirs.fileno(), start_new_session=True,
            )  # fmt: skip
        undo.callback(self._end_keeper, keeper)

    def _end_keeper(self, keeper: subprocess.Popen[bytes]) -> None:
        if self._control is not None:
            self._control.shutdown(socket.SHUT_RDWR)
        try:
            keeper.wait(LIMIT)
        finally:
            if keeper.returncode is None:
                # Its machines die with it.
                keeper.kill()
                keeper.wait()

    def _forget_keeper(self) -> None:
        self._control = self._replies = None
        self.wire.close()

    def _close_processes(self) -> None:
        for host in self.hosts:
            host.close()
            host.forget()


def stopped(pids: Sequence[int]) -> bool:
    """Whether all of these processes have stopped, or ended."""
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state not in "TtZX":
            return False
    return True
