"""The features of every process."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mesh_core._common.hooks import Addr
    from mesh_core._common.tracing import Tracer
    from mesh_core._failures.failure import MeshFailure
    from mesh_core._failures.policies import Policy
    from mesh_core._futures.future import Future
    from mesh_core._process.process import Process


def equip(process: Process) -> None:
    """Add the features that every process has."""
    hooks = process.hooks
    hooks.packed_class = _with_sources
    hooks.find_tracer = partial(_find_tracer, process)
    hooks.find_bypass = _find_bypass
    hooks.find_policy = _find_policy
    hooks.find_pids = partial(_find_pids, process)
    hooks.failures.append(partial(_note_failure, process))
    hooks.sync = _sync


def _with_sources(cls: type) -> object:
    from mesh_core._features.debug.sources import with_sources

    return with_sources(cls)


def _find_tracer(process: Process) -> Tracer | None:
    if "opentelemetry.trace" not in sys.modules:
        return None
    from mesh_core._features.traces import find_tracer

    return find_tracer(process)


def _find_bypass() -> object | None:
    from mesh_core.plugins._bypasses import create_bypass

    return create_bypass()


def _find_policy(name: str) -> Policy:
    from mesh_core.plugins._policies import create_policy

    return create_policy(name)


def _find_pids(process: Process, addrs: Iterable[Addr], timeout: float) -> dict[Addr, int]:
    from mesh_core.inspect._hosts import pids

    return pids(process, addrs, timeout)


def _note_failure(process: Process, failure: MeshFailure, handled: bool, by: str) -> None:
    from mesh_core.inspect._journal import Journal

    Journal.of(process).failed(failure, handled=handled, by=by)


def _sync(*args: Any, **kwargs: Any) -> Future[Any]:
    from mesh_core._features.workspace import sync

    return sync(*args, **kwargs)
