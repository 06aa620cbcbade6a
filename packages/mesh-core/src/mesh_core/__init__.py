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

from mesh_core._bundle import put_together

if TYPE_CHECKING:
    from mesh_core._actors.actor import Actor
    from mesh_core._actors.endpoint import endpoint
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
    from mesh_core._common.context import (
        Context,
        Instance,
        context,
        current_actor_name,
        current_rank,
        current_size,
    )
    from mesh_core._common.credentials import Credentials
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
    from mesh_core._common.headers import get_include
    from mesh_core._common.settings import Settings, SettingsError, configure, configured
    from mesh_core._failures.failure import MeshFailure
    from mesh_core._failures.supervision import set_fault_handler
    from mesh_core._features.workspace.report import WorkspaceReport
    from mesh_core._futures.combined import as_completed, gather, wait, wait_async
    from mesh_core._futures.future import Future, Stream
    from mesh_core._futures.promise import Promise
    from mesh_core._futures.sending import Sending
    from mesh_core._geometry.values import ValueMesh
    from mesh_core._meshes.accumulator import Accumulator
    from mesh_core._meshes.adverbs import Endpoint
    from mesh_core._meshes.attach import attach_to_workers
    from mesh_core._meshes.controllers import get_or_spawn_controller
    from mesh_core._meshes.handle import MeshHandle, mesh_of
    from mesh_core._meshes.hosts import HostMesh, proc_mesh, this_host, this_proc
    from mesh_core._meshes.ports import Channel, Port, PortReceiver
    from mesh_core._meshes.procs import ProcMesh
    from mesh_core._meshes.refs import Ref, RefLost, RefStoreFull, put, put_async
    from mesh_core._meshes.send import as_endpoint, send
    from mesh_core._native import Extent, Point, Region, Shape, Slice, __version__
    from mesh_core._process.agent import run_worker_loop_forever
    from mesh_core._process.host_agent import HostAgent
    from mesh_core._process.process import shutdown
    from mesh_core._process.standby import preload_host
    from mesh_core._serialize.exceptions import ActorError
    from mesh_core._system.interpreter import python_command
    from mesh_core._system.seeds import rank_seed

    _A = TypeVar("_A")
    # A mesh of actors is typed as their class, so that `trainers.step.call` is known; the type checker sees no difference.
    ActorMesh: TypeAlias = Annotated[_A, "a mesh of actors"]

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

