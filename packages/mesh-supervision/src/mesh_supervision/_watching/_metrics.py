"""What a job does as numbers for monitoring: Prometheus's text format, and OpenTelemetry's instruments."""

from __future__ import annotations

import importlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from mesh_core import MeshError, inspect
from mesh_core.inspect import ActorState, HostState, ProcState, Snapshot
from mesh_supervision._watching._limited import LimitedHandler, LimitedServer

Labels = dict[str, str]
Sample = tuple[Labels, float]
_FRESH_S = 1.0
"""Instruments that are read within this time share one snapshot."""


@dataclass(frozen=True)
class Metric:
    """One number for each of several things."""

    name: str
    text: str
    is_counter: bool
    unit: str
    read: Callable[[Snapshot], Iterable[Sample]]


def _hosts(value: Callable[[HostState], float]) -> Callable[[Snapshot], Iterator[Sample]]:
    return lambda snap: (({"host": host.name}, value(host)) for host in snap.hosts)


def _up(snap: Snapshot) -> Iterator[Sample]:
    """Return whether each process runs: also of ranks whose process has died, so that an alert sees them."""
    for proc in (*snap.procs, *snap.dead):
        labels = {"process": proc.name, "mesh": proc.mesh, "rank": str(proc.rank), "host": proc.host}
        yield labels, float(proc.state == "running")


def _procs(value: Callable[[ProcState], float | None]) -> Callable[[Snapshot], Iterator[Sample]]:
    def read(snap: Snapshot) -> Iterator[Sample]:
        for proc in snap.procs:
            if (found := value(proc)) is not None:
                yield (
                    {"process": proc.name, "mesh": proc.mesh, "rank": str(proc.rank), "host": proc.host},
                    found,
                )

    return read


def _actors(value: Callable[[ActorState], float]) -> Callable[[Snapshot], Iterator[Sample]]:
    def read(snap: Snapshot) -> Iterator[Sample]:
        for actor in snap.actors:
            labels = {
                "actor": actor.name,
                "class": actor.class_name,
                "rank": str(actor.rank),
                "process": actor.proc,
                "id": str(actor.actor_id),
            }
            yield labels, value(actor)

    return read


def _failures(snap: Snapshot) -> Iterator[Sample]:
    yield {}, float(len(snap.failures))


METRICS = (
    Metric(
        "mesh_host_up",
        "Whether the host's agent answers.",
        False,
        "",
        _hosts(lambda host: host.state == "running"),
    ),
    Metric(
        "mesh_host_load",
        "Threads that want to run, over the last minute.",
        False,
        "",
        _hosts(lambda host: host.load),
    ),
    Metric("mesh_host_memory_bytes", "Memory of the machine.", False, "By", _hosts(lambda host: host.memory)),
    Metric(
        "mesh_host_memory_free_bytes",
        "Memory that is available without swapping.",
        False,
        "By",
        _hosts(lambda host: host.memory_free),
    ),
    Metric(
        "mesh_process_up",
        "Whether the process runs and answers.",
        False,
        "",
        _up,
    ),
    Metric("mesh_process_cpu_seconds_total", "Processor time.", True, "s", _procs(lambda proc: proc.cpu)),
    Metric("mesh_process_resident_bytes", "Memory in place.", False, "By", _procs(lambda proc: proc.rss)),
    Metric(
        "mesh_process_restarts",
        "How often it was restarted.",
        False,
        "",
        _procs(lambda proc: proc.incarnation),
    ),
    Metric(
        "mesh_process_outgoing_bytes",
        "Bytes that wait to be sent to it.",
        False,
        "By",
        _procs(lambda proc: proc.outgoing),
    ),
    Metric(
        "mesh_process_calls", "Its calls that wait for replies.", False, "", _procs(lambda proc: proc.calls)
    ),
    Metric(
        "mesh_process_shared_bytes",
        "Shared memory that it owns.",
        False,
        "By",
        _procs(lambda proc: proc.shm_bytes),
    ),
    Metric("mesh_actor_queue", "Messages that wait.", False, "", _actors(lambda actor: actor.queue)),
    Metric(
        "mesh_actor_queue_bytes", "Bytes of those.", False, "By", _actors(lambda actor: actor.queue_bytes)
    ),
    Metric(
        "mesh_actor_received_total",
        "Messages received.",
        True,
        "",
        _actors(lambda actor: actor.received),
    ),
    Metric(
        "mesh_actor_handled_total",
        "Messages that were handled.",
        True,
        "",
        _actors(lambda actor: actor.handled),
    ),
    Metric("mesh_actor_failed_total", "Messages that raised.", True, "", _actors(lambda actor: actor.failed)),
    Metric(
        "mesh_actor_handling_seconds",
        "Time to handle one, lately.",
        False,
        "s",
        _actors(lambda actor: actor.mean),
    ),
    Metric(
        "mesh_actor_busy_seconds",
        "Since when the oldest message is handled that is not done; 0 if there is none.",
        False,
        "s",
        _actors(lambda actor: max((each.seconds for each in actor.running), default=0.0)),
    ),
    Metric("mesh_recent_failures", "Failures that the job still remembers.", False, "", _failures),
)


