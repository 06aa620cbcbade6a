"""Actors and meshes: one Python script drives a whole cluster.

>>> from mesh_core import Actor, endpoint, this_host
>>> class Trainer(Actor):
...     def __init__(self, lr: float) -> None:
...         self.lr = lr
...     @endpoint
...     def step(self, batch: int) -> float:
...         return self.lr * batch
>>> with this_host().spawn_procs(per_host={"gpus": 4}) as procs:
...     trainers = procs.spawn("trainers", Trainer, 0.5)
...     trainers.step.call(8).get().values()
[4.0, 4.0, 4.0, 4.0]
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, TypeVar

from mesh_core._actor import Actor
from mesh_core._adverbs import Endpoint
from mesh_core._bundle import put_together
from mesh_core._context import (
    Context,
    Instance,
    context,
    current_actor_name,
    current_rank,
    current_size,
)
from mesh_core._endpoint import endpoint
from mesh_core._errors import (
    ActorTimeout,
    AuthenticationError,
    BrokenPromise,
    ChannelClosed,
    DeviceMeshError,
    MailboxFull,
    MeshError,
    PluginError,
    PluginLoadError,
    PoolLost,
    ReplyDropped,
    SerializationError,
    SpawnError,
    SupervisionError,
    Undeliverable,
)
from mesh_core._exceptions import ActorError
from mesh_core._future import Future, Stream
from mesh_core._hosts import HostMesh, proc_mesh, this_host, this_proc
from mesh_core._native import Extent, Point, Region, Shape, Slice, __version__
from mesh_core._process import shutdown
from mesh_core._procs import ProcMesh
from mesh_core._sending import Sending
from mesh_core._values import ValueMesh

if TYPE_CHECKING:
    _A = TypeVar("_A")
    # A mesh of actors is typed as their class, so that `trainers.step.call` is known: to a type checker both are one.
    ActorMesh: TypeAlias = Annotated[_A, "a mesh of actors"]

    from mesh_core._accumulator import Accumulator
    from mesh_core._agent import run_worker_loop_forever
    from mesh_core._attach import attach_to_workers
    from mesh_core._controllers import get_or_spawn_controller
    from mesh_core._credentials import Credentials
    from mesh_core._failure import FailureKind, MeshFailure
    from mesh_core._host_agent import HostAgent
    from mesh_core._include import get_include
    from mesh_core._pipeline._pipeline import Pipeline, PipelineRun, Stage
    from mesh_core._pipeline._quarantine import Quarantined, StageError
    from mesh_core._pipeline._stats import PipelineStats, StageStats
    from mesh_core._pool._pool import Pool, PoolProgress
    from mesh_core._ports import Channel, Port, PortReceiver
    from mesh_core._promise import Promise
    from mesh_core._queue._client import QueueClosed
    from mesh_core._queue._queue import Queue, QueueEmpty, QueueFull, QueueItem, QueueItemError
    from mesh_core._queue._server import QueueStats
    from mesh_core._refs import Ref, RefLost, RefStoreFull, put, put_async
    from mesh_core._sandboxes._isolation import Isolation
    from mesh_core._sandboxes._outcome import SandboxDied, SandboxError, SandboxTimeout
    from mesh_core._sandboxes._sandbox import Sandbox
    from mesh_core._sandboxes._sandboxes import Sandboxes
    from mesh_core._seeds import rank_seed
    from mesh_core._send import as_endpoint, send
    from mesh_core._settings import Settings, SettingsError, configure, configured
    from mesh_core._supervision import set_fault_handler
    from mesh_core._together import as_completed, gather, wait, wait_async
    from mesh_core._tools import ToolLimit, ToolResult, ToolUsage, detach, run_tool, run_tool_async
    from mesh_core._workspace._report import WorkspaceReport
else:
    from mesh_core._actors import ActorMesh

put_together()

__all__ = [
    "Accumulator",
    "Actor",
    "ActorError",
    "ActorMesh",
    "ActorTimeout",
    "AuthenticationError",
    "BrokenPromise",
    "Channel",
    "ChannelClosed",
    "Context",
    "Credentials",
    "DeviceMeshError",
    "Endpoint",
    "Extent",
    "FailureKind",
    "Future",
    "Host",
    "HostAgent",
    "HostMesh",
    "Instance",
    "Isolation",
    "MailboxFull",
    "MeshError",
    "MeshFailure",
    "Pipeline",
    "PipelineRun",
    "PipelineStats",
    "PluginError",
    "PluginLoadError",
    "Point",
    "Pool",
    "PoolLost",
    "PoolProgress",
    "Port",
    "PortReceiver",
    "ProcMesh",
    "Promise",
    "Quarantined",
    "Queue",
    "QueueClosed",
    "QueueEmpty",
    "QueueFull",
    "QueueItem",
    "QueueItemError",
    "QueueStats",
    "Ref",
    "RefLost",
    "RefStoreFull",
    "Region",
    "ReplyDropped",
    "Sandbox",
    "SandboxDied",
    "SandboxError",
    "SandboxTimeout",
    "Sandboxes",
    "Sending",
    "SerializationError",
    "Settings",
    "SettingsError",
    "Shape",
    "Slice",
    "SpawnError",
    "Stage",
    "StageError",
    "StageStats",
    "Stream",
    "SupervisionError",
    "ToolLimit",
    "ToolResult",
    "ToolUsage",
    "Undeliverable",
    "ValueMesh",
    "WorkspaceReport",
    "__version__",
    "as_completed",
    "as_endpoint",
    "attach_to_workers",
    "concat",
    "configure",
    "configured",
    "context",
    "current_actor_name",
    "current_rank",
    "current_size",
    "detach",
    "endpoint",
    "gather",
    "get_include",
    "get_or_spawn_controller",
    "proc_mesh",
    "put",
    "put_async",
    "rank_seed",
    "run_tool",
    "run_tool_async",
    "run_worker_loop_forever",
    "send",
    "set_fault_handler",
    "shutdown",
    "this_host",
    "this_proc",
    "wait",
    "wait_async",
]

# Dataclasses take longer to import than all the rest, and most programs never name these.
_LATER = {
    "Accumulator": "mesh_core._accumulator",
    "Channel": "mesh_core._ports",
    "Pipeline": "mesh_core._pipeline._pipeline",
    "PipelineRun": "mesh_core._pipeline._pipeline",
    "PipelineStats": "mesh_core._pipeline._stats",
    "Quarantined": "mesh_core._pipeline._quarantine",
    "Stage": "mesh_core._pipeline._pipeline",
    "StageError": "mesh_core._pipeline._quarantine",
    "StageStats": "mesh_core._pipeline._stats",
    "Pool": "mesh_core._pool._pool",
    "PoolProgress": "mesh_core._pool._pool",
    "Port": "mesh_core._ports",
    "Promise": "mesh_core._promise",
    "as_completed": "mesh_core._together",
    "gather": "mesh_core._together",
    "get_include": "mesh_core._include",
    "wait": "mesh_core._together",
    "wait_async": "mesh_core._together",
    "PortReceiver": "mesh_core._ports",
    "Queue": "mesh_core._queue._queue",
    "QueueClosed": "mesh_core._queue._client",
    "QueueEmpty": "mesh_core._queue._queue",
    "QueueFull": "mesh_core._queue._queue",
    "QueueItem": "mesh_core._queue._queue",
    "QueueItemError": "mesh_core._queue._queue",
    "QueueStats": "mesh_core._queue._server",
    "attach_to_workers": "mesh_core._attach",
    "run_worker_loop_forever": "mesh_core._agent",
    "as_endpoint": "mesh_core._send",
    "send": "mesh_core._send",
    "Ref": "mesh_core._refs",
    "RefLost": "mesh_core._refs",
    "RefStoreFull": "mesh_core._refs",
    "put": "mesh_core._refs",
    "put_async": "mesh_core._refs",
    "rank_seed": "mesh_core._seeds",
    "Credentials": "mesh_core._credentials",
    "Host": "mesh_core._traits",
    "HostAgent": "mesh_core._host_agent",
    "get_or_spawn_controller": "mesh_core._controllers",
    "FailureKind": "mesh_core._failure",
    "MeshFailure": "mesh_core._failure",
    "Settings": "mesh_core._settings",
    "SettingsError": "mesh_core._settings",
    "Isolation": "mesh_core._sandboxes._isolation",
    "Sandbox": "mesh_core._sandboxes._sandbox",
    "SandboxDied": "mesh_core._sandboxes._outcome",
    "SandboxError": "mesh_core._sandboxes._outcome",
    "SandboxTimeout": "mesh_core._sandboxes._outcome",
    "Sandboxes": "mesh_core._sandboxes._sandboxes",
    "concat": "mesh_core._joined",
    "configure": "mesh_core._settings",
    "configured": "mesh_core._settings",
    "set_fault_handler": "mesh_core._supervision",
    "ToolLimit": "mesh_core._tools",
    "ToolResult": "mesh_core._tools",
    "ToolUsage": "mesh_core._tools",
    "WorkspaceReport": "mesh_core._workspace._report",
    "detach": "mesh_core._tools",
    "run_tool": "mesh_core._tools",
    "run_tool_async": "mesh_core._tools",
}


def __getattr__(name: str) -> Any:
    if name == "inspect":
        import importlib

        return importlib.import_module("mesh_core.inspect")
    module = _LATER.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(module), name)


def __dir__() -> list[str]:
    return sorted(__all__)
