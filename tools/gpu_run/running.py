"""Running one step after the other: each in a process group of its own, for so long and no longer."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from gpu_run.steps import Step
from gpu_run.tally import VARIABLE

LIMIT_S = 480.0
"""For all steps together."""
IN_SHORT = "in short: "
"""A program's line with what belongs into the table."""
CANNOT = 3
"""The exit status of a program that cannot do its work here; its last line says why."""
REHEARSAL = "MESH_GPU_REHEARSAL"
"""Set in rehearsals: tests and programs use the CPU, and small sizes."""
_LEAST_S = 5.0
_GRACE_S = 5.0
_LINES = 120


@dataclass(frozen=True)
class Found:
    """What became of a step."""

    step: Step
    state: str
    """"passed", "failed", "out of time" or "not run"."""
    short: str
    seconds: float = 0.0
    details: str = ""
    """What a program printed, or why tests failed."""
    skipped: Counter[str] = field(default_factory=Counter)
    """Why tests were skipped, and how many."""


def run(step: Step, folder: Path, environment: dict[str, str], left_s: float, slower: float = 1) -> Found:
    """Run a step, whatever becomes of it; its limit is so many times longer on a slower machine."""
    if left_s < _LEAST_S:
        return Found(step, "not run", "no time is left")
    tally = folder / "tally.jsonl"
    tally.unlink(missing_ok=True)
    limit = min(step.limit_s * slower, left_s)
    begun = time.monotonic()
    code, output = _process(_command(step), folder, {**environment, VARIABLE: str(tally)}, limit)
    seconds = time.monotonic() - begun
    if step.is_tests:
        return _of_tests(step, code, output, tally, seconds)
    return _of_program(step, code, output, seconds)


def _command(step: Step) -> list[str]:
    if not step.is_tests:
        return [sys.executable, *step.what]
    # What else is installed there is not asked whether it has plugins, and what it warns of does not fail a test.
    plugins = ("-p", "no:cacheprovider", "-p", "pytest_timeout", "-p", "gpu_run.tally")
    return [sys.executable, "-m", "pytest", "-q", *plugins, "-W", "default", *step.what]


def _process(
    command: list[str], folder: Path, environment: dict[str, str], limit_s: float
) -> tuple[int | None, str]:
    """Return its exit status, or none if it ran out of time, and the end of its output."""
    log = folder / "output.txt"
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env=environment,
            start_new_session=True,
        )
        code: int | None = None
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            # First so that tests can end what they have started.
            os.killpg(process.pid, signal.SIGINT)
            try:
                process.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                pass
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()
    return code, log.read_text(encoding="utf-8", errors="replace")


def _of_tests(step: Step, code: int | None, output: str, tally: Path, seconds: float) -> Found:
    noted = tally.read_text(encoding="utf-8").splitlines() if tally.exists() else []
    told = [json.loads(line) for line in noted]
    counts = Counter(each["outcome"] for each in told)
    short = ", ".join(f"{counts[each]} {each}" for each in ("passed", "failed", "skipped") if counts[each])
    failures = [f"{each['test']}\n{each['why']}" for each in told if each["outcome"] == "failed"]
    skipped = Counter(each["why"] for each in told if each["outcome"] == "skipped")
    if code is None:
        state = "out of time"
    elif code not in {0, 5} or counts["failed"]:
        state = "failed"
    else:
        state = "passed" if counts["passed"] else "not run"
    details = "\n\n".join(failures)
    if state in {"failed", "out of time"} and not failures:
        details = _end_of(output)
    if state == "not run":
        short = "; ".join(skipped) or "no test is for here"
    return Found(step, state, short or "no test has ended", seconds, details, skipped)


def _of_program(step: Step, code: int | None, output: str, seconds: float) -> Found:
    lines = output.splitlines()
    said = [line.removeprefix(IN_SHORT) for line in lines if line.startswith(IN_SHORT)]
    last = next((line for line in reversed(lines) if line.strip()), "")
    if code == CANNOT:
        return Found(step, "not run", last, seconds)
    state = "out of time" if code is None else "failed" if code else "passed"
    short = "; ".join(said) or ("" if state == "passed" else last)
    return Found(step, state, short, seconds, _end_of(output))


def _end_of(output: str) -> str:
    lines = [line for line in output.splitlines() if not line.startswith(IN_SHORT)]
    return "\n".join(lines[-_LINES:]).strip()
