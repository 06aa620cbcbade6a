"""The controller's part in syncs: an actor that runs one sync at a time."""

from __future__ import annotations

import array
import contextlib
import os
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mesh_core._actors.actor import Actor
from mesh_core._actors.endpoint import endpoint
from mesh_core._common.context import context
from mesh_core._common.current import current
from mesh_core._common.display import counted
from mesh_core._common.errors import MeshError
from mesh_core._features.workspace.extension import Copies
from mesh_core._features.workspace.fleet import Fleet, tell_running
from mesh_core._features.workspace.manifest import FILE, FOLDER, Manifest, Print, Scanner, hasher
from mesh_core._features.workspace.mirror import ABANDON, DONE, MORE, Committed, Piece
from mesh_core._features.workspace.placing import Workspace, key_of
from mesh_core._features.workspace.report import WorkspaceReport
from mesh_core._features.workspace.rules import Rules
from mesh_core._features.workspace.synced import Synced
from mesh_core.extensions import find, install

if TYPE_CHECKING:
    from mesh_core._failures.failure import MeshFailure
    from mesh_core._meshes.hosts import HostMesh
    from mesh_core._process.process import Process

_BATCH = 4 << 20
_MOST_PIECES = 2000
_AHEAD = 3
"""How many batches are sent ahead; with their size, this limits the memory that a sync takes."""
_TRIES = 5
_DISCARD_S = 10.0


class Synchronizer(Actor):
    """An actor in the script's process. Its endpoint is synchronous, so that there is one sync at a time."""

    def __init__(self) -> None:
        self._fleet = Fleet()
        self._scanners: dict[tuple[str, tuple[str, ...]], Scanner] = {}

    @endpoint
    def sync(self, hosts: HostMesh, source: str, to: str, reload: bool, patterns: tuple[str, ...]) -> Any:
        """Run one sync. Return a report, or the exception as a value, so that callers get it unwrapped."""
        try:
            return self._sync(hosts, source, to, reload, patterns)
        except Exception as error:  # noqa: BLE001 - raised at the caller
            return error.with_traceback(None)

    def _sync(
        self, hosts: HostMesh, source: str, to: str, reload: bool, patterns: tuple[str, ...]
    ) -> WorkspaceReport:
        began = time.monotonic()
        process = current()
        self._say(f"looks for changes in {Path(source).name}")
        rules = Rules(patterns)
        scanner = self._scanners.setdefault((source, patterns), Scanner(source, rules, _check_end))
        workspace = Workspace(source, key_of(source), to, process.scratch().path, (), 0)
        keepers = self._fleet.keepers(hosts)
        sent: dict[str, int] = {}
        try:
            manifest, lacking = self._transfer(scanner, keepers, workspace, sent)
            self._say(f"puts the files in place on {counted(len(hosts), 'host')}")
            committed: list[Committed] = keepers.commit.call(workspace).get().values()
        except BaseException:
            _discard(keepers, workspace)
            raise
        workspace = workspace._replace(paths=_importable(source, manifest))
        changed = _changed(process, manifest, lacking, committed)
        anything = any(each.written or each.deleted for each in committed)
        self._register(process, workspace, anything)
        reloaded, kept = tell_running(process, self._fleet, workspace, changed, reload)
        return WorkspaceReport(
            source=source,
            hosts=len(hosts),
            files=sum(entry.kind != FOLDER for entry in manifest.entries),
            sent=tuple(sorted(sent)),
            sent_bytes=sum(sent.values()),
            deleted=max(each.deleted for each in committed),
            seconds=time.monotonic() - began,
            reloaded=reloaded,
            kept=kept,
        )

    def _transfer(
        self, scanner: Scanner, keepers: Any, workspace: Workspace, sent: dict[str, int]
    ) -> tuple[Manifest, list[int]]:
        """Send all hosts what they lack of the tree, and try again if the tree changes meanwhile."""
        changing: list[str] = []
        needed: set[str] = set()
        for _ in range(_TRIES):
            manifest = scanner.scan()
            lacking = self._survey(keepers, workspace, manifest)
            needed.update(manifest.entries[number].path for number in lacking)
            changing = self._send(keepers, workspace, manifest, lacking, sent)
            if not changing:
                return manifest, [n for n, entry in enumerate(manifest.entries) if entry.path in needed]
        raise MeshError(
            f"{changing[0]!r} in {workspace.source} changed during each of {_TRIES} attempts to read it. "
            "Finish writing it before the sync, or exclude it. No host has changed"
        )

    def _survey(self, keepers: Any, workspace: Workspace, manifest: Manifest) -> list[int]:
        """Return the entries whose content at least one host lacks."""
        lacking: set[int] = set()
        answers = keepers.survey.call(workspace, manifest.digest, None).get().values()
        if None in answers:
            answers = keepers.survey.call(workspace, manifest.digest, manifest.encode()).get().values()
        for answer in set(answers):
            lacking.update(array.array("I", answer))
        return sorted(lacking)

    def _send(
        self,
        keepers: Any,
        workspace: Workspace,
        manifest: Manifest,
        lacking: list[int],
        sent: dict[str, int],
    ) -> list[str]:
        """Send contents, a limited number of bytes ahead; return the files that changed while they were read."""
        changing: list[str] = []
        under_way: deque[Any] = deque()
        total, done = sum(manifest.entries[number].size for number in lacking), 0
        for batch in _batches(_pieces(workspace.source, manifest, lacking, sent, changing)):
            _check_end()
            self._say(f"{done / 1e6:,.0f} of {total / 1e6:,.0f} MB sent to {counted(len(keepers), 'host')}")
            under_way.append(keepers.take.call(workspace, batch))
            done += sum(len(piece[1]) for piece in batch)
            if len(under_way) > _AHEAD:
                under_way.popleft().get()
        for future in under_way:
            future.get()
        return changing

    def _say(self, progress: str) -> None:
        current().slots.of(Synced).progress = progress

    def _register(self, process: Process, workspace: Workspace, changed: bool) -> None:
        """Make processes that are spawned from now on import from the copies."""
        told = [list(each) for each in process.slots.of(Synced).told]
        for at, each in enumerate(told):
            if (each[0], each[2]) == (workspace.source, workspace.to):
                told[at] = list(workspace._replace(version=each[5] + changed))
                break
        else:
            told.insert(0, list(workspace._replace(version=1)))
        process.slots.of(Synced).told = told
        if find(Copies) is None:
            # Processes spawned from now on carry it.
            install(Copies)

    def __supervise__(self, failure: MeshFailure) -> bool:
        """Handle a keeper's death: a sync under way raises it, and the next sync respawns the keeper."""
        return True


