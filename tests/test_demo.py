"""The demo: what the README's first command shows."""

import os
import re
import subprocess
import sys

import pytest

import workspace

pytest.importorskip("numpy", reason="the demo trains with numpy")
pytest.importorskip("mesh_supervision", reason="the demo has a policy of mesh-supervision's")

DEMO = workspace.ROOT / "examples" / "demo.py"


def run_demo(**env: str) -> str:
    done = subprocess.run(
        [sys.executable, str(DEMO)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=50,
        env={**os.environ, "PYTHONIOENCODING": "utf-8", **env},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    return done.stdout


@pytest.fixture(scope="module")
def output() -> str:
    """What it prints, also when it has ended long ago."""
    return run_demo()


@pytest.mark.slow
def test_demo_trains_loses_a_process_and_gets_it_back(output: str):
    losses = [float(loss) for loss in re.findall(r"step +\d+/\d+ .* loss (\S+) on \d ranks", output)]
    assert len(losses) == 10
    assert losses[-1] < losses[0] / 5

    killed = re.search(r"killing pid (\d+) with SIGKILL", output)
    assert killed is not None
    assert re.search(
        rf"caught: rank 3 \(workers=3\) of mesh 'trainers' died on host \S+, pid {killed[1]}: "
        r"killed by signal 9 \(SIGKILL\)",
        output,
    )
    before, after = output.split("caught:")
    assert "on 4 ranks" in before
    assert "on 4 ranks" in after
    assert "makes rank 3 again" in after

    assert "a slice of one" in after
    assert "a broadcast" in after
    accuracy = re.search(r"accuracy of rank 0: ([\d.]+)%", after)
    assert accuracy is not None
    assert float(accuracy[1]) > 95
    assert "replicas equal: yes" in after
    assert "every process has ended" in after


@pytest.mark.slow
def test_demo_draws_the_mesh_and_leaves_no_process(output: str):
    boxes, states = (
        [line for line in output.splitlines() if "│" in line and word in line] for word in ("pid", "o up")
    )
    seen = [(line.count("o up"), "x killed (SIGKILL)" in line) for line in states]
    assert seen == [(4, False), (3, True), (4, False)]
    assert len(boxes) == 3
    pids = {int(pid) for pid in re.findall(r"│ pid (\d+)", output)}
    # The fifth is the one that has taken the place of the fourth.
    assert len(pids) == 5
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.full
@pytest.mark.slow
def test_demo_draws_in_ascii_where_the_terminal_knows_nothing_else():
    output = run_demo(PYTHONIOENCODING="ascii")
    assert output.isascii()
    assert "+ workers=0 +" in output
    assert "| o up" in output
