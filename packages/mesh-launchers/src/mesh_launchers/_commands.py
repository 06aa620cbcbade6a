"""The commands of ``mesh`` for jobs of hosts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from argparse import REMAINDER, ArgumentParser, Namespace
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mesh_core.extensions import open_own_file
from mesh_core.plugins import CommandPlugin, hookimpl
from mesh_launchers._contract import Phase
from mesh_launchers._door import Door
from mesh_launchers._errors import JobNotFound, LaunchError
from mesh_launchers._exec import ExecCommand
from mesh_launchers._folder import JobFolder
from mesh_launchers._launch import JOB_VARIABLE, jobs
from mesh_launchers._plan import Plan
from mesh_launchers._shell import ShellCommand
from mesh_launchers._state import JobState

_STOP_S = 60.0
_POLL_S = 0.5
_TARGETS = "mesh.toml"


def _open(name: str) -> Door:
    return Door(name, JobFolder.of(name).connect(10.0))


def _write(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


class JobsCommand:
    """Lists the jobs of this user on this machine."""

    def configure(self, parser: ArgumentParser) -> None:
        """Declare the options."""
        parser.add_argument("job", nargs="?", help="show the hosts of this job")
        parser.add_argument("--json", action="store_true", help="print JSON")

    def run(self, args: Namespace) -> int:
        """List them."""
        found = [each for each in jobs() if args.job in (None, each.name)]
        if args.job is not None and not found:
            raise JobNotFound(f"no job {args.job!r} runs here")
        if args.json:
            _write(json.dumps([each.as_dict() for each in found], indent=2))
        elif args.job is not None:
            _write(_table([("HOST", "MESH", "STATE", "ADDRESS", "WHY"), *_hosts(found[0])]))
            if (credentials := found[0].credentials) is not None:
                _write(f"credentials: {credentials.trouble or credentials}")
        elif found:
            rows = [
                (each.name, each.launcher, _count(each), _user(each), str(each.credentials)) for each in found
            ]
            _write(_table([("JOB", "LAUNCHER", "HOSTS", "USED BY", "CREDENTIALS"), *rows]))
        else:
            _write("no jobs")
        return 0


def _hosts(state: JobState) -> list[tuple[str, ...]]:
    return [
        (each.name, each.mesh, str(each.phase), each.address or "-", (each.why.splitlines() or ["-"])[0])
        for each in state.hosts
        if each.phase is not Phase.ENDED
    ]


def _count(state: JobState) -> str:
    there = [each for each in state.hosts if each.phase is not Phase.ENDED]
    return f"{sum(each.phase is Phase.RUNNING for each in there)} of {len(there)}"


def _user(state: JobState) -> str:
    if state.used_by is not None:
        return f"pid {state.used_by}"
    return "nobody" if state.left is None else f"nobody, {state.left:.0f} s left"


def _table(rows: Iterable[tuple[str, ...]]) -> str:
    table = list(rows)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in table]
    return "\n".join(each.rstrip() for each in lines)


class StopCommand:
    """Ends jobs: their hosts, and what runs on these."""

    def configure(self, parser: ArgumentParser) -> None:
        """Declare the options."""
        parser.add_argument("job", nargs="+", help="its name; `mesh jobs` lists them")

    def run(self, args: Namespace) -> int:
        """End them."""
        for name in args.job:
            _stop(_open(name), name)
        return 0


def _stop(door: Door, name: str) -> None:
    try:
        door.ask("stop")
        if not door.wait_closed(_STOP_S):
            raise LaunchError(f"job {name!r} has not ended within {_STOP_S:g} s")
    finally:
        door.close()


class LogsCommand:
    """Shows what the agents of a job's hosts have written."""

    def configure(self, parser: ArgumentParser) -> None:
        """Declare the options."""
        parser.add_argument("job", help="its name; `mesh jobs` lists them")
        parser.add_argument("--host", help="only this host")
        parser.add_argument("--lines", type=int, default=50, metavar="N", help="the last N lines of each")
        parser.add_argument(
            "-f", "--follow", action="store_true", help="go on until the job's end, or Ctrl-C"
        )

    def run(self, args: Namespace) -> int:
        """Show them."""
        door, shown = _open(args.job), dict[int, list[str]]()
        try:
            while True:
                state = JobState.of(door.ask("state"))
                hosts = [each for each in state.hosts if args.host in (None, each.name)]
                if not hosts:
                    raise LaunchError(f"job {args.job!r} has no host {args.host!r}")
                for each in hosts:
                    lines = door.ask("log", host=each.number, lines=args.lines).splitlines()
                    for line in _new(shown.get(each.number, []), lines):
                        _write(f"[{each.name}] {line}")
                    shown[each.number] = lines
                if not args.follow:
                    return 0
                time.sleep(_POLL_S)
        except JobNotFound:
            # Followed to the end of the job.
            return 0
        finally:
            door.close()


