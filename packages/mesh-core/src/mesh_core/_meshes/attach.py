"""Attach hosts: machines on which agents run, as a mesh."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from mesh_core._common.checks import is_number
from mesh_core._common.codes import FailureKind
from mesh_core._common.current import current
from mesh_core._common.display import counted
from mesh_core._common.errors import REMEDY, AuthenticationError, MeshError, SpawnError
from mesh_core._futures.watched import Watched
from mesh_core._geometry.location import Location, Names
from mesh_core._meshes.addresses import Addresses
from mesh_core._meshes.hosts import HostMesh
from mesh_core._native import Lost, Placement, Region, Slice, attach, attach_dialers, be_host, roll

if TYPE_CHECKING:
    import concurrent.futures
    from collections.abc import Awaitable, Callable, Sequence
    from typing import Never

    from mesh_core._common.credentials import Credentials
    from mesh_core._native import Call
    from mesh_core._process.process import Process


def attach_to_workers(
    workers: Sequence[str | Awaitable[str] | concurrent.futures.Future[str]] = (),
    *,
    credentials: Credentials | str | os.PathLike[str],
    name: str = "hosts",
    listen: str | None = None,
    expect: int = 0,
    timeout: float | None = None,
    heartbeat_timeout: float | None = None,
    fan_out: int | None = None,
    hold: float = 0.0,
    **unknown: Never,
) -> HostMesh:
    """Return a mesh of hosts on which agents run, started there with ``mesh host``. Returns at once.

    It waits neither for futures of addresses, name resolution and connections, nor for the disk with the credentials.

    Args:
        workers: the agents' addresses, such as ``"tcp://b7:7411"``, or futures of addresses, including those of
            ``concurrent.futures`` and of event loops. Hosts are connected as their addresses become known.
        credentials: the job's credentials, or the folder that holds them (see :class:`Credentials`).
        name: the name of the mesh in errors and listings.
        listen: an address at which this script waits for agents that can only dial out (``mesh host --dial``).
        expect: how many agents will dial in.
        timeout: how many seconds to wait for agents that do not listen yet, counted from when their addresses are known;
            by default as long as a host may be silent (``heartbeat_timeout``).
        heartbeat_timeout: after how many seconds of silence one of these hosts counts as dead; by default the setting
            of that name.
        fan_out: how many others each of these hosts relays to; by default the setting of that name.
        hold: for this many seconds, what runs on the hosts goes on while the script's machine sleeps or its network is cut:
            while all of the script's hosts are unreachable at once, it does not declare them dead, nor they it.
            By default that is no longer than ``heartbeat_timeout``.
        **unknown: refused, with a hint at what was probably meant.

    A malformed argument raises here. Later problems are raised by ``initialized``, and by the first call to
    what was to run there: an :class:`AuthenticationError` if the credentials cannot be used or one side does not
    accept the other's, otherwise a :class:`SpawnError`.

    The mesh has one dimension, ``hosts``, in the order of ``workers`` or in the order in which the agents dial in; one call
    cannot do both. ``await`` the mesh, or wait for ``.initialized``, to learn whether all hosts can be reached.
    """
    from mesh_core._common.suggestions import unknown_option
    from mesh_core._system.interpreter import interpreter_words

    if unknown:
        raise TypeError(unknown_option("attach_to_workers", unknown, _OPTIONS))
    process = current()
    if process.identity.is_guest:
        raise MeshError(
            "this script joined a job that outlives it, and can use only the hosts of that job; attach others in another script"
        )
    if process.identity.mesh_id != 0:
        raise MeshError(
            "only the script that drives a job can attach hosts, not one of its workers. Attach them there, and "
            "pass the mesh"
        )
    if isinstance(workers, str):
        raise TypeError(
            f"workers= must be a list of addresses, got {workers!r}. Write [{workers!r}] for one address."
        )
    if not isinstance(credentials, str | os.PathLike) and not hasattr(credentials, "path"):
        raise TypeError(
            "credentials= must be the folder that `mesh credentials new` has made, or Credentials, got "
            f"{credentials!r}"
        )
    addresses = Addresses(workers, process)
    texts = [address for address in addresses.known if address is not None]
    if addresses.known and (listen is not None or expect):
        raise ValueError(
            "give either workers=, or listen= and expect= for hosts that dial in, but not both; call "
            "attach_to_workers() twice"
        )
    if not addresses.known and (listen is None or expect < 1):
        raise ValueError(
            "name the agents' addresses in workers=; or, for agents that dial out, give listen= and how many to expect="
        )
    if len(set(texts)) < len(texts):
        from collections import Counter

        twice = sorted(address for address, times in Counter(texts).items() if times > 1)
        raise ValueError(f"workers= names {', '.join(twice)} more than once; attach each host once")
    if timeout is not None and not (is_number(timeout) and timeout >= 0):
        raise ValueError(f"timeout= must be a number of seconds or None, got {timeout!r}")
    if not is_number(hold) or not 0 <= hold < float("inf"):
        raise ValueError(f"hold= must be a number of seconds, got {hold!r}")
    folder = str(getattr(credentials, "path", credentials))
    given = {"heartbeat_timeout": heartbeat_timeout, "fan_out": fan_out}
    changes = {name: value for name, value in given.items() if value is not None}
    settings = process.settings.changed("attach_to_workers()", **changes) if changes else process.settings
    # How processes are started on this host on behalf of other hosts.
    be_host(process.runtime, process.identity.host, interpreter_words(None), sorted(process.environ.items()))
    # Processes spawned on this host from now on identify themselves with these credentials.
    process.credentials = (os.path.abspath(folder), listen or "")  # noqa: PTH100 - without links resolved
    if listen is None:
        patience = settings.heartbeat_timeout if timeout is None else timeout
        base, call = attach(
            process.runtime,
            addresses.known,
            folder,
            settings.heartbeat_timeout,
            settings.fan_out,
            patience,
            hold,
        )
        count, where = len(addresses.known), lambda index: addresses.known[index] or f"worker {index}"
    else:
        base, call = attach_dialers(
            process.runtime, listen, expect, folder, settings.heartbeat_timeout, settings.fan_out, hold
        )
        count, where = expect, lambda _: f"an agent that dials {listen}"
    view = Region(["hosts"], Slice(base, [count], [1]))
    location = Location(Placement.agents(), Names(process.runtime))
    mesh = HostMesh(process, view, process.unique_name(name), location, root=view)
    mesh._ready = Watched(
        lambda: f"{mesh._name}: {call.arrived():,} of {counted(count, 'host')} attached",
        *(process, call, lambda call: _all_attached(process, call, base, count, where)),
        lambda: f"attaching {mesh._name!r}",
    )
    addresses.follow(base, mesh._ready)
    return mesh


_OPTIONS = (
    "credentials",
    "expect",
    "fan_out",
    "heartbeat_timeout",
    "hold",
    "listen",
    "name",
    "timeout",
    "workers",
)


def _all_attached(process: Process, call: Call, base: int, count: int, where: Callable[[int], str]) -> None:
    outcomes = call.outcomes()
    lost = {
        index: outcome
        for index, outcome in enumerate(outcomes)
        if outcome is None or isinstance(outcome, Lost)
    }
    if not lost:
        return
    # What the controller found out about each host, without the text that a loss adds.
    known = {} if process.closed else {host: (fate, why) for host, *_, fate, why in roll(process.runtime)}
    whys = [_why(known.get(base + index, ("", ""))[1], outcome) for index, outcome in lost.items()]
    # A common reason is not about the hosts, but about the script's own credentials or its own address.
    if len(whys) > 1 and len(set(whys)) == 1:
        failed = [whys[0]]
    else:
        failed = [_failed(where(index), why) for index, why in zip(lost, whys, strict=True)]
    first = "; ".join(failed[:3]) + (f"; and {len(failed) - 3} more" if len(failed) > 3 else "")
    text = f"{len(lost)} of {count} hosts cannot be used: {first}"
    refused = FailureKind.HOST_NOT_AUTHENTICATED
    if all(outcome is not None and outcome.kind is refused for outcome in lost.values()):
        raise AuthenticationError(text, remedy=REMEDY)
    raise SpawnError(text)


def _why(found: str, outcome: Lost | None) -> str:
    return found or (outcome.reason if outcome is not None else "nothing was heard of it")


def _failed(address: str, why: str) -> str:
    # Most reasons name the address.
    return why if address in why else f"{address}: {why}"
