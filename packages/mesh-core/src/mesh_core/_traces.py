"""Spans for OpenTelemetry: of spawns, of calls, and of what endpoints do, with the context carried along.

Off until a provider is set. Mesh never imports OpenTelemetry: it looks whether the program has, at every spawn, when an
endpoint is first taken from a mesh, and once an actor is constructed. So a call that is not traced pays for one look at
an attribute.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mesh_core._process import Process


def notice(process: Process) -> None:
    """Begin to trace if the program has set a provider meanwhile."""
    if process.tracer is None and "opentelemetry.trace" in sys.modules and not process.untraced:
        api = sys.modules["opentelemetry.trace"]
        provider = api.get_tracer_provider()
        # The API's own stand in until a real one is set, and record nothing.
        if not type(provider).__module__.startswith("opentelemetry.trace"):
            from mesh_core._tracer import Tracer

            process.tracer = Tracer(api, provider)


def trace(on: bool = True) -> bool:
    """Trace from now on, or no longer; returns whether spans are made.

    Tracing begins by itself once ``opentelemetry.trace`` has a provider. That is noticed at the next spawn, or when
    an endpoint is first taken from a mesh; after this call it is noticed at once, for this process.

    >>> from mesh_core import inspect
    >>> inspect.trace()  # nobody has set a provider here
    False
    """
    from mesh_core import _process

    process = _process.current()
    process.untraced = not on
    if on:
        notice(process)
    else:
        process.tracer = None
    return process.tracer is not None
