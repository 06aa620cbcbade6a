"""The launcher ``kubernetes``: hosts are pods of a Job."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import secrets
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from mesh_core.plugins import ProbeResult, hookimpl
from mesh_launchers import _kubernetes_objects as objects
from mesh_launchers._contract import API_VERSION, HostSpec, LauncherPlugin, Place
from mesh_launchers._errors import LaunchError
from mesh_launchers._kubernetes_api import Cluster
from mesh_launchers._kubernetes_group import Group
from mesh_launchers._kubernetes_objects import Names
from mesh_launchers._kubernetes_options import KubernetesOptions

_DEADLINE_S = 1200.0
"""The Job's time limit for hosts that are not kept."""


class KubernetesLauncher:
    """Starts agents as pods: a Job for each mesh, and for hosts that are added later."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._groups: list[Group] = []
        self._clusters: dict[tuple[str | None, ...], asyncio.Future[Cluster]] = {}
        self._run = secrets.token_hex(8)

    async def start(self, options: KubernetesOptions, hosts: Sequence[HostSpec]) -> None:
        """Begin to start hosts."""
        cluster = self._cluster(options)
        names = Names.of(self._place.job, len(self._groups), self._run)
        group = Group(self._place, cluster, names, options, hosts)
        self._groups.append(group)
        group.begin()

    def _cluster(self, options: KubernetesOptions) -> asyncio.Future[Cluster]:
        """Return the cluster that options name, once it is found."""
        key = (options.kubeconfig, options.context, options.namespace)
        if key not in self._clusters:
            self._clusters[key] = _apart(lambda: Cluster.of(*key))
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

    async def renew(self, order: str) -> None:
        """Give all hosts new certificates."""
        await asyncio.gather(*[each.renew(order) for each in self._groups])

    async def close(self) -> None:
        """End all hosts, and remove everything that was made for them."""
        done = await asyncio.gather(
            *[each.stop(list(each.hosts)) for each in self._groups], return_exceptions=True
        )
        for each in self._clusters.values():
            if each.done() and not each.cancelled() and each.exception() is None:
                each.result().close()
        failed = [each for each in done if isinstance(each, BaseException)]
        if failed:
            raise LaunchError("; ".join(str(each) for each in failed)) from failed[0]


def _apart(work: Callable[[], Cluster]) -> asyncio.Future[Cluster]:
    """Run a function in a thread that nobody waits for: the client takes long to import, and a user's plugin for tokens may never end."""
    loop = asyncio.get_running_loop()
    found: asyncio.Future[Cluster] = loop.create_future()

    def give(result: Cluster | None, error: BaseException | None) -> None:
        if found.cancelled():
            return
        if error is not None:
            found.set_exception(error)
        elif result is not None:
            found.set_result(result)

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except Exception as failure:  # noqa: BLE001 - told to whoever waits for it
            error = failure
        # The loop may have ended.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(give, result, error)

    threading.Thread(target=run, name="kubernetes configuration", daemon=True).start()
    return found


def _probe() -> ProbeResult[None]:
    if importlib.util.find_spec("kubernetes") is None:
        return ProbeResult.no(
            "there is no Python package kubernetes here", remedy="pip install 'mesh-launchers[kubernetes]'"
        )
    return ProbeResult.yes()


def _shown(options: KubernetesOptions, job: str, count: int, number: int) -> str:
    """Return the Job of a mesh of hosts, without the program of its container."""
    manifest = objects.job(Names.of(job, number, ""), count, options, _DEADLINE_S)
    for each in manifest["spec"]["template"]["spec"]["containers"]:
        if each["name"] == objects.CONTAINER:
            each["command"] = [options.python, "..."]
    return json.dumps(manifest, indent=2)


KUBERNETES = LauncherPlugin(
    name="kubernetes",
    api_version=API_VERSION,
    create=KubernetesLauncher,
    options=KubernetesOptions,
    probe=_probe,
    show=_shown,
    summary="pods of a Kubernetes cluster",
)


@hookimpl
def mesh_register_launchers() -> Iterable[LauncherPlugin]:
    """The plugin of this module."""
    yield KUBERNETES
