"""The policies that ``supervise=`` finds by name."""

from __future__ import annotations

from collections.abc import Iterable

from mesh_core.plugins import PolicyPlugin, hookimpl
from mesh_supervision._backoff import Backoff
from mesh_supervision._simple import Escalate, Ignore
from mesh_supervision._supervisor import OneForAll, OneForOne, RestForOne

INTENSITY, PERIOD = 3, 60.0
_EACH = f"{INTENSITY} restarts a minute, with backoff; then it gives up"

PLUGINS = (
    PolicyPlugin(
        name="one_for_one",
        api_version=1,
        create=lambda: OneForOne(intensity=INTENSITY, period=PERIOD, backoff=Backoff()),
        summary=f"restarts the rank that has died: {_EACH}",
    ),
    PolicyPlugin(
        name="one_for_all",
        api_version=1,
        create=lambda: OneForAll(intensity=INTENSITY, period=PERIOD, backoff=Backoff()),
        summary=f"restarts all ranks: {_EACH}",
    ),
    PolicyPlugin(
        name="rest_for_one",
        api_version=1,
        create=lambda: RestForOne(intensity=INTENSITY, period=PERIOD, backoff=Backoff()),
        summary=f"restarts the dead rank and those after it: {_EACH}",
    ),
    PolicyPlugin(
        name="escalate",
        api_version=1,
        create=Escalate,
        summary="stops the mesh and passes the failure on",
    ),
    PolicyPlugin(
        name="ignore",
        api_version=1,
        create=Ignore,
        summary="leaves dead what has died, and tells nobody",
    ),
)


@hookimpl
def mesh_register_policies() -> Iterable[PolicyPlugin]:
    """`supervise="one_for_one"`, and so on."""
    return PLUGINS
