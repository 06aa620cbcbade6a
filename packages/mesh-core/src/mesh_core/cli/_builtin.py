"""mesh-core's own commands and checks, offered in the same way as any plugin's: the entry points name this module."""

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
    "python": ("_interpreter:check_python", "the Python version and how it was built"),
    "kernel": ("_interpreter:check_kernel", "the kernel's version and the C library's"),
    "native": ("_interpreter:check_native", "the native module belongs to this version"),
    "plugins": ("_interpreter:check_plugins", "every installed plugin loads"),
    "cpus": ("_limits:check_cpus", "cores, and how much of them the container may use"),
    "open-files": ("_limits:check_open_files", "the limit on open files"),
    "processes": ("_limits:check_processes", "the limits on processes"),
    "shared-memory": ("_kernel:check_shared_memory", "anonymous shared memory and /dev/shm"),
    "memory-sharing": ("_kernel:check_memory_sharing", "a process may open its sibling's shared memory"),
    "pidfd": ("_kernel:check_pidfd", "the kernel tells at once when a process ends"),
    "unix-sockets": ("_kernel:check_unix_sockets", "local sockets, and descriptors sent through them"),
}


@cache
def _lazily(place: str, *, make: bool = False) -> Callable[[], Any]:
    """Find ``module:name`` below this package, and ``make`` one of it, when that is asked for: listing plugins must stay cheap.

    Descriptors are compared, so the same place gives the same function.
    """

    def find() -> Any:
        module, _, name = place.partition(":")
        found = getattr(import_module(f"mesh_core.cli.{module}"), name)
        return found() if make else found

    return find


@hookimpl
def mesh_register_commands() -> Iterable[CommandPlugin]:
    """`mesh credentials`, `mesh debug`, `mesh doctor`, `mesh host`, `mesh look` and `mesh plugins`."""
    for name, place in _COMMANDS.items():
        create = _lazily(place, make=True)
        yield CommandPlugin(name=name, api_version=1, create=create, summary=SUMMARIES[name])


@hookimpl
def mesh_register_doctor_checks() -> Iterable[DoctorCheck]:
    """What Mesh needs of the interpreter, the kernel and their limits."""
    for name, (place, summary) in _CHECKS.items():
        yield DoctorCheck(name=name, api_version=1, create=_lazily(f"checks.{place}"), summary=summary)
