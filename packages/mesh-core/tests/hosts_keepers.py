"""An extension that lives at hosts, and actors that ask it, in a module that a worker imports without pytest."""

from __future__ import annotations

from typing import Any

from core_owners import write_down
from hosts_samples import SOON

from mesh_core import Actor, HostMesh, endpoint, this_host
from mesh_core.extensions import Extension, Proc, current_proc, find


class Store(Extension):
    """What processes of a job keep at their hosts."""

    name = "store"
    on_hosts = True

    def start(self) -> None:
        self.kept: list[Any] = []

    def receive(self, message: Any, sender: Proc) -> Any:
        match message:
            case "who":
                return self.proc
            case "kept":
                return self.kept
        self.kept.append(message)
        return len(self.kept)

    def stop(self) -> None:
        if self.payload is not None:
            if not (self.proc.is_host or self.proc.is_controller):
                # It serves its processes until their end.
                assert self.call(this_host(), "who").get(timeout=SOON).item().is_host
            write_down(self.payload, f"{self.proc.host} {'host' if self.proc.is_host else 'process'}")


class Keeper(Actor):
    @endpoint
    def who(self, hosts: HostMesh | None = None) -> Any:
        store = find(Store)
        assert store is not None
        return store.call(hosts or this_host(), "who").get(timeout=SOON).values()

    @endpoint
    def keep(self, hosts: HostMesh, count: int) -> list[int]:
        """Keep numbers at the hosts, and return what the first has."""
        store = find(Store)
        assert store is not None
        for number in range(count):
            store.tell(hosts, number)
        kept: list[int] = store.call(hosts, "kept").get(timeout=SOON).values()[0]
        return kept

    @endpoint
    def bring(self, hosts: HostMesh) -> list[Proc]:
        """Spawn processes on other hosts, which ask theirs."""
        with hosts.spawn_procs() as procs:
            found = procs.spawn("keepers", Keeper).who.call().get(timeout=SOON).values()
            return [each[0] for each in found]

    @endpoint
    def here(self) -> Proc:
        return current_proc()
