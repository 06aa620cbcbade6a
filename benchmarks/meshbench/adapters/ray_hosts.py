# mypy: disable-error-code="import-not-found, import-untyped, misc, untyped-decorator, attr-defined, no-any-return"
"""Ray over several nodes of one machine, by its own `ray.cluster_utils.Cluster`: a raylet and an object store each."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import ray

from meshbench.adapter import PAYLOAD
from meshbench.timing import sample

_STORE = 1 << 30  # bytes of each node's object store: several arrays of 256 MiB


@ray.remote(num_cpus=0)
class Far:
    """An actor on a given node."""

    def __init__(self) -> None:
        self._data: Any = b""

    def echo(self, x: Any) -> Any:
        """Answer with `x`."""
        return x

    def take(self, x: Any) -> int:
        """Answer with the size of `x`."""
        return int(x.nbytes)

    def give(self, size: int) -> Any:
        """An array of so many bytes, made once."""
        if len(self._data) != size:
            self._data = import_module("numpy").ones(size, dtype="uint8")
        return self._data

    def rally(self, peer: Any, calls: int) -> list[float]:
        """Call `peer` one time after the other."""
        return sample(calls, lambda: ray.get(peer.echo.remote(PAYLOAD)))


class Hosts:
    """See `meshbench.adapter.HostsSystem`, without `host_cast`: Ray has none, and as many nodes are too many here."""

    def start_hosts(self, hosts: int, procs: int) -> None:
        """A head node for this script, `hosts` more nodes, `procs` actors on each of these."""
        cluster_utils = import_module("ray.cluster_utils")
        head = {"num_cpus": 1, "object_store_memory": _STORE, "include_dashboard": False}
        self._cluster = cluster_utils.Cluster(initialize_head=True, head_node_args=head)
        nodes = [self._cluster.add_node(num_cpus=1, object_store_memory=_STORE) for _ in range(hosts)]
        ray.init(address=self._cluster.address, log_to_driver=False, logging_level="ERROR")
        self._far = [[_on(node.node_id) for _ in range(procs)] for node in nodes]
        ray.get([actor.echo.remote(PAYLOAD) for actors in self._far for actor in actors])

    def close_hosts(self) -> None:
        """Leave the cluster, then end it."""
        ray.shutdown()
        self._cluster.shutdown()

    def host_call(self, calls: int) -> list[float]:
        """Blocking calls to the first actor of the first node that is not this script's."""
        remote = self._far[0][0].echo.remote
        return sample(calls, lambda: ray.get(remote(PAYLOAD)))

    def host_call_here(self, calls: int) -> list[float]:
        """The same to an actor of this script's node."""
        remote = _on(ray.get_runtime_context().get_node_id()).echo.remote
        return sample(calls, lambda: ray.get(remote(PAYLOAD)))

    def host_pair(self, calls: int, same: bool) -> list[float]:
        """The first actor of the first node calls."""
        peer = self._far[0][1] if same else self._far[1][0]
        return list(ray.get(self._far[0][0].rally.remote(peer, calls)))

    def host_put(self, size: int, times: int) -> list[float]:
        """As an argument: into this node's object store, from there into the other's."""
        data = import_module("numpy").ones(size, dtype="uint8")
        remote = self._far[0][0].take.remote
        return sample(times, lambda: ray.get(remote(data)), warm_up=1)

    def host_get(self, size: int, times: int) -> list[float]:
        """As a result: the same way back."""
        remote = self._far[0][0].give.remote
        return sample(times, lambda: ray.get(remote(size)), warm_up=1)


def _on(node: str) -> Any:
    strategies = import_module("ray.util.scheduling_strategies")
    return Far.options(
        scheduling_strategy=strategies.NodeAffinitySchedulingStrategy(node, soft=False)
    ).remote()
