"""The floor between hosts: one rustls stream between two processes of the `rawtls` program, no Python between."""

from __future__ import annotations

import subprocess
from pathlib import Path

RUNS = 7
SMALL = 300
"""Bytes of a small call and of its reply, about what mesh's take."""


def built(name: str) -> Path:
    """Where run.py has the program `name` of the benchmarks' folder built."""
    return Path(__file__).resolve().parents[2] / name / "target" / "release" / name


_PROGRAM = built("rawtls")


class System:
    """See `meshbench.adapter.HostsFloor`."""

    def start_hosts(self, hosts: int, procs: int) -> None:
        """Nothing: the program starts its other process itself, each time."""
        if not _PROGRAM.exists():
            raise FileNotFoundError(
                f"{_PROGRAM.name} is not built; run.py does it, or cargo in {_PROGRAM.parents[2].name}/"
            )

    def close_hosts(self) -> None:
        """Nothing is left running."""

    def host_call(self, calls: int) -> list[float]:
        """As many bytes each way as a small call has."""
        return self._measure(SMALL, SMALL, calls)

    def host_put(self, size: int, times: int) -> list[float]:
        """The bytes one way, one byte back."""
        return self._measure(size, 1, times)

    def host_get(self, size: int, times: int) -> list[float]:
        """One byte there, the bytes back."""
        return self._measure(1, size, times)

    def _measure(self, send: int, receive: int, times: int) -> list[float]:
        # Where the scheduler puts the two processes decides much, and it decides anew each time.
        each = max(times // RUNS, 1)
        command = [str(_PROGRAM), str(send), str(receive), str(each)]
        printed = [subprocess.check_output(command, text=True) for _ in range(RUNS)]
        return [float(line) for run in printed for line in run.splitlines()]
