"""Messages from one instance of an extension to others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mesh_core._common.codes import Request
from mesh_core._common.control import Control
from mesh_core._common.current import current
from mesh_core._common.errors import MeshError
from mesh_core._common.proc import Proc, signed
from mesh_core._extensions.events import Spawning
from mesh_core._extensions.host_procs import HostsLocation, check_there
from mesh_core._futures.sending import SENT, Sending
from mesh_core._meshes.adverbs import ManyFuture, collect, finish_all
from mesh_core._meshes.outcomes import Addressee
from mesh_core._native import Extent, Placement, Region, Target

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mesh_core import Future, HostMesh, ValueMesh
    from mesh_core._extensions.base import Extension
    from mesh_core._native import Call, Sender
    from mesh_core._process.process import Process


class _Question:
    """What was asked, for the future that waits for the answers."""

    def __init__(self, extension: str, who: Addressee) -> None:
        self._extension = extension
        self._who = who

    def what(self) -> str:
        return f"a message to extension {self._extension!r}"

    def _collect(
        self, call: Call, known: Mapping[int, BaseException]
    ) -> tuple[ValueMesh[Any], BaseException | None]:
        return collect(call, self._who, known)

    def finish(self, call: Call) -> ValueMesh[Any]:
        return finish_all(call, self._who)


def call(extension: Extension, to: Any, message: Any, timeout: float | None) -> Future[ValueMesh[Any]]:
    """See :meth:`Extension.call`."""
    sender, who = _address(extension, to)
    question = _Question(extension.name, who)
    said = sender.call(signed(current(), message), False, timeout)
    return ManyFuture(current(), said, question.finish, question.what, timeout)


def install_on(extension: Extension, to: Any) -> Future[ValueMesh[Any]]:
    """See :meth:`Extension.install_on`."""
    from mesh_core._extensions.carried import pack

    process = current()
    if hasattr(to, "_numbers"):
        return _install_on_hosts(process, extension, to)
    _, who = _address(extension, to)
    hosts = tuple(dict.fromkeys(to._location.name_of(rank) for rank in to._view))
    is_local = to._location.only == process.identity.host_no
    carried = pack(extension, Spawning(to.name, to.extent, hosts, is_local))
    if carried is None:
        raise MeshError(
            f"cannot install extension {extension.name!r} in these processes: its for_spawn() returned NOT_CARRIED"
        )
    sender = process.runtime.sender(
        to._location.target(to._procs_id, to._view), 0, Control.INSTALL, Request.EXTENSION
    )
    question = _Question(extension.name, who)
    return ManyFuture(process, sender.call(carried), question.finish, question.what)


def _install_on_hosts(process: Process, extension: Extension, hosts: HostMesh) -> Future[ValueMesh[Any]]:
    _check_installed(process, extension)
    numbers = hosts._numbers
    carried = process.host_procs.packed(extension, numbers)
    if carried is None:
        raise MeshError(
            f"cannot install extension {extension.name!r} on hosts: its for_spawn() returned NOT_CARRIED"
        )
    process.notices.start()
    process.host_procs.order(numbers, carried, tell=False)
    target, who = _of_hosts(extension, hosts)
    sender = process.runtime.sender(target, 0, Control.INSTALL, Request.EXTENSION)
    question = _Question(extension.name, who)
    return ManyFuture(process, sender.call(carried), question.finish, question.what)


def _of_hosts(extension: Extension, hosts: HostMesh) -> tuple[Target, Addressee]:
    """Return the target for the processes that run the hosts' extensions."""
    location = HostsLocation(hosts._numbers, hosts._location.names)
    root = Region.whole(hosts.extent)
    return location.target(0, root), Addressee(f"extension {extension.name}", location, root, root, None)


def _check_installed(process: Process, extension: Extension) -> None:
    if not process.extensions.may_send(extension):
        raise MeshError(
            f"cannot send from extension {extension.name!r}: this instance is not installed in this process. "
            "Use the one that install() or find() returns"
        )


def tell(extension: Extension, to: Any, message: Any) -> Sending:
    """See :meth:`Extension.tell`."""
    sender, _ = _address(extension, to)
    deferral = sender.tell(signed(current(), message))
    if deferral is None:
        return SENT
    return Sending(current(), deferral, f"a message to extension {extension.name!r}")


def _address(extension: Extension, to: Any) -> tuple[Sender, Addressee]:
    process = current()
    # The script may send to itself before it spawned anything, and that thread receives the messages.
    process.notices.start()
    name = f"extension {extension.name}"
    if isinstance(to, Proc):
        mesh, rank, host = to.address
        target, single = Target.one(mesh, rank, Placement.on(host)), Region.whole(Extent([], []))
        who = Addressee(name, process.here, single, single, None)
    elif hasattr(to, "_procs_id") and hasattr(to, "_view"):
        target = to._location.target(to._procs_id, to._view)
        who = Addressee(name, to._location, to._root, to._view, to)
    elif hasattr(to, "_numbers"):
        check_there(process, extension, to._numbers)
        target, who = _of_hosts(extension, to)
    else:
        raise TypeError(
            f"messages of extensions go to a ProcMesh, an ActorMesh, a HostMesh or a Proc, got {type(to).__name__}"
        )
    _check_installed(process, extension)
    return process.runtime.sender(target, 0, extension.name, Request.EXTENSION, True, who), who
