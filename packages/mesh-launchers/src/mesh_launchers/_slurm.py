"""The launcher ``slurm``: hosts allocated by Slurm, as tasks of one ``srun`` for each mesh.

SLR-1: hosts end with their srun, which is a child of the process that keeps the job: nothing is left in Slurm when that has ended.
SLR-2: what Slurm reports about a job that waits, or that it refuses, is reported in its own words; what it will never start fails at once.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mesh_core.extensions import naming
from mesh_core.plugins import ProbeResult, hookimpl
from mesh_launchers._contract import API_VERSION, HostSpec, LauncherPlugin, Phase, Place
from mesh_launchers._durations import seconds
from mesh_launchers._host import command, told
from mesh_launchers._squeue import FIELDS, Queued, grace_of, hostnames, notice_in, queued
from mesh_launchers._together import Group, GroupLauncher

_POLL_S = 1.0
_RUNNING_POLL_S = 5.0
_END_POLL_S = 0.5
_END_POLLS = 16
"""While a job completes, Slurm does not say what has ended it."""
_SOON_S = 120
"""How long before its time limit a job's end is announced."""
_ENDING_S = 2.0
"""How long before the kill hosts end by themselves."""
_NOTICE_LOOKS, _NOTICE_LOOK_S = 8, 0.05
"""Slurm prints why it signals a host at about the time when it does."""
_PLACE = "SLURM_PROCID"


@dataclass(frozen=True)
class SlurmOptions:
    """Options of the launcher ``slurm``. Those without a description are srun's of that name."""

    python: str = "python3"
    """The interpreter on the nodes, with mesh-core of the script's version."""
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    reservation: str | None = None
    constraint: str | None = None
    nodelist: str | None = None
    exclude: str | None = None
    het_group: int | None = None
    """In a heterogeneous job, the component that has these hosts (``--het-group``); by default the first."""
    time: str | int | None = None
    gres: str | None = None
    gpus_per_node: int | str | None = None
    cpus: int | None = None
    """Processors of each host (``--cpus-per-task``); without it, and without ``exclusive``, Slurm may give a host only one."""
    mem: str | None = None
    exclusive: bool = False
    """Whole nodes."""
    arguments: Sequence[str] = ()
    """More arguments of srun, such as ``("--licenses=mesh",)``."""
    without: Sequence[str] = ()
    """Arguments of this launcher that the site does not accept, such as ``("--no-kill",)``."""
    queue_timeout: float | str | None = None
    """The time in the queue after which hosts have failed, such as ``"2h"``; by default they wait forever."""
    start_timeout: float = 120.0
    """Seconds until a host's agent listens, once Slurm has started the job."""
    preemption_grace: float | None = None
    """Seconds that hosts continue after Slurm's SIGTERM, so that jobs can leave them; by default two less than Slurm waits before the kill
    (``KillWait``, or the partition's ``GraceTime`` if that is longer), if ``scontrol`` shows it; 0 ends them at once."""
    folder: str | None = None
    """A folder that the nodes see, for a private file with the hosts' credentials; by default that of the job."""
    listen: str = "0.0.0.0:0"
    """Where agents listen."""

    def __post_init__(self) -> None:
        """Check what Slurm would not check."""
        if self.queue_timeout is not None:
            seconds(self.queue_timeout, "queue_timeout")
        if self.preemption_grace is not None and self.preemption_grace < 0:
            raise ValueError(f"preemption_grace must not be negative, got {self.preemption_grace:g}")

    def command(self, name: str, count: int, inside: str | None) -> list[str]:
        """Return srun with its arguments, for so many hosts."""
        said: dict[str, object] = {
            "--job-name": name,
            "--nodes": count,
            "--ntasks": count,
            "--ntasks-per-node": 1,
            "--cpus-per-task": self.cpus,
            "--partition": self.partition,
            "--account": self.account,
            "--qos": self.qos,
            "--reservation": self.reservation,
            "--constraint": self.constraint,
            "--nodelist": self.nodelist,
            "--exclude": self.exclude,
            "--het-group": self.het_group,
            "--time": self.time,
            "--gres": self.gres,
            "--gpus-per-node": self.gpus_per_node,
            "--mem": self.mem,
            "--jobid": inside,
            "--kill-on-bad-exit": 0,
            "--wait": 0,
        }
        # Not unbuffered: that tears lines apart.
        flags = [
            "--no-kill",
            *(["--overlap"] if inside else []),
            *(["--exclusive"] if self.exclusive else []),
        ]
        words = [f"{key}={value}" for key, value in said.items() if value is not None] + flags
        return [
            "srun",
            *[each for each in words if each.partition("=")[0] not in self.without],
            *self.arguments,
        ]


class SlurmLauncher(GroupLauncher["_Step"]):
    """Starts agents by srun: a separate job for each mesh, or a step if the script is in a job already.

    Nodes return to Slurm when all hosts that were started together have ended.
    """

    async def start(self, options: SlurmOptions, hosts: Sequence[HostSpec]) -> None:
        """Begin to start hosts."""
        self.begin(_Step(self.place, options, hosts, len(self.groups)))


