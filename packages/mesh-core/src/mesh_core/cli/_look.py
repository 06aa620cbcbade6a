"""``mesh look``."""

import json
import string
import sys
import time
from argparse import SUPPRESS, ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from mesh_core._common.display import printable
from mesh_core._common.errors import MeshError
from mesh_core.cli import _exit
from mesh_core.cli._table import age, aligned
from mesh_core.inspect import JobInfo, RunningJob, connect, jobs


class LookCommand:
    """Look into a job on this machine, from any terminal of the same user, or with credentials into one on other machines.

    Nothing in the job is changed.
    """

    def configure(self, parser: ArgumentParser) -> None:
        """Declare the subcommands; without one, ``run`` lists the jobs."""
        _add_where(parser)
        parser.set_defaults(do="list", json=False, job=None, host=None, credentials=None)
        commands = parser.add_subparsers(metavar="COMMAND", help="without one, lists the jobs")
        for name, summary in (
            ("list", "list the running jobs"),
            ("snapshot", "show hosts, processes and actors, and what they are doing"),
            ("waits", "show who waits for whom, and deadlocks"),
            ("events", "show events until Ctrl-C or the end of the job"),
            ("logs", "show what workers print, until Ctrl-C or the end of the job"),
            ("stacks", "show the stacks of the Python threads of all processes"),
        ):
            each = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
            each.set_defaults(do=name)
            _add_where(each)
            if name != "logs":
                each.add_argument("--json", action="store_true", help="print JSON")
            if name == "events":
                each.add_argument(
                    "--past", action="store_true", help="begin with the events that are still kept"
                )
            elif name == "stacks":
                each.add_argument("mesh", nargs="?", default="", help="only the processes of this mesh")
            if name in ("snapshot", "waits", "stacks"):
                each.add_argument(
                    "--timeout",
                    type=float,
                    default=2.0,
                    metavar="SECONDS",
                    help="how long to wait for processes",
                )

    def run(self, args: Namespace) -> int:
        """Run one subcommand."""
        if (args.host is None) != (args.credentials is None):
            raise MeshError("--host and --credentials must be given together")
        if args.do == "list":
            known = jobs(host=args.host, credentials=args.credentials)
            found = [info for info in known if args.job in (None, info.pid, info.id)]
            print(_listed(found, args.host, as_json=args.json))
            return _exit.OK
        job = connect(args.job, host=args.host, credentials=args.credentials)
        try:
            _show(job, args)
        except KeyboardInterrupt:
            if args.do not in ("events", "logs"):
                raise
        except BrokenPipeError:
            # A reader such as `head` has left; without this, Python fails to flush stdout at exit.
            sys.stdout = None
        return _exit.OK


def _add_where(parser: ArgumentParser) -> None:
    """Add the options that select a job, which may stand before or after the subcommand."""
    parser.add_argument(
        "--job",
        type=_job,
        metavar="JOB",
        default=SUPPRESS,
        help="the pid of the job's script, or the job's ID",
    )
    parser.add_argument(
        "--host",
        metavar="ADDRESS",
        default=SUPPRESS,
        help="look through this host of the job, on any machine, such as tcp://b7:26600",
    )
    parser.add_argument(
        "--credentials",
        type=Path,
        metavar="DIR",
        default=SUPPRESS,
        help="the folder of the job's owner or of an observer; required with --host",
    )


def _job(text: str) -> int | str:
    if len(text) == 16 and set(text) <= set(string.hexdigits):
        return text.lower()
    if not text.isdecimal():
        raise ArgumentTypeError(f"must be a pid or an ID of 16 hexadecimal digits, got {text!r}")
    return int(text)


def _show(job: RunningJob, args: Namespace) -> None:
    if args.do == "snapshot":
        shot = job.snapshot(args.timeout)
        print(json.dumps({"schema": 1, **shot.as_dict()}, indent=2) if args.json else printable(str(shot)))
    elif args.do == "waits":
        graph = job.waits(args.timeout)
        print(json.dumps({"schema": 1, **graph.as_dict()}, indent=2) if args.json else printable(str(graph)))
    elif args.do == "stacks":
        found = job.stacks(args.mesh, args.timeout)
        if args.json:
            print(json.dumps({"schema": 1, "procs": [asdict(one) for one in found]}, indent=2))
        else:
            print(printable("\n\n".join(map(str, found))))
    elif args.do == "events":
        missed = 0
        for event in job.events(past=args.past):
            if job.missed > missed:
                print(f"mesh: missed {job.missed - missed} events", file=sys.stderr)
                missed = job.missed
            print(event.as_json() if args.json else printable(str(event)), flush=True)
    else:
        for one in job.logs():
            if one.missed:
                print(f"mesh: missed {one.missed} pieces of output", file=sys.stderr)
            stream = sys.stderr if one.is_error else sys.stdout
            stream.write(one.text)
            stream.flush()


def _listed(found: Iterable[JobInfo], host: str | None, *, as_json: bool) -> str:
    if as_json:
        return json.dumps({"schema": 1, "jobs": [asdict(info) for info in found]}, indent=2)
    rows = [
        (
            str(info.pid),
            # Pids of jobs on other machines are not unique.
            *([info.id, info.host] if host else []),
            Path(info.script).name or "python",
            age(time.time() - info.began),
            info.folder,
        )
        for info in found
    ]
    if not rows:
        return (
            f"no job can be looked into through {host}"
            if host
            else "you have no running jobs on this machine"
        )
    return aligned([("JOB", *(["ID", "ON"] if host else []), "SCRIPT", "FOR", "IN"), *rows])
