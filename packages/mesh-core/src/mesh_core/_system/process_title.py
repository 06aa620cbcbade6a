"""What a worker is called in listings of processes."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import TYPE_CHECKING

from mesh_core._native import name_process

if TYPE_CHECKING:
    from mesh_core._hosting.actor_cell import ActorCell
    from mesh_core._process.process import Identity

_CONTROLS = dict.fromkeys(range(32), "?")
# So many actors a title names.
_NAMED = 4
# A name has so many bytes in the kernel.
_SHORT = 15


class Title:
    """What ``ps`` and ``top`` show of a worker: what it is, and the first of its actors."""

    def __init__(self, me: Identity) -> None:
        self._process = me.proc_id
        self._named: list[ActorCell] | None = None
        """The actors that it was made of."""

    def show(self, actors: Mapping[int, ActorCell]) -> None:
        """Bring it up to date, if it is not: a worker may have actors by the thousand."""
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
