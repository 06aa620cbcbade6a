"""Functions that run on every process of a mesh, without an actor of the user's own."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mesh_core._actors.actor import Actor
from mesh_core._actors.endpoint import endpoint

if TYPE_CHECKING:
    from mesh_core._futures.future import Future
    from mesh_core._geometry.values import ValueMesh
    from mesh_core._meshes.procs import ProcMesh


class Runner(Actor):
    """Runs one function."""

    @endpoint
    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run it on a thread."""
        return function(*args, **kwargs)


class AsyncRunner(Actor):
    """Runs one coroutine function."""

    @endpoint
    async def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run it on an event loop."""
        return await function(*args, **kwargs)


def run(
    procs: ProcMesh, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Future[ValueMesh[Any]]:
    """Run a function on every process."""
    if not callable(function):
        raise TypeError(f"run() takes a function, got {function!r}")
    kind = AsyncRunner if inspect.iscoroutinefunction(function) else Runner
    runners: Any = procs.spawn(getattr(function, "__qualname__", "run"), kind)
    found: Future[ValueMesh[Any]] = runners.run.call(function, args, kwargs)
    # They end once they have run it.
    runners.stop()
    return found
