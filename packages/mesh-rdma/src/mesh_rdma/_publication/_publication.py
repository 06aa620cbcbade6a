"""A set of tensors whose versions are published."""

from __future__ import annotations

import os
import secrets
import threading
import time
import weakref
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from mesh_core.extensions import progress
from mesh_rdma._action import RDMAAction, carry_out
from mesh_rdma._errors import InvalidTransfer
from mesh_rdma._publication._layout import Kind, Layout, Part, Parts, Piece, is_elsewhere, layout_of
from mesh_rdma._publication._reader import PublicationReader, Source
from mesh_rdma._publication._server import ReaderFailure, Server, Slot

if TYPE_CHECKING:
    from mesh_core import HostMesh
    from mesh_rdma._publication._hosts import Copies

_LONGEST_NAME = 64


class Publication:
    """Weights of this process, published in versions that never change.

    >>> from mesh_rdma import Publication
    >>> state = {"weight": bytearray(b"first"), "bias": bytearray(b"!")}
    >>> publication = Publication(state)
    >>> reader = publication.reader()  # goes to any process of this host
    >>> version = publication.publish()
    >>> state["weight"][:] = b"later"  # the version stays as it is
    >>> with reader.use() as weights:
    ...     bytes(weights["weight"]), weights.version == version
    (b'first', True)
    >>> publication.close()

    ``publish()`` copies the tensors into a slot of shared memory and returns; nobody waits for readers, unless these have
    leases on all slots. Readers use a version where it lies, without a copy, under a lease that ends with their ``with``
    block or with their process.

    Args:
        state: names, and arrays of numpy, tensors of PyTorch (also DTensors, of which the local part is published) or
            bytes-like objects. The tensors are what each ``publish()`` takes: change them in place, or put others of the
            same type and shape in their places.
        pieces: which part of a whole tensor an entry is, for those that are sharded.
        name: under which readers find the publication again after its owner was restarted; by default one that nobody has.
        start: the number of the first version. By default the time in milliseconds, so that numbers go on when the owner is
            restarted.
        versions: how many versions there can be at once. Memory for each is taken when it is needed.
        hosts: hosts that get a copy of each version, once, for all readers there; see :meth:`add_hosts`.
    """

    def __init__(
        self,
        state: Mapping[str, Any],
        *,
        pieces: Mapping[str, Piece] | None = None,
        name: str | None = None,
        start: int | None = None,
        versions: int = 2,
        hosts: HostMesh | None = None,
    ) -> None:
        if versions < 2:
            raise InvalidTransfer(
                f"versions must be 2 or more, so that one can be read while another is made, got {versions}"
            )
        if name is not None and not (0 < len(name.encode()) <= _LONGEST_NAME and "\0" not in name):
            raise InvalidTransfer(f"a name must have 1 to {_LONGEST_NAME} bytes, got {name!r}")
        self._parts = Parts()
        self._checked = parts = self._parts.of(state, pieces)
        self._state, self._pieces = state, dict(pieces or {})
        self._kinds: dict[str, tuple[Kind, Piece]] = {each: (kind, piece) for each, _, kind, piece in parts}
        self._layout = layout_of(parts)
        first = time.time_ns() // 1_000_000 if start is None else start
        self._server = Server(name or secrets.token_hex(16), self._layout, versions, first - 1)
        self._fills: dict[int, _Fill] = {}
        self._publishing = threading.Lock()
        self._doing = ""
        self._versions = versions
        self._copies: Copies | None = None
        self._closing = weakref.finalize(self, self._server.close)
        if hosts is not None:
            self.add_hosts(hosts)

    @property
    def name(self) -> str:
        """The name by which readers find it."""
        return self._server.name

    @property
    def version(self) -> int | None:
        """The newest version; ``None`` before the first."""
        return self._server.newest

    @property
    def nbytes(self) -> int:
        """The memory that one version takes, in bytes."""
        return self._layout.nbytes

    @property
    def leases(self) -> list[tuple[int, int]]:
        """The current leases: pids of the processes, and the versions that they hold."""
        return self._server.leases

    @property
    def failures(self) -> list[ReaderFailure]:
        """The readers that failed to get a version, with their reasons; the last thousand. They are also logged."""
        return list(self._server.failures)

    @property
    def copies(self) -> dict[str, int | None]:
        """The hosts that have copies, and the newest version on each."""
        return {} if self._copies is None else self._copies.versions()

    def add_hosts(self, hosts: HostMesh) -> None:
        """Keep a copy of each version on these hosts too, from now on.

        A separate process on each host keeps the copy for all readers there. It fetches the newest version over the best
        transport available, and skips versions that it is too slow for. A host that is added later gets its first version from another copy.
        """
        if self._copies is None:
            from mesh_rdma._publication._hosts import Copies

            self._copies = Copies(self._server, self._versions)
        self._copies.add(hosts)

    def reader(self) -> PublicationReader:
        """Return a reader for other processes, on this host and on hosts with copies. It is small and can be pickled."""
        return PublicationReader([Source.here(self.name)])

    def publish(self, *, version: int | None = None, delta: bool = False, timeout: float | None = 60) -> int:
        """Publish the tensors as they are now; return the version number when they may be changed again.

        Args:
            delta: send other hosts only the elements that have changed, if these are few. They build the version
                from the previous one, bit-exactly. Worthwhile below about 1 GB/s to a host. The comparison
                continues after this returns.
            version: the number of the version, for example of the training step. It must be greater than all before. By default the next one.
            timeout: how long to wait if readers hold leases on all slots. After that, :class:`RDMATimeout`
                names them.

        Several threads may publish; their calls run one after another.
        """
        with self._publishing, progress(self._so_far):
            return self._publish(version, delta, timeout)

    def _so_far(self) -> str:
        return f"publish: {self._doing}, {self.nbytes / 1e6:,.0f} MB"

    def _publish(self, version: int | None, delta: bool, timeout: float | None) -> int:
        parts = self._check()
        base = self._server.lend(os.getpid()) if delta and self._copies is not None else None
        try:
            number = self._snapshot(parts, version, timeout)
        except BaseException:
            if base is not None:
                self._server.give_back(base)
            raise
        if self._copies is not None:
            if base is None:
                self._copies.publish()
            else:
                threading.Thread(
                    target=self._copies.publish_changes,
                    args=(base,),
                    name="mesh-publication-delta",
                    daemon=True,
                ).start()
        return number

    def _snapshot(self, parts: list[Part], version: int | None, timeout: float | None) -> int:
        self._doing = "waits until readers give a version back"
        number, at, slot = self._server.begin(version, timeout)
        try:
            self._doing = "copies the tensors"
            fill = self._fills.get(at)
            if fill is None or not fill.fits(slot, parts):
                fill = self._fills[at] = _Fill(slot, parts, self._layout)
            fill.run()
        except BaseException:
            self._server.abort()
            raise
        self._server.finish()
        return number

    def _check(self) -> list[Part]:
        parts = self._parts.of(self._state, self._pieces)
        if parts is self._checked:
            return parts
        for name, _, kind, piece in parts:
            if self._kinds.get(name) != (kind, piece):
                raise InvalidTransfer(
                    f"'{name}' was {_words(self._kinds.get(name))} when the publication was made, and is {_words((kind, piece))} "
                    "now. Make another publication."
                )
        missing = self._kinds.keys() - self._state.keys()
        if missing:
            raise InvalidTransfer(
                f"'{min(missing)}' is no longer in the state dict. Make another publication."
            )
        self._checked = parts
        return parts

    def close(self) -> None:
        """Stop publishing. Processes that wait for a version get an error; versions stay as long as they are in use."""
        if self._copies is not None:
            self._copies.close()
        self._closing()
        self._fills.clear()

    def join(self, timeout: float | None = None) -> bool:
        """After `close`: wait until the last lease has ended; return whether it has."""
        return self._server.join(timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Publication {self.name}: {len(self._kinds)} tensors, {self.nbytes} bytes, version {self.version}>"


class _Fill:
    """The copy of all tensors into one slot, made once."""

    def __init__(self, slot: Slot, parts: list[Part], layout: Layout) -> None:
        self._slot, self._parts = slot, parts
        self._action = RDMAAction()
        self._others: list[tuple[Any, int]] = []
        for name, local, _, _ in parts:
            offset = layout.entries[name].offset
            if is_elsewhere(local):
                if local.numel() > 0:
                    self._others.append((local, offset))
            else:
                self._action.write_remote(slot.own, local, offset=offset)

    def fits(self, slot: Slot, parts: list[Part]) -> bool:
        """Whether it is of these tensors, where they are now."""
        return slot is self._slot and parts is self._parts

    def run(self) -> None:
        """Copy."""

        def copy() -> None:
            for part, offset in self._others:
                import torch

                memory = self._slot.memory[offset : offset + part.numel() * part.element_size()]
                torch.frombuffer(memory, dtype=part.dtype).view(part.shape).copy_(part)

        # To the last byte, whatever is raised: the slot may be filled again after that.
        carry_out([self._action], None, copy)


def _words(known: tuple[Kind, Piece] | None) -> str:
    if known is None:
        return "not there"
    kind, piece = known
    return f"{kind.library or 'bytes'} {kind.dtype} {piece}"
