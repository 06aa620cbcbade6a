"""``mesh exec``: a command on the hosts of a job. The hosts need mesh-launchers too."""

from __future__ import annotations

import subprocess
import sys
from argparse import REMAINDER, ArgumentParser, Namespace

from mesh_core import Actor, HostMesh, endpoint
from mesh_launchers._errors import LaunchError
from mesh_launchers._launch import attach_job

_NOT_FOUND = 127
_SIGNAL = 128


class Runner(Actor):
    """Runs commands on its host. What they write is what its process writes, and comes to the terminal as such."""

    @endpoint
    def run(self, argv: list[str]) -> int:
        """Run one, and return its exit status as shells have it."""
        try:
            status = subprocess.run(argv, stdin=subprocess.DEVNULL, check=False).returncode
        except OSError as error:
            sys.stderr.write(f"{argv[0]}: {error.strerror}\n")
            return _NOT_FOUND
        return _SIGNAL - status if status < 0 else status


class ExecCommand:
    """Runs a command on the hosts of a job that no script uses, at the same time, and returns the worst exit status."""

    def configure(self, parser: ArgumentParser) -> None:
        """Declare the options."""
        parser.add_argument("--mesh", help="on the hosts of this mesh, where the job has several")
        parser.add_argument(
            "--on",
            metavar="RANGE",
            help="only on these hosts of the mesh: one, such as 2, or some, such as 0:4",
        )
        parser.add_argument("job", help="its name; `mesh jobs` lists them")
        parser.add_argument("command", nargs=REMAINDER, help="behind --: the command and its arguments")

    def run(self, args: Namespace) -> int:
        """Run it."""
        argv = args.command[1:] if args.command[:1] == ["--"] else args.command
        if not argv:
            raise LaunchError(f"say what to run: mesh exec {args.job} -- COMMAND")
        job = attach_job(args.job)
        try:
            if args.mesh is not None and args.mesh not in job.meshes:
                raise LaunchError(
                    f"job {job.name!r} has no mesh {args.mesh!r}; it has {', '.join(job.meshes)}"
                )
            hosts = _chosen(job.hosts if args.mesh is None else job.meshes[args.mesh], args.on)
            procs = hosts.spawn_procs(name="exec")
            statuses: list[int] = list(procs.spawn("runners", Runner).run.call(argv).get().values())
            procs.stop().get()
            return max(statuses)
        finally:
            job.detach()


def _chosen(hosts: HostMesh, on: str | None) -> HostMesh:
    """Return some of the hosts."""
    if on is None:
        return hosts
    first, colon, last = on.partition(":")
    try:
        begin = int(first) if first else 0
        end = (int(last) if last else len(hosts)) if colon else begin + 1
        if not 0 <= begin < end <= len(hosts):
            raise ValueError
    except ValueError:
        raise LaunchError(
            f"--on {on}: write one host, such as 2, or some, such as 0:4; there are {len(hosts)}"
        ) from None
    return hosts.slice(hosts=slice(begin, end))
