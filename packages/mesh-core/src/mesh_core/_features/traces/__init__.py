"""Spans for OpenTelemetry: of spawns, of calls, and of what endpoints do, with the context carried along.

Off until a provider is set. Mesh never imports OpenTelemetry: it looks whether the program has (``_tracing.notice``).
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mesh_core._common.tracing import Tracer
    from mesh_core._process.process import Process


class Wanted:
    """Whether the program wants spans, where it has set a provider."""

    def __init__(self) -> None:
        self.off = False


def find_tracer(process: Process) -> Tracer | None:
    """What makes the spans, if the program has set a provider by now."""
    if "opentelemetry.trace" not in sys.modules or process.slots.of(Wanted).off:
        return None
    api = sys.modules["opentelemetry.trace"]
    provider = api.get_tracer_provider()
    # The API's own stand in until a real one is set, and record nothing.
    if type(provider).__module__.startswith("opentelemetry.trace"):
        return None
    from mesh_core._features.traces.tracer import Tracer

    return Tracer(api, provider)


def trace(on: bool = True) -> bool:
    """Trace from now on, or no longer; returns whether spans are made.

    Tracing begins by itself once ``opentelemetry.trace`` has a provider. That is noticed at the next spawn, or when
    an endpoint is first taken from a mesh; after this call it is noticed at once, for this process.

    >>> from mesh_core import inspect
    >>> inspect.trace()  # nobody has set a provider here
    False
    """
    from mesh_core._common.current import current
    from mesh_core._common.tracing import notice

    process = current()
    process.slots.of(Wanted).off = not on
    if on:
        notice(process)
    else:
        process.tracer = None
    return process.tracer is not None
