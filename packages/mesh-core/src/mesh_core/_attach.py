"""Hosts of other machines: agents that run there, as a mesh."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from mesh_core import _process
from mesh_core._errors import REMEDY, AuthenticationError, MeshError, SpawnError
from mesh_core._failure import FailureKind
from mesh_core._future import Future
from mesh_core._home import Home, Names
from mesh_core._hosts import HostMesh
from mesh_core._native import Lost, Placement, Region, Slice, attach, attach_dialers, be_host, roll

if TYPE_CHECKING:
    import concurrent.futures
    from collections.abc import Awaitable, Sequence

    from mesh_core._credentials import Credentials
    from mesh_core._native import Call
    from mesh_core._process import Process

# So long a future among the addresses is waited for.
_ADDRESS_S = 600.0


def attach_to_workers(
    workers: Sequence[str | Awaitable[str] | concurrent.futures.Future[str]] = (),
    *,
    credentials: Credentials | str | os.PathLike[str],
    name: str = "hosts",
    listen: str | None = None,
    expect: int = 0,
    timeout: float | None = None,
) -> HostMesh:
    """Make a mesh of hosts on which agents run: ``mesh host`` was started there. Returns at once.

    Args:
        workers: the agents' addresses, such as ``"tcp://b7:7411"``; or futures of addresses, also those of
            ``concurrent.futures`` and of an event loop that runs in another thread.
        credentials: the job's credentials, or the folder that holds them (see :class:`Credentials`).
        name: what errors and listings call the mesh.
        listen: an address at which this script waits for agents that can only dial out (``mesh host --dial``).
        expect: how many of those there will be.
        timeout: for how many seconds agents are waited for that do not listen yet; by default as long as a host may
            be silent (``heartbeat_timeout``). This function returns at once all the same.

    An address that is none is a :class:`ValueError`, a folder without credentials of a controller an
    :class:`AuthenticationError`. What turns out only when the hosts are connected to is raised by ``initialized``, and
    by the first call to what was to run there: an :class:`AuthenticationError` where one side does not accept the
    other's credentials, else a :class:`SpawnError`.

    The mesh has one dimension, ``hosts``, in the order of ``workers``, or in which the agents dial in; one call makes a
    mesh of either. ``await`` it, or wait for ``.initialized``, to hear whether all can be reached.
    """
    from mesh_core._spawning import interpreter_command

    process = _process.current()
    if process.identity.mesh_id != 0:
        raise MeshError(
            "hosts are attached by the script that drives the job, not by a worker of it; attach them there, and "
            "pass the mesh"
        )
    if isinstance(workers, str):
        raise TypeError(f"workers= is a list of addresses; write [{workers!r}] for one")
    if not isinstance(credentials, str | os.PathLike) and not hasattr(credentials, "path"):
        raise TypeError(
            f"credentials= is the folder that `mesh credentials new` has made, or Credentials, not {credentials!r}"
        )
    addresses = [_address(worker, process) for worker in workers]
    if addresses and (listen is not None or expect):
        raise ValueError(
            "a mesh of hosts is made either of workers= or of those that dial in (listen=, expect=); call twice"
        )
    if not addresses and (listen is None or expect < 1):
        raise ValueError(
            "name the agents' addresses in workers=; or, for agents that dial out, give listen= and how many to expect="
        )
    if len(set(addresses)) < len(addresses):
        from collections import Counter

        twice = sorted(address for address, times in Counter(addresses).items() if times > 1)
        raise ValueError(f"workers= names {', '.join(twice)} more than once; a host is attached once")
    if timeout is not None and (
        isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout >= 0
    ):
        raise ValueError(f"timeout= is a number of seconds, or None, not {timeout!r}")
    folder = str(getattr(credentials, "path", credentials))
    settings = process.settings
    # What others ask for on this host.
    be_host(
        process.runtime, process.identity.host, interpreter_command(None), sorted(process.environ.items())
    )
    if listen is None:
        patience = settings.heartbeat_timeout if timeout is None else timeout
        base, call = attach(
            process.runtime, addresses, folder, settings.heartbeat_timeout, settings.fan_out, patience
        )
        where = dict(enumerate(addresses))
    else:
        at, base, call = attach_dialers(
            process.runtime, listen, expect, folder, settings.heartbeat_timeout, settings.fan_out
        )
        where = dict.fromkeys(range(expect), f"an agent that dials {at}")
    view = Region(["hosts"], Slice(base, [len(where)], [1]))
    home = Home(Placement.agents(), Names(process.runtime))
    mesh = HostMesh(process, view, process.unique_name(name), home, root=view)
    mesh._ready = Future(
        process,
        call,
        lambda call: _all_attached(process, call, base, where),
        lambda: f"attaching {mesh._name!r}",
    )
    return mesh


def _address(worker: Any, process: Process) -> str:
    address = worker
    if not isinstance(worker, str) and (hasattr(worker, "result") or hasattr(worker, "__await__")):
        from mesh_core._together import adopt

        address = adopt(worker, process, "addresses of workers").get(_ADDRESS_S)
    if not isinstance(address, str):
        raise TypeError(f"a worker is an address such as 'tcp://b7:7411', or a future of one, not {worker!r}")
    return address


def _all_attached(process: Process, call: Call, base: int, where: dict[int, str]) -> None:
    outcomes = call.outcomes()
    lost = {
        index: outcome
        for index, outcome in enumerate(outcomes)
        if outcome is None or isinstance(outcome, Lost)
    }
    if not lost:
        return
    # What the controller has found out of each host, without what a loss says around it.
    known = {} if process.closed else {host: why for host, *_, why in roll(process.runtime)}
    failed = [_failed(where[index], known.get(base + index), outcome) for index, outcome in lost.items()]
    first = "; ".join(failed[:3]) + (f"; and {len(failed) - 3} more" if len(failed) > 3 else "")
    text = f"{len(failed)} of {len(where)} hosts cannot be used: {first}"
    refused = FailureKind.HOST_NOT_AUTHENTICATED
    if all(outcome is not None and FailureKind(outcome.kind) is refused for outcome in lost.values()):
        raise AuthenticationError(text, remedy=REMEDY)
    raise SpawnError(text)


def _failed(address: str, why: str | None, outcome: Lost | None) -> str:
    why = why or (outcome.reason if outcome is not None else "nothing was heard of it")
    # Most reasons name the address.
    return why if address in why else f"{address}: {why}"
