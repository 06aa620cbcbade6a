"""Transports of other packages, as the engine calls them: on its threads, with plain values, and without exceptions."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mesh_rdma._errors import KINDS, RDMAError, advice
from mesh_rdma._verbs import stand_in

if TYPE_CHECKING:
    from mesh_core import PluginLoadError
    from mesh_rdma._contract import Exported, Peer, Transport, TransportPlugin
    from mesh_rdma._native import Watch

_OWN = "mesh-rdma"
_GROUP = "mesh.transports"
_CAUSES = 8
"""So many exceptions are remembered."""
_PASSED_ON = ("gone", "refused", "timed_out", "invalid", "unknown")
"""Kinds of errors that end a transfer, instead of letting another transport try it."""


def installed() -> list[Outside | Refused]:
    """Return the transports that are not native: those of other packages, and one of our own if it was asked for."""
    own = stand_in()
    return [*_of_others(), *([] if own is None else [Outside(own, own.probe())])]


def _of_others() -> list[Outside | Refused]:
    from importlib.metadata import entry_points

    # Without any, none of the code that finds plugins is imported.
    others = [each for each in entry_points(group=_GROUP) if each.dist is None or each.dist.name != _OWN]
    if not others:
        return []
    from mesh_core import PluginLoadError
    from mesh_core.plugins import PluginManager
    from mesh_rdma._contract import TRANSPORTS

    manager = PluginManager()
    own = {each.name for each in manager.entries(TRANSPORTS) if each.distribution == _OWN}
    found: list[Outside | Refused] = []
    for name in manager.names(TRANSPORTS):
        if name in own:
            if len(manager.origin(TRANSPORTS, name).split(" and ")) > 1:
                # The engine's own is used; selecting it warns of the others.
                manager.get(TRANSPORTS, name)
            continue
        try:
            plugin = manager.get(TRANSPORTS, name)
        except PluginLoadError as error:
            found.append(Refused(name, error))
        else:
            found.append(Outside(plugin, manager.probe(plugin)))
    return found


class Refused:
    """A transport whose plugin cannot be used: it is listed, with the reason, and whoever asks for it is told."""

    capabilities = (False, False, False, False)

    def __init__(self, name: str, error: PluginLoadError) -> None:
        self.name = name
        self.reason = f"it cannot be loaded: {error.cause} ({error.remedy})"


class _Causes:
    """What transports of other packages have raised last, for the errors that quote it."""

    def __init__(self) -> None:
        self._raised: dict[str, Exception] = {}

    def keep(self, said: str, error: Exception) -> None:
        # The frames hold views of memory, which must not outlive the transfer.
        traceback.clear_frames(error.__traceback__)
        while len(self._raised) >= _CAUSES:
            self._raised.pop(next(iter(self._raised)), None)
        self._raised[said] = error

    def of(self, message: str) -> Exception | None:
        """Return the exception that an error's message quotes."""
        return next((error for said, error in list(self._raised.items()) if said in message), None)


_RAISED = _Causes()
cause_of = _RAISED.of


def _answer(work: Callable[[], Any]) -> tuple[str | None, Any]:
    """Return a kind of error and its message, or ``None`` and the result."""
    try:
        return None, work()
    except RDMAError as error:
        kind = next((kind for kind in _PASSED_ON if KINDS[kind] is type(error)), "transport")
        return kind, str(error)
    except Exception as error:  # noqa: BLE001 - of code that is not ours; another transport may do it
        said = f"{type(error).__name__}: {error}{advice(error)}"
        _RAISED.keep(said, error)
        return "transport", said


class Outside:
    """One such transport."""

    def __init__(self, plugin: TransportPlugin, able: Any) -> None:
        self.name = plugin.name
        self.reason: str | None = None
        self.capabilities = (False, False, False, False)
        self._plugin = plugin
        self._lock = threading.Lock()
        self._made: Transport | None = None
        self._exported: dict[int, Exported] = {}
        if not able:
            self.reason = f"{able.reason} ({able.remedy})"
        else:
            can = able.capabilities
            self.capabilities = (can.copies, False, can.remote, can.one_sided)
            if can.atomics:
                self.reason = "it declares atomic operations, which version 1 of the contract does not have"

    def _transport(self) -> Transport:
        from mesh_rdma._contract import Transport

        with self._lock:
            if self._made is None:
                made = self._plugin.create()
                if not isinstance(made, Transport):
                    raise TypeError(
                        f"create() of the transport {self.name} gave {type(made).__name__}, no Transport"
                    )
                self._made = made
            return self._made

    def offer(
        self, key: int, windows: list[Any], writable: bool, whose: tuple[bytes, bytes]
    ) -> tuple[str | None, Any]:
        """Offer the memory; the result is the section. `whose` is the realm, and the token."""
        from mesh_rdma._contract import Exported

        def offer() -> bytes:
            export = Exported(key, tuple(memoryview(window) for window in windows), writable, *whose)
            section = bytes(self._transport().offer(export))
            self._exported[key] = export
            return section

        return _answer(offer)

    def withdraw(self, key: int) -> tuple[str | None, Any]:
        """Stop offering it, if it was offered."""
        export = self._exported.pop(key, None)
        return _answer(lambda: None if export is None else self._transport().withdraw(export))

    def reach(self, section: bytes, owner: str, watch: Watch) -> tuple[str | None, Any]:
        """Reach the owner; the result has the methods `run` and `alive`."""
        return _answer(lambda: _Reached(self._transport().reach(section, owner, watch)))


class _Reached:
    def __init__(self, peer: Peer) -> None:
        self._peer = peer

    def run(
        self, asked: list[tuple[bool, bytes, int, list[Any], tuple[bytes, bytes]]], watch: Watch
    ) -> tuple[str | None, Any]:
        from mesh_rdma._contract import Copy

        def run() -> None:
            views: list[memoryview] = []
            copies: list[Copy] = []
            for write, section, offset, windows, whose in asked:
                memory = tuple(memoryview(window) for window in windows)
                views.extend(memory)
                copies.append(Copy(write, section, offset, memory, *whose))
            try:
                self._peer.run(copies, watch)
            finally:
                for view in views:
                    view.release()

        return _answer(run)

    def alive(self) -> tuple[str | None, Any]:
        return _answer(self._peer.alive)
