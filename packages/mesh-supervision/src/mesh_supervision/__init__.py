"""Supervision policies for Mesh: what is restarted when something has died, how often, and who is told.

A policy is given to a spawn. Its words are those of Erlang/OTP.

>>> from mesh_core import Actor, this_host
>>> from mesh_supervision import Backoff, Ignore, OneForOne
>>> class Worker(Actor): ...
>>> with this_host().spawn_procs({"gpus": 2}, supervise=Ignore()) as procs:
...     policy = OneForOne(intensity=3, period=60.0, backoff=Backoff())
...     workers = procs.spawn("workers", Worker, supervise=policy)
"""

from importlib.metadata import version as _version

from mesh_supervision._backoff import Backoff
from mesh_supervision._breaker import Circuit, CircuitBreaker
from mesh_supervision._combine import ByKind, ByRank, Levels
from mesh_supervision._machine import RestartType, Strategy
from mesh_supervision._simple import Escalate, Ignore
from mesh_supervision._snapshots import Snapshots, keep_snapshots, snapshot
from mesh_supervision._store import Version
from mesh_supervision._supervisor import OneForAll, OneForOne, RestForOne, Supervisor

__all__ = [
    "Backoff",
    "ByKind",
    "ByRank",
    "Circuit",
    "CircuitBreaker",
    "Escalate",
    "Ignore",
    "Levels",
    "OneForAll",
    "OneForOne",
    "RestForOne",
    "RestartType",
    "Snapshots",
    "Strategy",
    "Supervisor",
    "Version",
    "__version__",
    "keep_snapshots",
    "snapshot",
]

__version__ = _version("mesh-supervision")
