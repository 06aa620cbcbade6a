"""Extend the processes of a job: code that lives in each process beside the actors, with state and messages of its own.

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

from mesh_core._serialize._registered import Registration, register_handler, register_reducer
from mesh_core.extensions._base import NOT_CARRIED, ActorEnd, Extension, ProcEnd, Raised, Spawning
from mesh_core.extensions._here import Proc, current_proc
from mesh_core.extensions._install import find, install, uninstall
from mesh_core.extensions._watching import Watch, watch

__all__ = [
    "NOT_CARRIED",
    "ActorEnd",
    "Extension",
    "Proc",
    "ProcEnd",
    "Raised",
    "Registration",
    "Spawning",
    "Watch",
    "current_proc",
    "find",
    "install",
    "register_handler",
    "register_reducer",
    "uninstall",
    "watch",
]
