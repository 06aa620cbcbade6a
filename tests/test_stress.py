"""A short run of the random stress; a release gets a long one: `python tests/stress/stress.py --seconds 600`."""

import subprocess
import sys
from pathlib import Path

import pytest

from levels import by_level

STRESS = Path(__file__).parent / "stress" / "stress.py"
SECONDS = by_level(quick="2", full="8", everything="60")


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_random_use_and_abuse_break_no_promise():
    run = subprocess.run(
        [sys.executable, str(STRESS), "--seconds", SECONDS, "--seed", "20", "--round", "4"],
        capture_output=True, text=True, timeout=220,
    )  # fmt: skip
    # The verdict is the last line, and what led there is before it; pytest's own summary has the first line only.
    *_, verdict = ["", *run.stderr.splitlines()]
    assert run.returncode == 0, f"{verdict}\n{run.stdout}{run.stderr[-20_000:]}"
    assert "nothing left" in run.stdout
    assert "panicked" not in run.stderr, run.stderr
