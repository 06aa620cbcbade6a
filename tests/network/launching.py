"""What the tests of launchers do with the scripts that they start."""

from __future__ import annotations

import os
from pathlib import Path

from cluster import Process

END_S = 90.0
"""So long a script may take to end, with its hosts, on a busy machine."""


def heard(script: Process) -> str:
    """Return the script's next line."""
    assert script.stdout is not None
    line: str = script.stdout.readline()
    assert line, f"the script has ended: {script.communicate(timeout=30)[1]}"
    return line.strip()


def ended(script: Process) -> None:
    """Wait for a script's good end."""
    out, error = script.communicate("\n", timeout=END_S)
    assert script.returncode == 0, out + error


def keeper(jobs: Path, job: str) -> int:
    """Return the process that keeps a job of that folder."""
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                words = (process / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if any(b"mesh_launchers._keeper" in each for each in words) and os.fsencode(jobs / job) in words:
                return int(process.name)
    raise AssertionError(f"nobody keeps {job}")


LIFE_S = 15.0
OUTLIVES = f"""
from datetime import UTC, datetime, timedelta
from mesh_launchers import _authority

_authority.LIFETIME = timedelta(seconds={LIFE_S})

class Counter(Actor):
    def __init__(self):
        self.calls = 0

    @endpoint
    def count(self):
        self.calls += 1
        return self.calls

def outlives(hosts, until):
    counters = hosts.spawn_procs().spawn("counters", Counter)
    calls = 0
    while datetime.now(UTC) < until:
        calls += 1
        assert counters.count.call().get(timeout=60).values() == [calls] * len(counters)
    return counters

def job_outlives(job):
    first = job.wait(timeout=90).state().credentials
    assert first.is_renewed
    outlives(job.hosts, first.until + timedelta(seconds={LIFE_S} + 2))
    now = job.state().credentials
    assert now.until > first.until and not now.trouble, now
    # Hosts that come later have new ones from the start.
    more = job.scale(len(job.hosts) + 1).spawn_procs().spawn("more", Counter)
    say("outlived", more.count.call().get(timeout=60).values())

"""
"""For scripts: :func:`job_outlives` calls actors until two lives of a job's first certificates are over (CRT-1)."""
