"""What the entry points name: the hooks. It imports only Mesh's descriptors; the work is imported when it is wanted."""

from collections.abc import Iterable
from pathlib import Path

from mesh_core.plugins import Check, Command, CommandPlugin, DoctorCheck, ProbeResult, hookimpl


def _command() -> Command:
    from mesh_sysinfo._command import SysinfoCommand

    return SysinfoCommand()


def _check() -> Check:
    from mesh_sysinfo._check import check_gpus

    return check_gpus


def _has_pci(devices: Path = Path("/sys/bus/pci/devices")) -> ProbeResult[None]:
    if devices.is_dir():
        return ProbeResult.yes()
    return ProbeResult.no(f"there is no {devices}", remedy="mount /sys in the container")


COMMAND = CommandPlugin(
    name="sysinfo", api_version=1, create=_command, summary="show cores, memory, NUMA nodes and GPUs"
)
CHECK = DoctorCheck(
    name="gpus",
    api_version=1,
    create=_check,
    probe=_has_pci,
    summary="every GPU in the machine has its driver",
)


@hookimpl
def mesh_register_commands() -> Iterable[CommandPlugin]:
    """`mesh sysinfo`."""
    yield COMMAND


@hookimpl
def mesh_register_doctor_checks() -> Iterable[DoctorCheck]:
    """A line of `mesh doctor` about GPUs."""
    yield CHECK