class _Step(Group):
    """The hosts of one srun."""

    def __init__(self, place: Place, options: SlurmOptions, hosts: Sequence[HostSpec], number: int) -> None:
        super().__init__(place, hosts, f"srun{number}.log")
        self._options = options
        self._name = f"mesh-{place.job}-{number}"
        self._nodes: dict[int, str] = {}
        self._addresses: dict[int, str] = {}
        self._status = 0
        self._grace = 0.0
        folder = place.folder if options.folder is None else Path(options.folder)
        self._file = folder / f"{self._name}.json"

    def begin(self) -> None:
        """Begin to start them, which may take long."""
        self.report([*self.hosts], Phase.WAITING)
        super().begin()

    async def live(self) -> None:
        """Start them, and follow what Slurm does with them."""
        options = self._options
        try:
            grace = options.preemption_grace
            self._grace = await _grace(options.partition) if grace is None else grace
            _write_anew(self._file, self._told())
            inside = os.environ.get("SLURM_JOB_ID")
            srun = options.command(self._name, len(self.hosts), inside)
            # Settings of one job leak into the next.
            env = {
                name: value
                for name, value in os.environ.items()
                if inside or not name.startswith(("SLURM_", "SBATCH_", "SRUN_")) or name == "SLURM_CONF"
            }
            # What was submitted can be read, since sites have rules of their own.
            with naming(self.process.log):
                self.process.log.write_text(f"$ {shlex.join(srun)}\n")
            # A job in the queue does not read its input: it ends with the process that keeps the job anyway.
            guard = ["setpriv", "--pdeathsig", "TERM"] if shutil.which("setpriv") else []
            arguments = [*guard, *srun, *command(options.python, self.place.job), str(self._file)]
            await self.start_process(arguments, b"", env)
            await self._watch()
        except OSError as error:
            self.fail(set(self.hosts), f"{type(error).__name__}: {error}")
        finally:
            self._file.unlink(missing_ok=True)

    def _told(self) -> bytes:
        """Return what the hosts read when Slurm starts them."""
        hosts = list(self.hosts.values())
        return told(self.place, hosts, variable=_PLACE, grace=self._grace, address=self._options.listen)

    async def renew(self, order: str) -> None:
        """Give the hosts new certificates, also those that Slurm has not started yet."""
        if self._file.exists():
            new = self._file.with_name(f"{self._file.name}.new")
            _write_anew(new, self._told())
            new.replace(self._file)
        await super().renew(order)

    async def _watch(self) -> None:
        """Report what Slurm says, until srun has ended."""
        limit = self._options.queue_timeout
        late = None if limit is None else time.monotonic() + seconds(limit, "queue_timeout")
        begun: float | None = None
        while not self.has_ended:
            waiting = not self.environments
            if waiting:
                now = await self._queue()
                if now.never_starts:
                    self.fail(set(self.hosts), f"Slurm will not start it: {now.why}")
                    await self.process.stop()
                    return
                if now.state == "PENDING":
                    self.report(self.left(), Phase.WAITING, str(now))
                if late is not None and time.monotonic() > late:
                    self.fail(set(self.hosts), f"it has waited {limit} in Slurm's queue: {now}")
                    await self.process.stop()
                    return
            elif begun is None:
                begun = time.monotonic()
            elif len(self.listening | self.over) < len(self.hosts):
                if time.monotonic() > begun + self._options.start_timeout:
                    silent = self.left() - self.listening
                    self.fail(silent, f"it has not listened after {self._options.start_timeout:g} s")
                    await self.end(silent)
            else:
                self._file.unlink(missing_ok=True)
                await self._look_for_nodes()
            pause = _POLL_S if len(self.listening | self.over) < len(self.hosts) else _RUNNING_POLL_S
            self.changed.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self.changed.wait(), pause)
        left = self.left() - self.ending
        if left:
            self.fail(left, await self._end_of_srun())

    async def _end_of_srun(self) -> str:
        """Report why srun has ended: in the words of a host, or of Slurm."""
        said = next((text for number, text in self.failed.items() if number not in self.taken), "")
        if said:
            return said
        how = f"srun has ended with status {self._status}"
        return await self._in_slurms_words(how, until_ended=False)

    async def _in_slurms_words(self, how: str, *, until_ended: bool) -> str:
        """Return what has happened, and what Slurm says about it."""
        # In a job of another owner, the step has no state of its own.
        if os.environ.get("SLURM_JOB_ID"):
            return how
        now = await self._queue()
        for _ in range(_END_POLLS):
            if now.state != "COMPLETING" and (now.has_ended or not until_ended):
                break
            await asyncio.sleep(_END_POLL_S)
            now = await self._queue()
        return f"{how}; Slurm says {now}" if now.has_ended else how

    async def _was_taken(self, number: int) -> None:
        """Report why a host has ended that Slurm has sent SIGTERM to."""
        why = await self._in_slurms_words(self.failed[number], until_ended=True)
        self.fail({number}, why)

    async def _queue(self) -> Queued:
        """Return what Slurm says about the job."""
        return queued(await _asked("squeue", "-h", "-t", "all", "-n", self._name, "-S", "i", "-o", FIELDS))

    async def _look_for_nodes(self) -> None:
        """A node that dies leaves the job, and its host says nothing."""
        if os.environ.get("SLURM_JOB_ID"):
            return
        now = await self._queue()
        # A job that ends releases its nodes one by one; its end reports that.
        if now.nodes and now.state != "COMPLETING" and not now.has_ended:
            there = hostnames(now.nodes)
            gone = {each for each in self.left() if self._nodes[each] not in there}
            self.fail(gone, f"its node has left the job{f': {now.why}' if now.why else ''}")
        # By the clock: which signals come before the end differs from site to site.
        if now.left is not None and now.left <= _SOON_S:
            for each in self.left() - self.ending:
                why = f"Slurm ends it in {now.left} s, at its time limit"
                self.report([each], Phase.RUNNING, why, self._addresses[each])

    def process_ended(self, status: int) -> None:
        """The end of srun is examined where it was waited for."""
        self._status = status

    def came(self, number: int, node: str) -> None:
        """Slurm has started a host."""
        self._nodes[number] = node
        self.report([number], Phase.STARTING)

    def address_of(self, number: int, address: str) -> str:
        """Return a host's address by the name of its node."""
        self._addresses[number] = f"tcp://{self._nodes[number]}:{address.rpartition(':')[2]}"
        return self._addresses[number]

    def is_being_taken(self, number: int) -> None:
        """Report at once what srun prints about the signal; Slurm is asked when the host has ended."""
        self.tasks.append(asyncio.create_task(self._announce()))

    async def _announce(self) -> None:
        """Processes may end before their host does: what ends them is to be known then."""
        for _ in range(_NOTICE_LOOKS):
            if said := notice_in(self.process.last_lines()):
                for each in self.left() - self.ending:
                    self.report([each], Phase.RUNNING, f"Slurm says {said}", self._addresses.get(each))
                return
            await asyncio.sleep(_NOTICE_LOOK_S)

    def host_ended(self, number: int, status: int) -> None:
        """Ask Slurm for the reason, if it has given notice."""
        if number in self.taken:
            self.tasks.append(asyncio.create_task(self._was_taken(number)))
        elif number not in self.failed and (said := notice_in(self.process.last_lines())):
            self.fail([number], f"it has ended with status {status}; Slurm says {said}")
        else:
            super().host_ended(number, status)

    async def ended(self) -> None:
        """Leave nothing in Slurm, and no credentials."""
        if self.process.pid is not None and "SLURM_JOB_ID" not in os.environ:
            await _asked("scancel", "-n", self._name)
        self._file.unlink(missing_ok=True)