class Failures:
    """Counts a job's failures as they appear in snapshots, which remember the latest only."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: set[tuple[object, ...]] = set()
        self._counts: Counter[tuple[str, str]] = Counter()
        self.metric = Metric(
            "mesh_failures_total",
            "Failures since these numbers are served, by kind of event and mesh; a host's have its name.",
            True,
            "",
            self._read,
        )

    def _read(self, snap: Snapshot) -> Iterator[Sample]:
        with self._lock:
            keys = {
                (each.kind, each.time, each.proc, each.actor, each.rank, each.host): each
                for each in snap.failures
            }
            for key, event in keys.items():
                if key not in self._seen:
                    mesh = event.actor or event.proc.rpartition("[")[0] or event.host
                    self._counts[event.kind, mesh] += 1
            # What a snapshot has forgotten does not come again.
            self._seen = set(keys)
            counts = sorted(self._counts.items())
        for (kind, mesh), count in counts:
            yield {"kind": kind, "mesh": mesh}, float(count)


def exposition(snap: Snapshot, failures: Failures | None = None) -> str:
    """Return a snapshot in Prometheus's text format."""
    lines = []
    for metric in (*METRICS, (failures or Failures()).metric):
        lines.append(f"# HELP {metric.name} {metric.text}")
        lines.append(f"# TYPE {metric.name} {'counter' if metric.is_counter else 'gauge'}")
        for labels, value in metric.read(snap):
            pairs = ",".join(f'{name}="{_escaped(text)}"' for name, text in labels.items())
            lines.append(
                f"{metric.name}{{{pairs}}} {float(value):.17g}"
                if pairs
                else f"{metric.name} {float(value):.17g}"
            )
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


class _Handler(LimitedHandler):
    """Answers one scrape."""

    server: _Server

    def do_GET(self) -> None:  # noqa: N802 - its name in the base class
        if self.path.partition("?")[0] != "/metrics":
            self.send_error(404, "there is /metrics only")
            return
        try:
            body = exposition(self.server.snapshot(), self.server.failures).encode()
        except MeshError as error:
            self.send_error(503, "the job does not answer", str(error))
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Log nothing: there is a scrape every few seconds."""


class _Server(LimitedServer):
    def __init__(self, address: tuple[str, int], snapshot: Callable[[], Snapshot]) -> None:
        super().__init__(address, _Handler)
        self.snapshot = snapshot
        self.failures = Failures()


class MetricsServer:
    r"""Serves a job's metrics at ``http://HOST:PORT/metrics``, in the format of Prometheus, until it is closed.

    Each scrape takes a snapshot; nothing is counted in advance. There is no authentication, so it listens on this machine only unless
    another address is given.

    >>> from urllib.request import urlopen
    >>> from mesh_core import this_host
    >>> from mesh_supervision import MetricsServer
    >>> with this_host().spawn_procs({"gpus": 2}, name="workers") as procs, MetricsServer(port=0) as server:
    ...     procs.initialized.get(timeout=30)
    ...     text = urlopen(server.url, timeout=30).read().decode()
    ...     print(*[line for line in text.splitlines() if line.startswith("mesh_process_up")], sep="\n")
    mesh_process_up{process="controller",mesh="controller",rank="0",host="..."} 1
    mesh_process_up{process="workers[0]",mesh="workers",rank="0",host="..."} 1
    mesh_process_up{process="workers[1]",mesh="workers",rank="1",host="..."} 1

    Args:
        port: the port to listen on; 0 lets the system choose.
        host: the address to listen on.
        snapshot: takes a snapshot; by default of the job of this process.
    """

    def __init__(
        self,
        port: int = 9464,
        host: str = "127.0.0.1",
        *,
        snapshot: Callable[[], Snapshot] = inspect.snapshot,
    ) -> None:
        try:
            self._server = _Server((host, port), snapshot)
        except OSError as error:
            raise MeshError(
                f"cannot serve metrics at {host}:{port}: {error}. Choose another port; 0 has the system choose"
            ) from error
        address, chosen = self._server.server_address[:2]
        self.url = f"http://{address!s}:{chosen}/metrics"
        self._thread = threading.Thread(target=self._server.serve_forever, name="mesh-metrics", daemon=True)
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


def export_metrics(meter: Any, snapshot: Callable[[], Snapshot] = inspect.snapshot) -> None:
    """Report the job's metrics to an OpenTelemetry meter: those that :class:`MetricsServer` serves, under the same names.

    A snapshot is taken when the meter's reader collects, at most once a second. While the job does not answer, there are no values.

    Args:
        meter: a meter of your provider, such as ``opentelemetry.metrics.get_meter("mesh")``.
        snapshot: takes a snapshot; by default of the job of this process.
    """
    observation = importlib.import_module("opentelemetry.metrics").Observation
    latest = _Latest(snapshot)
    for metric in (*METRICS, Failures().metric):

        def observe(_options: Any, metric: Metric = metric) -> Iterator[Any]:
            snap = latest.get()
            if snap is not None:
                for labels, value in metric.read(snap):
                    yield observation(float(value), labels)

        make = meter.create_observable_counter if metric.is_counter else meter.create_observable_gauge
        make(metric.name, [observe], unit=metric.unit, description=metric.text)


class _Latest:
    """Return the latest snapshot, which several instruments read one after the other."""

    def __init__(self, snapshot: Callable[[], Snapshot]) -> None:
        self._take = snapshot
        self._lock = threading.Lock()
        self._taken: tuple[float, Snapshot | None] = (-_FRESH_S, None)

    def get(self) -> Snapshot | None:
        with self._lock:
            when, snap = self._taken
            if time.monotonic() - when >= _FRESH_S:
                try:
                    snap = self._take()
                except MeshError:
                    snap = None
                self._taken = (time.monotonic(), snap)
            return snap
