"""The doctor check: GPUs that are there but cannot be used are found here, not in the middle of a job."""

from collections.abc import Iterator
from pathlib import Path

from mesh_core.plugins import Finding
from mesh_sysinfo._machine import ROOT, read_gpus


def check_gpus(root: Path = ROOT) -> Iterator[Finding]:
    """One finding for each GPU without a driver, or one for all."""
    gpus = read_gpus(root)
    for each in gpus:
        if each.driver is None:
            yield Finding(
                status="fail",
                detail=f"the {each.vendor} GPU {each.address} has no driver",
                remedy=f"install and load {each.vendor}'s driver, or pass the device into the container",
            )
    if all(each.driver for each in gpus):
        listed = ", ".join(f"{each.address} ({each.driver})" for each in gpus)
        detail = (
            f"{len(gpus)} GPU{'s' * (len(gpus) != 1)}, driver bound: {listed}"
            if gpus
            else "no GPU in this machine"
        )
        yield Finding(status="ok", detail=detail)
