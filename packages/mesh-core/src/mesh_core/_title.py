"""What a worker is called in listings of processes."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import TYPE_CHECKING

from mesh_core._native import name_process

if TYPE_CHECKING:
    from mesh_core._context import Instance
    from mesh_core._process import Identity

_CONTROLS = dict.fromkeys(range(32), "?")
# So many actors a title names.
_NAMED = 4
# A name has so many bytes in the kernel.
_SHORT = 15


def show_title(me: Identity, actors: Iterable[Instance] = ()) -> None:
    """Have ``ps`` and ``top`` show what this worker is, and which actors it has."""
    process = me.proc_id
    named = [f"{actor.name}[{actor.rank.rank}]" for actor in islice(actors, _NAMED + 1)]
    if len(named) > _NAMED:
        named[_NAMED:] = ["..."]
    title = f"mesh: {', '.join(named)} ({process})" if named else f"mesh: {process}"
    name, bracket, number = (named[0] if named else process).rpartition("[")
    end = bracket + number
    short = name.encode()[: _SHORT - len(end)].decode(errors="ignore") + end
    name_process(title.translate(_CONTROLS), short.translate(_CONTROLS))
