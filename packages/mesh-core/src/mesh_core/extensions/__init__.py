"""Extend the processes of a job with code that runs in each process beside the actors, with its own state and messages.

>>> from mesh_core import this_host
>>> from mesh_core.extensions import Extension, install, uninstall
>>> class Counter(Extension):
...     name = "counter"
...     def start(self) -> None:
...         self.count = 0
...     def receive(self, message: int, sender: Proc) -> int:
...         self.count += message
...         return self.count
>>> counter = install(Counter)
>>> with this_host().spawn_procs({"gpus": 2}) as procs:
...     counter.call(procs, 5).get(timeout=30).values()
[5, 5]
>>> uninstall("counter")
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mesh_core._extensions.base import NOT_CARRIED, Extension

if TYPE_CHECKING:
    from mesh_core._common.display import printable
    from mesh_core._common.membership import Membership, membership
    from mesh_core._common.named_files import naming
    from mesh_core._common.peers import peer_of, require_same_namespaces, require_same_user
    from mesh_core._common.private_folders import (
        jobs_folder,
        make_private,
        make_secret_folder,
        open_base,
        open_own_file,
        open_private,
    )
    from mesh_core._common.proc import Proc, current_proc
    from mesh_core._common.progress import clear_progress, progress
    from mesh_core._extensions.events import ActorEnd, EndpointCall, ProcEnd, Raised, Spawning
    from mesh_core._extensions.install import find, install, uninstall
    from mesh_core._extensions.watching import Watch, watch
    from mesh_core._failures.host_reasons import HostReasons
    from mesh_core._futures.watched import watched
    from mesh_core._hosting.local_actor import (
        LocalActor,
        actor_id,
        actor_ranks,
        local_actor,
        local_actors,
        procs_of,
        settled,
    )
    from mesh_core._native import ClockStop
    from mesh_core._process.guests import Guests, Joined, check_free, has_joined, join_job
    from mesh_core._serialize import dumps, loads
    from mesh_core._serialize.late import NotYet
    from mesh_core._serialize.registered import Registration, register_handler, register_reducer

__all__ = [
    "NOT_CARRIED",
    "ActorEnd",
    "ClockStop",
    "EndpointCall",
    "Extension",
    "Guests",
    "HostReasons",
    "Joined",
    "LocalActor",
    "Membership",
    "NotYet",
    "Proc",
    "ProcEnd",
    "Raised",
    "Registration",
    "Spawning",
    "Watch",
    "actor_id",
    "actor_ranks",
    "check_free",
    "clear_progress",
    "current_proc",
    "dumps",
    "find",
    "has_joined",
    "install",
    "jobs_folder",
    "join_job",
    "loads",
    "local_actor",
    "local_actors",
    "make_private",
    "make_secret_folder",
    "membership",
    "naming",
    "open_base",
    "open_own_file",
    "open_private",
    "peer_of",
    "printable",
    "procs_of",
    "progress",
    "register_handler",
    "register_reducer",
    "require_same_namespaces",
    "require_same_user",
    "settled",
    "uninstall",
    "watch",
    "watched",
]

# Every worker imports this package, and few use more of it than the base class.
_LATER = {
    "ActorEnd": "mesh_core._extensions.events",
    "EndpointCall": "mesh_core._extensions.events",
    "Guests": "mesh_core._process.guests",
    "HostReasons": "mesh_core._failures.host_reasons",
    "Joined": "mesh_core._process.guests",
    "check_free": "mesh_core._process.guests",
    "has_joined": "mesh_core._process.guests",
    "join_job": "mesh_core._process.guests",
    "ClockStop": "mesh_core._native",
    "LocalActor": "mesh_core._hosting.local_actor",
    "Membership": "mesh_core._common.membership",
    "NotYet": "mesh_core._serialize.late",
    "Proc": "mesh_core._common.proc",
    "ProcEnd": "mesh_core._extensions.events",
    "Raised": "mesh_core._extensions.events",
    "Registration": "mesh_core._serialize.registered",
    "Spawning": "mesh_core._extensions.events",
    "Watch": "mesh_core._extensions.watching",
    "actor_id": "mesh_core._hosting.local_actor",
    "actor_ranks": "mesh_core._hosting.local_actor",
    "current_proc": "mesh_core._common.proc",
    "dumps": "mesh_core._serialize",
    "loads": "mesh_core._serialize",
    "membership": "mesh_core._common.membership",
    "naming": "mesh_core._common.named_files",
    "find": "mesh_core._extensions.install",
    "install": "mesh_core._extensions.install",
    "local_actor": "mesh_core._hosting.local_actor",
    "local_actors": "mesh_core._hosting.local_actor",
    "peer_of": "mesh_core._common.peers",
    "printable": "mesh_core._common.display",
    "require_same_namespaces": "mesh_core._common.peers",
    "require_same_user": "mesh_core._common.peers",
    "jobs_folder": "mesh_core._common.private_folders",
    "make_private": "mesh_core._common.private_folders",
    "make_secret_folder": "mesh_core._common.private_folders",
    "open_base": "mesh_core._common.private_folders",
    "open_own_file": "mesh_core._common.private_folders",
    "open_private": "mesh_core._common.private_folders",
    "procs_of": "mesh_core._hosting.local_actor",
    "clear_progress": "mesh_core._common.progress",
    "progress": "mesh_core._common.progress",
    "watched": "mesh_core._futures.watched",
    "register_handler": "mesh_core._serialize.registered",
    "register_reducer": "mesh_core._serialize.registered",
    "settled": "mesh_core._hosting.local_actor",
    "uninstall": "mesh_core._extensions.install",
    "watch": "mesh_core._extensions.watching",
}


def __getattr__(name: str) -> Any:
    module = _LATER.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    found = globals()[name] = getattr(importlib.import_module(module), name)
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
