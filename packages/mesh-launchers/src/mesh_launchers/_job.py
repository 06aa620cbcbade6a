"""A job of hosts, as the script that has them sees it."""

from __future__ import annotations

import base64
import functools
import logging
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from mesh_core import ActorMesh, HostMesh, MeshError, ProcMesh, attach_to_workers
from mesh_core.extensions import Joined, clear_progress, join_job
from mesh_launchers._contract import Phase
from mesh_launchers._dialing import Dialed
from mesh_launchers._door import Door
from mesh_launchers._errors import JobNotFound, LaunchError
from mesh_launchers._explained import Explained
from mesh_launchers._folder import LINK, JobFolder
from mesh_launchers._state import HostState, JobState

_STOP_S = 60.0
_CONNECT_S = 10.0
_JOIN_S = 120.0
_FLUSH_S = 5.0
_DETACH_S = 30.0
_QUIET_S = 1.0
"""Progress that is shorter than this is not shown."""


class Job:
    """Hosts that a launcher has started; returned by :func:`launch` and :func:`attach_job`.

    It ends at the end of its ``with`` block, or else with the script, unless it is kept. Only one script can have it at a time.
    """

    def __init__(self, folder: JobFolder, credentials: Path | None, *, progress: bool) -> None:
        self.name = folder.name
        self._folder = folder
        self._credentials = credentials
        self._progress = progress
        self._changed = threading.Condition()
        self._state: JobState | None = None
        self._ended = False
        self._said = ""
        self._warned: set[int] = set()
        """Hosts that differ from the script, which has been warned."""
        self._troubled = False
        """Whether the script has been warned that the job's certificates expire."""
        self._addresses: dict[int, Future[str]] = {}
        self._numbers: dict[str, list[int]] = {}
        """The hosts of each mesh, in its order."""
        self._meshes: dict[str, HostMesh] = {}
        self._dialed: Dialed | None = None
        """Hosts that connect to this script, until all have connected."""
        self._attached: list[HostMesh] = []
        """The hosts as they were attached, whatever has joined or left since."""
        self._explained = Explained()
        self._maker = os.getpid()
        self._joined: Joined | None = None
        """This script's part in a job that outlives it."""
        self._door: Door

    def _open(self, door: Door, *, is_new: bool, take_over: bool = False) -> Self:
        """Take the job's hosts."""
        self._door = door
        state = JobState.of(door.ask("hold", take_over=take_over))
        if not is_new:
            # What another script has lost does not count for this one.
            door.ask("end", hosts=[each.number for each in state.hosts if each.phase is Phase.FAILED])
        for host in state.hosts:
            if host.is_there or is_new:
                self._numbers.setdefault(host.mesh, []).append(host.number)
        if state.keep is not None:
            self._joined = self._join()
        elif state.dial is None:
            for mesh, numbers in self._numbers.items():
                self._meshes[mesh] = self._attach(mesh, numbers)
        else:
            self._dialed = self._await(state, self._numbers)
        with self._changed:
            # Later reports are newer.
            self._state = self._state or state
            self._give(self._state)
            self._changed.notify_all()
        if self._progress:
            timer = threading.Timer(_QUIET_S, self._show)
            timer.daemon = True
            timer.start()
        return self

    def _join(self) -> Joined:
        """Join a job that outlives this script."""
        link = self._folder.connect(_CONNECT_S, LINK)
        try:
            told: dict[str, str] = self._door.ask("join", timeout=_JOIN_S)
            joined = join_job(link, base64.b64decode(told["told"]))
        except BaseException:
            link.close()
            raise
        self._meshes.update(joined.hosts)
        for mesh, hosts in joined.hosts.items():
            self._explained.add(hosts, self._numbers[mesh])
            joined.follow(hosts, self._door.begin("attached", hosts=self._numbers[mesh]))
        joined.on_flush(self._flush)
        joined.on_output(lambda procs, limit: self._door.begin("shown", procs=procs, limit=limit))
        joined.on_traits(lambda hosts: base64.b64decode(self._door.ask("traits", hosts=list(hosts))))
        return joined

    def _flush(self, limit: float = _FLUSH_S) -> None:
        """Let everything be shown that processes have printed."""
        with suppress(LaunchError):
            self._door.ask("flush", timeout=limit)

    def _attach(self, mesh: str, numbers: Sequence[int]) -> HostMesh:
        with self._changed:
            futures = [self._addresses.setdefault(each, Future()) for each in numbers]
        assert self._credentials is not None
        hosts = attach_to_workers(futures, credentials=self._credentials, name=mesh)
        self._attached.append(hosts)
        self._explained.add(hosts, numbers)
        return hosts

    def _await(self, state: JobState, numbers: Mapping[str, Sequence[int]]) -> Dialed:
        """Wait for hosts that connect to this script, for other threads."""
        assert state.dial is not None and self._credentials is not None
        names = {each.number: each.name for each in state.hosts}
        meshes = {mesh: [names[each] for each in mine] for mesh, mine in numbers.items()}
        dialed = Dialed(state.dial, meshes, self._credentials)
        self._attached.append(dialed.whole)
        return dialed

    def _come(self) -> None:
        """Return the meshes of hosts that connect to this script; waits for all of them."""
        if self._dialed is not None:
            with self._changed:
                self._meshes.update(self._dialed.wait(self._changed, self._all_run))
                for mesh, hosts in self._meshes.items():
                    self._explained.add(hosts, self._numbers[mesh])
            self._dialed = None

    def _all_run(self) -> bool:
        state = self.state()
        failed = [each for each in state.hosts if each.phase is Phase.FAILED]
        if failed:
            raise self._failure(failed[0], len(failed))
        return self._settled()

    def _release(self, why: str) -> None:
        """Release all hosts, with everything that runs on them."""
        stopped = []
        for each in self._attached:
            # The runtime may have been shut down.
            with suppress(MeshError):
                stopped.append(each.stop())
        # Afterwards: what was to run on hosts that have not come is no failure, as all is stopped.
        self._give_up(why)
        for future in stopped:
            with suppress(MeshError):
                future.get(timeout=_STOP_S)

    @property
    def procs(self) -> Mapping[str, ProcMesh]:
        """The meshes of processes of a kept job, by name: those that this script and earlier scripts have spawned.

        Meshes that actors have spawned belong to the actors and are not included.
        """
        return dict(self._kept_by("procs").procs)

    @property
    def actors(self) -> Mapping[str, ActorMesh[Any]]:
        """The meshes of actors of a kept job, by name; see :attr:`procs`."""
        return dict(self._kept_by("actors").actors)

    def _kept_by(self, what: str) -> Joined:
        if self._joined is None:
            raise LaunchError(
                f"job.{what} finds what other scripts have left in a job that is kept, and job {self.name!r} is not: give "
                "launch(keep='8h')"
            )
        return self._joined

    @property
    def meshes(self) -> Mapping[str, HostMesh]:
        """The job's hosts, by the names of their meshes. If hosts connect to the script, this waits until all have connected."""
        self._come()
        return dict(self._meshes)

    @property
    def hosts(self) -> HostMesh:
        """All hosts of a job that has a single mesh of them. Usable at once: messages wait until the hosts are ready.

        If hosts connect to the script (``dial=``), this waits until all have connected, and raises if one has failed.
        """
        self._come()
        # Spares have a mesh of their own.
        names = [each for each in self._meshes if each != SPARES]
        if len(names) != 1:
            raise LaunchError(
                f"job {self.name!r} has {len(names)} meshes of hosts, {', '.join(map(repr, names))}: take one of job.meshes"
            )
        return self._meshes[names[0]]

    @property
    def spares(self) -> HostMesh | None:
        """The spare hosts, which can replace others (``procs.respawn(on=job.spares)``); ``None`` if there are none."""
        self._come()
        return self._meshes.get(SPARES)

    def state(self) -> JobState:
        """Return the state of each host."""
        with self._changed:
            if self._state is None or self._ended:
                raise self._door.gone()
            return self._state

    def _knows(self, numbers: Sequence[int]) -> bool:
        """Return whether all these hosts have been reported, or never will be."""
        return self._state is None or {*numbers} <= {each.number for each in self._state.hosts}

    def wait(self, timeout: float | None = None) -> Self:
        """Wait until all hosts run; raises :class:`LaunchError` as soon as one has failed, or after ``timeout`` seconds."""
        with self._changed:
            self._changed.wait_for(self._settled, timeout)
            if not self._all_run():
                raise LaunchError(f"not all hosts run after {timeout:g} s: {self.state()}")
        return self

    def _settled(self) -> bool:
        phases = [] if self._state is None else [each.phase for each in self._state.hosts]
        return self._ended or Phase.FAILED in phases or not {Phase.WAITING, Phase.STARTING} & {*phases}

    def logs(self, lines: int = 50) -> dict[str, str]:
        """Return the last lines of output of each host's agent, by host name."""
        return {
            each.name: self._door.ask("log", host=each.number, lines=lines)
            for each in self.state().hosts
            if each.phase is not Phase.ENDED
        }

    def scale(self, hosts: int | Sequence[str], mesh: str | None = None) -> HostMesh:
        """Change the number of hosts in a mesh of the job, and return the new mesh, also available from ``meshes`` and ``hosts``.

        Failed hosts do not count, and leave the mesh. The hosts added last leave first; the processes on them end, which does not count as a
        failure. Meshes of processes do not change: use their ``grow`` and ``shrink``.

        Args:
            hosts: the number of hosts or, if hosts have names, the names of all: a number can then only be smaller than before.
            mesh: the name of the mesh, if there are several.
        """
        self._come()
        name = mesh or self._only()
        state = {each.number: each for each in self.state().hosts}
        there = [number for number in self._numbers.get(name, []) if state[number].is_there]
        if isinstance(hosts, int):
            if hosts < 1:
                raise ValueError(f"hosts must be at least 1, got {hosts}: stop() ends the whole job")
            wanted, new = there[:hosts], [None] * (hosts - len(there))
        else:
            wanted = [number for number in there if state[number].name in hosts]
            known = {state[number].name for number in wanted}
            new = [each for each in hosts if each not in known]  # type: ignore[misc]
        gone = [number for number in self._numbers.get(name, []) if number not in wanted]
        if new:
            # Before hosts are let go: nothing is to change where these cannot be had.
            self._door.ask("fits", mesh=name, targets=new)
        self._let_go(name, gone)
        if new:
            begun = self._door.ask("start", mesh=name, targets=new, timeout=_JOIN_S)
            numbers: list[int] = begun["numbers"]
            with self._changed:
                # Reports about the new hosts come separately, and perhaps after the answer.
                self._changed.wait_for(lambda: self._ended or self._knows(numbers))
            now = self.state()
            if self._joined is not None:
                more = self._joined.read(base64.b64decode(begun["hosts"]))
                self._explained.add(more, numbers)
                self._joined.follow(more, self._door.begin("attached", hosts=numbers))
            elif now.dial is None:
                more = self._attach(name, numbers)
            else:
                with self._changed:
                    more = self._await(now, {name: numbers}).wait(self._changed, self._all_run)[name]
                    self._explained.add(more, numbers)
            self._meshes[name] = self._meshes[name].join(more) if name in self._meshes else more
            self._numbers.setdefault(name, []).extend(numbers)
            with self._changed:
                if self._state is not None:
                    self._give(self._state)
        return self._meshes[name]

    def _only(self) -> str:
        names = [each for each in self._meshes if each != SPARES]
        if len(names) != 1:
            raise ValueError(
                f"job {self.name!r} has the meshes {', '.join(map(repr, names))}: say which, with mesh="
            )
        return names[0]

    def _let_go(self, name: str, gone: Sequence[int]) -> None:
        """End hosts of a mesh: first what runs there, so that this is not a failure."""
        if not gone:
            return
        numbers, whole = self._numbers[name], self._meshes[name]
        stays = [at for at, number in enumerate(numbers) if number not in gone]
        if self._joined is not None:
            # Its keeper has attached them, and releases them.
            self._numbers[name] = [numbers[at] for at in stays]
            if stays:
                singles = [whole.slice(hosts=slice(at, at + 1)) for at in stays]
                self._meshes[name] = functools.reduce(HostMesh.join, singles)
            else:
                del self._meshes[name]
            self._door.ask("end", hosts=list(gone))
            return
        if stays:
            singles = [whole.slice(hosts=slice(at, at + 1)) for at in range(len(numbers))]
            for at, number in enumerate(numbers):
                if number in gone:
                    whole.detach(singles[at]).get(timeout=_STOP_S)
            self._meshes[name] = functools.reduce(HostMesh.join, [singles[at] for at in stays])
        else:
            whole.detach().get(timeout=_STOP_S)
            del self._meshes[name]
        self._numbers[name] = [numbers[at] for at in stays]
        self._door.ask("end", hosts=list(gone))

    def stop(self) -> None:
        """Stop everything on the hosts, then the hosts, and leave nothing behind. Stopping twice does no harm."""
        with self._changed:
            ended = self._ended
        if ended:
            self._door.close()
            return
        self._release("the job was stopped")
        if self._joined is not None:
            self._joined.leave()
        with suppress(JobNotFound):
            self._door.ask("stop")
        if not self._door.wait_closed(_STOP_S):
            raise LaunchError(
                f"job {self.name!r} has not ended within {_STOP_S:g} s; its keeper writes to {self._folder.log}"
            )
        self._door.close()

    def detach(self) -> None:
        """Leave the job running: :func:`attach_job` can attach it again, within the time given by ``keep``.

        Processes and actors that this script has spawned continue. Actors in the script's own process end, and the next use of Mesh in
        this process starts afresh.
        """
        if self.state().keep is None:
            raise LaunchError(
                f"job {self.name!r} is not kept: give launch(keep='8h') for hosts that stay when no script has them"
            )
        if self._joined is not None:
            # What has been printed so far is this script's to show.
            self._flush(_DETACH_S)
            self._joined.leave()
        self._door.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A forked copy leaves the job to its parent.
        if self._maker == os.getpid():
            self.stop()

    def __repr__(self) -> str:
        with self._changed:
            known = f"job {self.name}: has ended" if self._ended or self._state is None else str(self._state)
        return f"<{known}>"

    # Messages of the keeper, on the door's thread.

    def _hear(self, state: JobState | None) -> None:
        with self._changed:
            if state is None:
                self._ended = True
            else:
                self._state = state
                self._give(state)
            self._changed.notify_all()
        if state is None:
            self._give_up("the job has ended")

    def _has_died(self, host: str, why: str) -> None:
        """The mesh has lost a host, perhaps of another job of this script."""
        with suppress(LaunchError, StopIteration):
            number = next(each.number for each in self.state().hosts if each.name == host and each.is_there)
            self._explained.knows(number, why)
            self._door.begin("lost", host=number, why=why)

    def _give(self, state: JobState) -> None:
        """Notify those who wait for addresses, or for the reasons of ends."""
        self._explained.hear(state)
        logger = logging.getLogger("mesh_launchers")
        trouble = "" if state.credentials is None else state.credentials.trouble
        if trouble and not self._troubled:
            logger.warning("credentials of job %s: %s", self.name, trouble)
        self._troubled = bool(trouble)
        for host in state.hosts:
            if host.phase is Phase.RUNNING and host.differs and host.number not in self._warned:
                self._warned.add(host.number)
                logger.warning(
                    "host %s of job %s is not like the script: %s",
                    host.name,
                    self.name,
                    "; ".join(host.differs),
                )
            if self._joined is not None and host.address is not None:
                self._joined.place(host.name, host.address)
            address = self._addresses.get(host.number)
            if address is None or address.done():
                continue
            if host.phase is Phase.RUNNING and host.address is not None:
                address.set_result(host.address)
            elif not host.is_there:
                address.set_exception(self._failure(host, 1))

    def _failure(self, host: HostState, count: int) -> LaunchError:
        others = f" ({count} hosts have failed)" if count > 1 else ""
        return LaunchError(
            f"host {host.name} of job {self.name!r} has not started{others}: {host.why or host.phase}",
            host=host.number,
        )

    def _give_up(self, why: str) -> None:
        with self._changed:
            waiting = [each for each in self._addresses.values() if not each.done()]
        for each in waiting:
            each.set_exception(LaunchError(why))

    def _show(self) -> None:
        """Show the progress, whenever it changes, until all hosts run."""
        while True:
            with self._changed:
                if self._ended or self._state is None:
                    return
                text, settled = str(self._state), self._settled()
                if text != self._said:
                    if not settled or self._said:
                        clear_progress()
                        sys.stderr.write(f"{text}\n")
                        sys.stderr.flush()
                    self._said = text
                if settled:
                    return
                self._changed.wait()


SPARES = "spares"
"""The mesh of spare hosts."""


def wants_progress(progress: bool | None) -> bool:
    """Return whether somebody is watching."""
    return os.isatty(2) if progress is None else progress
