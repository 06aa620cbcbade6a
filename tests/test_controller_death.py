"""Whatever ends a script, at whatever moment, nothing of it is left."""

import os
import random
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

VICTIM = Path(__file__).parent / "stress" / "victim.py"
TOKEN = "STRESS_VICTIM"
LIMIT = 10.0

SIGNALS = {
    "SIGKILL": signal.SIGKILL,
    "SIGTERM": signal.SIGTERM,
    "SIGINT": signal.SIGINT,
    "SIGHUP": signal.SIGHUP,
}


def family(mark):
    """Every process that carries the mark, by its pid, held by a descriptor that tells its end."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if f"{TOKEN}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                found[int(entry.name)] = os.pidfd_open(int(entry.name))
        except OSError:
            continue
    return found


def assert_all_end(mark):
    # A worker may be forked by a fork server that was not killed yet when the list was made: look until a look finds none.
    while alive := family(mark):
        for pid, ended in alive.items():
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")[:200]
            except OSError:
                command = b""
            try:
                assert select.select([ended], [], [], LIMIT)[0], (
                    f"process {pid} outlived its script: {command!r}"
                )
            finally:
                os.close(ended)


@pytest.mark.sampled(3, full=True)
@pytest.mark.slow
@pytest.mark.parametrize("ending", [*SIGNALS, "raise", "exit", "return"])
@pytest.mark.parametrize("seed", range(5))
def test_nothing_outlives_a_script(ending, seed):
    mark = f"{os.getpid()}-{ending}-{seed}"
    environment = {**os.environ, TOKEN: mark, "MESH_STOP_TIMEOUT": "1"}
    command = [sys.executable, str(VICTIM), str(seed), ending]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as victim:
        assert victim.stdout.readline() == b"under way\n"
        if ending in SIGNALS:
            # At a moment that the seed picks; a script that has ended by itself is what this must never see.
            with pytest.raises(subprocess.TimeoutExpired):
                victim.wait(random.Random(seed).random() * 0.7)
            victim.send_signal(SIGNALS[ending])
        try:
            _, errors = victim.communicate(timeout=30)
        finally:
            victim.kill()
    expected = {"raise": 1, "exit": 7, "return": 0}.get(ending)
    assert expected is None or victim.returncode == expected, errors.decode()
    assert_all_end(mark)
    assert b"panicked" not in errors, errors.decode()
