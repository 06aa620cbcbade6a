"""A worker's name in process listings."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import TYPE_CHECKING

from mesh_core._native import name_process

if TYPE_CHECKING:
    from mesh_core._hosting.actor_cell import ActorCell
    from mesh_core._process.process import Identity

_CONTROLS = dict.fromkeys(range(32), "?")
# How many actors a title names.
_NAMED = 4
# The kernel's limit for a name, in bytes.
_SHORT = 15


class Title:
    """What ``ps`` and ``top`` show of a worker: its name and its first actors."""

    def __init__(self, me: Identity) -> None:
        self._process = me.proc_id
        self._named: list[ActorCell] | None = None
        """The actors that the title shows."""

    def show(self, actors: Mapping[int, ActorCell]) -> None:
        """Update the title if the first actors changed: a worker may have thousands of actors."""
        first = list(islice(actors.values(), _NAMED + 1))
        if first == self._named:
            return
        self._named = first
        named = [f"{actor.instance.name}[{actor.instance.rank.rank}]" for actor in first]
        if len(named) > _NAMED:
            named[_NAMED:] = ["..."]
        process = self._process
        title = f"mesh: {', '.join(named)} ({process})" if named else f"mesh: {process}"
        name, bracket, number = (named[0] if named else process).rpartition("[")
        end = bracket + number
        short = name.encode()[: _SHORT - len(end)].decode(errors="ignore") + end
        name_process(title.translate(_CONTROLS), short.translate(_CONTROLS))
