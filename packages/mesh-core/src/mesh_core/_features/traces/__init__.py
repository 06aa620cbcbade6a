"""OpenTelemetry spans for spawns, calls and endpoints, with context propagation.

Off until a provider is set. Mesh never imports OpenTelemetry; it checks whether the program has
(``_common.tracing.notice``).
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mesh_core._common.tracing import Tracer
    from mesh_core._process.process import Process


class Wanted:
    """Whether the program wants spans if it has set a provider."""

    def __init__(self) -> None:
        self.off = False


def find_tracer(process: Process) -> Tracer | None:
    """Return a tracer if the program has set a provider."""
    if "opentelemetry.trace" not in sys.modules or process.slots.of(Wanted).off:
        return None
    api = sys.modules["opentelemetry.trace"]
    provider = api.get_tracer_provider()
    # The API's own providers are placeholders until a real one is set, and record nothing.
    if type(provider).__module__.startswith("opentelemetry.trace"):
        return None
    from mesh_core._features.traces.tracer import Tracer

    return Tracer(api, provider)


def trace(on: bool = True) -> bool:
    """Turn tracing on or off; return whether spans are made.

    Tracing starts by itself once ``opentelemetry.trace`` has a provider. Mesh notices that at the next spawn, or when an
    endpoint is first taken from a mesh. This call makes this process notice it at once.

    >>> from mesh_core import inspect
    >>> inspect.trace()  # no provider is set here
    False
    """
    from mesh_core._common.current import current
    from mesh_core._common.tracing import notice

    process = current()
    process.slots.of(Wanted).off = not on
    if on:
        notice(process)
    else:
        process.trace_with(None)
    return process.tracer is not None