def _new(before: list[str], now: list[str]) -> list[str]:
    """Return the lines at the end that were not there before."""
    for skipped in range(len(before) + 1):
        if before[skipped:] == now[: len(before) - skipped]:
            return now[len(before) - skipped :]
    return now


class ScaleCommand:
    """Changes the number of hosts of a job that no script uses."""

    def configure(self, parser: ArgumentParser) -> None:
        """Declare the options."""
        parser.add_argument("job", help="its name; `mesh jobs` lists them")
        parser.add_argument(
            "hosts", help="how many it is to have; or, of a launcher that wants names, such as b1,b2"
        )
        parser.add_argument("--mesh", help="in which mesh, where there are several")

    def run(self, args: Namespace) -> int:
        """Change it."""
        door = _open(args.job)
        try:
            state = JobState.of(door.ask("state"))
            meshes = list(dict.fromkeys(each.mesh for each in state.hosts))
            if args.mesh is None and len(meshes) > 1:
                raise LaunchError(
                    f"job {args.job!r} has the meshes {', '.join(meshes)}: say which with --mesh"
                )
            mesh = args.mesh or meshes[0]
            there = {each.number: each.name for each in state.hosts if each.mesh == mesh and each.is_there}
            gone, new = _changes(there, args.hosts)
            if new:
                # Before hosts are ended: nothing is to change where these cannot be had.
                door.ask("fits", mesh=mesh, targets=new)
            if gone:
                door.ask("end", hosts=gone)
            if new:
                door.ask("start", mesh=mesh, targets=new)
            _write(str(JobState.of(door.ask("state"))))
        except (ValueError, TypeError) as error:
            raise LaunchError(str(error)) from None
        finally:
            door.close()
        return 0


def _changes(there: Mapping[int, str], wanted: str) -> tuple[list[int], list[str | None]]:
    """Return which hosts go, by number, and which come, for as many or those that are wanted."""
    if wanted.lstrip("-").isdecimal():
        count = int(wanted)
        if count < 1:
            raise LaunchError("a mesh has one host at least; `mesh stop` ends the job")
        return list(there)[count:], [None] * (count - len(there))
    names = wanted.split(",")
    gone = [number for number, name in there.items() if name not in names]
    return gone, [each for each in names if each not in there.values()]


class RunCommand:
    """Starts hosts, runs a script with them, and ends them with it. The script gets them from ``attach_job()``."""

    def configure(self, parser: ArgumentParser) -> None:
        """Declare the options."""
        parser.add_argument(
            "--target", metavar="NAME", help=f"what the table [targets.NAME] of {_TARGETS} says"
        )
        parser.add_argument("--launcher", help="which launcher; `mesh plugins` lists them")
        parser.add_argument("--hosts", help="how many; or their names, such as b1,b2")
        parser.add_argument("--name", help="what other terminals call the job")
        parser.add_argument(
            "--opt",
            metavar="NAME=VALUE",
            action="append",
            default=[],
            help="an option of the launcher; may be repeated",
        )
        parser.add_argument(
            "--dry-run",
            action="store_true",
            help="only show what would be submitted to a scheduler, and whether the options are good",
        )
        parser.add_argument("script", help="the Python script to run")
        parser.add_argument("arguments", nargs=REMAINDER, help="its arguments")

    def run(self, args: Namespace) -> int:
        """Run it, and return its exit status."""
        try:
            plan = Plan.of(**_told(args))
        except (TypeError, ValueError) as error:
            raise LaunchError(str(error)) from None
        for each in plan.show():
            sys.stderr.write(f"mesh: $ {each}\n")
        if args.dry_run:
            return 0
        sys.stderr.flush()
        folder, connection = plan.begin()
        door = Door(folder.name, connection)
        try:
            try:
                door.ask("offer")
            except JobNotFound:
                raise plan.has_ended(folder) from None
            script = subprocess.Popen(
                [sys.executable, args.script, *args.arguments], env={**os.environ, JOB_VARIABLE: folder.name}
            )
            return _waited(script)
        finally:
            _stop(door, folder.name)