def _discard(keepers: Any, workspace: Workspace) -> None:
    """Have all hosts delete what has arrived, so that nothing is left by the time the script sees the error (WSP-4)."""
    with contextlib.suppress(Exception):
        keepers.discard.call(workspace).get(timeout=_DISCARD_S)


def _check_end() -> None:
    """Abort if the script is ending: it does not wait for a sync that nobody waits for."""
    me, actor_host = context().actor_instance, current().actor_host()
    actor = actor_host.actors.get(me.actor_id)
    if actor is None or actor.gone is not None:
        raise MeshError("the script ended before the sync; no host has changed. Wait for it with get()")


def _pieces(
    source: str, manifest: Manifest, lacking: list[int], sent: dict[str, int], changing: list[str]
) -> Iterator[Piece]:
    """Yield the contents of files in pieces; files that differ from the manifest are abandoned and added to ``changing``."""
    for number in lacking:
        entry = manifest.entries[number]
        assert entry.kind == FILE
        whole, left = hasher(), entry.size
        try:
            with Path(source, entry.path).open("rb", buffering=0) as file:
                before = Print.of(os.fstat(file.fileno()))
                data = file.read(min(left + 1, _BATCH))
                while left > len(data) > 0:
                    whole.update(data)
                    left -= len(data)
                    yield number, data, MORE
                    data = file.read(min(left + 1, _BATCH))
                whole.update(data)
                same = before == Print.of(os.fstat(file.fileno()))
        except OSError:
            data, same = b"", False
        if same and whole.digest() == entry.digest:
            sent[entry.path] = entry.size
            yield number, data, DONE
        else:
            changing.append(entry.path)
            yield number, b"", ABANDON


def _batches(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece[1])
        if size >= _BATCH or len(batch) >= _MOST_PIECES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _importable(source: str, manifest: Manifest) -> tuple[str, ...]:
    """Return the workspace's directories in ``sys.path``, in that order; the workspace itself if there are none."""
    folders = {entry.path for entry in manifest.entries if entry.kind == FOLDER}
    found: list[str] = []
    for each in sys.path:
        real = os.path.realpath(each or os.curdir)
        path = "" if real == source else real.removeprefix(f"{source}/")
        if path != real and (not path or path in folders) and path not in found:
            found.append(path)
    return tuple(found) or ("",)


def _changed(
    process: Process, manifest: Manifest, lacking: list[int], committed: list[Committed]
) -> list[str]:
    """Return the modules of which a running process may have imported old versions.

    Of files that are new on a host, these are the ones touched since this job began: a process there may have imported them
    from the controller's directory.
    """
    names = {path for each in committed for path in each.modules}
    for number in lacking:
        path = manifest.entries[number].path
        if manifest.touched.get(path, 0) >= process.began_ns:
            names.add(path)
    return sorted(names)
