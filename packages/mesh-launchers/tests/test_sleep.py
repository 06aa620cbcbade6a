"""The machine of the script sleeps: its processes stand still, and the hosts hear nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from counter import lives
from launched import LIMIT, leftovers, until
from scripts import Script

from mesh_core import Credentials
from mesh_launchers import HostSpec, Place, attach_job, jobs
from mesh_launchers._host import command, told

pytestmark = pytest.mark.slow


@pytest.mark.full
@pytest.mark.parametrize("keep", ["60s", "2s"])
def test_what_runs_on_kept_hosts_is_there_when_the_machine_has_woken(
    tmp_path: Path, jobs_folder: Path, keep: str
) -> None:
    """GTW-3, GTW-4: for as long as the job is kept, however short the time is after which silence is a death otherwise."""
    ticks, wakes = 2.5 if keep == "60s" else 9.0, keep == "60s"
    # What still computes when nobody comes is not waited for.
    patience = 5.0 if wakes else 0.5
    script = Script(
        tmp_path,
        f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from counter import Counter
        from mesh_core import MeshError, configure, set_fault_handler
        configure(heartbeat_timeout=1, stop_timeout={patience})
        set_fault_handler(lambda failure: True)
        job = launch("local", hosts=2, name="kept", keep="{keep}").wait(60)
        counters = job.hosts.spawn_procs(per_host={{"gpus": 1}}, name="procs").spawn("counters", Counter)
        counters.add.call(5).get(timeout=60)
        later = job.hosts.spawn_procs(start="exec").spawn("later", Counter)
        later.add.call(0).get(timeout=60)
        print(*job.procs["procs"].pids, flush=True)
        input()
        later.touch_later.broadcast({str(tmp_path / "later")!r}, {ticks})
        print("sleeps", flush=True)
        input()
        try:
            print(counters.add.call(1).get(timeout=60).values(), flush=True)
        except MeshError as error:
            print(" ".join(str(error).split()), flush=True)
        """,
    )
    pids = [int(each) for each in script.heard().split()]
    script.go()
    assert script.heard() == "sleeps"
    keeper = int(
        subprocess.run(
            ["pgrep", "-f", f"_keeper {jobs_folder / 'kept'}"], capture_output=True, text=True, check=True
        ).stdout
    )
    try:
        for pid in (script.process.pid, keeper):
            os.kill(pid, signal.SIGSTOP)
        if wakes:
            until((tmp_path / "later").exists, "more time has passed than a host may be silent for")
            assert all(map(lives, pids))
        else:
            # Nobody comes: it ends by itself.
            until(lambda: not any(map(lives, pids)), "the hosts notice the silence")
    finally:
        for pid in (keeper, script.process.pid):
            os.kill(pid, signal.SIGCONT)
    script.go()
    said = script.heard()
    assert said == "[6, 6]" if wakes else "host" in said
    assert script.end()[0] == 0
    if not wakes:
        until(lambda: not leftovers(jobs_folder), "the job ends")
        return
    until(lambda: jobs()[0].used_by is None, "the script's end is known")
    with attach_job("kept") as job:
        counters: Any = job.actors["counters"]
        assert counters.add.call(1).get(timeout=LIMIT).values() == [7, 7]


def test_hosts_end_after_too_long_a_silence_and_say_so(tmp_path: Path) -> None:
    """HST-2."""
    credentials = Credentials.new(tmp_path / "train").host_path
    place = Place("train", tmp_path, credentials, 1.0, lambda _: None)
    line = told(place, [HostSpec(0, "b1")], address="127.0.0.1:0")
    with subprocess.Popen(
        command(sys.executable, "b1"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as host:
        assert host.stdin is not None and host.stdout is not None
        host.stdin.write(line)
        host.stdin.flush()
        # It waits for its input, which is open and says nothing.
        said = host.stdout.read().decode()
    assert (
        "it heard nothing for 1 s: the machine of the script slept, or the network between them was cut"
        in said
    )
