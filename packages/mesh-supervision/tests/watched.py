"""Snapshots on paper, for tests of what is shown of them."""

from __future__ import annotations

from typing import Any

from mesh_core.inspect import ActorState, HostState, ProcState, Snapshot


def actor(name: str, rank: int, **more: Any) -> ActorState:
    fields: dict[str, Any] = {
        "name": name, "class_name": "Trainer", "rank": rank, "point": {"gpus": rank}, "proc": f"workers[{rank}]",
        "owner": "controller", "state": "idle", "age": 5.0, "queue": 0, "queue_bytes": 0, "received": 0,
        "received_bytes": 0, "handled": 0, "failed": 0, "rate": 0.0, "mean": 0.0, "longest": 0.0, "running": (),
        "actor_id": 100 + rank,
    }  # fmt: skip
    return ActorState(**{**fields, **more})


def proc(rank: int, *actors: ActorState, **more: Any) -> ProcState:
    fields: dict[str, Any] = {
        "name": f"workers[{rank}]", "mesh": "workers", "rank": rank, "point": {"gpus": rank}, "host": "b7",
        "pid": 4242 + rank, "owner": "controller", "state": "running", "cpu": 1.0, "rss": 8_000_000, "pss": None,
        "threads": 3, "outgoing": 0, "calls": 0, "shm_bytes": 0, "actors": actors,
    }  # fmt: skip
    return ProcState(**{**fields, **more})


def snap(*procs: ProcState, at: float = 1000.0) -> Snapshot:
    host = HostState("b7", 2, 0.4, 25_000_000_000, 22_000_000_000, procs)
    return Snapshot(at, (host,), ())
