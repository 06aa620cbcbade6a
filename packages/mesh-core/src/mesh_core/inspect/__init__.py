"""Look into a running job: its hosts, processes and actors, its events, and the stacks of its threads.

============== ==========================================================================================
``snapshot()`` every host, process and actor: queues, running endpoints, message counts, failures
``events()``   events as they happen
``waits()``    who waits for whom, for how long, and deadlocks
``stacks()``   the Python threads of every process of a mesh, even of a process that is stuck
``trace()``    turns OpenTelemetry spans on or off
``jobs()``     this user's running jobs on this machine
``connect()``  one of these jobs, to ask it the same questions from another terminal
============== ==========================================================================================

The processes' runtimes answer, not Python code. So this works while an actor is stuck, its event loop is blocked, or
C code holds the interpreter's lock.

>>> from mesh_core import Actor, endpoint, inspect, this_host
>>> class Counter(Actor):
...     @endpoint
...     def add(self, n: int) -> int:
...         return n + 1
>>> with this_host().spawn_procs(per_host={"gpus": 2}) as procs:
...     counters = procs.spawn("counters", Counter)
...     _ = counters.add.call(1).get()
...     [(actor.name, actor.rank, actor.handled) for actor in inspect.snapshot().actors]
[('counters', 0, 1), ('counters', 1, 1)]
"""

from __future__ import annotations

from mesh_core._features.traces import trace
from mesh_core.inspect._event import Event
from mesh_core.inspect._events import Events, events
from mesh_core.inspect._remote import JobInfo, LogText, RunningJob, connect, jobs
from mesh_core.inspect._snapshot import (
    ActorState,
    Awaited,
    ForkServerState,
    HostState,
    ProcState,
    Running,
    Snapshot,
    snapshot,
)
from mesh_core.inspect._stacks import ProcStacks, StackFrame, ThreadStack, stacks
from mesh_core.inspect._waits import Circle, Wait, Waits, waits

__all__ = [
    "ActorState",
    "Awaited",
    "Circle",
    "Event",
    "Events",
    "ForkServerState",
    "HostState",
    "JobInfo",
    "LogText",
    "ProcStacks",
    "ProcState",
    "Running",
    "RunningJob",
    "Snapshot",
    "StackFrame",
    "ThreadStack",
    "Wait",
    "Waits",
    "connect",
    "events",
    "jobs",
    "snapshot",
    "stacks",
    "trace",
    "waits",
]
