"""How processes start on other hosts: their environment, path and interpreter, and many spawns at once."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from core_hosts import hosts  # noqa: F401 - a fixture
from core_samples import Echo
from hosts_samples import SOON

from mesh_core import ActorError, HostMesh, MeshError, Point, SpawnError, SupervisionError
from mesh_core.testing import LocalCluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    """Hosts whose environment differs from the script's."""
    env = {"OF_THE_HOST": "yes", "OF_BOTH": "host", "CUDA_VISIBLE_DEVICES": "4,5"}
    with LocalCluster(hosts=2, env=env) as cluster:
        yield cluster


def environ(*names: str) -> list[str | None]:
    return [os.environ.get(name) for name in names]


TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def test_what_differs_by_rank_is_settled_on_each_host(
    hosts: HostMesh,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")  # of the script's machine

    def named(point: Point) -> dict[str, str]:
        return {"PLACE": f"{point['hosts']}.{point['gpus']}"}

    with hosts.spawn_procs({"gpus": 2}, devices="own", torch_env=True, env=named) as procs:
        actor: Any = procs.spawn("e", Echo)
        rows = actor.call.call(environ, "PLACE", "CUDA_VISIBLE_DEVICES", *TORCHRUN).get(timeout=SOON).values()
    assert len({row.pop() for row in rows}) == 1
    assert rows == [
        [f"{host}.{gpu}", str(4 + gpu), str(2 * host + gpu), str(gpu), "4", "2", "127.0.0.1"]
        for host in range(2)
        for gpu in range(2)
    ]


def test_the_spawn_reports_what_a_host_lacks(hosts: HostMesh) -> None:  # noqa: F811
    for options, text in (
        ({"devices": "own"}, r"a device for each of 3 processes.*may use 2 \(4, 5\)"),
        ({"proc_bind": [[100_000]] * 3}, r"proc_bind names the CPUs \[100000\], and this host has"),
    ):
        with hosts.spawn_procs({"gpus": 3}, **options) as procs, pytest.raises(SpawnError, match=text):  # type: ignore[arg-type]
            procs.initialized.get(timeout=SOON)


def test_a_variable_of_a_host_is_removed(one: HostMesh) -> None:
    for start in ("fork", "exec"):
        with one.spawn_procs(env={"OF_BOTH": None}, start=start) as procs:  # type: ignore[arg-type]
            actor: Any = procs.spawn("e", Echo)
            assert actor.call.call_one(environ, "OF_BOTH", "OF_THE_HOST").get(timeout=SOON) == [None, "yes"]


def where() -> tuple[str, str, list[str]]:
    return str(Path.cwd()), sys.executable, sys.path


def modules(*names: str) -> list[bool]:
    return [name in sys.modules for name in names]


@pytest.fixture
def one(hosts: HostMesh) -> HostMesh:  # noqa: F811
    return hosts.slice(hosts=1)


@pytest.mark.parametrize("start", ["fork", "exec"])
@pytest.mark.parametrize("preload", [(), ("colorsys",)])
def test_the_environment_is_the_hosts_with_what_the_spawn_says(
    one: HostMesh, monkeypatch: pytest.MonkeyPatch, start: Any, preload: tuple[str, ...]
) -> None:
    monkeypatch.setenv("OF_THE_SCRIPT", "yes")
    with one.spawn_procs(env={"OF_BOTH": "spawn", "NEW": "1"}, start=start, preload=preload) as procs:
        actor: Any = procs.spawn("e", Echo)
        found = actor.call.call_one(environ, "OF_THE_HOST", "OF_THE_SCRIPT", "OF_BOTH", "NEW").get(
            timeout=SOON
        )
        assert found == ["yes", None, "spawn", "1"]
        if start == "fork":
            assert actor.call.call_one(modules, "colorsys").get(timeout=SOON) == [bool(preload)]


@pytest.mark.parametrize("start", ["fork", "exec"])
def test_modules_of_the_script_are_found_where_its_folders_are(
    one: HostMesh, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, start: Any
) -> None:
    (tmp_path / "only_here.py").write_text("VALUE = 7\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend("/is/not/there")
    monkeypatch.chdir(tmp_path)
    with one.spawn_procs(start=start) as procs:
        actor: Any = procs.spawn("e", Echo)
        assert actor.call.call_one(eval, "__import__('only_here').VALUE").get(timeout=SOON) == 7
        cwd, executable, path = actor.call.call_one(where).get(timeout=SOON)
        assert (cwd, executable) == (str(tmp_path), sys.executable)
        assert str(tmp_path) in path and "/is/not/there" not in path


def test_a_missing_folder_does_not_prevent_a_start(
    one: HostMesh, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    with one.spawn_procs() as procs:
        first: Any = procs.spawn("e", Echo)
        assert first.echo.call_one(1).get(timeout=SOON) == 1
    monkeypatch.chdir(tmp_path)


def test_each_process_of_a_host_is_bound_to_its_cpus(hosts: HostMesh) -> None:  # noqa: F811
    cpus = sorted(os.sched_getaffinity(0))
    bind = [[cpus[0]], [cpus[-1]]]
    with hosts.spawn_procs({"gpus": 2}, proc_bind=bind) as procs:
        actor: Any = procs.spawn("e", Echo)
        found = actor.call.call(os.sched_getaffinity, 0).get(timeout=SOON).values()
        assert [sorted(each) for each in found] == bind * 2


def remember() -> None:
    os.environ["BOOTED"] = "yes"


def refuse() -> None:
    raise FileNotFoundError("no licence")


def test_a_bootstrap_runs_first(hosts: HostMesh) -> None:  # noqa: F811
    with hosts.spawn_procs(bootstrap=remember) as procs:
        actor: Any = procs.spawn("e", Echo)
        assert actor.call.call(environ, "BOOTED").get(timeout=SOON).values() == [["yes"], ["yes"]]


def test_a_bootstrap_that_fails(hosts: HostMesh) -> None:  # noqa: F811
    procs = hosts.spawn_procs(bootstrap=refuse)
    with pytest.raises(FileNotFoundError, match="no licence") as caught:
        procs.initialized.get(timeout=SOON)
    error: Any = caught.value
    assert isinstance(error, ActorError)
    assert error.host in hosts.names
    procs.stop().get(timeout=SOON)


def test_an_interpreter_that_is_not_there(one: HostMesh) -> None:
    procs = one.spawn_procs(start="exec", python="/no/such/python")
    with pytest.raises((SpawnError, SupervisionError)) as caught:
        procs.initialized.get(timeout=SOON)
    assert "/no/such/python" in str(caught.value) + "".join(getattr(caught.value, "stderr_tail", "") or "")


def test_a_module_that_cannot_be_preloaded(one: HostMesh) -> None:
    procs = one.spawn_procs(preload=["no_such_module"])
    with pytest.raises(MeshError, match="no_such_module"):
        procs.initialized.get(timeout=SOON)


def test_many_spawns_at_once(hosts: HostMesh) -> None:  # noqa: F811
    found: list[int] = []

    def spawn() -> None:
        with hosts.spawn_procs({"gpus": 2}) as procs:
            actor: Any = procs.spawn("e", Echo)
            found.extend(actor.call.call(os.getpid).get(timeout=SOON).values())

    threads = [threading.Thread(target=spawn) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(set(found)) == 24


def test_messages_follow_a_spawn_at_once(hosts: HostMesh) -> None:  # noqa: F811
    for _ in range(5):
        procs = hosts.spawn_procs()
        actor: Any = procs.spawn("e", Echo)
        values = [actor.echo.call(n) for n in range(20)]
        actor.stop()
        stopped = procs.stop()
        assert [value.get(timeout=SOON).values() for value in values] == [[n, n] for n in range(20)]
        stopped.get(timeout=SOON)


def test_processes_know_their_pids(hosts: HostMesh) -> None:  # noqa: F811
    with hosts.spawn_procs({"gpus": 2}) as procs:
        actor: Any = procs.spawn("e", Echo)
        procs.initialized.get(timeout=SOON)
        assert actor.call.call(os.getpid).get(timeout=SOON).values() == procs.pids
        assert procs.slice(hosts=1).pids == procs.pids[2:]
