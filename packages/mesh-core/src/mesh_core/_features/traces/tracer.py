"""Make OpenTelemetry spans; imported only once a provider is set."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from mesh_core._common.codes import MessageKind

if TYPE_CHECKING:
    from mesh_core._actors.endpoint import EndpointProperty
    from mesh_core._common.context import Instance
    from mesh_core._meshes.adverbs import Endpoint
    from mesh_core._native import Call, Completion, Message, Sender

_SYSTEM = "mesh"


class Tracer:
    """Makes spans, following OpenTelemetry's conventions for RPC and messaging."""

    def __init__(self, api: Any, provider: Any) -> None:
        from mesh_core._native import __version__

        self._api = api
        self._kinds = api.SpanKind
        self._tracer = provider.get_tracer("mesh_core", __version__)

    # Callers.

    def call(
        self, endpoint: Endpoint[..., Any], adverb: str, send: Callable[[Endpoint[..., Any]], Any]
    ) -> Any:
        """Make a call with ``send``, whose messages carry a span that ends when the call does."""
        mesh = endpoint._mesh
        if adverb == "broadcast":
            name, kind = f"broadcast {mesh._name}", self._kinds.PRODUCER
            attributes = _message_attributes("broadcast", "send", mesh._name)
        else:
            name = f"{mesh._interface.class_name}/{endpoint._name}"
            kind, attributes = self._kinds.CLIENT, _call_attributes(name)
            attributes["mesh.adverb"] = adverb
        attributes |= {
            "mesh.actor": mesh._name,
            "mesh.actors": len(mesh),
            "server.address": mesh._location.called(mesh._view),
        }
        span = _Open(self._tracer.start_span(name, kind=kind, attributes=attributes))
        try:
            future = send(endpoint._traced(span.context()))
        except BaseException as error:
            span.end(error)
            raise
        if adverb == "broadcast":
            span.end()
        else:
            span.follow(future)
        return future

    def spawn(self, sender: Sender, value: object, name: str, class_name: str) -> Call:
        """Send a spawn message inside a span that ends when it is sent: constructors have their own spans."""
        attributes = {**_call_attributes(f"{class_name}/__init__"), "mesh.actor": name}
        span = _Open(self._tracer.start_span(f"spawn {name}", kind=self._kinds.CLIENT, attributes=attributes))
        try:
            call = sender.traced(span.context()).call(value)
        except BaseException as error:
            span.end(error)
            raise
        span.end()
        return call

    def spawn_procs(self, name: str, count: int, host: str) -> None:
        """Record a span for the spawn of processes."""
        attributes = {"mesh.procs": name, "mesh.count": count, "server.address": host}
        self._tracer.start_span(f"spawn {name}", kind=self._kinds.CLIENT, attributes=attributes).end()

    def promise(self, call: Completion, name: str) -> _Open:
        """Start the span of a promise, which ends with its outcome."""
        call.time()
        attributes = {"mesh.promise": name} if name else {}
        title = f"promise {name}" if name else "promise"
        return _Open(self._tracer.start_span(title, kind=self._kinds.INTERNAL, attributes=attributes), call)

    # Receivers.

    def handling(
        self,
        spec: EndpointProperty[..., Any] | None,
        function: Callable[..., Any],
        message: Message,
        who: Instance,
    ) -> Callable[..., Any]:
        """Wrap an endpoint's function, or a constructor if ``spec`` is ``None``, in a span."""
        if message.kind is MessageKind.TELL:
            name, kind = f"process {who.name}", self._kinds.CONSUMER
            attributes = _message_attributes("process", "process", who.name)
            attributes["mesh.endpoint"] = message.name
        else:
            name = f"{who.class_name}/{message.name if spec is not None else '__init__'}"
            kind, attributes = self._kinds.SERVER, _call_attributes(name)
        attributes |= {"mesh.actor": who.name, "mesh.rank": who.rank.rank, "mesh.proc": who.proc_id}

        def span() -> Any:
            return self._tracer.start_as_current_span(
                name,
                context=_parent(self._api, message.trace),
                kind=kind,
                attributes=attributes,
                record_exception=False,
                set_status_on_exception=False,
            )

        if spec is not None and spec.is_async:

            async def run_async(*args: Any, **kwargs: Any) -> Any:
                with span() as current:
                    try:
                        return await function(*args, **kwargs)
                    except BaseException as error:
                        _failed(current, error)
                        raise

            return run_async

        def run(*args: Any, **kwargs: Any) -> Any:
            with span() as current:
                try:
                    return function(*args, **kwargs)
                except BaseException as error:
                    _failed(current, error)
                    raise

        return run