def _write_anew(path: Path, text: bytes) -> None:
    """Write a private file; not into one that somebody else has put there, if the folder is not ours alone."""
    with naming(path), os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
        file.write(text)


async def _grace(partition: str | None) -> float:
    """Return how long hosts may continue after Slurm's SIGTERM; ``None`` if that is unknown."""
    config = await _asked("scontrol", "show", "config")
    partitions = await _asked("scontrol", "-o", "show", "partition", *([partition] if partition else []))
    waits = grace_of(config, partitions)
    return 0.0 if waits is None else max(0.0, waits - _ENDING_S)


async def _asked(*words: str) -> str:
    """Return the output of one of Slurm's commands; empty if it cannot be run now."""
    try:
        asked = await asyncio.create_subprocess_exec(
            *words,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
    except OSError:
        return ""
    out, _ = await asked.communicate()
    return out.decode(errors="replace")


def _probe() -> ProbeResult[None]:
    missing = [each for each in ("srun", "squeue", "scancel") if shutil.which(each) is None]
    if missing:
        return ProbeResult.no(
            f"there is no {missing[0]} here",
            remedy="launch from a machine of the Slurm cluster, such as its login node",
        )
    return ProbeResult.yes()


def _shown(options: SlurmOptions, job: str, count: int, number: int) -> str:
    """Return the command of a mesh of hosts, without what srun runs."""
    inside = os.environ.get("SLURM_JOB_ID")
    return shlex.join(options.command(f"mesh-{job}-{number}", count, inside))


SLURM = LauncherPlugin(
    name="slurm",
    api_version=API_VERSION,
    create=SlurmLauncher,
    options=SlurmOptions,
    probe=_probe,
    show=_shown,
    summary="nodes that Slurm gives, by srun",
    explains=True,
)


@hookimpl
def mesh_register_launchers() -> Iterable[LauncherPlugin]:
    """The plugin of this module."""
    yield SLURM
