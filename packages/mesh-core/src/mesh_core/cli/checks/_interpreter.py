"""Checks of the interpreter, the kernel's version, the native module and the installed plugins."""

import importlib
import importlib.metadata
import os
import platform
import re
import sys
import sysconfig
from collections.abc import Iterator
from typing import Final

from mesh_core.cli._quiet import quiet_manager
from mesh_core.plugins import Finding

OLDEST_PYTHON: Final = (3, 11)
OLDEST_KERNEL: Final = (5, 3)


def check_python(version: tuple[int, ...] = tuple(sys.version_info[:3])) -> Iterator[Finding]:
    """Check for CPython 3.11 or later, which the abi3 wheel requires."""
    gil = "without the GIL" if sysconfig.get_config_var("Py_GIL_DISABLED") else "with the GIL"
    detail = (
        f"{platform.python_implementation()} {'.'.join(map(str, version))}, {gil}, {sysconfig.get_platform()}"
    )
    if platform.python_implementation() != "CPython" or version < OLDEST_PYTHON:
        yield Finding(status="fail", detail=detail, remedy="use CPython 3.11 or later")
    else:
        yield Finding(status="ok", detail=detail)


def check_kernel(release: str | None = None, libc: str | None = None) -> Iterator[Finding]:
    """Check for Linux 5.3 or later, which has pidfd, and for glibc, which the wheels are built for."""
    release = platform.release() if release is None else release
    found = re.match(r"(\d+)\.(\d+)", release)
    if found is not None and (int(found[1]), int(found[2])) < OLDEST_KERNEL:
        yield Finding(status="fail", detail=f"Linux {release}", remedy="use Linux 5.3 or later")
    else:
        yield Finding(status="ok", detail=f"Linux {release}, {platform.machine()}")
    if libc is None:
        try:
            libc = os.confstr("CS_GNU_LIBC_VERSION") or ""
        except (OSError, ValueError):
            libc = ""
    if libc:
        yield Finding(status="ok", detail=libc)
    else:
        yield Finding(
            status="warn", detail="the C library is not glibc", remedy="build mesh-core from source here"
        )


def check_native() -> Iterator[Finding]:
    """Check that the native module and the Python package have one version; an interrupted update can separate them."""
    python_half = importlib.metadata.version("mesh-core")
    try:
        native = importlib.import_module("mesh_core._native")
    except ImportError as error:
        yield Finding(
            status="fail", detail=f"mesh_core._native does not load: {error}", remedy="reinstall mesh-core"
        )
        return
    native_half = str(getattr(native, "__version__", "of unknown version"))
    if native_half != python_half:
        detail = f"the native module is {native_half}, but the Python package is {python_half}"
        yield Finding(status="fail", detail=detail, remedy="reinstall mesh-core")
    else:
        yield Finding(status="ok", detail=f"native module and Python package are both {python_half}")


def check_plugins() -> Iterator[Finding]:
    """Load every plugin once. A plugin that cannot work on this machine is fine; one that does not load is not."""
    reports = quiet_manager().survey()
    broken = [each for each in reports if each.status == "broken"]
    for each in broken:
        what = f"{each.kind} {each.name!r} of {each.distribution} {each.version}: {each.reason}"
        # An unknown group may belong to another project.
        yield Finding(status="warn" if each.kind == "group" else "fail", detail=what, remedy=each.remedy)
    if not broken:
        unable = sum(each.status == "unavailable" for each in reports)
        yield Finding(
            status="ok", detail=f"{len(reports)} load; {unable} of them cannot work on this machine"
        )
