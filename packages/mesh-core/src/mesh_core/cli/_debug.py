"""``mesh debug``."""

import contextlib
import json
import sys
import time
from argparse import REMAINDER, SUPPRESS, ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Final

from mesh_core._common.errors import MeshError
from mesh_core._features.debug.attached import Attached
from mesh_core._features.debug.client import Answer, Cast, Found, Stop, find
from mesh_core._features.debug.selection import Selection, names
from mesh_core.cli import _exit
from mesh_core.cli._table import age, aligned

_HELP: Final = """\
list                  show which actors are stopped, and where
attach WHICH          debug one actor: n, s, p, w, u, d, ll, b, c, interact ...; h explains them
cast WHICH COMMAND    send a command to several actors and show their answers
continue [WHICH]      let actors continue; without WHICH, all of them
quit                  leave; stopped actors stay stopped

WHICH is a number from the list, the name of a mesh, coordinates, or all: 2, trainers, gpus=0:4, trainers,gpus=3
"""


class DebugCommand:
    """List the actors that are stopped at breakpoints and debug them, one at a time or many at once."""

    def configure(self, parser: ArgumentParser) -> None:
        """Declare the subcommands; without one, ``run`` opens a prompt."""
        parser.add_argument("--job", type=int, metavar="PID", help="only the job whose script has this pid")
        parser.set_defaults(do=None, json=False)
        commands = parser.add_subparsers(metavar="COMMAND", help="without one, opens a prompt")
        for name, summary in (
            ("list", "show which actors are stopped, and where"),
            ("attach", "debug one actor"),
            ("cast", "send a command to several actors and show their answers"),
            ("continue", "let actors continue"),
        ):
            each = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
            each.set_defaults(do=name)
            each.add_argument("--job", type=int, metavar="PID", default=SUPPRESS, help="only this job")
            if name == "list":
                each.add_argument("--json", action="store_true", help="print JSON instead of a table")
            elif name == "cast":
                each.add_argument(
                    "which", help="all, a number from the list, a mesh, or coordinates: gpus=0:4"
                )
                each.add_argument(
                    "command", nargs=REMAINDER, help="a command of the debugger, such as: p loss"
                )
            else:
                each.add_argument("which", nargs="+" if name == "attach" else "*", help="as for cast")

    def run(self, args: Namespace) -> int:
        """Run one command, or open a prompt."""
        command: list[str] = args.command if args.do == "cast" else []
        if command[-2:-1] == ["--job"] and command[-1].isdecimal():
            # Everything after the actors is the command; its last words may still choose the job, as with other commands.
            args.job = int(command[-1])
            command = command[:-2]
        debugger = JobDebugger(args.job)
        if args.do is None:
            return debugger.prompt()
        if args.do == "list":
            debugger.show(as_json=args.json)
        elif args.do == "attach":
            debugger.attach(" ".join(args.which))
        elif args.do == "cast":
            debugger.cast(args.which, " ".join(command))
        else:
            debugger.continue_(" ".join(args.which))
        return _exit.OK


