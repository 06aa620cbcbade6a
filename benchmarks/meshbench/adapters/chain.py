"""The floor of a call to another host: three processes of the `chain` program, TCP and a Unix socket, nothing else done."""

from __future__ import annotations

import subprocess

from meshbench.adapters.rawtls import RUNS, SMALL, built

_PROGRAM = built("chain")


class System:
    """Calls alone of what `meshbench.adapter.HostsSystem` has; each starts the processes itself."""

    def start_hosts(self, hosts: int, procs: int) -> None:
        """Nothing but a look whether the program is there."""
        if not _PROGRAM.exists():
            raise FileNotFoundError(f"{_PROGRAM.name} is not built; run.py does it, or cargo in its folder")

    def close_hosts(self) -> None:
        """Nothing is left running."""

    def host_call(self, calls: int) -> list[float]:
        """Over TCP to a second process, over a Unix socket to a third, and back."""
        return _measure("far", calls)

    def host_call_here(self, calls: int) -> list[float]:
        """Over the Unix socket alone."""
        return _measure("near", calls)


def _measure(which: str, calls: int) -> list[float]:
    # As with rawtls, the scheduler places the processes anew each time.
    command = [str(_PROGRAM), which, str(SMALL), str(max(calls // RUNS, 1))]
    printed = [subprocess.check_output(command, text=True) for _ in range(RUNS)]
    return [float(line) for run in printed for line in run.splitlines()]
