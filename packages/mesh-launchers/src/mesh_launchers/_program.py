"""What runs on a host, or once for several hosts of one machine. It is sent there as text, with `_host_facts.py` in it, and needs nothing there
but mesh-core.

HST-1: the credentials come on its standard input, or in a private file, and go into memory; they are in no argument, no environment and no log.
HST-2: it ends when its standard input does, or is silent for too long, and with it all that runs on the host: nothing outlives whoever has
started it, also where the network between them has gone without a word. In a container, which has no standard input, a file changes instead.
HST-3: an agent, and the process that has started it, each remove the credentials where the other was killed.
HST-4: what it has to say is JSON on its standard output, in short lines that begin with the host's number, and nothing else is written there.
HST-5: SIGTERM is for who takes the host away: where there is a grace, it goes on to the agent, once, and nothing is ended before the grace is over.
Whoever wants the host to end says SIGINT to the agent.
HST-7: where it is to outlive the connection that has started it, that connection may be lost, and another one may take the host up again, until it has
been silent for too long. It ends at once when it is told to, and when whoever has started it has gone while the connection still stands. Each end asks
the kernel who the other is: code in a sandbox has the same user, and where the folder has been removed anybody may make one of that name.
HST-8: what a host's command has started beside the host, such as a helper of a prologue, ends with it, and delays neither its end nor the news of it.
HST-6: a host that connects to the script connects to a visitor by a second agent, which serves that visitor alone. It ends with the visit, and at
the latest with the host.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import importlib
import json
import os
import select
import shutil
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from mesh_launchers._host_facts import code, environment

ENDS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
SHORT = 800
"""Where the lines of many hosts come together, longer ones are torn apart."""
GRACE_S = 8.0
PREEMPTION = "MESH_PREEMPTION_GRACE"
"""Tells the agent how long it goes on after SIGTERM."""
ONE_S = 2.0
"""Within this time several SIGTERMs are one: a scheduler may send it to all processes of a host."""
LOOK_S = 5.0
AGAIN_S = 0.5
REACH_S = 10.0
"""For one attempt to connect."""
DEATH = 1
"""The number of prctl for a signal that comes at the parent's death."""
NAME = 15
"""That for a process's short name."""
DOOR = "door"
GONE_S = 1.0
"""Within this time both directions of a lost connection end, and not only one."""
UNSAID = 1 << 16
"""How much is kept of what is said while nobody listens."""
CHUNK = 1 << 16


def write(path: Path, data: str) -> None:
    """Write a private file; an error names it, which those of a full disk do not by themselves."""
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(base64.b64decode(data))
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


