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

from mesh_core._actors.actor import Actor
from mesh_core._actors.endpoint import endpoint
from mesh_core._bundle import put_together
from mesh_core._common.context import (
    Context,
    Instance,
    context,
    current_actor_name,
    current_rank,
    current_size,
)
from mesh_core._common.errors import (
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
from mesh_core._futures.future import Future, Stream
from mesh_core._futures.sending import Sending
from mesh_core._geometry.values import ValueMesh
from mesh_core._meshes.adverbs import Endpoint
from mesh_core._meshes.hosts import HostMesh, proc_mesh, this_host, this_proc
from mesh_core._meshes.procs import ProcMesh
from mesh_core._native import Extent, Point, Region, Shape, Slice, __version__
from mesh_core._process.process import shutdown
from mesh_core._serialize.exceptions import ActorError

if TYPE_CHECKING:
    _A = TypeVar("_A")
    # A mesh of actors is typed as their class, so that `trainers.step.call` is known; the type checker sees no difference.
    ActorMesh: TypeAlias = Annotated[_A, "a mesh of actors"]

    from mesh_core._blocks.forwarding import PortForwarder
    from mesh_core._blocks.pipeline.pipeline import Pipeline, PipelineRun, Stage
    from mesh_core._blocks.pipeline.quarantine import Quarantined, StageError
    from mesh_core._blocks.pipeline.stats import PipelineStats, StageStats
    from mesh_core._blocks.pool.pool import Pool, PoolProgress
    from mesh_core._blocks.queue.client import QueueClosed
    from mesh_core._blocks.queue.queue import Queue, QueueEmpty, QueueFull, QueueItem, QueueItemError
    from mesh_core._blocks.queue.server import QueueStats
    from mesh_core._blocks.sandboxes.isolation import Isolation
    from mesh_core._blocks.sandboxes.outcome import SandboxDied, SandboxError, SandboxTimeout
    from mesh_core._blocks.sandboxes.sandbox import Sandbox
    from mesh_core._blocks.sandboxes.sandboxes import Sandboxes
    from mesh_core._blocks.tools import ToolLimit, ToolResult, ToolUsage, detach, run_tool, run_tool_async
    from mesh_core._common.codes import FailureKind
    from mesh_core._common.credentials import Credentials
    from mesh_core._common.headers import get_include
    from mesh_core._common.settings import Settings, SettingsError, configure, configured
    from mesh_core._failures.failure import MeshFailure
    from mesh_core._failures.supervision import set_fault_handler
    from mesh_core._features.workspace.report import WorkspaceReport
    from mesh_core._futures.combined import as_completed, gather, wait, wait_async
    from mesh_core._futures.promise import Promise
    from mesh_core._meshes.accumulator import Accumulator
    from mesh_core._meshes.attach import attach_to_workers
    from mesh_core._meshes.controllers import get_or_spawn_controller
    from mesh_core._meshes.handle import MeshHandle, mesh_of
    from mesh_core._meshes.ports import Channel, Port, PortReceiver
    from mesh_core._meshes.refs import Ref, RefLost, RefStoreFull, put, put_async
    from mesh_core._meshes.send import as_endpoint, send
    from mesh_core._process.agent import run_worker_loop_forever
    from mesh_core._process.host_agent import HostAgent
    from mesh_core._process.standby import preload_host
    from mesh_core._system.interpreter import python_command
    from mesh_core._system.seeds import rank_seed
else:
    from mesh_core._meshes.actors import ActorMesh

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
    "MeshHandle",
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
    "PortForwarder",
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
    "mesh_of",
    "preload_host",
    "proc_mesh",
    "put",
    "put_async",
    "python_command",
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

# Dataclasses take longer to import than everything else, and most programs never use these.
_LATER = {
    "Accumulator": "mesh_core._meshes.accumulator",
    "Channel": "mesh_core._meshes.ports",
    "Pipeline": "mesh_core._blocks.pipeline.pipeline",
    "PipelineRun": "mesh_core._blocks.pipeline.pipeline",
    "PipelineStats": "mesh_core._blocks.pipeline.stats",
    "Quarantined": "mesh_core._blocks.pipeline.quarantine",
    "Stage": "mesh_core._blocks.pipeline.pipeline",
    "StageError": "mesh_core._blocks.pipeline.quarantine",
    "StageStats": "mesh_core._blocks.pipeline.stats",
    "Pool": "mesh_core._blocks.pool.pool",
    "PoolProgress": "mesh_core._blocks.pool.pool",
    "Port": "mesh_core._meshes.ports",
    "PortForwarder": "mesh_core._blocks.forwarding",
    "Promise": "mesh_core._futures.promise",
    "as_completed": "mesh_core._futures.combined",
    "gather": "mesh_core._futures.combined",
    "get_include": "mesh_core._common.headers",
    "wait": "mesh_core._futures.combined",
    "wait_async": "mesh_core._futures.combined",
    "PortReceiver": "mesh_core._meshes.ports",
    "Queue": "mesh_core._blocks.queue.queue",
    "QueueClosed": "mesh_core._blocks.queue.client",
    "QueueEmpty": "mesh_core._blocks.queue.queue",
    "QueueFull": "mesh_core._blocks.queue.queue",
    "QueueItem": "mesh_core._blocks.queue.queue",
    "QueueItemError": "mesh_core._blocks.queue.queue",
    "QueueStats": "mesh_core._blocks.queue.server",
    "attach_to_workers": "mesh_core._meshes.attach",
    "preload_host": "mesh_core._process.standby",
    "run_worker_loop_forever": "mesh_core._process.agent",
    "as_endpoint": "mesh_core._meshes.send",
    "send": "mesh_core._meshes.send",
    "Ref": "mesh_core._meshes.refs",
    "RefLost": "mesh_core._meshes.refs",
    "RefStoreFull": "mesh_core._meshes.refs",
    "put": "mesh_core._meshes.refs",
    "put_async": "mesh_core._meshes.refs",
    "python_command": "mesh_core._system.interpreter",
    "rank_seed": "mesh_core._system.seeds",
    "Credentials": "mesh_core._common.credentials",
    "Host": "mesh_core._meshes.host_traits",
    "HostAgent": "mesh_core._process.host_agent",
    "get_or_spawn_controller": "mesh_core._meshes.controllers",
    "FailureKind": "mesh_core._failures.failure",
    "MeshFailure": "mesh_core._failures.failure",
    "Settings": "mesh_core._common.settings",
    "SettingsError": "mesh_core._common.settings",
    "Isolation": "mesh_core._blocks.sandboxes.isolation",
    "Sandbox": "mesh_core._blocks.sandboxes.sandbox",
    "SandboxDied": "mesh_core._blocks.sandboxes.outcome",
    "SandboxError": "mesh_core._blocks.sandboxes.outcome",
    "SandboxTimeout": "mesh_core._blocks.sandboxes.outcome",
    "Sandboxes": "mesh_core._blocks.sandboxes.sandboxes",
    "MeshHandle": "mesh_core._meshes.handle",
    "concat": "mesh_core._meshes.joined",
    "mesh_of": "mesh_core._meshes.handle",
    "configure": "mesh_core._common.settings",
    "configured": "mesh_core._common.settings",
    "set_fault_handler": "mesh_core._failures.supervision",
    "ToolLimit": "mesh_core._blocks.tools",
    "ToolResult": "mesh_core._blocks.tools",
    "ToolUsage": "mesh_core._blocks.tools",
    "WorkspaceReport": "mesh_core._features.workspace.report",
    "detach": "mesh_core._blocks.tools",
    "run_tool": "mesh_core._blocks.tools",
    "run_tool_async": "mesh_core._blocks.tools",
}


def __getattr__(name: str) -> Any:
    if name == "inspect":
        import importlib

        return importlib.import_module("mesh_core.inspect")
    module = _LATER.get(name)
    if module is None:
        from mesh_core._common.siblings import where

        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{where(name)}")
    import importlib

    return getattr(importlib.import_module(module), name)


def __dir__() -> list[str]:
    return sorted(__all__)
