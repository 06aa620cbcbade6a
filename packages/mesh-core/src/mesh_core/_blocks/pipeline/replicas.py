"""The actors of a stage, which all runs of a pipeline share."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from mesh_core._blocks.pool.turns import OnCrash, OwnTurns

if TYPE_CHECKING:
    from mesh_core._blocks.pipeline.pipeline import Stage
    from mesh_core._blocks.pipeline.running import Core
    from mesh_core._blocks.pool.following import Following
    from mesh_core._meshes.actors import ActorMesh
    from mesh_core._meshes.adverbs import Endpoint


class Replicas:
    """A stage's actors."""

    def __init__(self, stage: Stage, following: Following, ahead: int) -> None:
        self.name = stage.name
        self.retries = stage.retries
        self._stage = stage
        self.streams: bool = stage.endpoint._arity.streams
        """Whether the endpoint is a generator."""
        self._ahead = ahead
        """How many bytes each of its generators may be ahead of its reader."""
        self.count = 0
        """How many turns there are."""
        self._runs: weakref.WeakSet[Core] = weakref.WeakSet()
        self._endpoints: dict[int, tuple[ActorMesh[Any], Endpoint[..., Any]]] = {}
        self.turns = OwnTurns(f"stage {stage.name!r}", stage.per_rank, OnCrash(stage.on_crash), following)
        self.turns.resized = self._resized
        self.turns.add(stage.endpoint._mesh)

    def _resized(self) -> None:
        self.count = self.turns.turns()
        for run in list(self._runs):
            run.pump()

    def join(self, run: Core) -> None:
        """Notify this run when the number of replicas changes."""
        self._runs.add(run)

    def endpoint(self, place: int, replica: ActorMesh[Any]) -> Endpoint[..., Any]:
        """Return the stage's endpoint at one replica."""
        found = self._endpoints.get(place)
        if found is None or found[0] is not replica:
            given = self._stage.endpoint
            limit = self._stage.timeout if self._stage.timeout is not None else given._limit
            endpoint = type(given)(replica, given._name, given._arity, limit, given._block, given._keeps)
            if self.streams:
                endpoint._senders = endpoint._senders.reading(self._ahead)
            found = self._endpoints[place] = replica, endpoint
        return found[1]

    def close(self) -> None:
        """Leave failures of the actors to their owner again."""
        self.turns.close()
