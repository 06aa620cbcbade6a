"""For which failures policies stopped meshes, so that every call that comes later says so, in any process of the job.

The process whose policy it was has the failure itself. It tells the others, by the way of news of repairs
(``mesh-proto/src/given_up.rs``), what of it can be said in words: no exception of a user's class is unpickled in a process
that has nothing to do with it.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from mesh_core._common.errors import MeshError
from mesh_core._futures.future import Future
from mesh_core._native import LONGEST_REASON, given_up, publish_given_up
from mesh_core._serialize import dumps, loads

if TYPE_CHECKING:
    from mesh_core._failures.failure import MeshFailure
    from mesh_core._native import Call
    from mesh_core._process.process import Process

_REMEMBERED = 1024
_LONGEST_TEXT = LONGEST_REASON // 8
"""Maximum characters of the reasons, of which each may take four bytes."""


class GivenUp:
    """What a process knows of meshes that policies stopped, its own and others."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._here: dict[int, MeshFailure] = {}

    def note(self, mesh_id: int, failure: MeshFailure) -> Future[None] | None:
        """Keep the failure for which a policy here stops a mesh, and tell all others; the future is done when they are being told."""
        self._here[mesh_id] = failure
        while len(self._here) > _REMEMBERED:
            del self._here[next(iter(self._here))]
        try:
            call = publish_given_up(self._process.runtime, mesh_id, dumps(_in_words(failure))[0])
        except MeshError:
            return None  # the runtime has been shut down, or this script has lost its job
        return Future(self._process, call, _ignore_losses, lambda: "telling why a mesh is stopped")

    def of(self, mesh: Any) -> MeshFailure | None:
        """Return the failure for which a policy stopped a mesh of actors, or their processes."""
        for mesh_id in (getattr(mesh, "_actor_id", 0), mesh._procs_id):
            failure = self._here.get(mesh_id)
            if failure is None and (said := given_up(self._process.runtime, mesh_id)) is not None:
                failure = dataclasses.replace(loads(said), mesh=mesh._with_region(mesh._root))
            if failure is not None:
                return failure
        return None


def _ignore_losses(call: Call) -> None:
    # A dead host does not need to know.
    call.outcomes()


def _in_words(failure: MeshFailure) -> MeshFailure:
    """Return what of a failure travels to everybody."""
    left, chain = _LONGEST_TEXT, []
    # The policy's own words are the last ones.
    for words in reversed(failure.chain):
        chain.append(words if len(words) <= left else f"{words[: max(left, 0)]} ...")
        left -= len(words)
        if left <= 0:
            break
    return dataclasses.replace(
        failure,
        mesh=None,
        exception=None,
        stderr_tail=(),
        reason=(failure.reason if failure.exception is None else failure._why())[:_LONGEST_TEXT],
        chain=tuple(reversed(chain)),
    )
