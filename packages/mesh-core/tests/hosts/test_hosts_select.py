"""Hosts that are selected by the labels and resources that their agents were started with."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hosts_samples import SOON, Member
from test_hosts_failure import wait_until

from mesh_core import (
    Credentials,
    Host,
    HostAgent,
    HostMesh,
    MeshError,
    Promise,
    attach_to_workers,
    endpoint,
    run_worker_loop_forever,
    shutdown,
    this_host,
)
from mesh_core.testing import LocalCluster

pytestmark = [pytest.mark.slow]

LABELS = [
    {"zone": "a", "disk": "ssd"},
    {"zone": "b"},
    {"zone": "a"},
    {"zone": "a", "disk": "ssd"},
]
RESOURCES = [{"gpus": 8}, {"gpus": 4.5, "cpus": 2}, {"gpus": 8}, {}]


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(hosts=4, labels=LABELS, resources=RESOURCES) as cluster:
        yield cluster


@pytest.fixture
def hosts(cluster: LocalCluster) -> Iterator[HostMesh]:
    hosts = cluster.attach()
    hosts.initialized.get(timeout=SOON)
    yield hosts
    shutdown()


class Asker(Member):
    @endpoint
    def labels(self, hosts: HostMesh) -> Any:
        return hosts.labels


def test_labels_and_resources_reach_the_script(hosts: HostMesh) -> None:
    assert hosts.labels == LABELS
    assert hosts.slice(hosts=slice(1, 3)).labels == LABELS[1:3]
    cpus = float(len(os.sched_getaffinity(0)))
    assert hosts.resources == [
        {"cpus": cpus, "gpus": 8.0},
        {"cpus": 2.0, "gpus": 4.5},
        {"cpus": cpus, "gpus": 8.0},
        {"cpus": cpus},
    ]
    assert this_host().labels == [{}] and this_host().resources == [{}]


def test_a_selection_is_a_mesh(hosts: HostMesh) -> None:
    some = hosts.select(lambda host: host.resources.get("gpus") == 8)
    assert some.names == ["host-0", "host-2"] and some.sizes == {"hosts": 2}
    members: Any = some.spawn_procs({"gpus": 1}).spawn("members", Member)
    assert [name for _, (name, _) in members.where.call().get(timeout=SOON)] == ["host-0", "host-2"]
    assert hosts.select(zone="a", disk="ssd").names == ["host-0", "host-3"]
    assert hosts.select(zone="b").sizes == {"hosts": 1}
    assert hosts.select(lambda _: True).names == hosts.names
    assert hosts.slice(hosts=slice(1, None)).select(zone="a").names == ["host-2", "host-3"]
    assert hosts.split(hosts=("row", "column"), row=2).select(zone="a", disk="ssd").sizes == {"hosts": 2}
    shown: list[Host] = []
    with pytest.raises(ValueError, match="was selected"):
        hosts.select(shown.append)
    assert [each.name for each in shown] == hosts.names
    assert [each.address for each in shown] == hosts.addresses


def test_hosts_that_are_not_contiguous_are_selected(hosts: HostMesh) -> None:
    chosen = hosts.select(zone="a")
    assert (chosen.names, chosen.sizes) == (["host-0", "host-2", "host-3"], {"hosts": 3})
    assert chosen.select(disk="ssd").names == [
        name for name, labels in zip(chosen.names, chosen.labels, strict=True) if labels.get("disk") == "ssd"
    ]
    with chosen.spawn_procs() as procs:
        assert len(procs.pids) == 3


def test_what_cannot_be_selected_says_why(hosts: HostMesh) -> None:
    for asked, said in (
        ({"zoen": "a"}, "has a label 'zoen'; did you mean 'zone'?"),
        ({"rack": "7"}, "has a label 'rack'; there are: disk, zone"),
        ({"zone": "c"}, "has the label zone='c'; there are: a, b"),
        ({"zone": "b", "disk": "ssd"}, "that is attached and not dead was selected"),
    ):
        with pytest.raises(ValueError, match=re.escape(said)):
            hosts.select(**asked)
    with pytest.raises(TypeError, match="label 'zone' must be a string, got 1"):
        hosts.select(zone=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="select\\(\\) needs labels such as"):
        hosts.select()
    with pytest.raises(TypeError, match="takes a function of a host"):
        hosts.select("zone")  # type: ignore[arg-type]
    with pytest.raises(ZeroDivisionError):
        hosts.select(lambda _: 1 // 0)
    with pytest.raises(ValueError, match=r"no host of .* has a label 'zone'; none was started with --label"):
        this_host().select(zone="a")


def test_hosts_that_are_gone_are_not_selected(hosts: HostMesh) -> None:
    hosts.slice(hosts=3).detach().get(timeout=SOON)
    assert hosts.select(zone="a").names == ["host-0", "host-2"]
    assert hosts.labels == LABELS, "what was known of it still is"


def test_hosts_that_are_not_attached_yet(cluster: LocalCluster) -> None:
    late = Promise[str]()
    hosts = attach_to_workers([cluster.addresses[0], late.future], credentials=cluster.credentials)
    wait_until(lambda: hosts.names[0] == "host-0")
    with pytest.raises(MeshError, match="are not known yet; wait for `initialized` of"):
        hosts.select(zone="a")
    assert hosts.slice(hosts=0).select(zone="a").names == ["host-0"]
    late.set_exception(LookupError("no node is free"))
    assert hosts.initialized.exception(timeout=SOON) is not None
    assert hosts.select(zone="a").names == ["host-0"]
    assert hosts.labels == [LABELS[0], {}]
    shutdown()


def test_a_worker_does_not_know(hosts: HostMesh) -> None:
    asker: Any = hosts.slice(hosts=0).spawn_procs().spawn("asker", Asker)
    with pytest.raises(MeshError, match="only the script that has attached hosts knows their labels"):
        asker.labels.call_one(hosts).get(timeout=SOON)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"labels": {"zone": 1}}, "label 'zone' must be a string, got 1"),
        ({"labels": {"zone": "x" * 257}}, "must be a printable text of at most 256 bytes"),
        ({"labels": {"zone": "a\x1b[2J"}}, "must be a printable text"),
        ({"labels": {"": "a"}}, "names of labels must be printable texts of at most 64 bytes, got ''"),
        ({"labels": {str(n): "" for n in range(65)}}, "labels must be at most 64, got 65"),
        ({"labels": ["zone"]}, "labels must be a mapping such as {'zone': 'a'}, got ['zone']"),
        ({"resources": {"gpus": "8"}}, "resource 'gpus' must be a number, got '8'"),
        ({"resources": {"gpus": True}}, "resource 'gpus' must be a number, got True"),
        ({"resources": {"gpus": -1}}, "resource 'gpus' must be a number of at least 0, got -1"),
        ({"resources": {"gpus": float("nan")}}, "resource 'gpus' must be a number of at least 0, got nan"),
    ],
)
def test_invalid_labels_and_resources_of_an_agent(
    cluster: LocalCluster, given: dict[str, Any], said: str
) -> None:
    folder = f"{cluster.credentials}/host"
    with pytest.raises((TypeError, ValueError), match=re.escape(said)):
        HostAgent(folder, **given)
    with pytest.raises((TypeError, ValueError), match=re.escape(said)):
        run_worker_loop_forever("127.0.0.1:0", credentials=folder, **given)


def test_a_cluster_needs_as_many_labels_as_hosts() -> None:
    with pytest.raises(ValueError, match=r"labels must be one mapping, or one for each of 3 hosts, got 1"):
        LocalCluster(hosts=3, labels=[{"zone": "a"}])


def test_the_command_takes_labels_and_resources(cluster: LocalCluster) -> None:
    command = [sys.executable, "-m", "mesh_core.cli", "host", "--listen", "127.0.0.1:0", "--credentials"]
    options = ["--label", "zone=a=b", "--label", "rack=", "--resource", "gpus=8", "--resource", "mem=1e9"]
    with subprocess.Popen(
        [*command, f"{cluster.credentials}/host", *options], stdout=subprocess.PIPE, text=True
    ) as agent:
        assert agent.stdout is not None
        try:
            address = agent.stdout.readline().strip()
            hosts = attach_to_workers([address], credentials=Credentials.load(cluster.credentials))
            hosts.initialized.get(timeout=SOON)
            assert hosts.labels == [{"zone": "a=b", "rack": ""}]
            assert {**hosts.resources[0], "cpus": 0} == {"cpus": 0, "gpus": 8.0, "mem": 1e9}
            shutdown()
        finally:
            agent.terminate()
    for wrong, said in (
        (["--label", "zone"], "must be NAME=VALUE, such as zone=a, got 'zone'"),
        (["--resource", "gpus=x"], "such as gpus=8, got 'gpus=x'"),
    ):
        run = subprocess.run(
            [*command, f"{cluster.credentials}/host", *wrong], capture_output=True, text=True, timeout=60
        )
        assert run.returncode == 2 and said in run.stderr
