"""Process groups among the processes of a mesh, made when they are first needed.

COL-1: nobody waits in a collective for a process that cannot take part in it. Such a process says so at the store where the group meets, under the
collective's number, and closes its connections: the others raise, and read the reason there. All of them count collectives alike, including those
that they have not taken part in, so they meet again for the next one, over new connections. The store is the controller's, which reports
there that a process has died: nobody waits there for a dead one.
"""

from __future__ import annotations

import socket
import time
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from mesh_core import MeshError
from mesh_tensor._backends import check, connected
from mesh_tensor._descriptors import HERE
from mesh_tensor._network import LOOPBACK, Where, interface, meeting_places
from mesh_tensor._ranks import serve

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mesh_core.extensions import ProcEnd
    from mesh_tensor._stream import Stream
    from mesh_tensor._windows import Window

_TIMEOUT = timedelta(minutes=30)
_CONNECT = timedelta(seconds=60)
"""How long processes that have all arrived may take to connect: after that, one of them must have died."""
_LOOK_S, _LOOK_LEAST_S = 0.0002, 0.02
"""How often a process that waits for the others checks, at first and at last, whether they have arrived or will not."""
_LOST = "lost"
"""The store's key for the first process that has ended."""
Address = tuple[int, int, int]


class Groups:
    """The groups of one mesh, as its controller knows them."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._made: dict[tuple[tuple[str, ...], str], int] = {}
        self._addresses: list[Address] | None = None
        self._meeting: tuple[str, int] | None = None
        self._store: Any = None
        self._places: dict[Address, str] = {}
        """The address at which each process listens for the others."""

    def lost(self, end: ProcEnd) -> None:
        """A process has ended: nobody should wait for it."""
        store = self._store
        # Each life of a process has its own address: this may be late news of one that was restarted since.
        if store is not None and end.address in (self._addresses or ()):
            store.set(_LOST, f"the process at {end.point} has ended")

    def clear(self) -> list[int]:
        """Forget them, because processes were restarted that are in none; return which those were."""
        numbers = list(self._made.values())
        self._made.clear()
        self._addresses = self._meeting = self._store = None
        return numbers

    def places(self, dim: str) -> dict[Address, int]:
        """Return each process's coordinate in one dimension."""
        self._stream.check()
        procs = self._stream.procs
        if dim not in procs.sizes:
            raise ValueError(f"{procs} has no dimension {dim!r}; it has {', '.join(map(repr, procs.sizes))}")
        points = [point for point, _ in procs]
        return {address: point[dim] for address, point in zip(self._known(), points, strict=True)}

    def ranks(self) -> dict[Address, int]:
        """Return each process's rank."""
        self._stream.check()
        return {address: rank for rank, address in enumerate(self._known())}

    def backend(self, kind: str) -> str:
        """Return PyTorch's name of the collectives of tensors on that kind of device."""
        stream = self._stream
        chosen = stream.tensors.backends.get((stream.procs, kind))
        if chosen is not None or kind in HERE:
            return chosen or "gloo"
        from mesh_tensor._devices import device_of

        told = stream.issuer.use_device(kind)
        are_apart = len({(host, name) for host, name, _ in told}) == len(told)
        own = device_of(kind).backend
        return own if own and are_apart and all(has for *_, has in told) else "gloo"

    def along(self, dims: tuple[str, ...], kind: str = "cpu") -> tuple[int, int]:
        """Return the number of the groups along these dimensions, one for each place in the others, and their size.

        They are for tensors on that kind of device.
        """
        self._stream.check()
        procs = self._stream.procs
        unknown = [dim for dim in dims if dim not in procs.sizes]
        if unknown:
            raise ValueError(
                f"{procs} has no dimension {unknown[0]!r}; it has {', '.join(map(repr, procs.sizes))}"
            )
        size = 1
        for dim in dims:
            size *= procs.sizes[dim]
        backend = self.backend(kind)
        made = self._made.get((dims, backend))
        if made is None:
            if self._meeting is None:
                self._meeting = self._meet()
            members: dict[tuple[int, ...], list[Address]] = {}
            for address, (point, _) in zip(self._known(), procs, strict=True):
                place = tuple(point[dim] for dim in procs.sizes if dim not in dims)
                members.setdefault(place, []).append(address)
            number = next(self._stream.tensors.groups)
            asked = self._stream.ask(
                "group", number, self._meeting, list(members.values()), self._places, backend
            )
            for point, answer in self._stream.wait(asked):
                self._stream.value(point, answer)
            made = self._made[dims, backend] = number
        return made, size

    def _meet(self) -> tuple[str, int]:
        """Create a store that all can reach; return its address."""
        stream = self._stream
        wheres = [Where(*answer[1]) for _, answer in stream.wait(stream.ask("where"))]
        host, places = meeting_places(stream.procs, wheres, stream.tensors.clear_text)
        self._places = dict(zip(self._known(), places, strict=True))
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host, 0), family=family) as listening:
            self._store = serve(listening)
            return host, listening.getsockname()[1]

    def _known(self) -> list[Address]:
        if self._addresses is None:
            self._addresses = [answer[1] for _, answer in self._stream.wait(self._stream.ask("who"))]
        return self._addresses


class LeftAlone(MeshError):
    """A collective did not happen, because a process could not take part in it."""


