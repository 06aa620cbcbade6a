"""The thread of a process that takes its snapshots, one after the other."""

import contextlib
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

from mesh_core import MeshError, Promise
from mesh_snapshots._files import Owner, Snapshot, SnapshotError


@dataclass(frozen=True)
class Job:
    """A snapshot that is to be taken."""

    owner: Owner
    data: bytes
    promise: Promise[Snapshot]


class Saver:
    """Has ``save`` called for each job, in their order. The thread lives from the first job on until :meth:`close`."""

    def __init__(self, save: Callable[[Job], Snapshot]) -> None:
        self._save = save
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._job: Job | None = None
        """The one that is being taken."""

    def put(self, job: Job) -> None:
        """Have a snapshot taken, soon."""
        with self._lock:
            if self._closed:
                raise SnapshotError(f"cannot save {job.owner}: snapshots were stopped in this process")
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="mesh-snapshots", daemon=True)
                self._thread.start()
            self._jobs.put(job)

    def close(self, seconds: float) -> None:
        """Wait until all that was put is taken. What is not within ``seconds`` fails."""
        with self._lock:
            self._closed = True
            thread = self._thread
            self._jobs.put(None)
        if thread is None:
            return
        thread.join(seconds)
        if thread.is_alive():
            left = [self._job]
            with contextlib.suppress(queue.Empty):
                while True:
                    left.append(self._jobs.get_nowait())
            self._jobs.put(None)
            for job in left:
                if job is not None:
                    error = SnapshotError(
                        f"no snapshot of {job.owner} within {seconds:g} s: its process ends"
                    )
                    # The thread may have come to an end with it just now.
                    with contextlib.suppress(MeshError):
                        job.promise.set_exception(error)

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._job = job
            if not job.promise.cancelled:
                with contextlib.suppress(MeshError):
                    self._take(job)
            self._job = job = None

    def _take(self, job: Job) -> None:
        try:
            snapshot = self._save(job)
        except BaseException as error:  # noqa: BLE001 - it is raised where the snapshot is waited for
            job.promise.set_exception(error)
        else:
            job.promise.set_result(snapshot)
