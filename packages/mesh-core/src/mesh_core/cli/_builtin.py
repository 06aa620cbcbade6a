"""mesh-core's own commands and checks, offered through entry points like those of any plugin."""

from collections.abc import Callable, Iterable
from functools import cache
from importlib import import_module
from typing import Any

from mesh_core.cli._summaries import SUMMARIES
from mesh_core.plugins import CommandPlugin, DoctorCheck, hookimpl

_COMMANDS = {
    "plugins": "_plugins:PluginsCommand",
    "credentials": "_credentials:CredentialsCommand",
    "debug": "_debug:DebugCommand",
    "host": "_host:HostCommand",
    "look": "_look:LookCommand",
    "doctor": "_doctor:DoctorCommand",
}
_CHECKS = {
    "python": ("_interpreter:check_python", "the Python version and build"),
    "kernel": ("_interpreter:check_kernel", "the versions of the kernel and the C library"),
    "native": ("_interpreter:check_native", "the native module matches this version"),
    "plugins": ("_interpreter:check_plugins", "every installed plugin loads"),
    "cpus": ("_limits:check_cpus", "CPU cores, and the container's CPU limit"),
    "open-files": ("_limits:check_open_files", "the limit on open files"),
    "processes": ("_limits:check_processes", "the limits on processes"),
    "shared-memory": ("_kernel:check_shared_memory", "anonymous shared memory and /dev/shm"),
    "memory-sharing": ("_kernel:check_memory_sharing", "processes can open each other's shared memory"),
    "pidfd": ("_kernel:check_pidfd", "the kernel reports at once when a process ends"),
    "unix-sockets": ("_kernel:check_unix_sockets", "local sockets, and passing descriptors through them"),
}


@cache
def _lazily(place: str, *, make: bool = False) -> Callable[[], Any]:
    """Return a function that imports ``module:name`` from this package, and with ``make`` calls it; listing plugins stays cheap.

    Cached because plugin descriptors are compared: the same place must give the same function.
    """

    def load() -> Any:
        module, _, name = place.partition(":")
        found = getattr(import_module(f"mesh_core.cli.{module}"), name)
        return found() if make else found

    return load


@hookimpl
def mesh_register_commands() -> Iterable[CommandPlugin]:
    """`mesh credentials`, `mesh debug`, `mesh doctor`, `mesh host`, `mesh look` and `mesh plugins`."""
    for name, place in _COMMANDS.items():
        create = _lazily(place, make=True)
        yield CommandPlugin(name=name, api_version=1, create=create, summary=SUMMARIES[name])


@hookimpl
def mesh_register_doctor_checks() -> Iterable[DoctorCheck]:
    """Checks of the interpreter, the kernel and resource limits."""
    for name, (place, summary) in _CHECKS.items():
        yield DoctorCheck(name=name, api_version=1, create=_lazily(f"checks.{place}"), summary=summary)
