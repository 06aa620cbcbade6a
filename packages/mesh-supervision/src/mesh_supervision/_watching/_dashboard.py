"""``mesh dashboard``: a running job as a page, for a browser on this machine.

The page and its two files are the same for everybody and hold no secret. The data that they ask for requires the token,
which is in the part of the address that browsers do not send. The job is queried when somebody asks, and no more often
than once per interval, however many people look.

DSH-1: without the token nothing about the job is revealed, and a page of another origin cannot get it, as it travels in a header.
DSH-2: a request under another name than this machine's own, such as a rebound DNS name, is refused.
"""

from __future__ import annotations

import hmac
import itertools
import json
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from importlib.resources import files
from types import TracebackType
from typing import Any, Protocol, Self
from urllib.parse import parse_qs, urlsplit

from mesh_core import MeshError
from mesh_core.inspect import ActorState, HostState, JobInfo, LogText, ProcStacks, ProcState, Snapshot
from mesh_supervision._watching._limited import LimitedHandler, LimitedServer

_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
}
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_LINES_KEPT = 2_000
_LINES_AT_ONCE = 500


class Job(Protocol):
    """The part of a running job that is needed."""

    @property
    def info(self) -> JobInfo:
        """A description of the job."""

    def snapshot(self, timeout: float = 1.0, *, pss: bool = True) -> Snapshot:
        """The tree."""

    def stacks(self, mesh: str = "", timeout: float = 2.0) -> tuple[ProcStacks, ...]:
        """The threads."""

    def logs(self) -> Iterator[LogText]:
        """What workers print."""


# The data of the page.


def view(snap: Snapshot, before: Snapshot | None = None) -> dict[str, Any]:
    """Return a snapshot as the page needs it; the previous one says how much processor time was used since."""
    used = {(proc.name, proc.pid): proc.cpu for proc in before.procs} if before is not None else {}
    passed = snap.time - before.time if before is not None else 0.0

    def share(proc: ProcState) -> float | None:
        earlier = used.get((proc.name, proc.pid))
        if proc.cpu is None or earlier is None or passed <= 0:
            return None
        return max(0.0, proc.cpu - earlier) / passed

    return {
        "time": snap.time,
        "hosts": [_host(host, share) for host in snap.hosts],
        "failures": [{"time": event.time, "text": str(event)} for event in reversed(snap.failures)],
    }


def _host(host: HostState, share: Callable[[ProcState], float | None]) -> dict[str, Any]:
    return {
        "name": host.name,
        "number": host.number,
        "state": host.state,
        "cpus": host.cpus,
        "load": host.load,
        "memory": host.memory,
        "free": host.memory_free,
        "procs": [
            _proc(proc, share(proc))
            # Each in its place of the grid, also a rank that has died.
            for proc in sorted((*host.procs, *host.dead), key=lambda each: each.rank)
        ],
    }


def _proc(proc: ProcState, share: float | None) -> dict[str, Any]:
    return {
        "name": proc.name,
        "mesh": proc.mesh,
        "rank": proc.rank,
        "point": dict(proc.point),
        "pid": proc.pid,
        "state": proc.state,
        "cpu": share,
        "memory": proc.rss,
        "life": proc.incarnation + 1,
        "calls": proc.calls,
        "actors": [_actor(actor) for actor in proc.actors],
    }


def _actor(actor: ActorState) -> dict[str, Any]:
    return {
        "id": str(actor.actor_id),
        "name": actor.name,
        "class": actor.class_name,
        "rank": actor.rank,
        "state": actor.state,
        "queue": actor.queue,
        "handled": actor.handled,
        "failed": actor.failed,
        "rate": actor.rate,
        "mean": actor.mean,
        "running": [
            {"endpoint": each.endpoint, "seconds": each.seconds, "caller": each.caller}
            for each in actor.running
        ],
    }


