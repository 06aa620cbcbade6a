"""The extension: one instance in each process, which takes the snapshots of its actors."""

import logging
import os
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from mesh_core import Future, Promise, current_actor_name, this_host
from mesh_core.extensions import Extension, Proc, ProcEnd, current_proc, find, install
from mesh_core.plugins import PluginManager
from mesh_snapshots._contract import WRITERS, WriterPlugin
from mesh_snapshots._files import Owner, Snapshot, SnapshotError, name_of, pack, remove_strays, unpack
from mesh_snapshots._keeper import Begin, Find, Keeper, Saved
from mesh_snapshots._saver import Job, Saver
from mesh_snapshots._sweeper import Here, Sweeper

S = TypeVar("S")

_ANSWER_S = 60.0
"""How long the keeper may take to answer."""
_END_S = 10.0
"""How long the end of a process waits for what is being written."""


@dataclass(frozen=True)
class Settings:
    """What every instance is told."""

    folder: str
    writer: WriterPlugin
    keeper: Proc
    """The process in which snapshots were enabled: it knows which there are."""


class Snapshots(Extension):
    """Takes snapshots of the actors of this process, and finds those of their earlier lives.

    Get it from :func:`enable` in a script, and from :func:`here` in an actor.
    """

    name = "snapshots"
    on_hosts = True
    payload: Settings

    def start(self) -> None:
        """Open the writer, and have the host clean up should this process die; a host does only that."""
        if self.proc.is_host:
            self._sweeper = Sweeper()
            return
        folder, plugin = self.payload.folder, self.payload.writer
        able = PluginManager().probe(plugin)
        if not able:
            raise SnapshotError(
                f"snapshot writer {plugin.name!r} cannot work on host {self.proc.host}: {able.reason}. Try: {able.remedy}."
            )
        if not Path(folder).is_dir():
            raise SnapshotError(
                f"there is no folder {folder} on host {self.proc.host}; snapshots need one that all hosts share"
            )
        self._writer = plugin.create()
        self._saver = Saver(self._save)
        self._numbers: dict[Owner, int] = {}
        """Of the last snapshots; used by the saver's thread only."""
        self._keeper = Keeper(folder) if self.proc == self.payload.keeper else None
        if not self.proc.is_controller:
            self.tell(this_host(), Here(folder))

    def stop(self) -> None:
        """Finish what is being written."""
        if not self.proc.is_host:
            self._saver.close(_END_S)

    def proc_ended(self, end: ProcEnd) -> None:
        """Clean up behind a process of this host."""
        self._sweeper.sweep(end.address)

    def save(self, state: object, *, name: str = "") -> Future[Snapshot]:
        """Take a snapshot of the actor that runs. What happens to ``state`` after this call is not in it.

        ``name`` is by which it is found; by default the actor's, and to be given where no actor runs.

        The future is done when the snapshot is on disk and would be found. An actor's snapshots are taken in the order of
        its calls. If one cannot be written the future raises the :class:`OSError`, and the snapshots before it stay.
        """
        owner = self._owner(name)
        promise = Promise[Snapshot](f"snapshot of {owner}")
        self._saver.put(Job(owner, pack(pickle.dumps(state, pickle.HIGHEST_PROTOCOL)), promise))
        return promise.future

    def restore(self, default: S, *, name: str = "") -> Future[S]:
        """The state of the last snapshot of the actor that runs, from whichever life; ``default`` if there is none."""
        owner = self._owner(name)
        asked = self.call(self.payload.keeper, Find(owner), timeout=_ANSWER_S)
        return asked.then(lambda answers: _read(owner, answers.item(), default))

    def latest(self) -> dict[Owner, Snapshot]:
        """The newest snapshot of each actor, in the process that has enabled snapshots."""
        if self._keeper is None:
            raise SnapshotError(f"only {self.payload.keeper} knows all snapshots; this is {self.proc}")
        return self._keeper.latest()

    def receive(self, message: Any, sender: Proc) -> tuple[Snapshot, ...] | tuple[str, ...] | None:
        """Answer another process's instance."""
        if isinstance(message, Here):
            self._sweeper.hear(message, sender)
            return None
        if self._keeper is None:
            raise SnapshotError(f"{self.proc} keeps no snapshots; {self.payload.keeper} does")
        return self._keeper.answer(message, sender)

    def _owner(self, name: str) -> Owner:
        return Owner(self.proc.mesh_name, self.proc.point.rank, name or current_actor_name())

    def _ask(self, message: Begin | Saved) -> Any:
        if self._keeper is not None:
            # Messages reach an extension until it is told to stop, and what is left is saved after that.
            return self._keeper.answer(message, self.proc)
        return _result_of(self.call(self.payload.keeper, message, timeout=_ANSWER_S)).item()

    def _save(self, job: Job) -> Snapshot:
        """Take a snapshot; on the saver's thread."""
        owner, folder = job.owner, self.payload.folder
        number = self._numbers.get(owner)
        if number is None:
            known: tuple[Snapshot, ...] = self._ask(Begin(owner))
            remove_strays(folder, owner, {each.path for each in known})
            number = known[0].number if known else 0
        number += 1
        path = str(Path(folder, name_of(owner, number, self.proc.address)))
        _result_of(self._writer.write(path, job.data))
        snapshot = Snapshot(owner, number, path)
        spare: tuple[str, ...] = self._ask(Saved(snapshot))
        self._numbers[owner] = number
        for each in spare:
            Path(each).unlink(missing_ok=True)
        return snapshot


def enable(folder: str | os.PathLike[str], writer: str = "native") -> Snapshots:
    """Have snapshots in the processes that this one spawns from now on.

    ``folder`` has to be shared by their hosts. What an earlier run of the script has left there is found again. ``writer`` is
    a plugin of the kind ``snapshot writer``.
    """
    plugin = PluginManager().get(WRITERS, writer)
    place = Path(folder).absolute()
    # For nobody else: whoever can write there has code run where snapshots are read.
    place.mkdir(parents=True, exist_ok=True, mode=0o700)
    return install(Snapshots, Settings(str(place), plugin, current_proc()))


def here() -> Snapshots:
    """Return this process's instance."""
    found = find(Snapshots)
    if found is None:
        raise SnapshotError(
            f"{current_proc()} takes no snapshots: call mesh_snapshots.enable(folder) in the script, before spawn_procs()"
        )
    return found


def _result_of(future: Future[S]) -> S:
    """Wait for a future, and for nothing else: what the script owns may fail meanwhile, and that is its own to hear."""
    error = future.exception()
    if error is not None:
        raise error
    return future.get()


def _read(owner: Owner, known: tuple[Snapshot, ...], default: S) -> S:
    for each in known:
        try:
            state = unpack(Path(each.path).read_bytes(), each.path)
        except (OSError, SnapshotError) as error:
            logging.getLogger("mesh").warning("snapshot %d of %s is left out: %s", each.number, owner, error)
            continue
        found: S = pickle.loads(state)
        return found
    if known:
        raise SnapshotError(
            f"no snapshot of {owner} can be read; the newest is {known[0].path}. Bring it back, or remove the owner's files "
            "to begin anew"
        )
    return default
