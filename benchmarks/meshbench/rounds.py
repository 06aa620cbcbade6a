"""The driver's loop: every system in turn, item by item, several rounds, each measurement in a process of its own."""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from meshbench.catalogue import ITEMS, Samples
from meshbench.environments import SYSTEMS
from meshbench.processes import descendants

_PR_SET_CHILD_SUBREAPER = 36
_FOLDERS = re.compile(r"(?<![\w.…])/(?:[^\s/\"':]+/)+")
_GRACE = 5.0  # seconds that a system's helpers get to end by themselves after their script has ended


@dataclass(frozen=True)
class Outcome:
    """What one measurement gave: samples, or why there are none; and what it left behind."""

    system: str
    item: str
    round: int
    samples: Samples | None
    error: str | None
    seconds: float
    processes_left: int
    files_left: int


def adopt_orphans() -> None:
    """Make this process the parent of orphaned grandchildren, so that a daemon that stays behind is seen and ended."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def measure(
    system: str, item: str, round_number: int, *, python: Path, home: Path, quick: bool, torch: bool
) -> Outcome:
    """Run one item on one system in a fresh interpreter and clear up after it."""
    # Short names: socket paths inside must stay below 108 characters.
    with tempfile.TemporaryDirectory(prefix="mb-", ignore_cleanup_errors=True) as scratch:
        files = Path(scratch, "t")
        files.mkdir()
        environment = {
            **os.environ,
            **SYSTEMS[system].variables,
            "PYTHONPATH": str(home),
            "TMPDIR": str(files),
            "MESH_BENCH_TENSOR": "torch" if torch else "numpy",
        }
        command = [str(python), "-m", "meshbench.child", SYSTEMS[system].adapter, item]
        if quick:
            command.append("--quick")
        start = time.perf_counter()
        answer, error = _run(command, environment, Path(scratch), files, ITEMS[item].time_limit)
        seconds = time.perf_counter() - start
        left = _end_leftovers(at_once=error is not None)
        files_left = sum(1 for path in files.rglob("*") if not path.is_dir())
    samples: Samples | None = None
    if error is None:
        try:
            samples = json.loads(answer)
        except ValueError as problem:
            error = f"no JSON on stdout ({problem})"
    return Outcome(system, item, round_number, samples, error, seconds, len(left), files_left)


def _run(
    command: list[str], environment: dict[str, str], scratch: Path, cwd: Path, limit: float
) -> tuple[bytes, str | None]:
    """What the command wrote to stdout, and what went wrong, if anything."""
    # Files and not pipes: a daemon that inherits a pipe's end would hold it open.
    output, log = scratch / "stdout", scratch / "stderr"
    with output.open("wb") as out, log.open("wb") as err:
        child = subprocess.Popen(
            command, stdout=out, stderr=err, stdin=subprocess.DEVNULL, env=environment, cwd=cwd
        )
        try:
            status = child.wait(limit)
        except subprocess.TimeoutExpired:
            problem: str | None = f"not done after {limit:.0f} s"
        except BaseException:  # Ctrl-C: nothing may run on
            _end_leftovers(at_once=True)
            raise
        else:
            problem = f"exit status {status}" if status else None
    if problem is not None:
        tail = log.read_text(errors="replace").strip().splitlines()[-12:]
        # Results are kept and shown: where this machine keeps its files is nobody's concern.
        problem = "\n".join([problem, *(_FOLDERS.sub("…/", line) for line in tail)])
    return output.read_bytes(), problem


def _end_leftovers(*, at_once: bool) -> list[int]:
    """Wait a little for processes below this one to end, then end them; those that had to be ended are returned."""
    give_up = time.perf_counter() + (0.0 if at_once else _GRACE)
    while (left := _unfinished()) and time.perf_counter() < give_up:
        time.sleep(0.05)
    ended = left
    while left:
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.02)
        left = _unfinished()
    return ended


def _unfinished() -> list[int]:
    """Descendants that still run; finished ones are reaped, as orphans of the measured script are ours now."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return []
    return descendants(os.getpid())


def run_all(
    systems: list[str],
    items: list[str],
    *,
    rounds: int,
    pythons: Mapping[str, Path],
    home: Path,
    quick: bool,
    torch: bool,
    progress: Callable[[Outcome, int, int], None],
) -> list[Outcome]:
    """All items on all systems, interleaved (item by item: A B C, A B C, …), so that drift falls on all alike."""
    plan = [
        (item, number, system)
        for item in items
        for number in range(min(rounds, ITEMS[item].rounds or rounds))
        for system in systems
        if ITEMS[item].is_for(system)
    ]
    outcomes: list[Outcome] = []
    broken: set[tuple[str, str]] = set()
    for done, (item, number, system) in enumerate(plan, 1):
        if (system, item) in broken:
            continue  # it failed in an earlier round of this run, and would only take the time limit again
        outcome = measure(system, item, number, python=pythons[system], home=home, quick=quick, torch=torch)
        if outcome.error is not None:
            broken.add((system, item))
        outcomes.append(outcome)
        progress(outcome, done, len(plan))
    return outcomes
