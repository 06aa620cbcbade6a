"""Code that is sent to several hosts."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from mesh_core import Actor, HostMesh, endpoint
from mesh_core.testing import LocalCluster

SOON = 30.0
MODULE = "synced_to_hosts"


class Importer(Actor):
    """Returns what it has imported, and from where."""

    @endpoint
    def look(self) -> tuple[str, int]:
        import importlib

        module = importlib.import_module(MODULE)
        return str(module.__file__), module.NUMBER


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(hosts=3) as cluster:
        yield cluster


@pytest.fixture
def hosts(cluster: LocalCluster) -> HostMesh:
    hosts = cluster.attach()
    hosts.initialized.get(timeout=SOON)
    return hosts


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / f"{MODULE}.py").write_text("NUMBER = 1\n")
    monkeypatch.syspath_prepend(str(folder))
    return folder


def test_each_host_has_a_copy_of_its_own(hosts: HostMesh, project: Path) -> None:
    report = hosts.sync_workspace(project).get(timeout=SOON)
    assert (report.hosts, len(report.sent)) == (3, 1)
    with hosts.spawn_procs(per_host={"gpus": 2}) as procs:
        importers = procs.spawn("importers", Importer)
        before = list(importers.look.call().get(timeout=SOON).values())
        assert [number for _, number in before] == [1] * 6
        files = [file for file, _ in before]
        assert len(set(files)) == 3, "processes of one host share a copy, hosts do not"
        assert files[0::2] == files[1::2]
        assert not any(file.startswith(str(project)) for file in files)
        (project / f"{MODULE}.py").write_text("NUMBER = 23\n")
        report = hosts.sync_workspace(project, reload=True).get(timeout=SOON)
        assert len(report.sent) == 1
        after = list(importers.look.call().get(timeout=SOON).values())
        assert [number for _, number in after] == [23] * 6
    # Nothing has changed: nothing is sent.
    assert hosts.sync_workspace(project).get(timeout=SOON).sent == ()


def test_a_host_that_dies_leaves_the_others_as_they_were(
    cluster: LocalCluster, hosts: HostMesh, project: Path, fault_tolerant: None
) -> None:
    hosts.sync_workspace(project).get(timeout=SOON)
    cluster.kill(1, signal.SIGKILL)
    (project / f"{MODULE}.py").write_text("NUMBER = 23\n")
    with pytest.raises(Exception, match="host"):
        hosts.sync_workspace(project).get(timeout=SOON)
    rest = hosts.slice(hosts=slice(0, 3, 2))
    with rest.spawn_procs() as procs:
        importers = procs.spawn("importers", Importer)
        assert [number for _, number in importers.look.call().get(timeout=SOON).values()] == [1, 1]
        assert rest.sync_workspace(project, reload=True).get(timeout=SOON).hosts == 2
        assert [number for _, number in importers.look.call().get(timeout=SOON).values()] == [23, 23]
