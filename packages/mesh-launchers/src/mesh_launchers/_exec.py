"""``mesh exec``: a command on the hosts of a job, even while a script has the job."""

from __future__ import annotations

import signal
import sys
from argparse import REMAINDER, ArgumentParser, Namespace
from collections.abc import Callable

from mesh_core import HostMesh
from mesh_launchers._contract import Phase
from mesh_launchers._errors import LaunchError
from mesh_launchers._remote import Runner
from mesh_launchers._state import HostState
from mesh_launchers._visit import chosen, visited

LOST = 255
"""The status of a host that was lost, or could not be reached; ssh uses the same."""
_INTERRUPTED = 130
_GRACE_S = 5.0


class ExecCommand:
    """Runs a command on the hosts of a job, at the same time, and returns the worst exit status. A script may have the job."""

    def configure(self, parser: ArgumentParser) -> None:
        """Declare the options."""
        self._options(parser)
        parser.add_argument("job", help="its name; `mesh jobs` lists them")
        parser.add_argument("command", nargs=REMAINDER, help="after --: the command and its arguments")

    def _options(self, parser: ArgumentParser) -> None:
        parser.add_argument("--mesh", help="on the hosts of this mesh, where the job has several")
        parser.add_argument(
            "--on",
            metavar="HOSTS",
            help="only on these hosts of the mesh: host=2, hosts=0:4, or their names with commas in between",
        )
        add_dial(parser)

    def run(self, args: Namespace) -> int:
        """Run it."""
        argv = command_of(args, "mesh exec", args.command, self._options)
        if not argv:
            raise LaunchError(f"say what to run: mesh exec {args.job} -- COMMAND")
        with visited(args.job) as visit:
            hosts = running(chosen(visit.state(), args.mesh, args.on), is_named=args.on is not None)
            statuses, interrupted = run_on(visit.attach(hosts, args.dial), argv)
            lost = {
                host: each
                for host, each in zip(hosts, statuses, strict=True)
                if isinstance(each, BaseException)
            }
            if lost:
                visit.check()
            for host, error in lost.items():
                sys.stderr.write(f"mesh: {host.name}: {str(error).splitlines()[0]}\n")
            if interrupted:
                return _INTERRUPTED
            return max(LOST if isinstance(each, BaseException) else each for each in statuses)


def command_of(
    args: Namespace, name: str, words: list[str], options: Callable[[ArgumentParser], None]
) -> list[str]:
    """Return the command among the words behind a job's name. Options before its ``--`` are added to the arguments.

    As a part of the command, they would have it run on all hosts where one was meant.
    """
    if not words or not words[0].startswith("-"):
        return words
    at = words.index("--") if "--" in words else len(words)
    parser = ArgumentParser(prog=name, usage=f"{name} [options] JOB [options] -- COMMAND", add_help=False)
    options(parser)
    parser.parse_args(words[:at], args)
    return words[at + 1 :]


def add_dial(parser: ArgumentParser) -> None:
    """Declare the option of both commands for hosts that connect to the script."""
    parser.add_argument(
        "--dial",
        metavar="HOST:PORT",
        help="where the hosts of a job with dial= connect to this command; by default the host of that, and a free port",
    )


def running(hosts: list[HostState], *, is_named: bool) -> list[HostState]:
    """Return the hosts that run. Others are an error if the user has named them, else a line on stderr."""
    there = [each for each in hosts if each.phase is Phase.RUNNING]
    for each in hosts:
        if each not in there:
            why = f": {each.why.splitlines()[0]}" if each.why else ""
            words = f"host {each.name} is {each.phase}{why}"
            if is_named or not there:
                raise LaunchError(words)
            sys.stderr.write(f"mesh: {words}; left out\n")
    return there


def run_on(hosts: HostMesh, argv: list[str]) -> tuple[list[int | BaseException], bool]:
    """Run a command on some hosts; return their exit statuses, or errors, and whether Ctrl-C has interrupted it.

    Ctrl-C interrupts the commands there; a second one, or some seconds, kills them.
    """
    procs = hosts.spawn_procs(name="exec")
    # Every line with its host in front, as it arrives.
    procs.logging_option(aggregate_window_sec=None)
    runners = procs.spawn("exec", Runner)
    run = runners.run.call(argv)
    interrupted = False
    try:
        outcomes = run.get(return_exceptions=True)
    except KeyboardInterrupt:
        interrupted = True
        try:
            runners.send.broadcast(signal.SIGINT)
            outcomes = run.get(timeout=_GRACE_S, return_exceptions=True)
        except (KeyboardInterrupt, TimeoutError):
            runners.send.broadcast(signal.SIGKILL)
            outcomes = run.get(timeout=_GRACE_S, return_exceptions=True)
    # Do not wait for lost hosts.
    procs.stop().exception(_GRACE_S)
    return list(outcomes.values()), interrupted
