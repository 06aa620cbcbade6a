"""Direct links between the workers of a host other than the script's."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from core_owners import lines, suspend
from talk_samples import SOON, Friend, Place, wait_for

from mesh_core import shutdown
from mesh_core.testing import LocalCluster


def test_what_goes_by_direct_links_needs_no_agent(tmp_path: Path) -> None:
    with LocalCluster(hosts=1) as cluster:
        procs = cluster.attach().spawn_procs({"gpus": 2})
        place: Any = procs.slice(gpus=0).spawn("place", Place)
        friend: Any = procs.slice(gpus=1).spawn("friend", Friend)
        talking = friend.wait_and_talk.call_one(place, str(tmp_path))
        wait_for((tmp_path / "ready").exists)
        agent = cluster.pids[0]
        suspend(agent)
        try:
            (tmp_path / "go").touch()
            wait_for((tmp_path / "done").exists)
        finally:
            os.kill(agent, signal.SIGCONT)
        talking.get(timeout=SOON)
        assert lines(tmp_path / "done") == ["True"]
        shutdown()
