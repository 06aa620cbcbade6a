"""The machine of the script sleeps: its processes stand still, and the hosts hear nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from greeter import Greeter
from launched import LIMIT, until
from scripts import Script

from mesh_core import Credentials
from mesh_launchers import HostSpec, Place, attach_job, jobs
from mesh_launchers._host import command, told

pytestmark = pytest.mark.slow


def test_kept_hosts_are_there_when_the_machine_has_woken(tmp_path: Path, jobs_folder: Path) -> None:
    script = Script(
        tmp_path,
        f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from greeter import Greeter
        from mesh_core import MeshError, configure, set_fault_handler
        configure(heartbeat_timeout=2)
        set_fault_handler(lambda failure: True)
        job = launch("local", hosts=2, name="kept", keep="60s").wait(60)
        greeters = job.hosts.spawn_procs(per_host={{"gpus": 1}}).spawn("greeters", Greeter)
        greeters.greet.call("you").get(timeout=60)
        print("sleeps", flush=True)
        input()
        try:
            print(greeters.greet.call("you").get(timeout=60))
        except MeshError as error:
            print(" ".join(str(error).split()), flush=True)
        """,
    )
    assert script.heard() == "sleeps"
    keeper = int(
        subprocess.run(
            ["pgrep", "-f", f"_keeper {jobs_folder / 'kept'}"], capture_output=True, text=True, check=True
        ).stdout
    )
    logs = [jobs_folder / "kept" / "launcher" / f"{number}.log" for number in (0, 1)]
    try:
        for pid in (script.process.pid, keeper):
            os.kill(pid, signal.SIGSTOP)
        # The job's processes end there before the machine wakes.
        until(
            lambda: all("has ended here" in each.read_text() for each in logs), "the hosts notice the silence"
        )
    finally:
        for pid in (keeper, script.process.pid):
            os.kill(pid, signal.SIGCONT)
    script.go()
    assert "host" in script.heard()
    assert script.end()[0] == 0
    until(lambda: jobs()[0].used_by is None, "the script's end is known")
    with attach_job("kept") as job:
        procs = job.hosts.spawn_procs(per_host={"gpus": 1})
        greeted = procs.spawn("greeters", Greeter).greet.call("you").get(timeout=LIMIT)
        assert greeted.values() == ["hello you"] * 2


def test_hosts_that_hear_nothing_for_too_long_end_and_say_so(tmp_path: Path) -> None:
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
