"""A process beside the script that has a job: it reaches the same hosts as a job of its own, with the same credentials.

VST-1: the script does not notice it: agents serve several jobs, and what one of them runs ends with it, however it ends.
VST-2: only the owner can visit: the keeper's socket and the credentials lie in private folders, and the keeper checks the peer's user.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import cloudpickle

from mesh_core import HostMesh, MeshError, attach_to_workers
from mesh_launchers import _remote
from mesh_launchers._authority import authority
from mesh_launchers._contract import Phase
from mesh_launchers._dialing import check_dial, free_address, in_order, listening, wait_listening
from mesh_launchers._door import Door
from mesh_launchers._errors import JobNotFound, LaunchError
from mesh_launchers._folder import JobFolder
from mesh_launchers._job import SPARES
from mesh_launchers._state import HostState, JobState

_CONNECT_S = 10.0
_COME_S = 60.0
_ENDS_S = 2.0


class Visit:
    """A job's hosts, as seen by a process beside its script. A kept job does not end while it is visited."""

    def __init__(self, name: str) -> None:
        self._folder = JobFolder.of(name)
        self._ended = threading.Event()
        self._state: JobState
        self._door = Door(name, self._folder.connect(_CONNECT_S), self._hear)

    def _hear(self, state: JobState | None) -> None:
        if state is None:
            self._ended.set()

    def state(self) -> JobState:
        """Return the state of the job, which does not expire before :meth:`close`."""
        self._state = JobState.of(self._door.ask("visit"))
        return self._state

    def attach(self, hosts: Sequence[HostState], dial: str | None = None) -> HostMesh:
        """Attach some of the hosts. Those that connect to the script connect to `dial`, or to a free port of the script's machine."""
        authority().take(Path(self._folder.read()["credentials"]), self._folder.name)
        # Hosts need not have this package.
        cloudpickle.register_pickle_by_value(_remote)
        if any(each.address is None for each in hosts):
            return self._await(hosts, dial)
        addresses = [each.address for each in hosts if each.address is not None]
        return attach_to_workers(addresses, credentials=authority().credentials(), name="hosts")

    def _await(self, hosts: Sequence[HostState], dial: str | None) -> HostMesh:
        """Let hosts that nobody can connect to connect to this process."""
        of_script = self._state.dial
        assert of_script is not None
        address = free_address(of_script) if dial is None else dial
        check_dial(address)
        whole = attach_to_workers(
            listen=listening(address), expect=len(hosts), credentials=authority().credentials(), name="hosts"
        )
        wait_listening(whole, address)
        try:
            self._door.ask("dial", hosts=[each.number for each in hosts], address=address)
            whole.initialized.get(timeout=_COME_S)
        except TimeoutError:
            raise LaunchError(f"not all hosts have come to {address} within {_COME_S:g} s") from None
        except LaunchError as error:
            raise LaunchError(
                f"{error}. Hosts of this job connect to the processes that use them; --dial HOST:PORT names an address of this machine "
                "that is open to them"
            ) from None
        return in_order(whole, [each.name for each in hosts])

    def check(self) -> None:
        """Raise if the job has ended. Its hosts' end may be noticed a little sooner."""
        if self._ended.wait(_ENDS_S):
            raise JobNotFound(f"job {self._folder.name!r} has ended, and what ran on its hosts with it")

    def close(self) -> None:
        """Leave the job."""
        self._door.close()


@contextmanager
def visited(name: str) -> Iterator[Visit]:
    """Visit a job; an error that is caused by its end says so."""
    visit = Visit(name)
    try:
        yield visit
    except LaunchError:
        raise
    except MeshError:
        visit.check()
        raise
    finally:
        visit.close()


def chosen(state: JobState, mesh: str | None, on: str | None) -> list[HostState]:
    """Return the hosts that a user names by `mesh` and `on`."""
    meshes: dict[str, list[HostState]] = {}
    for each in state.hosts:
        if each.phase is not Phase.ENDED:
            meshes.setdefault(each.mesh, []).append(each)
    if mesh is None:
        names = [each for each in meshes if each != SPARES]
        if len(names) != 1:
            raise LaunchError(f"job {state.name!r} has the meshes {', '.join(meshes)}: say which with --mesh")
        mesh = names[0]
    if mesh not in meshes:
        raise LaunchError(f"job {state.name!r} has no mesh {mesh!r}; it has {', '.join(meshes)}")
    hosts = meshes[mesh]
    return hosts if on is None else _some(hosts, on)


def _some(hosts: Sequence[HostState], on: str) -> list[HostState]:
    """Return the hosts of a range, or the named ones."""
    dim, equals, text = on.rpartition("=")
    named = {each.name: each for each in hosts}
    if not equals or dim in ("host", "hosts"):
        names = text.split(",")
        if all(each in named for each in names):
            return [named[each] for each in names]
        first, colon, last = text.partition(":")
        try:
            begin = int(first) if first else 0
            end = (int(last) if last else len(hosts)) if colon else begin + 1
            if 0 <= begin < end <= len(hosts):
                return list(hosts[begin:end])
        except ValueError:
            pass
    raise LaunchError(
        f"{on!r} names no hosts: write one, such as host=2, some, such as hosts=0:4, or their names; "
        f"there are {len(hosts)}: {', '.join(named)}"
    )
