"""Processes: how they start, what they find, how they end."""

from __future__ import annotations

import asyncio
import os
import re
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from core_samples import Echo, environment

from mesh_core import (
    MeshError,
    ProcMesh,
    SpawnError,
    SupervisionError,
    current_rank,
    inspect,
    proc_mesh,
    this_host,
)

pytestmark = [pytest.mark.usefixtures("runtime"), pytest.mark.python]

Start = pytest.mark.parametrize("start", ["fork", pytest.param("exec", marks=pytest.mark.slow)])


def ask(procs: ProcMesh, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Returns the result of a function in every process."""
    values: list[Any] = procs.spawn("echo", Echo).call.call(function, *args).get().values()
    return values


def test_references_to_the_same_processes_are_equal() -> None:
    with this_host().spawn_procs({"gpus": 2}) as procs, this_host().spawn_procs({"gpus": 2}) as others:
        assert procs.slice(gpus=0) == procs.slice(gpus=0)
        assert procs.slice(gpus=0) != procs.slice(gpus=1)
        assert procs != others
        assert procs != procs.rename(gpus="ranks")
        assert procs != "procs"
        (back,) = set(ask(procs.slice(gpus=0), same, procs))
        assert {procs: "found"}[back] == "found"


def same(procs: ProcMesh) -> ProcMesh:
    return procs


# Where they start.


@Start
def test_processes_are_new_and_below_this_one(start: Any) -> None:
    with this_host().spawn_procs(per_host={"gpus": 2}, start=start) as procs:
        pids = ask(procs, os.getpid)
        assert len({os.getpid(), *pids}) == 3
        assert procs.pids == pids


@Start
def test_env_is_there_before_any_module_of_the_user(start: Any, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "reads_env.py").write_text("import os\nSEEN = os.environ.get('MESH_CORE_TEST_GREETING')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("MESH_CORE_TEST_KEPT", "kept")
    with this_host().spawn_procs(start=start, env={"MESH_CORE_TEST_GREETING": "hello"}) as procs:
        assert ask(procs, import_and_get, "reads_env", "SEEN") == ["hello"]
        assert ask(procs, environment, "MESH_CORE_TEST_KEPT") == ["kept"]
    assert "MESH_CORE_TEST_GREETING" not in os.environ


def import_and_get(module: str, name: str) -> Any:
    import importlib

    return getattr(importlib.import_module(module), name)


def test_env_changes_between_spawns(monkeypatch: Any) -> None:
    """The fork server is the same: changes since it started are sent to each worker."""
    for value in ("one", "two", None):
        if value is None:
            monkeypatch.delenv("MESH_CORE_TEST_VALUE")
        else:
            monkeypatch.setenv("MESH_CORE_TEST_VALUE", value)
        with this_host().spawn_procs() as procs:
            assert ask(procs, environment, "MESH_CORE_TEST_VALUE") == [value]


@Start
def test_cwd_and_path_are_the_scripts(start: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    with this_host().spawn_procs(start=start) as procs:
        assert ask(procs, os.getcwd) == [str(tmp_path)]
        assert ask(procs, sys_path)[0][0] == str(tmp_path / "modules")


def sys_path() -> list[str]:
    return sys.path


def test_each_process_is_bound_to_its_cpus() -> None:
    cpus = sorted(os.sched_getaffinity(0))
    wanted = [[cpus[0]], cpus[-1:]]
    with this_host().spawn_procs(per_host={"gpus": 2}, proc_bind=wanted) as procs:
        assert ask(procs, affinity) == wanted
    with pytest.raises(ValueError, match="for 1 processes, and 2 are asked for"):
        this_host().spawn_procs(per_host={"gpus": 2}, proc_bind=[[0]])


def affinity() -> list[int]:
    return sorted(os.sched_getaffinity(0))


@pytest.mark.slow
def test_another_interpreter(tmp_path: Path) -> None:
    wrapper = tmp_path / "python"
    wrapper.write_text(f'#!/bin/sh\nWRAPPED=yes exec {sys.executable} "$@"\n')
    wrapper.chmod(0o755)
    with this_host().spawn_procs(start="exec", python=str(wrapper)) as procs:
        assert ask(procs, environment, "WRAPPED") == ["yes"]


def test_another_interpreter_needs_exec() -> None:
    with pytest.raises(ValueError, match="needs start='exec'"):
        this_host().spawn_procs(python="/usr/bin/python3")
    with pytest.raises(ValueError, match="'fork' or 'exec', got 'spawn'"):
        this_host().spawn_procs(start="spawn")  # type: ignore[arg-type]


def test_an_interpreter_that_is_not_there() -> None:
    with pytest.raises(SpawnError, match="'/nowhere/python' is not a program that can be run"):
        this_host().spawn_procs(start="exec", python="/nowhere/python")


@pytest.mark.slow
def test_a_program_that_is_not_an_interpreter() -> None:
    procs = this_host().spawn_procs(start="exec", python="/bin/false")
    with procs, pytest.raises(SpawnError, match=r"died while it started.*exited with status 1"):
        procs.initialized.get()


# Preloading.


def test_preloaded_modules_are_imported_once_for_all(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "heavy.py").write_text("import os\nIMPORTED_BY = os.getpid()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with this_host().spawn_procs(per_host={"gpus": 3}, preload=["heavy"]) as procs:
        importers = ask(procs, import_and_get, "heavy", "IMPORTED_BY")
        assert len(set(importers)) == 1
        assert importers == ask(procs, os.getppid)


def test_preloaded_modules_see_the_environment(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "early.py").write_text("import os\nSEEN = os.environ.get('MESH_CORE_TEST_EARLY')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with this_host().spawn_procs(preload=["early"], env={"MESH_CORE_TEST_EARLY": "yes"}) as procs:
        assert ask(procs, import_and_get, "early", "SEEN") == ["yes"]


def test_a_preload_that_cannot_be_imported(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "bad_preload.py").write_text("raise RuntimeError('never')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, text in (("bad_preload", "RuntimeError: never"), ("no_such_module_here", "No module named")):
        with this_host().spawn_procs(preload=[name]) as procs:
            with pytest.raises(SpawnError, match=text):
                procs.initialized.get()
            with pytest.raises(MeshError, match=text):
                procs.spawn("echo", Echo).echo.call_one(1).get()


def test_the_process_that_forks_workers_has_one_thread() -> None:
    """NUR-1."""
    with this_host().spawn_procs(per_host={"gpus": 2}) as procs:
        for server in set(ask(procs, os.getppid)):
            assert len(list(Path(f"/proc/{server}/task").iterdir())) == 1


@pytest.mark.slow
def test_a_preload_that_starts_threads_falls_back_to_exec(script: Any, tmp_path: Path) -> None:
    """NUR-2."""
    (tmp_path / "threaded.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    run = script(
        """
        import os, sys
        from mesh_core import this_host
        from core_samples import Echo

        if __name__ == "__main__":
            with this_host().spawn_procs(per_host={"gpus": 2}, preload=["threaded"]) as procs:
                echo = procs.spawn("echo", Echo)
                print(echo.echo.call(1).get().values())
                print(echo.call.call(lambda: "main_exec" in " ".join(sys.orig_argv)).get().values())
        """
    )
    out, err = run.finish()
    assert out.splitlines() == ["[1, 1]", "[True, True]"]
    assert "preload='threaded' started 1 thread when it was imported" in err
    assert "start by exec instead" in err
    assert err.count("preload='threaded'") == 1


@pytest.mark.beside
def test_preloading_a_module_that_imports_numpy_forks(tmp_path: Path, monkeypatch: Any) -> None:
    """numpy starts threads, and is known to survive a fork, whichever module imports it."""
    pytest.importorskip("numpy")
    (tmp_path / "models.py").write_text("import numpy.linalg, os\nIMPORTED_BY = os.getpid()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with this_host().spawn_procs(per_host={"gpus": 2}, preload=["models"]) as procs:
        assert ask(procs, import_and_get, "models", "IMPORTED_BY") == ask(procs, os.getppid)


@pytest.mark.slow
def test_a_module_that_starts_threads_is_named_with_the_remedy(script: Any, tmp_path: Path) -> None:
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("import pack.calm, pack.busy\n")
    (tmp_path / "pack" / "calm.py").write_text("")
    (tmp_path / "pack" / "busy.py").write_text(
        "import threading\nfor _ in range(2): threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    (tmp_path / "outer.py").write_text("import pack\n")
    run = script(
        """
        from mesh_core import this_host

        if __name__ == "__main__":
            with this_host().spawn_procs(preload=["json", "outer"]) as procs:
                procs.initialized.get()
        """
    )
    _, err = run.finish()
    assert "preload='outer' imports 'pack.busy', which started 2 threads when it was imported" in err
    assert "To fork them, leave 'pack.busy' out of what is preloaded" in err


@pytest.mark.slow
@pytest.mark.once
def test_exit_handlers_of_the_interpreters_start_run_in_workers(
    script: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    """Like those of coverage tools; handlers of preloaded modules belong to the process that imported them."""
    notes = tmp_path / "notes"
    notes.mkdir()
    for module, name in (("sitecustomize", "start"), ("preloaded", "preload")):
        (tmp_path / f"{module}.py").write_text(
            "import atexit, os, pathlib\n"
            f"atexit.register(lambda: pathlib.Path({str(notes)!r}, f'{name}-{{os.getpid()}}').touch())\n"
        )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    run = script(
        """
        from mesh_core import this_host

        if __name__ == "__main__":
            with this_host().spawn_procs({"gpus": 2}, preload=["preloaded"]) as procs:
                print(*procs.pids)
        """
    )
    out, err = run.finish()
    workers = out.split()
    assert len(workers) == 2, err
    assert {f"start-{pid}" for pid in [*workers, run.process.pid]} == {path.name for path in notes.iterdir()}


# Bootstrapping.


@Start
def test_bootstrap_runs_before_any_actor(start: Any) -> None:
    def prepare() -> None:
        os.environ["PREPARED"] = str(os.getpid())

    with this_host().spawn_procs(per_host={"gpus": 2}, bootstrap=prepare, start=start) as procs:
        assert ask(procs, environment, "PREPARED") == [str(pid) for pid in procs.pids]
        procs.initialized.get()


def test_a_bootstrap_that_raises() -> None:
    def fail() -> None:
        raise RuntimeError("not on this machine")

    with this_host().spawn_procs(per_host={"gpus": 2}, bootstrap=fail, name="workers") as procs:
        with pytest.raises(RuntimeError, match="not on this machine") as caught:
            procs.initialized.get()
        assert isinstance(caught.value, MeshError)
        assert "raised as RuntimeError by the bootstrap of processes 'workers' on rank" in str(caught.value)
        echo = procs.spawn("echo", Echo)
        reason = "its bootstrap raised RuntimeError: not on this machine"
        for future in (echo.echo.call(1), echo.slice(gpus=1).echo.call_one(1), echo.initialized):  # type: ignore[attr-defined]
            with pytest.raises(SupervisionError, match=reason) as died:
                future.get()
            assert isinstance(died.value.__cause__, RuntimeError)
        # Other callers are told of it too.
        with this_host().spawn_procs() as others:
            [said] = ask(others, call_and_say, echo)
        assert reason in said


def call_and_say(mesh: Any) -> str:
    try:
        mesh.echo.call(1).get()
    except SupervisionError as error:
        return str(error)
    return "no error"


def test_a_bootstrap_that_is_not_a_function() -> None:
    with pytest.raises(TypeError, match="bootstrap must be a function without arguments, got 3"):
        this_host().spawn_procs(bootstrap=3)  # type: ignore[arg-type]


# Names and ends.


def test_names() -> None:
    with this_host().spawn_procs(name="workers") as named, this_host().spawn_procs() as first:
        assert named.name == "workers"
        assert first.name.startswith("procs")
        with this_host().spawn_procs() as second:
            assert second.name != first.name


def test_stop_twice() -> None:
    procs = this_host().spawn_procs(per_host={"gpus": 2})
    assert procs.stop().get() is None
    assert procs.stop("again").get() is None
    with procs:
        pass


def test_a_part_of_a_mesh_stops_alone() -> None:
    with this_host().spawn_procs(per_host={"gpus": 2}) as procs:
        pids = procs.pids
        procs.slice(gpus=0).stop().get(timeout=30)
        assert procs.pids == [None, pids[1]]
        assert ask(procs.slice(gpus=1), os.getpid) == pids[1:]


def test_a_with_block_stops_them_after_an_error_too() -> None:
    procs = this_host().spawn_procs()
    [pid] = ask(procs, os.getpid)
    with pytest.raises(KeyError), procs:
        raise KeyError
    assert not Path(f"/proc/{pid}").exists()


def test_async_with() -> None:
    async def main() -> list[int]:
        async with this_host().spawn_procs(per_host={"gpus": 2}) as procs:
            echo = await procs.spawn("echo", Echo)
            values: list[int] = (await echo.call.call(os.getpid)).values()
            return values

    pids = asyncio.run(main())
    assert len(pids) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_proc_mesh() -> None:
    async def main() -> int:
        procs = await proc_mesh(gpus=2, env={"MESH_CORE_TEST_SHORT": "form"})
        async with procs:
            values = (await procs.spawn("echo", Echo).call.call(environment, "MESH_CORE_TEST_SHORT")).values()
        assert values == ["form"] * 2
        return len(procs)

    assert asyncio.run(main()) == 2


def test_spawn_returns_before_the_processes_are_up() -> None:
    with this_host().spawn_procs(per_host={"gpus": 4}) as procs:
        waiting = procs.spawn("echo", Echo).call.call(os.getpid)
        assert not waiting.done() or procs.initialized.done()
        assert waiting.get().values() == procs.pids


def test_a_mesh_that_is_stopped_before_it_is_up() -> None:
    for _ in range(5):
        this_host().spawn_procs(per_host={"gpus": 4}).stop().get()


# Numbers of processes.


@pytest.mark.parametrize("count", [0, -1, True, 1.5, "2"])
def test_an_invalid_number(count: Any) -> None:
    with pytest.raises(ValueError, match=r"per_host\['gpus'\] must be a whole number of at least 1"):
        this_host().spawn_procs(per_host={"gpus": count})


@pytest.mark.parametrize("sizes", [{"gpus": 1_000_000}, {"a": 10**6, "b": 10**6}])
def test_a_million(sizes: Any) -> None:
    with pytest.raises(ValueError, match="more than a host can hold; the most is 100,000"):
        this_host().spawn_procs(per_host=sizes)


def test_the_size_is_refused_from_one_process_more_than_a_host_can_hold() -> None:
    """The largest one gets as far as the next check."""
    with pytest.raises(ValueError, match="'fork' or 'exec', got 'never'"):
        this_host().spawn_procs(per_host={"a": 1000, "b": 100}, start="never")  # type: ignore[call-overload]
    with pytest.raises(ValueError, match=r"100,001 processes .* are more than a host can hold"):
        this_host().spawn_procs(per_host={"gpus": 100_001}, start="never")  # type: ignore[call-overload]


def test_more_than_the_hard_limit_of_descriptors_allows(script: Any) -> None:
    run = script(
        """
        import resource
        from mesh_core import SpawnError, this_host
        from core_samples import Echo

        if __name__ == "__main__":
            resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
            try:
                this_host().spawn_procs(per_host={"gpus": 1000})
            except SpawnError as error:
                print(error)
            with this_host().spawn_procs(per_host={"gpus": 4}) as procs:
                print(procs.spawn("echo", Echo).echo.call(1).get().values())
        """
    )
    lines = run.finish()[0].splitlines()
    assert re.search(r"this needs \d{4} open files, and the hard limit is 256", lines[0])
    assert lines[1] == "[1, 1, 1, 1]"


def test_no_descriptor_is_left_at_a_spawn(script: Any) -> None:
    """The error names the limit, whatever could not be opened first."""
    run = script(
        """
        import os, resource
        from mesh_core import MeshError, this_host

        with this_host().spawn_procs() as procs:
            procs.initialized.get(timeout=30)
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
        taken = []
        try:
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        except OSError:
            pass
        for _ in range(8):
            try:
                this_host().spawn_procs()
                print("spawned")
            except MeshError as error:
                print("open files" in str(error) and "256" in str(error), error)
            os.close(taken.pop())
        """
    )
    lines = run.finish()[0].splitlines()
    assert len(lines) == 8
    assert [line for line in lines if not line.startswith("True")] == []


@pytest.mark.once
@pytest.mark.slow
def test_the_soft_limit_of_descriptors_is_raised(script: Any) -> None:
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 600:
        pytest.skip("the hard limit of open files is too low here")
    run = script(
        """
        import resource
        from mesh_core import this_host
        from core_samples import Echo

        if __name__ == "__main__":
            hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            resource.setrlimit(resource.RLIMIT_NOFILE, (128, hard))
            with this_host().spawn_procs(per_host={"gpus": 100}) as procs:
                print(len(procs.spawn("echo", Echo).echo.call(1).get().values()))
        """
    )
    assert run.finish()[0].split() == ["100"]


# Functions on every process.


def add_here(a: int, b: int = 0) -> tuple[int, int]:
    return os.getpid(), a + b


async def add_later(a: int) -> int:
    await asyncio.sleep(0)
    return a + 1


def test_a_function_runs_on_every_process() -> None:
    with this_host().spawn_procs({"gpus": 2}) as procs:
        found = procs.run(add_here, 1, b=2).get(timeout=30)
        assert found.sizes == {"gpus": 2}
        assert found.values() == [(pid, 3) for pid in procs.pids]
        assert procs.slice(gpus=1).run(add_later, 1).get(timeout=30).values() == [2]
        assert procs.run(lambda: current_rank()["gpus"]).get(timeout=30).values() == [0, 1]
        with pytest.raises(ZeroDivisionError):
            procs.run(divmod, 1, 0).get(timeout=30)
        with pytest.raises(TypeError, match=r"run\(\) takes a function, got 3"):
            procs.run(3)  # type: ignore[call-overload]
        # Nothing is left of it.
        while any(proc.actors for proc in inspect.snapshot().procs if proc.pid in procs.pids):
            pass


def test_what_libraries_do_with_processes_is_hinted_at() -> None:
    with this_host().spawn_procs() as procs:
        with pytest.raises(
            AttributeError,
            match=r"no attribute 'activate': it is a function of mesh_tensor, with activate\(procs\)",
        ):
            procs.activate()
        assert not hasattr(procs, "anything")
        echo: Any = procs.spawn("echo", Echo)
        with pytest.raises(AttributeError, match=r"no attribute 'rref': write remote\(actors\.endpoint\)"):
            echo.call.rref()
        assert not hasattr(echo.call, "anything")
    with pytest.raises(AttributeError, match=r"'concurrent_endpoint': write endpoint\(concurrent=True\)"):
        getattr(sys.modules["mesh_core"], "concurrent_endpoint")  # noqa: B009 - type checkers know better
