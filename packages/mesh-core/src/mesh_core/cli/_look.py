"""``mesh look``."""

import json
import sys
import time
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from mesh_core.cli import _exit
from mesh_core.cli._table import aligned
from mesh_core.inspect import JobInfo, RunningJob, connect, jobs


class LookCommand:
    """Look into a job that runs on this machine, from any terminal of the same user. Nothing in the job is changed."""

    def configure(self, parser: ArgumentParser) -> None:
        """Declare the subcommands; without one it lists the jobs."""
        parser.add_argument("--job", type=int, metavar="PID", help="the job whose script has this pid")
        parser.set_defaults(do="list", json=False)
        commands = parser.add_subparsers(metavar="COMMAND", help="without one, lists the jobs")
        for name, summary in (
            ("list", "list the jobs that run"),
            ("snapshot", "show hosts, processes and actors, and what they do"),
            ("events", "show what happens, until Ctrl-C or the job's end"),
            ("logs", "show what workers print, until Ctrl-C or the job's end"),
            ("stacks", "show where the Python threads of all processes stand"),
        ):
            each = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
            each.set_defaults(do=name)
            each.add_argument("--job", type=int, metavar="PID", default=SUPPRESS, help="the job to look into")
            if name != "logs":
                each.add_argument("--json", action="store_true", help="print JSON")
            if name == "events":
                each.add_argument("--past", action="store_true", help="begin with those that are still kept")
            elif name == "stacks":
                each.add_argument("mesh", nargs="?", default="", help="only the processes of this mesh")
            if name in ("snapshot", "stacks"):
                each.add_argument(
                    "--timeout", type=float, default=2.0, metavar="SECONDS", help="wait so long for processes"
                )

    def run(self, args: Namespace) -> int:
        """Carry out one subcommand."""
        if args.do == "list":
            # Of none there is nothing to say by a status: that is not wrong.
            found = [info for info in jobs() if args.job in (None, info.pid)]
            print(_listed(found, as_json=args.json))
            return _exit.OK
        job = connect(args.job)
        try:
            _show(job, args)
        except KeyboardInterrupt:
            if args.do not in ("events", "logs"):
                raise
        except BrokenPipeError:
            # `head` has seen enough; at its end Python would flush into nothing.
            sys.stdout = None
        return _exit.OK


def _show(job: RunningJob, args: Namespace) -> None:
    if args.do == "snapshot":
        shot = job.snapshot(args.timeout)
        print(json.dumps({"schema": 1, **shot.as_dict()}, indent=2) if args.json else shot)
    elif args.do == "stacks":
        found = job.stacks(args.mesh, args.timeout)
        if args.json:
            print(json.dumps({"schema": 1, "procs": [asdict(one) for one in found]}, indent=2))
        else:
            print("\n\n".join(map(str, found)))
    elif args.do == "events":
        missed = 0
        for event in job.events(past=args.past):
            if job.missed > missed:
                print(f"mesh: {job.missed - missed} events were missed", file=sys.stderr)
                missed = job.missed
            print(event.as_json() if args.json else event, flush=True)
    else:
        for one in job.logs():
            if one.missed:
                print(f"mesh: {one.missed} texts were missed", file=sys.stderr)
            stream = sys.stderr if one.is_error else sys.stdout
            stream.write(one.text)
            stream.flush()


def _listed(found: Iterable[JobInfo], *, as_json: bool) -> str:
    if as_json:
        return json.dumps({"schema": 1, "jobs": [asdict(info) for info in found]}, indent=2)
    rows = [
        (str(info.pid), Path(info.script).name or "python", _age(time.time() - info.began), info.folder)
        for info in found
    ]
    return (
        aligned([("JOB", "SCRIPT", "FOR", "IN"), *rows]) if rows else "no job of yours runs on this machine"
    )


def _age(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"
