"""Actors that are supervised, and a policy that lets tests wait for what another one is asked."""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from mesh_core import Actor, MeshFailure, ProcMesh, endpoint, this_host
from mesh_core.policies import Action, Event, Policy, Repaired, RepairEvent, RepairFailed
from mesh_supervision import OneForOne

WITHIN = 30.0
E = TypeVar("E")


class Heard:
    """Asks another policy, and keeps what it was asked for tests to wait for."""

    def __init__(self, policy: Policy, log: queue.SimpleQueue[Any] | None = None) -> None:
        self.policy = policy
        self.log: queue.SimpleQueue[Any] = queue.SimpleQueue() if log is None else log

    def on(self, event: Event, now: float) -> tuple[Policy, Sequence[Action]]:
        following, actions = self.policy.on(event, now)
        self.log.put((event, actions))
        return Heard(following, self.log), actions

    def on_repair(self, event: RepairEvent, now: float) -> tuple[Policy, Sequence[Action]]:
        following, actions = self.policy.on_repair(event, now)  # type: ignore[attr-defined]
        self.log.put((event, actions))
        return Heard(following, self.log), actions

    def wait(self, kind: type[E]) -> E:
        """The next event of that kind."""
        until = time.monotonic() + WITHIN
        while True:
            event, _ = self.log.get(timeout=max(0.0, until - time.monotonic()))
            if isinstance(event, kind):
                return event

    def repaired(self) -> Repaired:
        return self.wait(Repaired)

    def failed_repair(self) -> RepairFailed:
        return self.wait(RepairFailed)


class Worker(Actor):
    """Has a life that can be told from the one before, and may not be constructed while a file says so."""

    def __init__(self, obstacle: Path | None = None) -> None:
        self.worked = 0
        if obstacle is not None and obstacle.exists():
            if obstacle.read_text() == "exit":
                os._exit(3)
            raise RuntimeError("there is an obstacle")

    @endpoint
    def who(self) -> tuple[int, int]:
        """Its process, and how often it was asked in this life."""
        self.worked += 1
        return os.getpid(), self.worked

    @endpoint
    def leave(self, status: int) -> None:
        os._exit(status)

    @endpoint
    def fail(self) -> None:
        raise RuntimeError("out of luck")


class Boss(Actor):
    """Owns workers, supervised, and is told when that does not help."""

    def __init__(self) -> None:
        self.told: list[MeshFailure] = []
        self.procs: ProcMesh = this_host().spawn_procs({"gpus": 2}, name="boss's")
        self.workers: Any = self.procs.spawn("workers", Worker, supervise=OneForOne(intensity=1, period=60.0))

    @endpoint
    def reference(self) -> Any:
        return self.workers

    @endpoint
    def reports(self) -> list[str]:
        return [failure.report() for failure in self.told]

    def __supervise__(self, failure: MeshFailure) -> bool:
        self.told.append(failure)
        return True
