"""What actors on other hosts have started ends with the agents of these hosts."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from core_processes import Watch, family
from core_trees import Trees, pipe, plant

from mesh_core import Credentials, HostAgent, attach_to_workers, shutdown


@pytest.mark.slow
def test_a_tree_ends_with_the_agent_of_its_host(tmp_path: Path, fault_tolerant: None) -> None:
    job = Credentials.new(tmp_path / "job")
    job.issue_host(tmp_path / "host")
    with HostAgent(tmp_path / "host", name="first") as agent, pipe(tmp_path / "tree") as tree:
        hosts = attach_to_workers([agent.address], credentials=job)
        procs = hosts.spawn_procs({"gpus": 1})
        plant(procs.spawn("trees", Trees), "daemon", tree)
        everything = Watch(family(agent.pid))
        agent.send_signal(signal.SIGKILL)
        assert tree.ended()
        assert everything.wait() == []
        shutdown()
