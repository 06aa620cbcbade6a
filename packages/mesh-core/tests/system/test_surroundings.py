"""The surroundings of processes: environment, arguments, devices; and how other programs see them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from core_processes import family
from core_samples import Echo, environment

from mesh_core import Actor, Point, ProcMesh, SpawnError, endpoint, proc_mesh, this_host

pytestmark = pytest.mark.usefixtures("runtime")

Start = pytest.mark.parametrize("start", ["fork", pytest.param("exec", marks=pytest.mark.slow)])

SECRET = "MESH_CORE_TEST_SECRET"


def ask(procs: ProcMesh, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Call a function in every process, and return the results."""
    values: list[Any] = procs.spawn("echo", Echo).call.call(function, *args).get().values()
    return values


def variables(*names: str) -> list[str | None]:
    return [os.environ.get(name) for name in names]


# The environment.


@Start
def test_nothing_of_the_environment_is_in_arguments(start: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv(SECRET, "hunter2-of-the-script")
    options: dict[str, Any] = {"preload": ["json"]} if start == "fork" else {}
    with this_host().spawn_procs(start=start, env={"MORE": "hunter2-of-the-spawn"}, **options) as procs:
        assert ask(procs, variables, SECRET, "MORE") == [["hunter2-of-the-script", "hunter2-of-the-spawn"]]
        # As passed to the interpreter, whatever listings show.
        assert "hunter2" not in json.dumps(ask(procs, original_arguments))
        commands = family()
        assert set(procs.pids) <= set(commands)
        assert not any("hunter2" in command or SECRET in command for command in commands.values())


def original_arguments() -> list[str]:
    return sys.orig_argv


@Start
def test_a_long_environment(start: Any) -> None:
    long = {f"MESH_CORE_TEST_{n}": "x" * 100_000 for n in range(30)}
    with this_host().spawn_procs(start=start, env={**long, "ONE": "y" * 500_000}) as procs:
        assert ask(procs, lengths) == [[100_000] * 30 + [500_000]]


def lengths() -> list[int]:
    return [len(os.environ[name]) for name in [*(f"MESH_CORE_TEST_{n}" for n in range(30)), "ONE"]]


@pytest.mark.slow
def test_a_long_environment_is_there_when_modules_are_preloaded(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "reads_long.py").write_text("import os\nSEEN = len(os.environ['LONG'])\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with this_host().spawn_procs(preload=["reads_long"], env={"LONG": "x" * 300_000}) as procs:
        assert ask(procs, seen) == [300_000]


def seen() -> int:
    import reads_long  # type: ignore[import-not-found]

    length: int = reads_long.SEEN
    return length


@Start
def test_none_removes_a_variable(start: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv(SECRET, "x")
    with this_host().spawn_procs(start=start, env={SECRET: None, "NEVER_THERE": None}) as procs:
        assert ask(procs, environment, SECRET) == [None]
    assert os.environ[SECRET] == "x"


@Start
def test_variables_of_each_rank(start: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("DROPPED", "x")

    def own(point: Point) -> Mapping[str, str | None]:
        here = {"PLACE": f"{point['a']},{point['b']} of {point.extent.nelements}"}
        return {**here, "DROPPED": None} if point.rank == 1 else here

    with this_host().spawn_procs({"a": 2, "b": 2}, env=own, start=start) as procs:
        assert ask(procs, variables, "PLACE", "DROPPED") == [
            ["0,0 of 4", "x"],
            ["0,1 of 4", None],
            ["1,0 of 4", "x"],
            ["1,1 of 4", "x"],
        ]


def test_invalid_environments() -> None:
    with pytest.raises(TypeError, match="env must be a mapping of names to strings"):
        this_host().spawn_procs(env=["A"])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"env\(Point.*must be a mapping of names to strings"):
        this_host().spawn_procs(env=lambda point: "A=1")  # type: ignore[arg-type, return-value]


class Owner(Actor):
    """Spawns more processes."""

    @endpoint
    def spawned(self, **options: Any) -> list[Any]:
        with this_host().spawn_procs(**options) as procs:
            return ask(procs, variables, "INHERITED", "WRAPPED")


@pytest.mark.slow
@pytest.mark.once
def test_children_of_actors_have_their_interpreter_and_environment(tmp_path: Path) -> None:
    wrapper = tmp_path / "python"
    wrapper.write_text(f'#!/bin/sh\nWRAPPED=$((WRAPPED + 1)) exec {sys.executable} "$@"\n')
    wrapper.chmod(0o755)
    options: dict[str, Any] = {"start": "exec", "python": str(wrapper), "env": {"INHERITED": "yes"}}
    with this_host().spawn_procs(**options) as procs:
        owner = procs.spawn("owner", Owner)
        for start, count in (("exec", "2"), ("fork", "1")):
            # A fork has the fork server's interpreter and its spawner's environment.
            assert owner.spawned.call_one(start=start).get() == [["yes", count]]


# Devices, and what torchrun sets.


@Start
def test_own_devices(start: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-5a, 7 ")
    with this_host().spawn_procs({"gpus": 3}, devices="own", start=start) as procs:
        assert ask(procs, environment, "CUDA_VISIBLE_DEVICES") == ["3", "GPU-5a", "7"]
    with this_host().spawn_procs({"gpus": 2}) as procs:
        assert ask(procs, environment, "CUDA_VISIBLE_DEVICES") == ["3,GPU-5a, 7 "] * 2
    with this_host().spawn_procs(
        {"gpus": 2}, devices="own", env={"CUDA_VISIBLE_DEVICES": "1,0"}, preload=["json"]
    ) as procs:
        assert ask(procs, environment, "CUDA_VISIBLE_DEVICES") == ["1", "0"]


def test_too_few_devices(monkeypatch: Any) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,-1,2")
    with pytest.raises(SpawnError, match=r"a device for each of 3 processes.*may use 2 \(0, 1\)"):
        this_host().spawn_procs({"gpus": 3}, devices="own")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(SpawnError, match="may use none"):
        proc_mesh(gpus=1, devices="own")
    with pytest.raises(ValueError, match="devices must be 'own'"):
        this_host().spawn_procs({"gpus": 1}, devices="mine")  # type: ignore[arg-type]


TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@Start
def test_what_torchrun_sets(start: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("RANK", "inherited")
    with this_host().spawn_procs({"nodes": 2, "gpus": 2}, torch_env=True, start=start) as procs:
        rows = ask(procs, variables, *TORCHRUN)
    ports = {row.pop() for row in rows}
    assert rows == [[str(rank), str(rank), "4", "4", "127.0.0.1"] for rank in range(4)]
    assert len(ports) == 1 and 1024 < int(ports.pop()) < 65536
    with this_host().spawn_procs(torch_env=True, env={"MASTER_PORT": "29500"}) as procs:
        assert ask(procs, environment, "MASTER_PORT") == ["29500"]
        # What Lightning looks for, before it would start ranks itself.
        assert ask(procs, environment, "GROUP_RANK") == ["0"]
        assert ask(procs, environment, "TORCHELASTIC_RUN_ID")[0].startswith("mesh-")


# Arguments, and what other programs see.


@Start
def test_arguments_are_the_scripts(start: Any, script: Any) -> None:
    run = script(
        f"""
        import sys
        from mesh_core import this_host
        from core_samples import Echo

        if __name__ == "__main__":
            with this_host().spawn_procs(start={start!r}) as procs:
                print(procs.spawn("echo", Echo).call.call_one(lambda: sys.argv).get() == sys.argv, sys.argv[1:])
        """,
        "--lr",
        "0.1",
    )
    assert run.finish()[0].split("\n")[0] == "True ['--lr', '0.1']"


@Start
def test_listings_name_processes_and_actors(start: Any) -> None:
    with this_host().spawn_procs({"gpus": 2}, name="trainers", start=start) as procs:
        assert [titles(pid) for pid in procs.pids] == [
            ("mesh: trainers[0]", "trainers[0]"),
            ("mesh: trainers[1]", "trainers[1]"),
        ]
        echo = procs.slice(gpus=1).spawn("a-name-that-is-long", Echo)
        assert echo.call.call_one(original_arguments).get()
        assert titles(procs.pids[1]) == ("mesh: a-name-that-is-long[0] (trainers[1])", "a-name-that-[0]")
        # What the interpreter and others read is unchanged.
        assert echo.call.call_one(environment, "HOME").get() == os.environ.get("HOME")
        assert b"HOME=" in Path(f"/proc/{procs.pids[1]}/environ").read_bytes()
        echo.stop().get()
        while titles(procs.pids[1])[0] != "mesh: trainers[1]":
            os.sched_yield()  # it is on its way


def titles(pid: int | None) -> tuple[str, str]:
    process = Path(f"/proc/{pid}")
    return (process / "cmdline").read_text().rstrip("\0"), (process / "comm").read_text().strip()


@Start
def test_pids_wait_for_the_processes(start: Any) -> None:
    with this_host().spawn_procs({"gpus": 3}, start=start) as procs:
        pids = procs.slice(gpus=slice(0, 2)).pids
        assert None not in pids
        assert procs.pids[:2] == pids == ask(procs, os.getpid)[:2]


def test_pids_of_processes_that_cannot_be_spawned() -> None:
    with this_host().spawn_procs({"gpus": 2}, preload=["no_such_module_here"]) as procs:
        assert procs.pids == [None, None]
        with pytest.raises(SpawnError):
            procs.initialized.get()
