"""A description of the machine for the table: what decides the figures, nothing that names the machine."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def describe() -> dict[str, str | int | float]:
    """Processor, cores, memory, kernel, Python and how busy it already is.

    Example:
        >>> describe()["cores"] >= 1
        True
    """
    return {
        "processor": _first("/proc/cpuinfo", "model name") or platform.machine(),
        "cores": os.cpu_count() or 1,
        "cores usable": len(os.sched_getaffinity(0)),
        "virtual machine": "yes" if "hypervisor" in _first("/proc/cpuinfo", "flags").split() else "no",
        "memory GiB": round(int(_first("/proc/meminfo", "MemTotal").split()[0]) / 2**20, 1),
        "kernel": platform.release(),
        "libc": " ".join(platform.libc_ver()),
        "python": platform.python_version(),
        "load before": round(os.getloadavg()[0], 2),
    }


def _first(path: str, key: str) -> str:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return ""
    return next(
        (line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == key), ""
    )
