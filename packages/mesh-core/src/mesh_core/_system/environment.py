"""The surroundings of a new process: its environment, CPUs and working directory.

Checked at the spawn as far as possible, and applied between the fork and the first line of the worker.
first line of the worker.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mesh_core._common.checks import is_whole

if TYPE_CHECKING:
    from mesh_core._native import Extent, Point

Env = Mapping[str, str | None]
"""Changes to an environment: ``None`` removes a variable."""

_DEVICES = "CUDA_VISIBLE_DEVICES"


class Refusal(Exception):
    """Why a process cannot start here."""


# At the spawn.


def checked_env(env: Env | Callable[[Point], Env] | None, extent: Extent) -> tuple[Env, list[Env]]:
    """Return the changes that ``env=`` makes for all processes, and those for each if it is a function."""
    if env is None:
        return {}, []
    if not callable(env):
        return _checked(env, "env"), []
    from mesh_core._native import Point

    own: list[Env] = []
    for rank in range(extent.nelements):
        point = Point(rank, extent)
        own.append(_checked(env(point), f"env({point!r})"))
    return {}, own


def _checked(env: Any, what: str) -> dict[str, str | None]:
    if not isinstance(env, Mapping):
        raise TypeError(
            f"{what} must be a mapping of names to strings (None removes a variable), got {env!r}"
        )
    for key, value in env.items():
        if (
            not isinstance(key, str)
            or not isinstance(value, str | None)
            or not key
            or "=" in key
            or "\0" in key + (value or "")
        ):
            raise ValueError(
                f"{what}[{key!r}] = {value!r}: names and values must be strings (None removes a variable), names not "
                "empty and without '='"
            )
    return dict(env)


def checked_binding(binding: Any, per_host: int) -> list[list[int]] | None:
    """Return ``proc_bind=`` if it is a list of CPUs for each of a host's processes; raise otherwise."""
    if binding is None:
        return None
    if not isinstance(binding, Sequence) or isinstance(binding, str | bytes):
        raise TypeError(f"proc_bind must be a list of CPUs for each process of a host, got {binding!r}")
    checked = []
    for place, cpus in enumerate(binding):
        if not isinstance(cpus, Sequence | set | frozenset) or isinstance(cpus, str | bytes):
            raise TypeError(f"proc_bind[{place}] must be a list of CPU numbers such as [0, 1], got {cpus!r}")
        for cpu in cpus:
            if not is_whole(cpu):
                raise TypeError(
                    f"proc_bind[{place}] must hold CPU numbers such as 0, got {cpu!r} ({type(cpu).__name__})"
                )
            if cpu < 0:
                raise ValueError(f"proc_bind[{place}] must hold CPU numbers from 0, got {cpu}")
        if not cpus:
            raise ValueError(f"proc_bind[{place}] must name at least one CPU")
        checked.append(sorted(cpus))
    if len(checked) != per_host:
        raise ValueError(
            f"proc_bind names CPUs for {len(checked)} processes, and {per_host} are asked for on each host"
        )
    return checked


def free_port(*, here: bool) -> int:
    """Return a port for a group's master: below the kernel's ephemeral range, and checked to be free if on this host."""
    first = 32_768
    with (
        contextlib.suppress(OSError, ValueError),
        open("/proc/sys/net/ipv4/ip_local_port_range") as file,  # noqa: PTH123 - as for the working directory
    ):
        first = int(file.read().split()[0])
    lowest = 10_000
    first = max(first, lowest + 1_000)
    while True:
        port = lowest + int.from_bytes(os.urandom(4), "little") % (first - lowest)
        if not here or _is_free(port):
            return port


def _is_free(port: int) -> bool:
    import socket

    with socket.socket() as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind(("", port))
        except OSError:
            return False
    return True


# In the new process.


def environment(told: dict[str, Any], rank: int, around: Mapping[str, str]) -> dict[str, str]:
    """Return a process's environment; ``around`` is that of its host."""
    env: dict[str, str] = {**around, **told["env"]} if told["afar"] else dict(told["env"])
    per_host: int = told["per_host"]
    changes: dict[str, str | None] = {**told["changes"], **told["own"]}
    if told["torch"] is not None:
        address, port = told["torch"]
        if rank == 0 and "MASTER_PORT" not in changes and not _is_free(port):
            raise Refusal(
                f"port {port}, which torch_env=True chose for MASTER_PORT, is in use on this host; spawn again, or "
                "choose one with env={'MASTER_PORT': ...}"
            )
        size = 1
        for each in told["sizes"]:
            size *= each
        env |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank % per_host),
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(per_host),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
            # By these, programs such as Lightning's recognize that they were started on every rank, and need not start ranks themselves.
            "GROUP_RANK": str(rank // per_host),
            "TORCHELASTIC_RUN_ID": f"mesh-{port}",
        }
    for key, value in changes.items():
        if value is None:
            env.pop(key, None)
        else:
            env[key] = value
    if told["devices"] == "own":
        env[_DEVICES] = own_device(visible_devices(env), rank % per_host, per_host)
    return env


def visible_devices(env: Mapping[str, str], dev: str = "/dev") -> list[str]:
    """Return CUDA's names of the devices that a program with this environment may use, without asking CUDA.

    >>> visible_devices({"CUDA_VISIBLE_DEVICES": "2,5"})
    ['2', '5']
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as dev:
    ...     for name in ("nvidia3", "nvidia7", "nvidiactl", "null"):
    ...         open(f"{dev}/{name}", "w").close()
    ...     visible_devices({}, dev)
    ['0', '1']
    """
    said = env.get(_DEVICES)
    if said is None:
        # /dev/nvidia0 and so on; CUDA numbers the existing ones from 0.
        files = [name for name in os.listdir(dev) if name.startswith("nvidia") and name[6:].isdigit()]  # noqa: PTH208
        return [str(n) for n in range(len(files))]
    names = []
    for name in said.split(","):
        # As in CUDA, an invalid name ends the list.
        if not (name := name.strip()) or name.startswith("-") or name == "NoDevFiles":
            break
        names.append(name)
    return names


def own_device(devices: list[str], place: int, needed: int) -> str:
    """Return the device for one of a host's processes."""
    if len(devices) < needed:
        seen = f"{len(devices)} ({', '.join(devices)})" if devices else "none"
        raise Refusal(
            f"devices='own' needs a device for each of {needed} processes on a host, and this host may use {seen}; spawn "
            f"fewer, or check CUDA_VISIBLE_DEVICES there"
        )
    return devices[place]


def settle(told: dict[str, Any], rank: int) -> None:
    """Change to the working directory, if it exists on this host, and bind to the CPUs."""
    with contextlib.suppress(OSError):
        os.chdir(told["cwd"])
    if told["bind"] is not None:
        cpus = told["bind"][rank % len(told["bind"])]
        try:
            os.sched_setaffinity(0, cpus)
        except (OSError, OverflowError) as error:
            there = sorted(os.sched_getaffinity(0))
            why = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
            raise Refusal(f"proc_bind names the CPUs {cpus}, and this host has {there}: {why}") from None