class _Watcher:
    """Queries the job for everybody who looks at the page."""

    def __init__(self, job: Job, interval: float) -> None:
        self._job = job
        self._interval = interval
        self._lock = threading.Lock()
        self._taken = 0.0
        self._snap: Snapshot | None = None
        self._said: bytes = b""
        self._lines: deque[tuple[int, str, bool]] = deque(maxlen=_LINES_KEPT)
        self._listens = False

    def look(self) -> bytes:
        """Return what the job does, as JSON; simultaneous requests share one query."""
        with self._lock:
            now = time.monotonic()
            if self._snap is None or now - self._taken >= self._interval:
                snap = self._job.snapshot(pss=False)
                said = view(snap, self._snap)
                info = self._job.info
                self._said = json.dumps(
                    {**said, "script": info.script, "pid": info.pid, "interval": self._interval}
                ).encode()
                self._snap, self._taken = snap, now
            return self._said

    def stacks(self, proc: str) -> bytes:
        """Return where the threads of a process are in their code."""
        mesh = proc.partition("[")[0]
        found = [each for each in self._job.stacks(mesh) if each.proc == proc]
        return json.dumps({"proc": proc, "text": "\n\n".join(map(str, found))}).encode()

    def lines(self, after: int) -> bytes:
        """Return what workers have printed since a line; output is followed from the first request on."""
        with self._lock:
            if not self._listens:
                self._listens = True
                threading.Thread(target=self._listen, name="mesh-dashboard-logs", daemon=True).start()
            # Lines that are about to come may push out the first ones.
            found = [each for each in tuple(self._lines) if each[0] > after][-_LINES_AT_ONCE:]
        return json.dumps([{"number": n, "text": text, "error": error} for n, text, error in found]).encode()

    def _listen(self) -> None:
        numbers = itertools.count(1)
        try:
            for text in self._job.logs():
                if text.missed:
                    self._lines.append((next(numbers), f"... {text.missed:,} lines are missing here", True))
                for line in text.text.rstrip("\n").split("\n"):
                    self._lines.append((next(numbers), line, text.is_error))
        except MeshError as error:
            self._lines.append((next(numbers), f"no more is heard of the job: {error}", True))


class _Handler(LimitedHandler):
    """Answers one request."""

    server: _Server

    def do_GET(self) -> None:  # noqa: N802 - its name in the base class
        if not self._is_asked_here():
            self._say(
                421,
                "text/plain; charset=utf-8",
                b"this page is for browsers of this machine, under its own name\n",
            )
            return
        asked = urlsplit(self.path)
        if asked.path in _FILES:
            name, kind = _FILES[asked.path]
            self._say(200, kind, self.server.files[name])
        elif asked.path.startswith("/api/"):
            self._tell(asked.path.removeprefix("/api/"), parse_qs(asked.query))
        else:
            self._say(404, "text/plain; charset=utf-8", b"there is no such page\n")

    def _is_asked_here(self) -> bool:
        # DSH-2.
        return self.headers.get("Host", "") in self.server.names

    def _tell(self, what: str, words: dict[str, list[str]]) -> None:
        shown = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(shown.encode(), self.server.token.encode()):
            self._answer(
                403, {"error": "the address lacks its token; take the whole of it from the terminal"}
            )
            return
        watcher = self.server.watcher
        try:
            if what == "look":
                body = watcher.look()
            elif what == "stacks":
                body = watcher.stacks(words.get("proc", [""])[0])
            elif what == "logs":
                after = words.get("after", ["0"])[0]
                body = watcher.lines(int(after) if after.isdecimal() else 0)
            else:
                self._answer(404, {"error": f"nothing is called {what}"})
                return
        except MeshError as error:
            self._answer(503, {"error": str(error)})
            return
        self._say(200, "application/json", body)

    def _answer(self, status: int, said: dict[str, str]) -> None:
        self._say(status, "application/json", json.dumps(said).encode())

    def _say(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def version_string(self) -> str:
        """Reveal no versions."""
        return "mesh"

    def log_message(self, *_: Any) -> None:
        """Log nothing: there is a request every second."""


class _Server(LimitedServer):
    def __init__(self, port: int, watcher: _Watcher) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.watcher = watcher
        self.token = secrets.token_urlsafe(24)
        chosen = self.server_address[1]
        self.names = (f"127.0.0.1:{chosen}", f"localhost:{chosen}")
        page = files("mesh_supervision._watching._page")
        self.files = {name: page.joinpath(name).read_bytes() for name, _ in _FILES.values()}


class Dashboard:
    """Serves a page about a job at :attr:`url` until it is closed; the same as ``mesh dashboard``.

    It listens on this machine only. The address contains a token: anyone who has it can see what the job does, the stacks of its threads and
    what its workers print, but cannot change anything.

    >>> import os
    >>> from urllib.request import Request, urlopen
    >>> from mesh_core import this_host
    >>> from mesh_core.inspect import connect
    >>> from mesh_supervision import Dashboard
    >>> with this_host().spawn_procs({"gpus": 2}, name="workers") as procs:
    ...     procs.initialized.get(timeout=30)
    ...     with Dashboard(connect(os.getpid())) as dashboard:
    ...         address, _, token = dashboard.url.partition("#")
    ...         b"<title>" in urlopen(address, timeout=30).read()
    True

    Args:
        job: the job that is shown; :func:`mesh_core.inspect.connect` finds it.
        port: the port to listen on; 0 lets the system choose.
        interval: the job is queried at most once in so many seconds.
    """

    def __init__(self, job: Job, port: int = 0, *, interval: float = 1.0) -> None:
        try:
            self._server = _Server(port, _Watcher(job, interval))
        except OSError as error:
            raise MeshError(
                f"cannot serve the dashboard at 127.0.0.1:{port}: {error}. Choose another port; 0 has the system choose"
            ) from error
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/#{self._server.token}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="mesh-dashboard", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
