"""Hosts in a job of torchrun: rank 0 continues as the script, and every node of the job is one of its hosts.

    torchrun --nnodes=4 --nproc-per-node=1 --rdzv-backend=c10d --rdzv-endpoint=b1:29400 train.py

with a script that all ranks run:

    from mesh_launchers import torchrun

    if __name__ == "__main__":
        with torchrun.hosts() as hosts:
            procs = hosts.spawn_procs({"gpus": 8})

Only rank 0 enters the ``with`` block. Python cannot skip the block in the other ranks, so these never return from :func:`hosts`: the first rank of
every other node serves there as the node's host, and exits with status 0 when rank 0 has left the block. Other ranks of a node exit at once. So the
script needs no branches on its rank.

TRN-1: addresses go through torchrun's own store, which anyone who can connect to it may read and write. Keys never do: they come from a folder.
TRN-2: a serving rank polls and never blocks in the store, so torchrun's SIGTERM ends it at once, with its host. With a grace, SIGTERM is first
a notice to the host's agent (HST-5), and the rank ends with the agent.
TRN-3: ranks identify each other by random numbers of their own, so nothing that an earlier attempt left in the store is taken for theirs.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib
import json
import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from mesh_core import Credentials, HostMesh, MeshError, attach_to_workers
from mesh_core.extensions import open_private
from mesh_launchers import _authority
from mesh_launchers._authority import authority
from mesh_launchers._comparing import compare
from mesh_launchers._contract import HostSpec, Place
from mesh_launchers._errors import LaunchError
from mesh_launchers._folder import base
from mesh_launchers._host import command, told
from mesh_launchers._renewal import Renewal

__all__ = ["hosts"]

_POLL_S = 0.1
_BEAT_S = 5.0
_LOOKS = 10
"""How many times less often than elsewhere one looks whether certificates are to be renewed."""
_SILENCE_S = 600.0
"""How long a rank serves without a message of the script."""
_END_S = 30.0
_ONE_S = 2.0
"""Within this time several SIGTERMs are one: a scheduler may send it to all processes of a node, and torchrun to its ranks."""
_TERM_S = 10.0
"""How long a rank waits for torchrun's SIGTERM after the script has failed: its own status would hide that of the script."""
_OWN = ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE",
        "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # fmt: skip
"""What torchrun sets for its ranks: the processes of a host are none."""

_logger = logging.getLogger("mesh_launchers")
_used = False


@contextlib.contextmanager
def hosts(
    *,
    credentials: str | os.PathLike[str] | None = None,
    folder: str | os.PathLike[str] | None = None,
    listen: str | None = None,
    timeout: float = 300.0,
    preemption_grace: float = 0.0,
) -> Iterator[HostMesh]:
    """Use the nodes of the torchrun job that runs this script as hosts, in node order. Only rank 0 enters the block.

    The first rank of every other node serves as that node's host inside this call. It exits when the block has ended, with status 0, or 1 if rank 0
    has failed. If any rank fails, torchrun ends all of them, and restarts them if ``--max-restarts`` allows it.

    Args:
        credentials: a folder that ``mesh credentials new`` has made. Node 0 has the whole folder, and the others have its part for hosts (its
            ``host`` folder) under the same path.
        folder: where to put the credentials that are made for this job if none are given: a folder that all nodes see and only this user can write
            to. They stay there, as files of mode 0600, until all hosts have started. By default ``~/.local/state/mesh/torchrun``.
        listen: where agents listen, such as ``"0.0.0.0:7411"``; by default any port, on loopback if there is one node only.
        timeout: seconds until the hosts of all nodes have started.
        preemption_grace: seconds that a host continues after torchrun's SIGTERM, so that jobs can leave it: less than torchrun waits before it kills a
            rank, which is 30 s. Without it, SIGTERM ends a host at once.
    """
    global _used
    place = _Rank.of(os.environ)
    if place.local_rank:
        sys.exit(0)
    if _used:
        raise LaunchError(
            "torchrun.hosts() can be used once in a script: the other ranks have ended with its block"
        )
    _used = True
    if preemption_grace < 0:
        raise ValueError(f"preemption_grace must not be negative, got {preemption_grace:g}")
    spot = _Meeting(place, _Store(place, timeout), credentials, folder, listen, timeout, preemption_grace)
    if place.node:
        _serve(spot)
    with contextlib.ExitStack() as ends:
        mesh = _Controller(spot, ends).begin()
        ends.callback(_let_go, mesh)
        try:
            yield mesh
        except SystemExit as error:
            if not error.code:
                # The script has ended as it wanted to.
                ends.close()
            raise


