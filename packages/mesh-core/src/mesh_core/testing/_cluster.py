"""Several hosts on one machine, for tests: real agents, real connections, real encryption."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from mesh_core._common.errors import MeshError
from mesh_core._process.host_agent import HostAgent

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self

    from mesh_core import HostMesh

V = TypeVar("V")


def _each(
    given: Mapping[str, V] | Sequence[Mapping[str, V]] | None, hosts: int, what: str
) -> list[Mapping[str, V] | None]:
    """What was said of all hosts, or of each."""
    if given is None or isinstance(given, Mapping):
        return [given] * hosts
    if len(given) != hosts:
        raise ValueError(f"{what}= must be of all hosts, or one for each of {hosts}, got {len(given)}")
    return list(given)


class LocalCluster:
    """``hosts`` agents on this machine, each a process of its own with an address and credentials of its own.

    ``labels`` and ``resources`` are those of each host, or one mapping for all.

    >>> from mesh_core.testing import LocalCluster
    >>> with LocalCluster(hosts=2) as cluster:
    ...     procs = cluster.attach().spawn_procs(per_host={"gpus": 1})
    ...     procs.sizes
    {'hosts': 2, 'gpus': 1}
    """

    def __init__(
        self,
        hosts: int,
        *,
        env: Mapping[str, str] | None = None,
        credentials: str | None = None,
        labels: Mapping[str, str] | Sequence[Mapping[str, str]] | None = None,
        resources: Mapping[str, float] | Sequence[Mapping[str, float]] | None = None,
    ) -> None:
        if hosts < 1:
            raise ValueError(f"a cluster has at least one host, not {hosts}")
        self._labels = _each(labels, hosts, "labels")
        self._resources = _each(resources, hosts, "resources")
        self._count = hosts
        self._env = dict(env or {})
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._given = credentials
        self._agents: list[HostAgent] = []
        # Not the mesh: it would keep a runtime that was shut down.
        self._attached = False
        self.addresses: list[str] = []
        """Where the agents listen."""

    @property
    def credentials(self) -> str:
        """The folder with the job's credentials."""
        if self._given is not None:
            return self._given
        if self._folder is None:
            raise MeshError("the cluster is not started; use it in a with block")
        return str(Path(self._folder.name) / "job")

    @property
    def pids(self) -> list[int]:
        """The agents' processes."""
        return [agent.pid for agent in self._agents]

    def start(self) -> Self:
        """Start the agents, and wait until they listen."""
        from mesh_core._common.credentials import Credentials

        if self._folder is not None:
            raise MeshError("the cluster is started already; stop() it first")
        self._folder = tempfile.TemporaryDirectory(prefix="mesh-cluster-")
        try:
            if self._given is None:
                Credentials.new(self.credentials)
            for number in range(self._count):
                self._agents.append(self._agent_of(number))
                self._agents[number].launch()
            self.addresses += [agent.wait_until_ready() for agent in self._agents]
        except BaseException:
            self.stop()
            raise
        return self

    def _agent_of(self, number: int) -> HostAgent:
        from mesh_core._common.credentials import Credentials

        assert self._folder is not None
        name = f"host-{number}"
        folder = Path(self._folder.name) / name
        Credentials.load(self.credentials).issue_host(folder)
        return HostAgent(
            folder,
            name=name,
            labels=self._labels[number],
            resources=self._resources[number],
            env=self._env,
            log=folder.with_suffix(".log"),
        )

    def log(self, number: int) -> str:
        """What an agent has written."""
        return self._agent(number).log()

    def attach(self) -> HostMesh:
        """The agents as a mesh of hosts."""
        from mesh_core._meshes.attach import attach_to_workers

        self._attached = True
        # They listen, or have been killed.
        return attach_to_workers(self.addresses, credentials=self.credentials, timeout=0)

    def kill(self, number: int, with_signal: int = signal.SIGKILL) -> None:
        """Send an agent a signal; SIGKILL if none is named.

        Returns once it has ended by SIGKILL, or stands still by SIGSTOP with all its threads.
        """
        self._agent(number).send_signal(with_signal)

    def _agent(self, number: int) -> HostAgent:
        if self._folder is None:
            raise MeshError("the cluster is not started; use it in a with block")
        if not 0 <= number < len(self._agents):
            raise IndexError(f"there is no agent {number}; this cluster has {len(self._agents)}, from 0 on")
        return self._agents[number]

    def restart(self, number: int) -> None:
        """Start an agent that has ended anew, at its old address."""
        agent = self._agent(number)
        if agent.is_running:
            self.kill(number)
        agent.start()

    def stop(self) -> None:
        """End the agents, and all that runs on them."""
        if self._attached:
            from mesh_core._process.process import shutdown

            self._attached = False
            shutdown()
        # All are asked before any is waited for.
        for agent in self._agents:
            agent.terminate()
        for agent in self._agents:
            agent.stop()
        self._agents.clear()
        self.addresses.clear()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()
