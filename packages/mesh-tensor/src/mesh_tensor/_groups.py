"""Process groups among the processes of a mesh, made when they are first needed."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mesh_tensor._stream import Stream

_TIMEOUT = timedelta(minutes=30)
Address = tuple[int, int, int]


class Groups:
    """The groups of one mesh, as its controller knows them."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._made: dict[tuple[str, ...], int] = {}
        self._addresses: list[Address] | None = None
        self._meeting: tuple[str, int] | None = None

    def clear(self) -> list[int]:
        """Forget them, as processes were made again that are in none; which those were."""
        numbers = list(self._made.values())
        self._made.clear()
        self._addresses = self._meeting = None
        return numbers

    def places(self, dim: str) -> dict[Address, int]:
        """Return each process's coordinate in one dimension."""
        procs = self._stream.procs
        if dim not in procs.sizes:
            raise ValueError(f"{procs} has no dimension {dim!r}; it has {', '.join(map(repr, procs.sizes))}")
        points = [point for point, _ in procs]
        return {address: point[dim] for address, point in zip(self._known(), points, strict=True)}

    def ranks(self) -> dict[Address, int]:
        """Return each process's rank."""
        return {address: rank for rank, address in enumerate(self._known())}

    def along(self, dims: tuple[str, ...]) -> tuple[int, int]:
        """Return the number of the groups along these dimensions, one for each place in the others, and their size."""
        procs = self._stream.procs
        unknown = [dim for dim in dims if dim not in procs.sizes]
        if unknown:
            raise ValueError(
                f"{procs} has no dimension {unknown[0]!r}; it has {', '.join(map(repr, procs.sizes))}"
            )
        size = 1
        for dim in dims:
            size *= procs.sizes[dim]
        made = self._made.get(dims)
        if made is None:
            if self._meeting is None:
                first = next(iter(procs))[1]
                ((_, answer),) = self._stream.wait(self._stream.ask("serve", of=first))
                self._meeting = answer[1]
            members: dict[tuple[int, ...], list[Address]] = {}
            for address, (point, _) in zip(self._known(), procs, strict=True):
                place = tuple(point[dim] for dim in procs.sizes if dim not in dims)
                members.setdefault(place, []).append(address)
            number = next(self._stream.tensors.groups)
            asked = self._stream.ask("group", number, self._meeting, list(members.values()))
            for point, answer in self._stream.wait(asked):
                self._stream.value(point, answer)
            made = self._made[dims] = number
        return made, size

    def _known(self) -> list[Address]:
        if self._addresses is None:
            self._addresses = [answer[1] for _, answer in self._stream.wait(self._stream.ask("who"))]
        return self._addresses


def serve() -> tuple[Any, tuple[str, int]]:
    """Begin a store at which processes find each other; it and where it is."""
    from torch._C._distributed_c10d import TCPStore

    host = "127.0.0.1"
    store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
    return store, (host, store.port)


def join(address: Address, number: int, meeting: tuple[str, int], members: list[list[Address]]) -> Any:
    """Make this process's group."""
    from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, TCPStore

    index, mine = next((index, each) for index, each in enumerate(members) if address in each)
    host, port = meeting
    store = PrefixStore(f"{number}.{index}", TCPStore(host, port, is_master=False))
    # Names with an underscore, and the only way to say which network to use.
    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # noqa: SLF001
    options._devices = [ProcessGroupGloo.create_device(hostname=host)]  # noqa: SLF001
    options._timeout = _TIMEOUT  # noqa: SLF001
    return ProcessGroupGloo(store, mine.index(address), len(mine), options)
