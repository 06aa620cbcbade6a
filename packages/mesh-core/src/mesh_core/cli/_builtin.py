"""mesh-core's own commands and checks, offered by the same road as anybody's: the entry points name this module."""

from collections.abc import Iterable

from mesh_core.cli._summaries import SUMMARIES
from mesh_core.plugins import Check, Command, CommandPlugin, DoctorCheck, hookimpl


@hookimpl
def mesh_register_commands() -> Iterable[CommandPlugin]:
    """`mesh credentials`, `mesh debug`, `mesh doctor`, `mesh host`, `mesh look` and `mesh plugins`."""
    creates = {
        "plugins": _plugins,
        "credentials": _credentials,
        "debug": _debug,
        "host": _host,
        "look": _look,
        "doctor": _doctor,
    }
    for name, create in creates.items():
        yield CommandPlugin(name=name, api_version=1, create=create, summary=SUMMARIES[name])


@hookimpl
def mesh_register_doctor_checks() -> Iterable[DoctorCheck]:
    """What Mesh needs of the interpreter, the kernel and their limits."""
    checks = {
        "python": (_python, "the Python version and how it was built"),
        "kernel": (_kernel, "the kernel's version and the C library's"),
        "native": (_native, "the native module belongs to this version"),
        "plugins": (_installed_plugins, "every installed plugin loads"),
        "cpus": (_cpus, "cores, and how much of them the container may use"),
        "open-files": (_open_files, "the limit on open files"),
        "processes": (_processes, "the limits on processes"),
        "shared-memory": (_shared_memory, "anonymous shared memory and /dev/shm"),
        "memory-sharing": (_memory_sharing, "a process may open its sibling's shared memory"),
        "pidfd": (_pidfd, "the kernel tells at once when a process ends"),
        "unix-sockets": (_unix_sockets, "local sockets, and descriptors sent through them"),
    }
    for name, (create, summary) in checks.items():
        yield DoctorCheck(name=name, api_version=1, create=create, summary=summary)


# Each imports its own when it is wanted: listing the plugins must stay cheap.


def _plugins() -> Command:
    from mesh_core.cli._plugins import PluginsCommand

    return PluginsCommand()


def _credentials() -> Command:
    from mesh_core.cli._credentials import CredentialsCommand

    return CredentialsCommand()


def _debug() -> Command:
    from mesh_core.cli._debug import DebugCommand

    return DebugCommand()


def _host() -> Command:
    from mesh_core.cli._host import HostCommand

    return HostCommand()


def _look() -> Command:
    from mesh_core.cli._look import LookCommand

    return LookCommand()


def _doctor() -> Command:
    from mesh_core.cli._doctor import DoctorCommand

    return DoctorCommand()


def _python() -> Check:
    from mesh_core.cli.checks._interpreter import check_python

    return check_python


def _kernel() -> Check:
    from mesh_core.cli.checks._interpreter import check_kernel

    return check_kernel


def _native() -> Check:
    from mesh_core.cli.checks._interpreter import check_native

    return check_native


def _installed_plugins() -> Check:
    from mesh_core.cli.checks._interpreter import check_plugins

    return check_plugins


def _cpus() -> Check:
    from mesh_core.cli.checks._limits import check_cpus

    return check_cpus


def _open_files() -> Check:
    from mesh_core.cli.checks._limits import check_open_files

    return check_open_files


def _processes() -> Check:
    from mesh_core.cli.checks._limits import check_processes

    return check_processes


def _shared_memory() -> Check:
    from mesh_core.cli.checks._kernel import check_shared_memory

    return check_shared_memory


def _memory_sharing() -> Check:
    from mesh_core.cli.checks._kernel import check_memory_sharing

    return check_memory_sharing


def _pidfd() -> Check:
    from mesh_core.cli.checks._kernel import check_pidfd

    return check_pidfd


def _unix_sockets() -> Check:
    from mesh_core.cli.checks._kernel import check_unix_sockets

    return check_unix_sockets