class JobDebugger:
    """The commands of ``mesh debug``, for the stopped actors of one job or of all."""

    def __init__(self, job: int | None) -> None:
        self._job = job
        self._listed: list[Stop] | None = None
        """The list last shown, which numbers in commands refer to."""

    def prompt(self) -> int:
        """Read and run commands until the user leaves."""
        if sys.stdin.isatty():
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401 - gives input() its editing and history
        self._run("list")
        while True:
            try:
                line = input("mesh debug> ")
            except KeyboardInterrupt:
                print()
                continue
            except EOFError:
                print()
                return _exit.OK
            if line.strip() in ("quit", "q", "exit"):
                return _exit.OK
            self._run(line)

    def _run(self, line: str) -> None:
        word, _, rest = line.strip().partition(" ")
        which, _, command = rest.strip().partition(" ")
        commands: dict[str, Callable[[], None]] = {
            "list": self.show,
            "attach": lambda: self.attach(rest),
            "cast": lambda: self.cast(which, command),
            "continue": lambda: self.continue_(rest),
            "help": lambda: print(_HELP, end=""),
        }
        if not word:
            return
        short = {"l": "list", "a": "attach", "c": "continue", "h": "help", "?": "help"}
        known = commands.get(short.get(word, word))
        try:
            if known is None:
                raise MeshError(f"unknown command {word!r}; the commands are {', '.join(commands)} and quit")
            known()
        except (MeshError, OSError) as error:
            print(f"mesh: {error}")
        except KeyboardInterrupt:
            print()

    def show(self, *, as_json: bool = False) -> None:
        """Show which actors are stopped."""
        found = find(self._job)
        self._listed = found.stops
        print(_as_json(found) if as_json else _as_table(found))

    def attach(self, which: str) -> None:
        """Debug one actor."""
        found = self._pick(which) if which else self._stops()
        if not found:
            raise MeshError("nothing is stopped")
        if len(found) > 1:
            raise MeshError(
                f"attach takes one actor, but {which + ' matches' if which else 'there are'} {len(found)}: "
                f"{names(found)}. Name one, or use cast"
            )
        Attached(found[0]).run()

    def cast(self, which: str, command: str) -> None:
        """Send one command to several actors."""
        if not which or not command.strip():
            raise MeshError("cast needs actors and a command, such as: cast gpus=0:4 p loss")
        _show(Cast(self._pick(which), command).collect(_waiting))

    def continue_(self, which: str) -> None:
        """Let actors continue."""
        _show(Cast(self._pick(which or "all"), "continue").collect(_waiting))

    def _stops(self) -> list[Stop]:
        return find(self._job).stops

    def _pick(self, which: str) -> list[Stop]:
        selection = Selection.parse(which)
        # Numbers refer to the list that the user has seen; everything else to what is stopped now.
        if selection.numbers and self._listed is not None:
            return selection.pick(self._listed)
        return selection.pick(self._stops())


def _waiting(count: int) -> None:
    print(f"\rwaiting for {count} (Ctrl-C gives up) ", end="", file=sys.stderr, flush=True)


def _show(answers: list[Answer]) -> None:
    groups: dict[str, list[Stop]] = {}
    for answer in answers:
        groups.setdefault(answer.text, []).append(answer.stop)
    for text, stops in groups.items():
        count = f" ({len(stops)} alike)" if len(stops) > 1 else ""
        print(f"{names(stops)}{count}:")
        for line in text.splitlines() or ["(nothing)"]:
            print(f"  {line}")


def _as_json(found: Found) -> str:
    stops = [
        {
            "number": number,
            "job": stop.job,
            "script": stop.script,
            "pid": stop.pid,
            **{key: value for key, value in stop.about.items() if key not in ("id", "banner")},
        }
        for number, stop in enumerate(found.stops)
    ]
    return json.dumps({"schema": 1, "stops": stops, "silent": found.silent}, indent=2)


def _as_table(found: Found) -> str:
    notes = [
        f"process {Path(path).stem} of job {Path(path).parent.name} has stopped actors, but does not answer"
        for path in found.silent
    ]
    if not found.stops:
        return "\n".join(["nothing is stopped", *notes])
    several = len({stop.about.get("host") for stop in found.stops}) > 1
    rows = [("#", "JOB", "MESH", "RANK", "COORDINATES", *["HOST"] * several, "AT", "IN", "FOR", "WHY")]
    for number, stop in enumerate(found.stops):
        about = stop.about
        why = about["why"] if about["state"] == "stopped" else "running"
        rows.append(
            (
                str(number),
                f"{Path(stop.script).name or 'python'} ({stop.job})",
                stop.mesh,
                str(about["rank"]),
                ",".join(f"{label}={index}" for label, index in stop.coordinates.items()) or "-",
                *[str(about.get("host", "-"))] * several,
                f"{about['file']}:{about['line']}",
                about["function"],
                age(time.time() - about["since"]),
                why + (" (attached)" if about["attached"] else ""),
            )
        )
    return "\n".join([aligned(rows), *notes])