class Host:
    """One host: its agent, which is a process of its own, and what it has to say."""

    def __init__(
        self, told: dict[str, Any], mine: dict[str, Any], out: TextIO | Door, visit: str = ""
    ) -> None:
        self._told = told
        self._out = out
        self._mine = mine
        self.number: int = mine["number"]
        self.visit = visit
        """Which visitor this agent is for, if it is not the script's."""
        self._options = {"name": mine["name"], "labels": mine["labels"], **told["options"]}
        self._grace: float = told.get("grace", 0.0)
        self._files: dict[str, str] = told["credentials"]
        self._credentials = ""
        self._agent = 0
        self._held = -1
        """A descriptor of its folder."""
        self.ends = -1
        """A descriptor of the agent's process, once it runs."""
        self._late: float | None = None
        """When it is killed, once it was asked to end."""

    def for_visitor(self, visit: str, dial: str) -> Host:
        """Return a second agent of this host, which connects to a visitor (HST-6)."""
        options = {**self._told["options"], "dial": dial, "once": True}
        return Host({**self._told, "options": options, "grace": 0.0}, self._mine, self._out, visit)

    def say(self, **what: Any) -> None:
        """Tell whoever has started this."""
        text = json.dumps({"visit": self.visit, **what} if self.visit else what)
        pieces = [text[at : at + SHORT] for at in range(0, len(text), SHORT)]
        lines = [f"{self.number}:+{piece}\n" for piece in pieces[:-1]]
        self._out.write("".join([*lines, f"{self.number}:={pieces[-1]}\n"]))
        self._out.flush()

    def say_to(self, out: TextIO) -> None:
        """Say what follows elsewhere."""
        self._out = out

    @property
    def folder(self) -> str:
        """Its private folder, once it has one."""
        return self._credentials

    def fork(self) -> bool:
        """Make the agent's process; whether this is still the other one."""
        from mesh_core.extensions import make_secret_folder

        # Both processes have it: once they have been killed, somebody removes the folder.
        self._credentials, self._held = make_secret_folder("mesh-host-")
        for name, data in self._files.items():
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            try:
                with os.fdopen(os.open(name, flags, 0o600, dir_fd=self._held), "wb") as file:
                    file.write(base64.b64decode(data))
            except OSError as error:
                # Those of a full disk name no file by themselves.
                raise OSError(error.errno, error.strerror, f"{self._credentials}/{name}") from error
        # One that came while Python forks would be lost.
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDS)
        self._agent = os.fork()
        if not self._agent:
            return False
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDS)
        self.ends = os.pidfd_open(self._agent)
        return True

    def serve(self, starter: int) -> None:
        """Be the agent, until it ends."""
        for each in ENDS:
            signal.signal(each, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDS)
        # A session of its own: the kernel shares processors between sessions first, and a host is one of many others here.
        with contextlib.suppress(PermissionError):
            os.setsid()
        # It ends with whoever cleans up behind it; `ps -o comm` shows which host it is.
        libc = ctypes.CDLL(None)
        libc.prctl(DEATH, signal.SIGINT)
        libc.prctl(NAME, self._mine["name"].encode())
        if os.getppid() != starter:
            return
        if self.visit and not self._reaches(self._options["dial"]):
            return
        if "log" in self._mine:
            log = os.open(self._mine["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.close(log)
        from mesh_core import run_worker_loop_forever

        if self._grace:
            os.environ[PREEMPTION] = f"{self._grace:g}"
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        # Workers are to be copies of this process.
        self._files.clear()
        if "dial" in self._options:
            self.say(dials=self._options["dial"])
        run_worker_loop_forever(
            credentials=self._credentials,
            ready=lambda address: self.say(address=f"tcp://{address}"),
            standby=True,
            tell=tell,
            **self._options,
        )

    def _reaches(self, dial: str) -> bool:
        """Return whether a visitor can be connected to; it listens already, so there is no second attempt."""
        host, _, port = dial.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=REACH_S).close()
        except OSError as error:
            self.say(failed=error.strerror or str(error))
            return False
        return True

    def warn(self) -> None:
        """Tell the agent that the host will be taken away."""
        if self.runs:
            os.kill(self._agent, signal.SIGTERM)

    def forget(self) -> None:
        """Close what belongs to the process that has made the agent."""
        if self.runs:
            os.close(self.ends)
            self.ends = -1
        if self._held >= 0:
            os.close(self._held)
            self._held = -1

    def clean(self) -> None:
        """Remove its credentials."""
        if self._credentials:
            shutil.rmtree(self._credentials, ignore_errors=True)

    @property
    def agent(self) -> int:
        """The agent's process, while it runs."""
        return self._agent if self.runs else 0

    @property
    def runs(self) -> bool:
        """Whether its agent runs."""
        return self.ends >= 0

    def end(self) -> None:
        """Ask the agent to end."""
        if self.runs and self._late is None:
            self._late = time.monotonic() + GRACE_S
            os.kill(self._agent, signal.SIGINT)

    def left(self, now: float) -> float | None:
        """Return how long the agent has until it is killed; kills it when that is over."""
        if self._late is None or not self.runs:
            return None
        if now >= self._late:
            os.kill(self._agent, signal.SIGKILL)
            return GRACE_S
        return self._late - now

    def renew(self, files: dict[str, str]) -> None:
        """Take new certificates, which its agent reads by itself."""
        self._files.update(files)
        for name, data in files.items() if self._credentials and self.runs else ():
            path = Path(self._credentials) / name
            new = path.with_name(f".{name}.new")
            try:
                write(new, data)
                new.replace(path)
            except OSError as error:
                # The old ones hold for a while, and these come again with the next ones.
                tell(f"new certificates cannot be taken: {error}")

    def has_ended(self) -> int:
        """Tell the end of its agent; returns how it has ended."""
        status = os.waitstatus_to_exitcode(os.waitpid(self._agent, 0)[1])
        self.forget()
        self.clean()
        if status < 0 and self._late is None:
            self.say(failed=f"its agent was ended by signal {-status} ({signal.Signals(-status).name})")
        self.say(over=status)
        return abs(status)


class Door:
    """Where a host is taken up again by whoever has started it, after a lost connection (HST-7)."""

    def __init__(self, first: socket.socket) -> None:
        self._listener: socket.socket | None = None
        self._line: socket.socket | None = None
        self._unsaid: deque[str] = deque()
        self._sent = 0
        """How much of the first of these has been sent."""
        self._take(first)
        logs, log = os.pipe()
        for stream in (1, 2):
            os.dup2(log, stream)
        os.close(log)
        self.logs = logs
        """What this process and the agents write."""
        self.words, self._words_in = os.pipe()
        """What agents say themselves."""
        self._first_words = ""
        for each in (self.logs, self.words):
            os.set_blocking(each, False)

    def open(self, folder: str) -> str:
        """Listen in a private folder; return the path."""
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            # However long the folder's own path is.
            self._listener.bind(f"/proc/self/fd/{at}/{DOOR}")
        finally:
            os.close(at)
        self._listener.listen()
        return f"{folder}/{DOOR}"

    @property
    def inputs(self) -> list[int]:
        """Descriptors to wait for."""
        sockets = [each.fileno() for each in (self._listener, self._line) if each is not None]
        return [*sockets, self.logs, self.words]

    def read(self, ready: Sequence[int]) -> bytes | None:
        """Take what has come; return what was said by whoever has started the hosts, and nothing at the end of a connection."""
        if self.words in ready and (text := os.read(self.words, CHUNK).decode()):
            self._first_words = self._first_words or text
            self.write(text)
        said = None
        if self._line is not None and self._line.fileno() in ready:
            try:
                said = self._line.recv(CHUNK)
            except OSError:
                said = b""
            if not said:
                self._line.close()
                self._line = None
        if self._listener is not None and self._listener.fileno() in ready:
            line = self._listener.accept()[0]
            if why := refused(line):
                line.close()
                sys.stderr.write(f"refused a connection to this host: {why}\n")
                return said
            self._take(line)
            # They may have been on their way when the connection was lost.
            self.write(self._first_words)
            said = b""
        return said

    def log(self) -> str:
        """Return what was written since."""
        with contextlib.suppress(BlockingIOError):
            return os.read(self.logs, SHORT).decode(errors="replace")
        return ""

    def _take(self, line: socket.socket) -> None:
        """Talk to a newer connection; the old one may not know yet that it is lost."""
        if self._line is not None:
            self._line.close()
        self._line, self._sent = line, 0
        line.setblocking(False)

    def write(self, text: str) -> None:
        """Say something, or keep it for the next connection."""
        self._unsaid.append(text)
        while sum(map(len, self._unsaid)) > UNSAID and len(self._unsaid) > 1:
            self._unsaid.popleft()
            self._sent = 0

    def flush(self) -> None:
        """Send what there is to say."""
        while self._unsaid and self._line is not None:
            data = self._unsaid[0].encode()[self._sent :]
            try:
                self._sent += self._line.send(data)
            except OSError:
                # It does not read: the next one gets this from the beginning.
                self._line.close()
                self._line = None
                return
            if self._sent >= len(self._unsaid[0].encode()):
                self._unsaid.popleft()
                self._sent = 0

    def leave(self) -> TextIO:
        """Be closed, in an agent; returns what that says its own words into."""
        for each in (self._listener, self._line):
            if each is not None:
                each.close()
        os.close(self.logs)
        os.close(self.words)
        return os.fdopen(self._words_in, "w")


class Hosts:
    """The process that starts agents, and cleans up behind them: of one host, or of all that run on this machine."""

    def __init__(self, told: dict[str, Any], out: TextIO | Door) -> None:
        self._door = out if isinstance(out, Door) else None
        mine = told["hosts"]
        if told["place"]:
            # Where many are started by one command, each finds its place by a variable that this has set.
            place = int(os.environ[told["place"]])
            mine = mine[place : place + 1]
        self._hosts = {each["number"]: Host(told, each, out) for each in mine}
        self._visits: dict[str, Host] = {}
        """Agents for visitors, by the visit."""
        self._silence: float = told["silence"]
        self._grace: float = told.get("grace", 0.0)
        self._warned: float | None = None
        """When it was said that the hosts will be taken away."""
        self._is_told = False
        """Whether the launcher knows that."""
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Ends a wait, which a signal does not by itself."""
        self._dial: str | None = told["options"].get("dial")
        self._asked: dict[str, Any] = told["code"]
        self._beat: str | None = told.get("beat")
        self._heard = b""
        self._last = time.monotonic()

    def run(self) -> int:
        """Have the agents run until they end, or are to end."""
        what = {**environment(), "code": code(self._asked["modules"], self._asked["path"])}
        for each in self._hosts.values():
            each.say(environment=what, node=socket.gethostname())
        try:
            self._import()
        except ImportError as error:
            return self._fail(
                f"{sys.executable} has no mesh-core ({error}): install it there, or name an interpreter that has it with python="
            )
        try:
            if self._dial is not None and not self._reach(self._dial):
                return 0
            starter = os.getpid()
            for each in self._hosts.values():
                if not each.fork():
                    self._become(each, starter)
                    return 0
            self._open_door()
            return self._watch()
        except SystemExit:
            # All processes of a container are killed when the first one has ended: the agents are to end in order before.
            if os.getpid() == 1:
                self._end()
            raise
        except Exception as error:  # noqa: BLE001 - told to whoever waits for these hosts
            return self._fail(f"{type(error).__name__}: {error}")
        finally:
            for each in [*self._hosts.values(), *self._visits.values()]:
                each.clean()
            self._say_logs()

    def _open_door(self) -> None:
        """Let whoever has started the hosts come back to them."""
        first = next(iter(self._hosts.values()))
        if self._door is not None:
            first.say(door=self._door.open(first.folder))

    def _say_logs(self) -> None:
        """Pass on what this process and the agents have written."""
        while self._door is not None and (text := self._door.log()):
            next(iter(self._hosts.values())).say(log=text)

    @property
    def _inputs(self) -> list[int]:
        """Where orders come from."""
        if self._beat:
            return []
        return [0] if self._door is None else self._door.inputs

    def _become(self, host: Host, starter: int) -> None:
        """Be the agent of a host, in the process that was forked for it."""
        # The others are not this one's to speak of, nor to clean up behind.
        for other in [*self._hosts.values(), *self._visits.values()]:
            other.forget()
        self._hosts, self._visits = {host.number: host}, {}
        if self._door is not None:
            host.say_to(self._door.leave())
            self._door = None
        host.serve(starter)

    def _begin_visit(self, number: int, visit: str, dial: str) -> None:
        """Have a host connect to a visitor."""
        host = self._hosts.get(number)
        if host is None or not host.runs or visit in self._visits:
            return
        starter = os.getpid()
        second = host.for_visitor(visit, dial)
        if second.fork():
            self._visits[visit] = second
            return
        self._become(second, starter)
        sys.exit(0)

    def leave(self) -> bool:
        """Take a SIGTERM; whether it is a notice, and no order to end at once (HST-5)."""
        now = time.monotonic()
        if self._warned is not None:
            return now - self._warned < ONE_S
        if not self._grace or not any(each.runs for each in self._hosts.values()):
            return False
        self._warned = now
        os.eventfd_write(self._wake, 1)
        for each in self._hosts.values():
            each.warn()
        return True

    def _import(self) -> None:
        """Import what agents need; where there are several, once for all of them."""
        for module in ("inspect", "random", "subprocess"):
            importlib.import_module(module)
        from mesh_core import Settings, preload_host, run_worker_loop_forever  # noqa: F401

        if len(self._hosts) > 1:
            preload_host()

    def _fail(self, why: str) -> int:
        for each in self._hosts.values():
            each.say(failed=why)
        return 1

    def _reach(self, dial: str) -> bool:
        """Wait until the script can be connected to, and say why it cannot; whether the hosts are still wanted."""
        host, _, port = dial.rpartition(":")
        said = ""
        while True:
            try:
                socket.create_connection((host.strip("[]"), int(port)), timeout=REACH_S).close()
            except OSError as error:
                why = error.strerror or str(error)
            else:
                return True
            if why != said:
                for each in self._hosts.values():
                    each.say(unreached=why)
                said = why
            heard = select.select(self._inputs, [], [], AGAIN_S)[0]
            if self._beat:
                self._look(self._beat)
            if heard:
                if self._is_over(heard):
                    return False
            elif time.monotonic() > self._last + self._silence:
                return False

    def _watch(self, *, is_over: bool = False) -> int:
        """Wait for the agents' ends, or end them."""
        worst = 0
        while running := {
            each.ends: each for each in [*self._hosts.values(), *self._visits.values()] if each.runs
        }:
            now = time.monotonic()
            if self._warned is not None and not self._is_told:
                self._is_told = True
                for each in self._hosts.values():
                    each.say(leaving=True)
            waits = [left for each in running.values() if (left := each.left(now)) is not None]
            if not is_over:
                waits.append(max(0.0, min(self._last + self._silence, self._taken_at) - now))
            ready = self._wait([*running, *([] if is_over else self._inputs)], waits)
            for end in running.keys() & ready:
                worst = max(worst, self._has_ended(running[end], is_over=is_over))
            if not is_over and not running.keys() >= set(ready):
                is_over = self._is_over(ready)
            elif not is_over and time.monotonic() >= self._taken_at:
                is_over = True
            elif not is_over and time.monotonic() >= self._last + self._silence:
                is_over = True
                self._tell_silence()
            if is_over:
                for each in [*self._hosts.values(), *self._visits.values()]:
                    each.end()
        return worst

    @property
    def _taken_at(self) -> float:
        """When agents are ended that go on though their grace is over."""
        return float("inf") if self._warned is None else self._warned + self._grace + ONE_S

    def _tell_silence(self) -> None:
        for each in self._hosts.values():
            if each.runs:
                each.say(
                    failed=f"it has ended, as it heard nothing for {self._silence:g} s: the machine of the script slept, "
                    "or the network between them was cut"
                )

    def _has_ended(self, host: Host, *, is_over: bool) -> int:
        """Tell the end of an agent; returns how the host has ended, if it was not that of a visitor."""
        if self._visits.get(host.visit) is host:
            del self._visits[host.visit]
            host.has_ended()
            return 0
        for visitor in self._visits.values():
            if visitor.number == host.number:
                visitor.end()
        if self._warned is not None and not is_over:
            since = time.monotonic() - self._warned
            host.say(failed=f"it was taken away: SIGTERM came {since:.0f} s before its end", taken=True)
        return host.has_ended()

    def _wait(self, inputs: Sequence[int], limits: Sequence[float]) -> list[int]:
        """Wait until something happens, or may have; returns what has."""
        pauses = [*limits, min(LOOK_S, self._silence / 4)] if self._beat else limits
        ready = select.select([*inputs, self._wake], [], [], min(pauses, default=None))[0]
        if self._wake in ready:
            os.eventfd_read(self._wake)
            ready.remove(self._wake)
        if self._beat:
            self._look(self._beat)
        if os.getpid() == 1:
            self._reap()
        return ready

    def _end(self) -> None:
        """End all agents, and wait until they have."""
        for each in self._hosts.values():
            each.end()
        self._watch(is_over=True)

    def _look(self, beat: str) -> None:
        """Look whether the file has changed that does so as long as the launcher is there."""
        try:
            said = Path(beat).read_bytes()
        except OSError:
            # It may be in the middle of a change.
            said = self._heard
        if said != self._heard:
            self._heard, self._last = said, time.monotonic()
            # After the first line, which is a number, come orders for all hosts.
            self._obey(said.split(b"\n")[1:])

    def _reap(self) -> None:
        """Forget processes that have ended, and whose parents had before: they are the first process's."""
        agents = {each.agent for each in [*self._hosts.values(), *self._visits.values()]}
        while (found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            if found.si_pid in agents:
                break
            os.waitpid(found.si_pid, 0)

    def _is_over(self, ready: Sequence[int]) -> bool:
        """Take what was said; whether all hosts are to end. Something is said now and then, and the end is that of the input."""
        if self._door is None:
            said = os.read(0, 4096)
        else:
            self._say_logs()
            heard = self._door.read(ready)
            self._door.flush()
            if not heard:
                # The next connection begins with a line of its own.
                self._heard = self._heard if heard is None else b""
                return False
            said = heard
        self._last = time.monotonic()
        *lines, self._heard = (self._heard + said).split(b"\n")
        numbers = self._obey(lines)
        # Before they run there is nothing else to do for those that are not wanted.
        return not said or b"over" in lines or numbers >= self._hosts.keys()

    def _obey(self, lines: Sequence[bytes]) -> set[int]:
        """Do what was said; return the hosts that are to end."""
        ending: set[int] = set()
        for line in lines:
            match line.decode().split(" "):
                case ["end", *numbers]:
                    ending.update(map(int, numbers))
                case ["dial", which, visit, dial]:
                    self._begin_visit(int(which), visit, dial)
                case ["leave", visit] if visit in self._visits:
                    self._visits[visit].end()
                case ["renew", text]:
                    files = json.loads(base64.b64decode(text))
                    for each in [*self._hosts.values(), *self._visits.values()]:
                        each.renew(files)
        for number in ending & self._hosts.keys():
            self._hosts[number].end()
        return ending


def tell(line: str) -> None:
    """Write what people should know of an agent."""
    if threading.current_thread() is threading.main_thread():
        hear_once()
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} mesh host: {line}\n")
    sys.stderr.flush()


def hear_once() -> None:
    """Have several SIGTERMs that come together be one to the agent: the scheduler's, and what this program hands on."""
    handler = signal.getsignal(signal.SIGTERM)
    if not callable(handler) or hasattr(handler, "is_heard_once"):
        return
    heard = [-ONE_S]

    def once(number: int, frame: Any) -> None:
        now = time.monotonic()
        if now - heard[0] >= ONE_S:
            heard[0] = now
            handler(number, frame)

    once.is_heard_once = True  # type: ignore[attr-defined]
    signal.signal(signal.SIGTERM, once)


def refused(line: socket.socket) -> str:
    """Return why the process at the other end is not to be talked to; empty if it is."""
    from mesh_core.extensions import require_same_namespaces

    try:
        require_same_namespaces(line)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def relay(line: socket.socket) -> None:
    """Pass on what a host and whoever has started it say to each other, until either has gone (HST-7)."""
    sources = [line.fileno(), 0]
    with contextlib.suppress(OSError):
        while True:
            ready = select.select(sources, [], [])[0]
            if line.fileno() in ready:
                said = line.recv(CHUNK)
                if not said:
                    return
                while said:
                    said = said[os.write(1, said) :]
            if 0 in ready:
                heard = os.read(0, CHUNK)
                if heard:
                    line.sendall(heard)
                elif is_lost(1):
                    return
                else:
                    line.sendall(b"\nover\n")
                    sources.remove(0)


def is_lost(output: int) -> bool:
    """Return whether nobody reads an output any more."""
    poll = select.poll()
    poll.register(output, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(GONE_S * 1000))


def resume(path: str, number: int) -> int:
    """Take a host up again after a lost connection."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
        try:
            line.connect(path)
            why = refused(line)
        except OSError:
            why = "its agent has ended while the connection to it was lost"
        if not why:
            relay(line)
            return 0
    sys.stdout.write(f"{number}:={json.dumps({'failed': why, 'over': 1})}\n")
    return 1


def linger() -> Door | int:
    """Go on in a process that outlives this one's connection; returns this one's exit status where that is over."""
    ours, theirs = socket.socketpair()
    with ours:
        pid = os.fork()
        if pid:
            theirs.close()
            relay(ours)
            # It has ended, or goes on with another connection.
            select.select([os.pidfd_open(pid)], [], [], GONE_S)
            ended, status = os.waitpid(pid, os.WNOHANG)
            return os.waitstatus_to_exitcode(status) if ended else 0
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    return Door(theirs)


def main() -> int:
    """Run hosts; a second argument names a file with what it is told."""
    running: list[Hosts] = []

    def ended(number: int, _frame: object) -> None:
        """End in order, unless it is a notice."""
        if number != signal.SIGTERM or not running or not running[0].leave():
            sys.exit(128 + number)

    for each in ENDS:
        signal.signal(each, ended)
    arguments = sys.argv[1:]
    if len(arguments) > 2:
        told = json.loads(Path(arguments[2]).read_bytes())
    else:
        # Without a buffer: what comes later is for the one that watches.
        line = bytearray()
        while not line.endswith(b"\n"):
            byte = os.read(0, 1)
            if not byte:
                return 1
            line += byte
        told = json.loads(line)
        line.clear()
    if "resume" in told:
        return resume(told["resume"], told["number"])
    out: TextIO | Door
    if told.get("lingers"):
        door = linger()
        if isinstance(door, int):
            return door
        out = door
    else:
        out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
    running.append(Hosts(told, out))
    return running[0].run()


if __name__ == "__main__":
    sys.exit(main())
