"""``mesh top``, ``mesh dashboard``, ``mesh why``, ``mesh metrics`` and ``mesh trace``."""

from __future__ import annotations

import string
import sys
import threading
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Iterable
from pathlib import Path

from mesh_core import MeshError
from mesh_core.extensions import printable
from mesh_core.inspect import RunningJob, connect
from mesh_core.plugins import CommandPlugin, hookimpl

_ID = 16


class TopCommand:
    """Watch a job on the screen: one of this machine, or with credentials one that a host belongs to."""

    def configure(self, parser: ArgumentParser) -> None:
        """Declare arguments."""
        _add_where(parser)
        parser.add_argument(
            "--interval", type=_seconds, default=1.0, metavar="SECONDS", help="look so often (1)"
        )

    def run(self, args: Namespace) -> int:
        """Show it until q is pressed, or the job ends."""
        job = _job_of(args)
        try:
            from mesh_supervision._watching._top import Top
        except ModuleNotFoundError as error:
            if error.name not in ("textual", "rich"):
                raise
            raise MeshError(
                "mesh top draws with Textual, which is not installed: pip install mesh-supervision[top]"
            ) from error
        if not sys.stdout.isatty():
            raise MeshError("mesh top needs a terminal; `mesh look snapshot` prints the same once")
        said = Top(job, args.interval).run()
        if said:
            print(f"mesh top: {said}", file=sys.stderr)
        return 0


class WhyCommand:
    """Say why a job makes no progress: who is waited for, waits for nobody, and is at which line."""

    def configure(self, parser: ArgumentParser) -> None:
        """Declare arguments."""
        _add_where(parser)
        parser.add_argument("--stacks", action="store_true", help="show the whole stacks of the culprits")
        parser.add_argument(
            "--timeout", type=_seconds, default=2.0, metavar="SECONDS", help="wait so long for processes (2)"
        )

    def run(self, args: Namespace) -> int:
        """Query the job, and print the answer."""
        from mesh_supervision._watching._why import Reason, confirmed, why

        job, limit = _job_of(args), args.timeout

        def ask() -> Reason:
            return why(job.snapshot(limit, pss=False), job.waits(limit), job.stacks(timeout=limit))

        reason = confirmed(ask)
        print(printable(str(reason)))
        if args.stacks:
            for culprit in reason.culprits:
                if culprit.stack:
                    print(printable(f"\n{culprit.who}, {culprit.stack}"))
        return 0


class MetricsCommand:
    """Serve a job's numbers to Prometheus, or print them once."""

    def configure(self, parser: ArgumentParser) -> None:
        """Declare arguments."""
        _add_where(parser)
        parser.add_argument("--once", action="store_true", help="print them, and serve nothing")
        parser.add_argument(
            "--listen", default="127.0.0.1", metavar="ADDRESS", help="where to serve them (127.0.0.1)"
        )
        parser.add_argument("--port", type=int, default=9464, help="at which port (9464)")

    def run(self, args: Namespace) -> int:
        """Serve until Ctrl-C."""
        from mesh_supervision._watching._metrics import MetricsServer, exposition

        job = _job_of(args)
        if args.once:
            print(exposition(job.snapshot()), end="")
            return 0
        with MetricsServer(args.port, args.listen, snapshot=job.snapshot) as server:
            print(f"metrics of job {job.info.pid} at {server.url}; Ctrl-C ends it", flush=True)
            try:
                threading.Event().wait()
            except KeyboardInterrupt:
                return 0
        return 0


class DashboardCommand:
    """Show a running job as a page in a browser on this machine."""

    def configure(self, parser: ArgumentParser) -> None:
        """Declare arguments."""
        _add_where(parser)
        parser.add_argument(
            "--port", type=int, default=0, help="where to serve it; the system chooses otherwise"
        )
        parser.add_argument(
            "--interval", type=_seconds, default=1.0, metavar="SECONDS", help="look so often (1)"
        )

    def run(self, args: Namespace) -> int:
        """Serve until Ctrl-C."""
        from mesh_supervision._watching._dashboard import Dashboard

        job = _job_of(args)
        with Dashboard(job, args.port, interval=args.interval) as dashboard:
            print(f"job {job.info.pid} is shown at {dashboard.url}", flush=True)
            print("the address is the key: who has all of it sees the job; Ctrl-C ends it", flush=True)
            try:
                threading.Event().wait()
            except KeyboardInterrupt:
                return 0
        return 0