def _let_go(mesh: HostMesh) -> None:
    """End what runs on the hosts. The runtime may have been shut down, and a host may have died."""
    with contextlib.suppress(MeshError):
        mesh.stop().get(timeout=_END_S)


@dataclass(frozen=True)
class _Rank:
    """The variables that torchrun sets for this process."""

    node: int
    nodes: int
    local_rank: int
    run: str
    address: str
    port: int
    serves_store: bool
    """Return whether this process itself serves the store."""

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> _Rank:
        try:
            return cls(
                node=int(environ["GROUP_RANK"]),
                nodes=int(environ["GROUP_WORLD_SIZE"]),
                local_rank=int(environ["LOCAL_RANK"]),
                run=environ["TORCHELASTIC_RUN_ID"],
                address=environ["MASTER_ADDR"],
                port=int(environ["MASTER_PORT"]),
                serves_store=environ["RANK"] == "0" and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
            )
        except KeyError as error:
            raise LaunchError(
                f"torchrun.hosts() wants a script that torchrun runs, and {error.args[0]} is not set: "
                "torchrun --nnodes=2 --nproc-per-node=1 ... script.py. Use launch() for hosts from elsewhere"
            ) from None


class _Store:
    """torchrun's own store, for what is not secret (TRN-1)."""

    def __init__(self, rank: _Rank, timeout: float) -> None:
        try:
            store: Any = importlib.import_module("torch.distributed").TCPStore
        except ImportError as error:
            raise LaunchError(
                f"torchrun.hosts() needs PyTorch ({error}): pip install 'mesh-launchers[torchrun]'"
            ) from None
        self._prefix = f"mesh/{rank.run}"
        limit = datetime.timedelta(seconds=timeout)
        self._open: Callable[[bool], Any] = lambda serves: store(
            rank.address, rank.port, is_master=serves, timeout=limit, wait_for_workers=False
        )
        self._store = self._call(lambda: self._open(rank.serves_store))

    def _call(self, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except RuntimeError as error:
            raise _StoreLost(f"torchrun's store cannot be used: {str(error).splitlines()[0]}") from error

    def put(self, key: str, what: Mapping[str, Any]) -> None:
        """Store a value."""
        self._call(lambda: self._store.set(f"{self._prefix}/{key}", json.dumps(what)))

    def get(self, key: str) -> Any:
        """Return a stored value, or ``None``; never waits, because Python handles no signal in there (TRN-2)."""
        full = f"{self._prefix}/{key}"
        if not self._call(lambda: self._store.check([full])):
            return None
        return json.loads(self._call(lambda: self._store.get(full)))

    def again(self) -> _Store:
        """Return a connection of its own, for another thread."""
        other = object.__new__(_Store)
        other._prefix, other._open = self._prefix, self._open
        other._store = self._call(lambda: self._open(False))
        return other


class _ScriptFailed(LaunchError):
    """Rank 0 has ended."""


class _StoreLost(LaunchError):
    """The process that has the store has ended."""


@dataclass(frozen=True)
class _Meeting:
    """Where the ranks meet, and with which settings."""

    rank: _Rank
    store: _Store
    credentials: str | os.PathLike[str] | None
    folder: str | os.PathLike[str] | None
    listen: str | None
    timeout: float
    preemption_grace: float

    def passed_on(self, token: str) -> Path:
        """Return the folder in which credentials are passed on."""
        folder = base().parent / "torchrun" if self.folder is None else Path(self.folder)
        return folder.expanduser() / f"mesh-{token}"

    def agent(self, folder: Path) -> _Agent:
        """Start this node's host, with credentials from a folder."""
        listen = self.listen or ("127.0.0.1:0" if self.rank.nodes == 1 else "0.0.0.0:0")
        node = self.rank.node
        spec = HostSpec(node, f"node{node}", labels={"node": str(node), "hostname": socket.gethostname()})
        place = Place("torchrun", folder, folder, _SILENCE_S, lambda _: None)
        return _Agent(spec.name, told(place, [spec], grace=self.preemption_grace, address=listen))

    def address(self, agent: _Agent, towards: tuple[str, int]) -> str:
        """Return where others reach this node's host."""
        where, _, port = agent.address.removeprefix("tcp://").rpartition(":")
        if where in {"0.0.0.0", "[::]"}:
            where = _own_address(*towards)
            where = f"[{where}]" if ":" in where else where
        return f"tcp://{where}:{port}"


class _Agent:
    """This node's host: its program, as a child that ends with this process."""

    def __init__(self, name: str, line: bytes) -> None:
        self.environment: Mapping[str, Any] = {}
        self.address = ""
        self.why = ""
        self._ready = threading.Event()
        env = {
            name: value
            for name, value in os.environ.items()
            if name not in _OWN and not name.startswith("TORCHELASTIC_")
        }
        # What it writes is for torchrun's log of this rank.
        self._process = subprocess.Popen(
            command(sys.executable, name),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=env,
            start_new_session=True,
        )
        self.say(line)
        self._reader = threading.Thread(target=self._read, name="mesh-torchrun-host", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        text = b""
        with self._process.stdout as pipe:
            for line in pipe:
                _, _, rest = line.partition(b":")
                text += rest[1:].rstrip(b"\n")
                if rest[:1] == b"=":
                    self._hear(json.loads(text))
                    text = b""
        self.why = self.why or f"it has ended with status {self._process.wait()}"
        self._ready.set()

    def _hear(self, what: Mapping[str, Any]) -> None:
        self.environment = what.get("environment", self.environment)
        self.why = str(what.get("failed", self.why))
        if "address" in what:
            self.address = str(what["address"])
            self._ready.set()

    def say(self, text: bytes) -> None:
        """Write to it."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(text)
            self._process.stdin.flush()

    def is_ready(self) -> bool:
        """Whether it listens; raises :class:`LaunchError` when it has ended."""
        if self._ready.is_set() and (self.has_ended or not self.address):
            raise LaunchError(self.why)
        return self._ready.is_set()

    def warn(self) -> None:
        """Tell it that the node will be taken away."""
        with contextlib.suppress(OSError):
            self._process.send_signal(signal.SIGTERM)

    @property
    def has_ended(self) -> bool:
        """Return whether it has ended, by itself or not."""
        return not self._reader.is_alive()

    def end(self) -> None:
        """End it, and what runs on the host."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._reader.join(_END_S)


def _own_address(host: str, port: int) -> str:
    """Return the address of this machine by which another one reaches it: that of the interface which leads there."""
    for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            # Nothing is sent.
            probe.connect(address)
            return str(probe.getsockname()[0])
    return socket.gethostname()


# The ranks that serve.


def _serve(meeting: _Meeting) -> NoReturn:
    """Be a host until the script has ended, and end this process."""
    notice = _Notice(meeting.preemption_grace)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, notice.heard)
    why, grace = "", 0.0
    try:
        with contextlib.ExitStack() as ends:
            why = _served(meeting, ends, notice)
    except (LaunchError, OSError) as error:
        why, grace = str(error), _TERM_S if isinstance(error, _ScriptFailed) else 0.0
    if why:
        sys.stderr.write(f"node {meeting.rank.node} ({socket.gethostname()}): {why}\n")
        sys.stderr.flush()
        # torchrun ends this rank meanwhile, if it sees the end of rank 0.
        time.sleep(grace)
    sys.exit(1 if why else 0)


class _Notice:
    """What SIGTERM means to a rank that serves: its end, or first a notice to its host's agent (TRN-2)."""

    def __init__(self, grace: float) -> None:
        self.agent: _Agent | None = None
        self._grace = grace
        self._heard_at: float | None = None

    def heard(self, number: int, _frame: object) -> None:
        """Handle the signal."""
        now = time.monotonic()
        if not self._grace or self.agent is None or (self._heard_at or now) + _ONE_S < now:
            sys.exit(128 + number)
        if self._heard_at is None:
            self._heard_at = now
            self.agent.warn()


def _served(meeting: _Meeting, ends: contextlib.ExitStack, notice: _Notice) -> str:
    """Serve; return why it failed, if it did."""
    store, rank = meeting.store, meeting.rank
    # Of this process alone, so that nobody takes an earlier one's messages for its own (TRN-3).
    me = secrets.token_hex(8)
    store.put(f"node/{rank.node}", {"me": me})
    token = str(_wait(lambda: store.get(f"welcome/{me}"), meeting.timeout, "rank 0")["token"])
    if not token.isalnum():
        raise LaunchError(f"what the store says is not of rank 0's: {token!r}")
    said = f"{token}/{me}"
    if meeting.credentials is None:
        # Gone already, unless rank 0 has died before it could.
        ends.callback(shutil.rmtree, meeting.passed_on(token), ignore_errors=True)
    try:
        mine = meeting.agent(_credentials_here(meeting, token))
        ends.callback(mine.end)
        _wait(mine.is_ready, meeting.timeout, "this node's agent")
        notice.agent = mine
    except (LaunchError, OSError) as error:
        store.put(said, {"failed": str(error)})
        raise
    address = meeting.address(mine, (rank.address, rank.port))
    store.put(said, {"address": address, "environment": mine.environment})
    why = _until_over(store, token, mine)
    mine.end()
    if not why:
        store.put(f"{said}/bye", {})
    return why


def _until_over(store: _Store, token: str, agent: _Agent) -> str:
    """Wait for the end of the script; return why it has failed, if it has."""
    beat, changed, said, pause = None, time.monotonic(), time.monotonic(), _BEAT_S
    while (over := store.get(f"{token}/over")) is None:
        if agent.has_ended:
            return f"its agent has ended: {agent.why}"
        now = time.monotonic()
        if now > said + pause:
            said = now
            agent.say(b"\n")
            if (heard := store.get(f"{token}/beat")) != beat:
                if beat is None or heard["order"] != beat["order"]:
                    agent.say(f"{heard['order']}\n".encode())
                beat, changed = heard, now
                pause = min(_BEAT_S, max(_POLL_S, float(heard["pause"])))
            elif now > changed + _SILENCE_S:
                return f"rank 0 has not said anything for {_SILENCE_S:g} s"
        time.sleep(_POLL_S)
    if over.get("failed"):
        raise _ScriptFailed(str(over["failed"]))
    return ""


def _credentials_here(meeting: _Meeting, token: str) -> Path:
    """Return this node's credentials."""
    if meeting.credentials is not None:
        given = Credentials.load(meeting.credentials)
        return given.host_path if given.owner else given.path
    folder = meeting.passed_on(token)
    try:
        os.close(open_private(str(folder)))
    except FileNotFoundError:
        raise LaunchError(
            f"there is no {folder}, where rank 0 has put the credentials: name a folder= that all nodes see, or give credentials="
        ) from None
    except PermissionError as error:
        raise LaunchError(f"the credentials that rank 0 has passed on are not used: {error}") from None
    return folder


def _wait(met: Callable[[], Any], timeout: float, what: str) -> Any:
    """Poll until a function returns something; return that."""
    end = time.monotonic() + timeout
    while not (found := met()):
        if time.monotonic() > end:
            raise LaunchError(f"{what} has not come within {timeout:g} s")
        time.sleep(_POLL_S)
    return found


# Rank 0.


class _Controller:
    """Rank 0, which has the others as hosts."""

    def __init__(self, meeting: _Meeting, ends: contextlib.ExitStack) -> None:
        self._meeting = meeting
        self._store = meeting.store
        self._ends = ends
        self._token = secrets.token_hex(8)
        self._names: dict[int, str] = {}
        """The random number of each other node's rank."""

    def begin(self) -> HostMesh:
        """Wait for all nodes; return them as hosts."""
        self._ends.push(self._end)
        meeting = self._meeting
        if meeting.credentials is None:
            path = authority().credentials()
        else:
            given = Credentials.load(meeting.credentials)
            if not given.owner:
                raise LaunchError(
                    f"{given.path} is a host's part: node 0 needs the folder that `mesh credentials new` has made"
                )
            authority().take(given.path, "torchrun")
            path = given.path
        is_ours = meeting.credentials is None
        mine = Credentials.load(path).host_path
        passes_on = is_ours and meeting.rank.nodes > 1
        with _passed_on(mine, meeting.passed_on(self._token) if passes_on else None):
            agent = meeting.agent(mine)
            self._ends.callback(agent.end)
            others = self._meet()
            _wait(agent.is_ready, meeting.timeout, "the agent of node 0")
        self._keep_saying(
            agent, Renewal(path, _authority.LIFETIME.total_seconds() if is_ours else None), is_ours=is_ours
        )
        towards = _split(others[0]["address"]) if others else (meeting.rank.address, meeting.rank.port)
        known = [{"address": meeting.address(agent, towards), "environment": agent.environment}, *others]
        for node, each in enumerate(known):
            refused, differs = compare(each["environment"], known[0]["environment"])
            if refused:
                raise LaunchError(f"node {node} cannot be used: {refused}", host=node)
            if differs:
                _logger.warning("node %s is not like the script: %s", node, "; ".join(differs))
        return attach_to_workers([each["address"] for each in known], credentials=path, name="torchrun")

    def _meet(self) -> list[dict[str, Any]]:
        """Return what the other nodes report about their hosts, in the order of the nodes (TRN-3)."""
        found: dict[int, dict[str, Any]] = {}
        others, store = range(1, self._meeting.rank.nodes), self._store
        end = time.monotonic() + self._meeting.timeout
        while len(found) < len(others):
            for node in others:
                said = None if node in found else store.get(f"node/{node}")
                if said is None:
                    continue
                if self._names.get(node) != said["me"]:
                    # It may be of an earlier attempt, whose successor then says another one.
                    self._names[node] = said["me"]
                    store.put(f"welcome/{said['me']}", {"token": self._token})
                host = store.get(f"{self._token}/{said['me']}")
                if host is not None and "failed" in host:
                    raise LaunchError(f"node {node} has not started its host: {host['failed']}", host=node)
                if host is not None:
                    found[node] = host
            if time.monotonic() > end:
                missing = [node for node in others if node not in found]
                raise LaunchError(
                    f"node {', '.join(map(str, missing))} has not come within {self._meeting.timeout:g} s; do all ranks call torchrun.hosts()?",
                    host=missing[0],
                )
            time.sleep(_POLL_S)
        return [found[node] for node in others]

    def _keep_saying(self, agent: _Agent, renewal: Renewal, *, is_ours: bool) -> None:
        """Report until the end that this rank is alive, and pass renewed certificates on (CRT-1)."""
        over, store = threading.Event(), self._store.again()

        def beat() -> None:
            count, order = 0, ""
            # An order must have reached all nodes in half a life of certificates.
            pause = min(_BEAT_S, _LOOKS * renewal.pause)
            while not over.wait(pause):
                count += 1
                agent.say(b"\n")
                before, new = renewal.state.trouble, renewal.look()
                if new is not None and is_ours:
                    order = new
                    agent.say(f"{order}\n".encode())
                with contextlib.suppress(_StoreLost):
                    # The order is in each of them: a node may miss some.
                    store.put(f"{self._token}/beat", {"count": count, "order": order, "pause": pause})
                    if new is not None:
                        renewal.reached()
                if renewal.state.trouble and not before:
                    _logger.warning("credentials: %s", renewal.state.trouble)

        thread = threading.Thread(target=beat, name="mesh-torchrun-beat", daemon=True)
        thread.start()
        self._ends.callback(thread.join)
        self._ends.callback(over.set)

    def _end(self, kind: type[BaseException] | None, error: BaseException | None, _trace: object) -> None:
        """Notify the others, and wait for their ends if all is well."""
        with contextlib.suppress(_StoreLost):
            if error is not None:
                why = f"rank 0 has failed: {type(error).__name__}: {error}"
                self._store.put(f"{self._token}/over", {"failed": why})
                return
            self._store.put(f"{self._token}/over", {})
            byes = [f"{self._token}/{each}/bye" for each in self._names.values()]
            with contextlib.suppress(LaunchError):
                _wait(
                    lambda: all(self._store.get(each) is not None for each in byes), _END_S, "the others' end"
                )


@contextlib.contextmanager
def _passed_on(host: Path, folder: Path | None) -> Iterator[None]:
    """Put the hosts' credentials into a folder that only this user can read, where the other nodes find them."""
    if folder is None:
        yield
        return
    folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder.mkdir(mode=0o700)
    try:
        for each in host.iterdir():
            if each.is_file():
                with os.fdopen(
                    os.open(folder / each.name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb"
                ) as file:
                    file.write(each.read_bytes())
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return host.strip("[]"), int(port)
