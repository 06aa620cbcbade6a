"""What the kernel knows about traces: where spans begin and end, and what messages carry between processes.

The kernel calls a tracer if there is one; ``_features.traces`` makes spans for OpenTelemetry. A call that is not
traced only pays for a look at ``process.tracer``. An endpoint only pays for a look at ``process.around``, which also has
the extensions that observe endpoints.
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
    """A span that has begun."""

    def end(self, error: BaseException | None = None) -> None:
        """End it, as failed if there is an error; called once."""
        ...


class Tracer(Protocol):
    """Creates spans."""

    def call(
        self, endpoint: Endpoint[..., Any], adverb: str, send: Callable[[Endpoint[..., Any]], Any]
    ) -> Any:
        """Make a call through ``send``, with an endpoint whose messages carry a span that ends when the call does."""
        ...

    def spawn(self, sender: Sender, value: object, name: str, class_name: str) -> Call:
        """Send the spawn of an actor; its constructor gets its own span."""
        ...

    def spawn_procs(self, name: str, count: int, host: str) -> None:
        """Record that processes were requested."""
        ...

    def promise(self, call: Completion, name: str) -> Span:
        """Begin a promise's span, which ends when the promise gets its outcome."""
        ...

    def handling(
        self,
        spec: EndpointProperty[..., Any] | None,
        function: Callable[..., Any],
        message: Message,
        who: Instance,
    ) -> Callable[..., Any]:
        """Return an endpoint's function (or, without one, a constructor) wrapped in the span that ``message.trace`` starts."""
        ...


Around = Callable[
    ["EndpointProperty[..., Any]", Callable[..., Any], "Message", "Instance"], Callable[..., Any]
]
"""Returns an endpoint's function with something around it."""


def nested(wrappers: list[Around]) -> Around | None:
    """Return what puts all of these around a function, the first one innermost; ``None`` if there are none."""
    if len(wrappers) < 2:
        return wrappers[0] if wrappers else None

    def around(
        spec: EndpointProperty[..., Any], function: Callable[..., Any], message: Message, who: Instance
    ) -> Callable[..., Any]:
        for each in wrappers:
            function = each(spec, function, message, who)
        return function

    return around


def notice(process: Process) -> None:
    """Start tracing if it is wanted by now. Called at every spawn, when an endpoint is first taken from a mesh, and after an
    actor is constructed.
    """
    if process.tracer is None and (tracer := process.hooks.find_tracer()) is not None:
        process.trace_with(tracer)
