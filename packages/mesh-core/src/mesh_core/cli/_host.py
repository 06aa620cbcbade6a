"""``mesh host``: run the agent of this machine."""

from __future__ import annotations

import argparse
import sys

from mesh_core.cli import _exit

_EXAMPLE = """\
example, with a folder created by `mesh credentials new train` on the script's machine:
  scp -rp train/host HERE:mesh-credentials
  mesh host --listen 0.0.0.0:26600 --credentials mesh-credentials
  ... and in the script: attach_to_workers(["tcp://HERE:26600"], credentials="train")

The address is printed to stdout. Jobs that begin or end, and refused connections, are reported on stderr."""


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE, such as zone=a, got {text!r}")
    return name, value


def _amount(text: str) -> tuple[str, float]:
    name, value = _pair(text)
    try:
        return name, float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be NAME=NUMBER, such as gpus=8, got {text!r}") from None


class HostCommand:
    """Serve jobs on this machine."""

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the options."""
        parser.formatter_class = argparse.RawDescriptionHelpFormatter
        parser.description = (
            "Serve jobs on this machine, also several at once, until SIGTERM, SIGHUP or Ctrl-C."
        )
        parser.epilog = _EXAMPLE
        parser.add_argument(
            "--listen",
            metavar="HOST:PORT",
            help="the address at which controllers and other hosts connect; port 0 stands for any free port",
        )
        parser.add_argument(
            "--credentials", metavar="DIR", required=True, help="the folder with this host's credentials"
        )
        parser.add_argument(
            "--dial",
            metavar="HOST:PORT",
            help="the address at which a script waits (attach_to_workers(listen=...)), if nobody can connect to this host",
        )
        parser.add_argument(
            "--once",
            action="store_true",
            help="serve a single job, and exit when it ends",
        )
        parser.add_argument(
            "--name", help="this host's name in errors and listings (default: the machine's name)"
        )
        parser.add_argument(
            "--label",
            metavar="NAME=VALUE",
            action="append",
            default=[],
            type=_pair,
            help="a label by which scripts select this host, such as zone=a (hosts.select(zone='a')); may be repeated",
        )
        parser.add_argument(
            "--resource",
            metavar="NAME=NUMBER",
            action="append",
            default=[],
            type=_amount,
            help="the same with an amount, such as gpus=8; may be repeated",
        )

    def run(self, options: argparse.Namespace) -> int:
        """Serve until SIGTERM, SIGHUP or Ctrl-C."""
        from mesh_core._process.agent import run_worker_loop_forever

        if options.listen is None and options.dial is None:
            print(
                "mesh: missing argument: give --listen, or --dial if nobody can connect to this host",
                file=sys.stderr,
            )
            return _exit.USAGE

        def ready(address: str) -> None:
            print(f"tcp://{address}", flush=True)

        run_worker_loop_forever(
            options.listen,
            credentials=options.credentials,
            dial=options.dial,
            name=options.name,
            labels=dict(options.label),
            resources=dict(options.resource),
            once=options.once,
            ready=ready,
        )
        return _exit.OK