# Each is imported when it is first asked for: while the first processes start, a script has time for what it needs later.
_WHERE = {
    "Accumulator": "mesh_core._meshes.accumulator",
    "Actor": "mesh_core._actors.actor",
    "ActorError": "mesh_core._serialize.exceptions",
    "ActorMesh": "mesh_core._meshes.actors",
    "ActorTimeout": "mesh_core._common.errors",
    "AuthenticationError": "mesh_core._common.errors",
    "BrokenPromise": "mesh_core._common.errors",
    "Channel": "mesh_core._meshes.ports",
    "ChannelClosed": "mesh_core._common.errors",
    "Context": "mesh_core._common.context",
    "Credentials": "mesh_core._common.credentials",
    "DeviceMeshError": "mesh_core._common.errors",
    "Endpoint": "mesh_core._meshes.adverbs",
    "Extent": "mesh_core._native",
    "FailureKind": "mesh_core._common.codes",
    "Future": "mesh_core._futures.future",
    "Host": "mesh_core._meshes.host_traits",
    "HostAgent": "mesh_core._process.host_agent",
    "HostMesh": "mesh_core._meshes.hosts",
    "Instance": "mesh_core._common.context",
    "Isolation": "mesh_core._blocks.sandboxes.isolation",
    "MailboxFull": "mesh_core._common.errors",
    "MeshError": "mesh_core._common.errors",
    "MeshFailure": "mesh_core._failures.failure",
    "MeshHandle": "mesh_core._meshes.handle",
    "Pipeline": "mesh_core._blocks.pipeline.pipeline",
    "PipelineRun": "mesh_core._blocks.pipeline.pipeline",
    "PipelineStats": "mesh_core._blocks.pipeline.stats",
    "PluginError": "mesh_core._common.errors",
    "PluginLoadError": "mesh_core._common.errors",
    "Point": "mesh_core._native",
    "Pool": "mesh_core._blocks.pool.pool",
    "PoolLost": "mesh_core._common.errors",
    "PoolProgress": "mesh_core._blocks.pool.pool",
    "Port": "mesh_core._meshes.ports",
    "PortForwarder": "mesh_core._blocks.forwarding",
    "PortReceiver": "mesh_core._meshes.ports",
    "ProcMesh": "mesh_core._meshes.procs",
    "Promise": "mesh_core._futures.promise",
    "Quarantined": "mesh_core._blocks.pipeline.quarantine",
    "Queue": "mesh_core._blocks.queue.queue",
    "QueueClosed": "mesh_core._blocks.queue.client",
    "QueueEmpty": "mesh_core._blocks.queue.queue",
    "QueueFull": "mesh_core._blocks.queue.queue",
    "QueueItem": "mesh_core._blocks.queue.queue",
    "QueueItemError": "mesh_core._blocks.queue.queue",
    "QueueStats": "mesh_core._blocks.queue.server",
    "Ref": "mesh_core._meshes.refs",
    "RefLost": "mesh_core._meshes.refs",
    "RefStoreFull": "mesh_core._meshes.refs",
    "Region": "mesh_core._native",
    "ReplyDropped": "mesh_core._common.errors",
    "Sandbox": "mesh_core._blocks.sandboxes.sandbox",
    "SandboxDied": "mesh_core._blocks.sandboxes.outcome",
    "SandboxError": "mesh_core._blocks.sandboxes.outcome",
    "SandboxTimeout": "mesh_core._blocks.sandboxes.outcome",
    "Sandboxes": "mesh_core._blocks.sandboxes.sandboxes",
    "Sending": "mesh_core._futures.sending",
    "SerializationError": "mesh_core._common.errors",
    "Settings": "mesh_core._common.settings",
    "SettingsError": "mesh_core._common.settings",
    "Shape": "mesh_core._native",
    "Slice": "mesh_core._native",
    "SpawnError": "mesh_core._common.errors",
    "Stage": "mesh_core._blocks.pipeline.pipeline",
    "StageError": "mesh_core._blocks.pipeline.quarantine",
    "StageStats": "mesh_core._blocks.pipeline.stats",
    "Stream": "mesh_core._futures.future",
    "SupervisionError": "mesh_core._common.errors",
    "ToolLimit": "mesh_core._blocks.tools",
    "ToolResult": "mesh_core._blocks.tools",
    "ToolUsage": "mesh_core._blocks.tools",
    "Undeliverable": "mesh_core._common.errors",
    "ValueMesh": "mesh_core._geometry.values",
    "WorkspaceReport": "mesh_core._features.workspace.report",
    "__version__": "mesh_core._native",
    "as_completed": "mesh_core._futures.combined",
    "as_endpoint": "mesh_core._meshes.send",
    "attach_to_workers": "mesh_core._meshes.attach",
    "concat": "mesh_core._meshes.joined",
    "configure": "mesh_core._common.settings",
    "configured": "mesh_core._common.settings",
    "context": "mesh_core._common.context",
    "current_actor_name": "mesh_core._common.context",
    "current_rank": "mesh_core._common.context",
    "current_size": "mesh_core._common.context",
    "detach": "mesh_core._blocks.tools",
    "endpoint": "mesh_core._actors.endpoint",
    "gather": "mesh_core._futures.combined",
    "get_include": "mesh_core._common.headers",
    "get_or_spawn_controller": "mesh_core._meshes.controllers",
    "mesh_of": "mesh_core._meshes.handle",
    "preload_host": "mesh_core._process.standby",
    "proc_mesh": "mesh_core._meshes.hosts",
    "put": "mesh_core._meshes.refs",
    "put_async": "mesh_core._meshes.refs",
    "python_command": "mesh_core._system.interpreter",
    "rank_seed": "mesh_core._system.seeds",
    "run_tool": "mesh_core._blocks.tools",
    "run_tool_async": "mesh_core._blocks.tools",
    "run_worker_loop_forever": "mesh_core._process.agent",
    "send": "mesh_core._meshes.send",
    "set_fault_handler": "mesh_core._failures.supervision",
    "shutdown": "mesh_core._process.process",
    "this_host": "mesh_core._meshes.hosts",
    "this_proc": "mesh_core._meshes.hosts",
    "wait": "mesh_core._futures.combined",
    "wait_async": "mesh_core._futures.combined",
}


def __getattr__(name: str) -> Any:
    import importlib

    if name == "inspect":
        return importlib.import_module("mesh_core.inspect")
    module = _WHERE.get(name)
    if module is None:
        from mesh_core._common.siblings import where

        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{where(name)}")
    value = globals()[name] = getattr(importlib.import_module(module), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
