"""What the kernel knows of traces: where spans begin and end, and what messages carry between processes.

The kernel calls a tracer where there is one; ``_features.traces`` is the one that makes spans for OpenTelemetry. A call that is not
traced pays for one look at ``process.tracer``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from mesh_core._actors.endpoint import EndpointProperty
    from mesh_core._common.context import Instance
    from mesh_core._meshes.adverbs import Endpoint
    from mesh_core._native import Call, Completion, Message, Sender
    from mesh_core._process.process import Process


class Span(Protocol):
    """One that has begun."""

    def end(self, error: BaseException | None = None) -> None:
        """End it, as failed if there is an error; once."""
        ...


class Tracer(Protocol):
    """Makes spans."""

    def call(
        self, endpoint: Endpoint[..., Any], adverb: str, send: Callable[[Endpoint[..., Any]], Any]
    ) -> Any:
        """Make a call by ``send``, with an endpoint whose messages carry a span that ends when the call does."""
        ...

    def spawn(self, sender: Sender, value: object, name: str, class_name: str) -> Call:
        """Send the spawn of an actor, whose constructor gets a span of its own."""
        ...

    def spawn_procs(self, name: str, count: int, host: str) -> None:
        """Note that processes were asked for."""
        ...

    def promise(self, call: Completion, name: str) -> Span:
        """Begin the span of a promise, which ends when that had its outcome."""
        ...

    def handling(
        self,
        spec: EndpointProperty[..., Any] | None,
        function: Callable[..., Any],
        message: Message,
        who: Instance,
    ) -> Callable[..., Any]:
        """An endpoint's function (or, without one, a constructor) inside the span that ``message.trace`` begets."""
        ...


def notice(process: Process) -> None:
    """Begin to trace if that is wanted by now: at every spawn, when an endpoint is first taken from a mesh, and once an
    actor is constructed.
    """
    if process.tracer is None:
        process.tracer = process.hooks.find_tracer()