class Group:
    """This process's place in a group."""

    def __init__(  # noqa: PLR0917 - a place is all of these
        self, name: str, meeting: tuple[str, int], rank: int, size: int, where: str, backend: str = "gloo"
    ) -> None:
        from torch._C._distributed_c10d import PrefixStore, TCPStore

        host, port = meeting
        self.rank = rank
        self.size = size
        self._where = where
        self.backend = backend
        """PyTorch's name of the backend of its collectives."""
        if backend != "gloo":
            # Nobody should wait for this process at the store if it cannot come.
            check(backend)
        store = TCPStore(host, port, is_master=False, timeout=_CONNECT)
        self._whole = store
        self._store = PrefixStore(name, store)
        self._turn = 0
        """The number of the next or present collective."""
        self.made: Any = None
        """PyTorch's own, while all are connected."""
        self._window: Window | bool | None = False
        """The windows of these connections, once all have checked whether they can have them."""
        self._meet(here=True)

    @contextmanager
    def together(self) -> Iterator[Callable[..., None]]:
        """Take part in the next collective; returns a function that calls PyTorch's group and waits, once or several times."""
        self._turn += 1
        try:
            if self.made is None:
                self._meet(here=True)
            yield self._do
        except LeftAlone:
            raise
        except BaseException as error:
            # In another process, if it was first: all know it by its number.
            why = self._say(error)
            self.made = None
            if why is None:
                raise
            raise LeftAlone(why) from error

    def leave(self, why: object) -> None:
        """Tell the others that this process does not take part in the next collective."""
        self._turn += 1
        if self.made is None:
            with suppress(LeftAlone):
                self._meet(here=False, why=why)
        else:
            self._say(why)
            self.made = None

    def window(self) -> Window | None:
        """Return the memory that is shared with the others; ``None`` if not all are on one machine. All call it in the same collective."""
        if isinstance(self._window, bool):
            from mesh_tensor._windows import opened

            self._window = opened(self._do, self.rank, self.size) if self.backend == "gloo" else None
        return self._window

    def _do(self, what: str, *args: Any) -> None:
        # No variable refers to the group: a traceback would keep its connections.
        getattr(self.made, what)(*args).wait()

    def _say(self, why: object) -> str | None:
        """Report why this process does not take part; return what another one had reported before, which this one had not read."""
        mine = f"the process at {self.rank} of {self.size} could not take part in it: {_short(why)}"
        try:
            said = self._store.compare_set(f"{self._turn}/left", "", mine).decode()
        except RuntimeError:
            return f"a process of the group has ended ({_short(why)})"
        return None if said == mine else said

    def _meet(self, *, here: bool, why: object = None) -> None:
        """Meet for a collective, and connect if all members are there and take part."""
        store, turn = self._store, self._turn
        all_here, left = f"{turn}/all", f"{turn}/left"
        try:
            if not here:
                self._say(why)
            if store.add(f"{turn}/came", 1) == self.size:
                # Those that were still about to read about the previous meeting have come to this one.
                for each in ("all", "left", "came"):
                    store.delete_key(f"{turn - 1}/{each}")
                store.set(all_here, "")
            if not here:
                return
            end = time.monotonic() + _TIMEOUT.total_seconds()
            pause = _LOOK_S
            while not store.check([all_here]) and not store.check([left]):
                if self._whole.check([_LOST]):
                    self._say(self._whole.get(_LOST).decode())
                elif time.monotonic() > end:
                    self._say(f"it has waited {_TIMEOUT} for the others")
                # Not by a wait with a time limit: PyTorch logs each one that expires.
                time.sleep(pause)
                pause = min(2 * pause, _LOOK_LEAST_S)
            if store.check([left]):
                raise LeftAlone(store.get(left).decode())
            self._window = False
            self.made = self._connected()
        except LeftAlone:
            raise
        except RuntimeError as error:
            raise LeftAlone(self._say(error) or _short(error)) from error

    def staged(self, tensor: Any) -> Any:
        """Return a tensor as the backend accepts it: gloo accepts those on the CPU."""
        return tensor.to("cpu") if self.backend == "gloo" else tensor

    def _connected(self) -> Any:
        if self.backend != "gloo":
            from torch._C._distributed_c10d import PrefixStore

            store = PrefixStore(f"{self._turn}", self._store)
            return connected(self.backend, store, self.rank, self.size, _TIMEOUT)
        return self._connected_by_gloo()

    def _connected_by_gloo(self) -> Any:
        from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo

        # Private names, and the only way to choose a network.
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # noqa: SLF001
        named = interface() if self._where != LOOPBACK else None
        # The environment's choice, if there is a choice.
        chosen = {"interface": named} if named else {"hostname": self._where}
        options._devices = [ProcessGroupGloo.create_device(**chosen)]  # noqa: SLF001
        options._timeout = _CONNECT  # noqa: SLF001
        made: Any = ProcessGroupGloo(PrefixStore(f"{self._turn}", self._store), self.rank, self.size, options)
        # That limit was for the connections: in a collective the others may have to compute for long before they arrive.
        made._set_default_timeout(_TIMEOUT)  # noqa: SLF001 - likewise
        return made


def join(  # noqa: PLR0917 - a message
    address: Address,
    number: int,
    meeting: tuple[str, int],
    members: list[list[Address]],
    places: dict[Address, str],
    backend: str = "gloo",
) -> Group:
    """Make this process's group."""
    index, mine = next((index, each) for index, each in enumerate(members) if address in each)
    return Group(f"{number}.{index}", meeting, mine.index(address), len(mine), places[address], backend)


def _short(error: object) -> str:
    """Return the error without the stack that PyTorch adds to it."""
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__
