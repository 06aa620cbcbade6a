"""Checks of the limits on CPUs, open files and processes."""

import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from mesh_core.plugins import Finding

ROOT: Final = Path("/")
UNLIMITED: Final = resource.RLIM_INFINITY

# A worker takes a few descriptors of its owner (socket, pidfd, output), and as many of its host agent.
FILES_PER_WORKER: Final = 8
FEW_FILES, ENOUGH_FILES = 256, 4096
FEW_PROCESSES, ENOUGH_PROCESSES = 64, 4096


def check_cpus(root: Path = ROOT) -> Iterator[Finding]:
    """Check the cores that this process may run on against its cgroup's CPU limit."""
    cores = len(os.sched_getaffinity(0))
    quota = cgroup_cpus(root)
    if quota is None or quota >= cores:
        yield Finding(status="ok", detail=f"{cores} cores, not limited by a cgroup")
        return
    yield Finding(
        status="warn",
        detail=f"{cores} cores are visible, but the cgroup limits CPU time to that of {quota:g}",
        remedy=f"spawn about {max(1, int(quota))} busy processes, or raise the container's CPU limit",
    )


def check_open_files(limits: tuple[int, int] | None = None) -> Iterator[Finding]:
    """Check RLIMIT_NOFILE: each worker takes a few descriptors of its owner."""
    soft, hard = limits or resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == UNLIMITED:
        yield Finding(status="ok", detail="unlimited open files")
        return
    detail = f"{soft:,} open files per process (hard limit: {_number(hard)}), enough for about {soft // FILES_PER_WORKER:,} workers"
    if soft >= ENOUGH_FILES:
        yield Finding(status="ok", detail=detail)
        return
    reachable = 65536 if hard == UNLIMITED else min(hard, 65536)
    remedy = (
        f"ulimit -n {reachable}"
        if reachable > soft
        else "raise the hard limit (nofile) in limits.conf or the container"
    )
    yield Finding(status="fail" if soft < FEW_FILES else "warn", detail=detail, remedy=remedy)


def check_processes(root: Path = ROOT, limits: tuple[int, int] | None = None) -> Iterator[Finding]:
    """Check RLIMIT_NPROC, the cgroup's pids.max and the kernel's limits; threads count as processes in all of them."""
    soft, _ = limits or resource.getrlimit(resource.RLIMIT_NPROC)
    found = {
        "RLIMIT_NPROC (ulimit -u)": None if soft == UNLIMITED else soft,
        "the cgroup's pids.max": cgroup_pids(root),
    }
    for name in ("pid_max", "threads-max"):
        found[f"kernel.{name}"] = _integer(root / "proc/sys/kernel" / name)
    known = {name: value for name, value in found.items() if value is not None}
    if not known:
        yield Finding(status="ok", detail="unlimited processes and threads")
        return
    name, least = min(known.items(), key=lambda item: item[1])
    detail = f"at most {least:,} processes and threads, because of {name}"
    if least >= ENOUGH_PROCESSES:
        yield Finding(status="ok", detail=detail)
    else:
        yield Finding(
            status="fail" if least < FEW_PROCESSES else "warn", detail=detail, remedy=f"raise {name}"
        )


def cgroup_cpus(root: Path = ROOT) -> float | None:
    """Return the CPU limit, in cores: the lowest of the cgroup and those above it; ``None`` for no limit."""
    quotas: list[float] = []
    for folder in _cgroup_folders(root, "cpu"):
        words = _words(folder / "cpu.max")  # version 2: "200000 100000" or "max 100000"
        if len(words) != 2:
            words = _words(folder / "cpu.cfs_quota_us") + _words(
                folder / "cpu.cfs_period_us"
            )  # version 1: -1 means no limit
        if len(words) == 2 and words[0].isdigit() and words[1].isdigit() and int(words[1]) > 0:
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas, default=None)


def cgroup_pids(root: Path = ROOT) -> int | None:
    """Return the lowest limit on processes of the cgroup and those above it; ``None`` for no limit."""
    limits = [_integer(folder / "pids.max") for folder in _cgroup_folders(root, "pids")]
    return min((each for each in limits if each is not None), default=None)


def _cgroup_folders(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of this process's cgroup and of those above it, each of which may set a limit."""
    mount = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        parts = line.split(":", 2)  # "0::/path" in version 2, "4:cpu,cpuacct:/path" in version 1
        if len(parts) != 3 or not (parts[1] == "" or controller in parts[1].split(",")):
            continue
        top = mount if parts[1] == "" else mount / controller
        folder = top / parts[2].strip("/")
        # In a container the path may be the host's and not exist here; the top of the mount is then our cgroup.
        yield from (each for each in (folder, *folder.parents) if each == top or top in each.parents)


def _integer(path: Path) -> int | None:
    words = _words(path)
    return int(words[0]) if words and words[0].isdigit() else None


def _words(path: Path) -> list[str]:
    return _text(path).split()


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _number(value: int) -> str:
    return "unlimited" if value == UNLIMITED else f"{value:,}"
