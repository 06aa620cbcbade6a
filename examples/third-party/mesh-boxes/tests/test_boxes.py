"""The suite of the contract, and what is particular about these hosts."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from mesh_boxes import BOXES

from mesh_core import Actor, endpoint, shutdown
from mesh_launchers import HostSpec, LaunchError, launch
from mesh_launchers.testing import LauncherConformance

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not BOXES.probe().available, reason=f"{BOXES.probe().reason}: {BOXES.probe().remedy}"),
]
LIMIT = 30.0


@pytest.fixture(autouse=True)
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keep jobs in a folder of the test's own."""
    monkeypatch.setenv("MESH_JOBS", str(tmp_path / "jobs"))
    yield
    shutdown()


class TestBoxes(LauncherConformance):
    plugin = BOXES
    distribution = "mesh-boxes"

    def kill(self, host: HostSpec) -> bool:
        """Kill the sandbox, with all that is in it."""
        # Another run on this machine has hosts of the same names.
        mine = f"MESH_JOBS={os.environ['MESH_JOBS']}".encode()
        for process in Path("/proc").iterdir():
            if process.name.isdigit():
                try:
                    words = (process / "cmdline").read_bytes().split(b"\0")
                    is_mine = mine in (process / "environ").read_bytes().split(b"\0")
                except OSError:
                    continue
                if is_mine and words[0] == b"bwrap" and host.name.encode() in words:
                    os.kill(int(process.name), signal.SIGKILL)
                    return True
        return False


class Guest(Actor):
    @endpoint
    def where(self) -> str:
        return socket.gethostname()

    @endpoint
    def processes(self) -> int:
        return sum(each.name.isdigit() for each in Path("/proc").iterdir())

    @endpoint
    def write(self, path: str) -> bool:
        try:
            Path(path).write_text("x")
        except OSError:
            return False
        return True


def test_hosts_are_apart(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "own").mkdir()
    with launch("boxes", hosts=2, name="lab", writable=[str(tmp_path / "shared")]) as job:
        guests = job.hosts.spawn_procs(per_host={"cpus": 1}).spawn("guests", Guest)
        assert guests.where.call().get(timeout=LIMIT).values() == ["lab-0", "lab-1"]
        assert all(each < 10 for each in guests.processes.call().get(timeout=LIMIT).values())
        assert guests.write.call(str(tmp_path / "shared" / "file")).get(timeout=LIMIT).values() == [True] * 2
        assert guests.write.call("/usr/file").get(timeout=LIMIT).values() == [False] * 2
        assert guests.write.call("/tmp/mesh-boxes-file").get(timeout=LIMIT).values() == [True] * 2
    assert not Path("/tmp/mesh-boxes-file").exists()


def test_a_folder_that_is_not_one() -> None:
    with pytest.raises(LaunchError, match="'/nowhere' is no folder"):
        launch("boxes", hosts=1, writable=["/nowhere"])
