"""Several hosts on one machine, for tests, with real agents, connections and encryption."""

from __future__ import annotations

import os
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
    """Return one value per host, from one for all or a sequence."""
    if given is None or isinstance(given, Mapping):
        return [given] * hosts
    if len(given) != hosts:
        raise ValueError(f"{what} must be one mapping, or one for each of {hosts} hosts, got {len(given)}")
    return list(given)


class LocalCluster:
    """``hosts`` agents on this machine, each in its own process, with its own address and credentials.

    ``labels`` and ``resources`` are one mapping for all hosts, or a sequence with one for each.

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
            raise ValueError(f"hosts must be at least 1, got {hosts}")
        self._labels = _each(labels, hosts, "labels")
        self._resources = _each(resources, hosts, "resources")
        self._count = hosts
        self._maker = os.getpid()
        self._env = dict(env or {})
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._given = credentials
        self._agents: list[HostAgent] = []
        # Not the mesh, which would keep a runtime alive that was shut down.
        self._attached = False
        self.addresses: list[str] = []
        """The addresses of the agents."""

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
        """The pids of the agents."""
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
        """Return an agent's output."""
        return self._agent(number).log()

    def attach(self) -> HostMesh:
        """Attach to the agents and return them as a mesh of hosts."""
        from mesh_core._meshes.attach import attach_to_workers

        self._attached = True
        # No need to wait: agents listen already, or were killed.
        return attach_to_workers(self.addresses, credentials=self.credentials, timeout=0)

    def kill(self, number: int, with_signal: int = signal.SIGKILL) -> None:
        """Send an agent a signal, by default SIGKILL.

        With SIGKILL, returns once the agent has ended; with SIGSTOP, once all its threads have stopped.
        """
        self._agent(number).send_signal(with_signal)

    def _agent(self, number: int) -> HostAgent:
        if self._folder is None:
            raise MeshError("the cluster is not started; use it in a with block")
        if not 0 <= number < len(self._agents):
            raise IndexError(f"number must be from 0 to {len(self._agents) - 1}, got {number}")
        return self._agents[number]

    def restart(self, number: int) -> None:
        """Restart an agent at its old address; if it is still running, kill it first."""
        agent = self._agent(number)
        if agent.is_running:
            self.kill(number)
        agent.start()

    def stop(self) -> None:
        """Stop the agents and everything that runs on them."""
        if self._attached:
            from mesh_core._process.process import shutdown

            self._attached = False
            shutdown()
        # Ask all of them before waiting for any.
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
        # A forked copy leaves the hosts to its parent.
        if self._maker == os.getpid():
            self.stop()
