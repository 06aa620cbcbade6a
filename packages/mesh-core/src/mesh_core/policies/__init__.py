"""Supervision policies: what to do about failures, as a function of state, event and time.

Pass a policy to a spawn: ``spawn(..., supervise=policy)``. It touches neither processes nor a clock. Mesh calls it with
events and carries out the actions that it returns.

>>> from dataclasses import dataclass
>>> from mesh_core import FailureKind
>>> from mesh_core.policies import Action, Escalate, Event, Failed, Ignore
>>> @dataclass(frozen=True)
... class Tolerate:
...     most: int
...     failures: int = 0
...
...     def on(self, event: Event, now: float) -> tuple["Tolerate", list[Action]]:
...         if not isinstance(event, Failed):
...             return self, []
...         if self.failures < self.most:
...             return Tolerate(self.most, self.failures + 1), [Ignore()]
...         return self, [Escalate(f"more than {self.most} failures")]
>>> policy = Tolerate(most=1)
>>> policy, actions = policy.on(Failed("workers", 2, FailureKind.KILLED), now=0.0)
>>> actions
[Ignore()]
>>> policy, actions = policy.on(Failed("workers", 3, FailureKind.KILLED), now=1.0)
>>> actions
[Escalate(reason='more than 1 failures')]
"""

from mesh_core._failures.policies import (
    Action,
    Due,
    Ended,
    Escalate,
    Event,
    Failed,
    Ignore,
    Later,
    Policy,
    Repaired,
    RepairEvent,
    RepairFailed,
    RepairPolicy,
    Respawn,
    Restart,
    Stop,
    checked_actions,
)

__all__ = [
    "Action",
    "Due",
    "Ended",
    "Escalate",
    "Event",
    "Failed",
    "Ignore",
    "Later",
    "Policy",
    "RepairEvent",
    "RepairFailed",
    "RepairPolicy",
    "Repaired",
    "Respawn",
    "Restart",
    "Stop",
    "checked_actions",
]
