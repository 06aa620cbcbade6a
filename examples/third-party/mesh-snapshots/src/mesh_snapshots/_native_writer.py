"""The writer that comes with the package: a thread in C for each file, which finishes a promise."""

import os
from collections.abc import Iterable

from mesh_core import Future, Promise
from mesh_core.plugins import ProbeResult, hookimpl
from mesh_snapshots._contract import Writer, WriterCapabilities, WriterPlugin


class NativeWriter:
    """Hands each file to a thread that never takes the interpreter's lock."""

    def write(self, path: str, data: bytes) -> Future[None]:
        """See :class:`~mesh_snapshots.Writer`."""
        from mesh_snapshots import _native

        def finish(status: int) -> None:
            if status:
                raise OSError(status, os.strerror(status), path)

        promise = Promise[None](f"writing {path}", finish=finish)
        _native.write(promise.native_handle(), path, data)
        return promise.future


def _create() -> Writer:
    return NativeWriter()


def _probe() -> ProbeResult[WriterCapabilities]:
    return ProbeResult.yes(WriterCapabilities(durable=True, takes_lock=False))


NATIVE = WriterPlugin(
    name="native",
    api_version=1,
    create=_create,
    probe=_probe,
    summary="a thread in C for each file; waits for the disk",
)


@hookimpl
def mesh_register_snapshot_writers() -> Iterable[WriterPlugin]:
    """`writer="native"`."""
    yield NATIVE
