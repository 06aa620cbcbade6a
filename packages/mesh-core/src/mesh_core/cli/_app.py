"""Find and run the plugin that a command line names.

The first word picks the subcommand before argparse runs, so that only its plugin is imported;
``mesh --version`` and ``mesh --help`` import none.
"""

import argparse
import importlib.metadata
import os
import sys
from collections.abc import Sequence
from typing import Final

from mesh_core._common.display import printable
from mesh_core._common.errors import MeshError, PluginError, PluginLoadError
from mesh_core.cli import _exit
from mesh_core.cli._quiet import quiet_manager
from mesh_core.cli._summaries import SIBLING_SUMMARIES, SUMMARIES
from mesh_core.plugins import COMMANDS, PluginEntry, PluginManager

_OWN_DISTRIBUTION: Final = "mesh-core"


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``mesh`` with these arguments, by default those of the process, and return the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    manager = quiet_manager()
    try:
        status = _dispatch(manager, arguments)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return _exit.INTERRUPTED
    except BrokenPipeError:
        # Otherwise the interpreter prints another error when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _exit.PIPE_CLOSED
    except MeshError as error:
        return _complain(str(error), _exit.FAILED)


def _dispatch(manager: PluginManager, arguments: list[str]) -> int:
    if arguments and not arguments[0].startswith("-"):
        return _run(manager, arguments[0], arguments[1:])
    parser = _parser(manager)
    options = parser.parse_args(arguments)
    if options.version:
        from mesh_core.cli._version import version_report

        print(version_report())
        return _exit.OK
    parser.print_help(sys.stderr)
    return _exit.USAGE


def _parser(manager: PluginManager) -> argparse.ArgumentParser:
    lines = [f"  {entry.name:<14}  {_summary(entry)}" for entry in manager.entries(COMMANDS)]
    parser = argparse.ArgumentParser(
        prog="mesh",
        usage="mesh [--version] [--help] COMMAND ...",
        description="Drive a whole cluster from one Python script.",
        epilog="\n".join(
            [
                "commands:",
                *(line.rstrip() for line in lines),
                "",
                "`mesh COMMAND --help` describes a command.",
            ]
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--version", "-V", action="store_true", help="show the versions of Mesh packages and Python"
    )
    return parser


def _summary(entry: PluginEntry) -> str:
    """Return what a command does; for a command of an outside package, what that package is."""
    if entry.distribution == _OWN_DISTRIBUTION:
        return SUMMARIES.get(entry.name, "")
    if known := SIBLING_SUMMARIES.get((entry.distribution, entry.name)):
        return f"{known} (from {entry.distribution})"
    try:
        summary = " ".join((importlib.metadata.metadata(entry.distribution)["Summary"] or "").split())
    except Exception:  # noqa: BLE001 - damaged or missing, and not needed
        summary = ""
    return f"{summary} (from {entry.distribution})" if summary else f"from {entry.distribution}"


def _run(manager: PluginManager, name: str, arguments: list[str]) -> int:
    try:
        # Mesh's own commands work even if another distribution offers the same name: `mesh plugins` reports it.
        plugin = manager.get(COMMANDS, name, distribution=_OWN_DISTRIBUTION if name in SUMMARIES else None)
    except PluginLoadError as error:
        return _complain(str(error), _exit.UNUSABLE)
    except PluginError as error:
        return _complain(str(error), _exit.USAGE)
    able = manager.probe(plugin)
    if not able:
        return _complain(f"command {name!r} cannot work here: {able.reason}; {able.remedy}", _exit.UNUSABLE)
    parser = argparse.ArgumentParser(
        prog=f"mesh {name}", description=plugin.summary or None, allow_abbrev=False
    )
    try:
        command = plugin.create()
        command.configure(parser)
        status: object = command.run(parser.parse_args(arguments))
    except (MeshError, OSError):
        raise
    except Exception as error:
        error.add_note(f"raised by command {name!r} of {manager.origin(COMMANDS, name)}")
        raise
    if not isinstance(status, int):
        # Python itself takes None for success, and prints anything else.
        origin = manager.origin(COMMANDS, name)
        return _complain(
            f"run() of command {name!r} must return its exit status, an int, got {status!r}; report this to the author of {origin}",
            _exit.UNUSABLE,
        )
    return status


def _complain(message: str, status: int) -> int:
    # Parts of it may come from other machines.
    print(printable(f"mesh: {message}"), file=sys.stderr)
    return status