def _waited(script: subprocess.Popen[bytes]) -> int:
    """Wait for a script, and forward the signals that would end this command; return its status as shells report it."""

    def hand_on(number: int, _frame: object) -> None:
        # A terminal sends Ctrl-C to both.
        if number != signal.SIGINT:
            script.send_signal(number)

    before = {each: signal.signal(each, hand_on) for each in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)}
    try:
        status = script.wait()
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    return 128 - status if status < 0 else status


def _told(args: Namespace) -> dict[str, Any]:
    """Return the options of the command line, merged over those of a target."""
    told: dict[str, Any] = {} if args.target is None else dict(_target(args.target))
    for name in ("launcher", "name"):
        if getattr(args, name) is not None:
            told[name] = getattr(args, name)
    if args.hosts is not None:
        told["hosts"] = int(args.hosts) if args.hosts.isdecimal() else args.hosts.split(",")
    for each in args.opt:
        name, equals, value = each.partition("=")
        if not equals:
            raise LaunchError(f"--opt {each}: write NAME=VALUE")
        told[name] = _value(value)
    told.setdefault("launcher", "local")
    return told


def _value(text: str) -> Any:
    """Return a value as TOML reads it, or the text itself."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _target(name: str) -> Mapping[str, Any]:
    """Return a table of the nearest file of targets, from the working folder upwards."""
    here = Path.cwd()
    for folder in (here, *here.parents):
        path = folder / _TARGETS
        if path.is_file():
            targets = _read(path).get("targets", {})
            if name not in targets:
                raise LaunchError(f"{path} has no target {name!r}; it has {', '.join(targets) or 'none'}")
            found: Mapping[str, Any] = targets[name]
            return found
    raise LaunchError(
        f"there is no {_TARGETS} in {here} or above it, which would say what target {name!r} is"
    )


def _read(path: Path) -> dict[str, Any]:
    """Read a file of targets; refuse another user's, whose launchers and interpreters would be started."""
    try:
        with os.fdopen(open_own_file(str(path)), "rb") as file:
            return tomllib.load(file)
    except PermissionError as error:
        raise LaunchError(
            f"{error}: a target says which programs are started, so only your own files are read. Copy what you trust into a {_TARGETS} of "
            "your own in a nearer folder, or name it by --launcher, --hosts and --opt"
        ) from None


@hookimpl
def mesh_register_commands() -> Iterable[CommandPlugin]:
    """The commands of this module."""
    yield CommandPlugin(
        name="exec", api_version=1, create=ExecCommand, summary="run a command on a job's hosts"
    )
    yield CommandPlugin(
        name="jobs", api_version=1, create=JobsCommand, summary="list the jobs of hosts that run"
    )
    yield CommandPlugin(
        name="run", api_version=1, create=RunCommand, summary="run a script with hosts of a launcher"
    )
    yield CommandPlugin(
        name="shell", api_version=1, create=ShellCommand, summary="open a terminal on a host of a job"
    )
    yield CommandPlugin(
        name="scale", api_version=1, create=ScaleCommand, summary="have more hosts in a job, or fewer"
    )
    yield CommandPlugin(name="stop", api_version=1, create=StopCommand, summary="end jobs, with their hosts")
    yield CommandPlugin(
        name="logs", api_version=1, create=LogsCommand, summary="show what a job's hosts have written"
    )
