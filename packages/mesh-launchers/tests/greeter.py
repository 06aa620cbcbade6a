"""What tests of jobs run on hosts, and how they kill these."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from mesh_core import Actor, endpoint


class Greeter(Actor):
    """Answers."""

    @endpoint
    def greet(self, name: str) -> str:
        return f"hello {name}"

    @endpoint
    def environ(self, name: str) -> str | None:
        return os.environ.get(name)


def host_pids(name: str, runtime: str | None = None) -> list[int]:
    """Return the processes of the host of this name, here: what looks after the agent, where that is for it alone, and then the agent.

    A copy of the agent that is to fork workers has the agent's name for a moment, and is none of them.
    """
    # With this runtime folder, or the test's own: tests that run beside this one have hosts of the same names.
    mine = f"XDG_RUNTIME_DIR={runtime or os.environ['XDG_RUNTIME_DIR']}".encode()
    parents, agents = {}, set()
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                words = (process / "cmdline").read_bytes()
                is_its = (process / "comm").read_text().strip() == name[:15]
                is_mine = mine in (process / "environ").read_bytes().split(b"\0")
                if (
                    is_mine
                    and b"\0mesh-host\0" in words
                    and (is_its or words.endswith(f"\0{name}\0".encode()))
                ):
                    stat = (process / "stat").read_text()
                    parents[int(process.name)] = int(stat.rpartition(") ")[2].split()[1])
                    if is_its:
                        agents.add(int(process.name))
            except OSError:
                continue
    its = [pid for pid, parent in parents.items() if parent not in agents]
    return sorted(its, key=lambda pid: parents[pid] in parents)


def kill_host(name: str, runtime: str | None = None) -> bool:
    """Kill the agent."""
    os.kill(host_pids(name, runtime)[-1], signal.SIGKILL)
    return True