class _Open:
    """A span that ends once: with its call or promise, or when that is garbage-collected."""

    def __init__(self, span: Any, call: Call | Completion | None = None) -> None:
        self._span = span
        self._call = call
        self._over = False

    def context(self) -> str:
        """Return the span's W3C ``traceparent`` and, after a space, its ``tracestate``, for messages."""
        told = self._span.get_span_context()
        parent = f"00-{told.trace_id:032x}-{told.span_id:016x}-{int(told.trace_flags):02x}"
        state = told.trace_state.to_header() if told.trace_state else ""
        return f"{parent} {state}" if state else parent

    def follow(self, future: Any) -> None:
        """End with the call of ``future``: at the time of its last reply, with its error if it fails."""
        self._call = future._call
        finish = getattr(future, "_finish", None)
        if finish is None:
            make = future._make
            future._make = lambda n: self._stream_future(make(n), n)
        else:
            future._finish = partial(self._finished, finish, 0)

    def _stream_future(self, future: Any, n: int) -> Any:
        future._finish = partial(self._finished, future._finish, n)
        return future

    def _finished(self, finish: Callable[[Call], Any], n: int, call: Call) -> Any:
        try:
            value = finish(call)
        except BaseException as error:
            self.end(error)
            raise
        # A stream ends with its last outcome, in whatever order outcomes are read.
        if n == 0 or n == len(call) - 1:
            self.end()
        return value

    def end(self, error: BaseException | None = None) -> None:
        """End the span, as failed if there is an error."""
        if self._over:
            return
        self._over = True
        if error is not None:
            _failed(self._span, error)
        finished = self._call.finished() if self._call is not None else None
        self._span.end(time.time_ns() if finished is None else finished)

    def __del__(self) -> None:
        # Nobody asked for the result, or the call was abandoned.
        if not self._over:
            if self._call is not None and not self._call.done():
                self._span.set_attribute("mesh.abandoned", True)
            self.end()


def _parent(api: Any, told: str | None) -> Any:
    """Return the context that a message carries; ``None`` without a valid one."""
    if told is None:
        return None
    header, _, state = told.partition(" ")
    words = header.split("-")
    try:
        _, trace_id, span_id, flags = words
        parent = api.SpanContext(
            trace_id=int(trace_id, 16),
            span_id=int(span_id, 16),
            is_remote=True,
            trace_flags=api.TraceFlags(int(flags, 16)),
            trace_state=api.TraceState.from_header([state]) if state else None,
        )
    except (ValueError, TypeError):
        return None
    return api.set_span_in_context(api.NonRecordingSpan(parent)) if parent.is_valid else None


def _call_attributes(method: str) -> dict[str, Any]:
    return {"rpc.system.name": _SYSTEM, "rpc.method": method}


def _message_attributes(operation: str, kind: str, destination: str) -> dict[str, Any]:
    return {
        "messaging.system": _SYSTEM,
        "messaging.operation.name": operation,
        "messaging.operation.type": kind,
        "messaging.destination.name": destination,
    }


def _failed(span: Any, error: BaseException) -> None:
    from mesh_core._common.errors import type_name

    kind = getattr(error, "cause_name", "") or type_name(type(error))
    span.set_attribute("error.type", kind)
    span.record_exception(error)
    status = sys.modules["opentelemetry.trace"].Status
    code = sys.modules["opentelemetry.trace"].StatusCode.ERROR
    span.set_status(status(code, f"{kind}: {_first_line(error)}"))


def _first_line(error: BaseException) -> str:
    try:
        return str(error).partition("\n")[0]
    except Exception:  # noqa: BLE001 - a foreign __str__ may raise anything
        return "its text is not available"
