"""The launcher ``kubernetes``: hosts are pods of a Job."""

from __future__ import annotations

import asyncio
import importlib.util
import secrets
from collections.abc import Iterable, Sequence

from mesh_core.plugins import ProbeResult, hookimpl
from mesh_launchers._contract import API_VERSION, HostSpec, LauncherPlugin, Place
from mesh_launchers._errors import LaunchError
from mesh_launchers._kubernetes_api import Cluster
from mesh_launchers._kubernetes_group import Group
from mesh_launchers._kubernetes_objects import Names
from mesh_launchers._kubernetes_options import KubernetesOptions


class KubernetesLauncher:
    """Starts agents as pods: a Job for each mesh, and for the hosts that come later."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._groups: list[Group] = []
        self._clusters: dict[tuple[str | None, ...], Cluster] = {}
        self._run = secrets.token_hex(8)

    async def start(self, options: KubernetesOptions, hosts: Sequence[HostSpec]) -> None:
        """Begin to start hosts."""
        cluster = await self._cluster(options)
        names = Names.of(self._place.job, len(self._groups), self._run)
        group = Group(self._place, cluster, names, options, hosts)
        self._groups.append(group)
        group.begin()

    async def _cluster(self, options: KubernetesOptions) -> Cluster:
        key = (options.kubeconfig, options.context, options.namespace)
        if key not in self._clusters:
            # The client takes long to import, and its plugins may ask others for a token.
            self._clusters[key] = await asyncio.to_thread(Cluster.of, *key)
        return self._clusters[key]

    async def stop(self, numbers: Sequence[int]) -> None:
        """End hosts."""
        await asyncio.gather(*[each.stop(numbers) for each in self._groups])

    async def log(self, number: int, lines: int) -> str:
        """Return the last lines that a host's agent has written."""
        for each in self._groups:
            if number in each.hosts:
                return await each.log(number, lines)
        return ""

    async def close(self) -> None:
        """End all hosts, and remove all that was made for them."""
        done = await asyncio.gather(
            *[each.stop(list(each.hosts)) for each in self._groups], return_exceptions=True
        )
        for each in self._clusters.values():
            each.close()
        failed = [each for each in done if isinstance(each, BaseException)]
        if failed:
            raise LaunchError("; ".join(str(each) for each in failed)) from failed[0]


def _probe() -> ProbeResult[None]:
    if importlib.util.find_spec("kubernetes") is None:
        return ProbeResult.no(
            "there is no Python package kubernetes here", remedy="pip install 'mesh-launchers[kubernetes]'"
        )
    return ProbeResult.yes()


KUBERNETES = LauncherPlugin(
    name="kubernetes",
    api_version=API_VERSION,
    create=KubernetesLauncher,
    options=KubernetesOptions,
    probe=_probe,
    summary="pods of a Kubernetes cluster",
)


@hookimpl
def mesh_register_launchers() -> Iterable[LauncherPlugin]:
    """The one of this module."""
    yield KUBERNETES