class TraceCommand:
    """Record what a job does for a while, as a timeline for Perfetto and Chrome."""

    def configure(self, parser: ArgumentParser) -> None:
        """Declare arguments."""
        _add_where(parser)
        parser.add_argument(
            "-o", "--output", type=Path, required=True, metavar="FILE", help="the file to write"
        )
        parser.add_argument(
            "--seconds", type=_seconds, default=10.0, metavar="SECONDS", help="record for so long (10)"
        )
        parser.add_argument(
            "--interval", type=_interval, default=1.0, metavar="SECONDS", help="look so often (1)"
        )

    def run(self, args: Namespace) -> int:
        """Record until the time is over, the job ends, or Ctrl-C; then write the file."""
        from mesh_supervision._watching._trace import JobTrace

        job = _job_of(args)
        try:
            # Printed before the recording, not after it.
            with args.output.open("a"):
                pass
            trace = JobTrace(args.interval, snapshot=job.snapshot)
            with trace:
                try:
                    trace.over.wait(args.seconds)
                except KeyboardInterrupt:
                    print("mesh trace: ended early", file=sys.stderr)
            trace.save(args.output)
        except OSError as error:
            raise MeshError(f"cannot write the trace to {args.output}: {error}") from error
        if trace.why:
            print(f"mesh trace: {trace.why}", file=sys.stderr)
        if trace.left_out:
            print(f"mesh trace: {trace.left_out:,} later entries are left out", file=sys.stderr)
        print(f"{args.output}: open it at https://ui.perfetto.dev")
        return 0


def _add_where(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--job", type=_job, metavar="JOB", help="the pid of the job's script, or the job's id"
    )
    parser.add_argument("--host", metavar="ADDRESS", help="look through this host of the job: tcp://b7:26600")
    parser.add_argument(
        "--credentials",
        type=Path,
        metavar="DIR",
        help="with --host: the folder of the owner, or an observer's",
    )


def _job_of(args: Namespace) -> RunningJob:
    if (args.host is None) != (args.credentials is None):
        raise MeshError("--host and --credentials go together: which host to look through, and with what")
    return connect(args.job, host=args.host, credentials=args.credentials)


def _job(text: str) -> int | str:
    if len(text) == _ID and set(text) <= set(string.hexdigits):
        return text.lower()
    if not text.isdecimal():
        raise ArgumentTypeError(f"{text!r} is neither a pid nor an id of {_ID} hexadecimal digits")
    return int(text)


def _interval(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.01 <= seconds <= 60:
        raise ArgumentTypeError(f"{text!r} is not a number of seconds from 0.01 to 60")
    return seconds


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 3600:
        raise ArgumentTypeError(f"{text!r} is not a number of seconds from 0.1 to 3600")
    return seconds


PLUGINS = (
    CommandPlugin(name="top", api_version=1, create=TopCommand, summary="watch a running job on the screen"),
    CommandPlugin(
        name="why", api_version=1, create=WhyCommand, summary="say why a running job makes no progress"
    ),
    CommandPlugin(
        name="metrics", api_version=1, create=MetricsCommand, summary="serve a job's numbers to Prometheus"
    ),
    CommandPlugin(
        name="dashboard",
        api_version=1,
        create=DashboardCommand,
        summary="show a running job as a page in a browser",
    ),
    CommandPlugin(
        name="trace",
        api_version=1,
        create=TraceCommand,
        summary="record what a running job does, for Perfetto",
    ),
)


@hookimpl
def mesh_register_commands() -> Iterable[CommandPlugin]:
    """`mesh top`, `mesh dashboard`, `mesh why`, `mesh metrics`, `mesh trace`."""
    return PLUGINS
