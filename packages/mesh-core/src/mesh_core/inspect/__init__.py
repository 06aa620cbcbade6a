"""Look at a running program: the whole tree at one moment, what happens in it, and where its threads stand.

============== ==========================================================================================
``snapshot()`` every host, process and actor: what waits, what runs since when, how much was handled, failures
``events()``   what happens, as it happens
``waits()``    who waits for whom, since when, and where that is a circle
``stacks()``   the Python threads of every process of a mesh, also of one that is stuck
``trace()``    whether calls make OpenTelemetry spans
``jobs()``     the jobs of this user that run on this machine
``connect()``  one of them, to ask it all this from another terminal
============== ==========================================================================================

All of it is answered by the processes' runtimes, not by Python code there: it works while an actor is stuck, its event
loop is blocked, or C code holds the interpreter's lock.

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
from mesh_core.inspect._snapshot import ActorState, Awaited, HostState, ProcState, Running, Snapshot, snapshot
from mesh_core.inspect._stacks import ProcStacks, StackFrame, ThreadStack, stacks
from mesh_core.inspect._waits import Circle, Wait, Waits, waits

__all__ = [
    "ActorState",
    "Awaited",
    "Circle",
    "Event",
    "Events",
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
