"""Supervision policies for Mesh: what is restarted when something has died, how often, and who is notified.

A policy is passed to a spawn. Its terms are those of Erlang/OTP.

>>> from mesh_core import Actor, this_host
>>> from mesh_supervision import Backoff, Ignore, OneForOne
>>> class Worker(Actor): ...
>>> with this_host().spawn_procs({"gpus": 2}, supervise=Ignore()) as procs:
...     policy = OneForOne(intensity=3, period=60.0, backoff=Backoff())
...     workers = procs.spawn("workers", Worker, supervise=policy)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mesh_supervision._backoff import Backoff
    from mesh_supervision._breaker import Circuit, CircuitBreaker
    from mesh_supervision._collectives import watch_collectives
    from mesh_supervision._combine import ByKind, ByRank, Levels
    from mesh_supervision._elastic import ElasticMesh, Notice, leaving
    from mesh_supervision._elastic_turn import Change
    from mesh_supervision._groups import Group, form_group
    from mesh_supervision._heal import heal_mesh, whole
    from mesh_supervision._health import Health, Limits, Trouble, TroubleKind
    from mesh_supervision._health_watch import HealthWatch, watch_health
    from mesh_supervision._machine import RestartType, Strategy
    from mesh_supervision._simple import Escalate, Ignore
    from mesh_supervision._snapshots import Snapshots, keep_snapshots, snapshot
    from mesh_supervision._store import Version
    from mesh_supervision._supervisor import OneForAll, OneForOne, RestForOne, Supervisor
    from mesh_supervision._watching._dashboard import Dashboard
    from mesh_supervision._watching._metrics import MetricsServer, export_metrics
    from mesh_supervision._watching._trace import JobTrace

    __version__: str

__all__ = [
    "Backoff",
    "ByKind",
    "ByRank",
    "Change",
    "Circuit",
    "CircuitBreaker",
    "Dashboard",
    "ElasticMesh",
    "Escalate",
    "Group",
    "Health",
    "HealthWatch",
    "Ignore",
    "JobTrace",
    "Levels",
    "Limits",
    "MetricsServer",
    "Notice",
    "OneForAll",
    "OneForOne",
    "RestForOne",
    "RestartType",
    "Snapshots",
    "Strategy",
    "Supervisor",
    "Trouble",
    "TroubleKind",
    "Version",
    "__version__",
    "export_metrics",
    "form_group",
    "heal_mesh",
    "keep_snapshots",
    "leaving",
    "snapshot",
    "watch_collectives",
    "watch_health",
    "whole",
]

# Workers import the package for its extensions, and somebody waits for a restarted one, so unused parts are not imported.
_LATER = {
    "Backoff": "mesh_supervision._backoff",
    "Circuit": "mesh_supervision._breaker",
    "CircuitBreaker": "mesh_supervision._breaker",
    "watch_collectives": "mesh_supervision._collectives",
    "ByKind": "mesh_supervision._combine",
    "ByRank": "mesh_supervision._combine",
    "Levels": "mesh_supervision._combine",
    "ElasticMesh": "mesh_supervision._elastic",
    "Notice": "mesh_supervision._elastic",
    "leaving": "mesh_supervision._elastic",
    "Change": "mesh_supervision._elastic_turn",
    "Group": "mesh_supervision._groups",
    "form_group": "mesh_supervision._groups",
    "heal_mesh": "mesh_supervision._heal",
    "whole": "mesh_supervision._heal",
    "Health": "mesh_supervision._health",
    "Limits": "mesh_supervision._health",
    "Trouble": "mesh_supervision._health",
    "TroubleKind": "mesh_supervision._health",
    "HealthWatch": "mesh_supervision._health_watch",
    "watch_health": "mesh_supervision._health_watch",
    "RestartType": "mesh_supervision._machine",
    "Strategy": "mesh_supervision._machine",
    "Escalate": "mesh_supervision._simple",
    "Ignore": "mesh_supervision._simple",
    "Snapshots": "mesh_supervision._snapshots",
    "keep_snapshots": "mesh_supervision._snapshots",
    "snapshot": "mesh_supervision._snapshots",
    "Version": "mesh_supervision._store",
    "OneForAll": "mesh_supervision._supervisor",
    "OneForOne": "mesh_supervision._supervisor",
    "RestForOne": "mesh_supervision._supervisor",
    "Supervisor": "mesh_supervision._supervisor",
    "Dashboard": "mesh_supervision._watching._dashboard",
    "MetricsServer": "mesh_supervision._watching._metrics",
    "export_metrics": "mesh_supervision._watching._metrics",
    "JobTrace": "mesh_supervision._watching._trace",
}


def __getattr__(name: str) -> Any:
    found: Any
    if name == "__version__":
        from importlib.metadata import version

        found = version("mesh-supervision")
    elif (module := _LATER.get(name)) is not None:
        import importlib

        found = getattr(importlib.import_module(module), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
