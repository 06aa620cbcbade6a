"""What is shown of a running job: numbers for monitoring, and the screen of `mesh top`."""

from __future__ import annotations

import asyncio
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import urlopen

import pytest
from watched import actor, proc, snap

from mesh_core import MeshError, inspect, set_fault_handler, this_host
from mesh_core.inspect import (
    Event,
    JobInfo,
    LogText,
    ProcStacks,
    Running,
    Snapshot,
    StackFrame,
    ThreadStack,
)
from mesh_supervision import MetricsServer, export_metrics
from mesh_supervision._watching import _limited
from mesh_supervision._watching._dashboard import view
from mesh_supervision._watching._metrics import Failures, exposition
from mesh_supervision._watching._rows import Order, rows, summary

WITHIN = 30.0


def test_the_tree_shows_who_does_what() -> None:
    busy = actor(
        "trainers",
        0,
        queue=3,
        handled=1200,
        failed=1,
        rate=40.0,
        mean=7e-6,
        running=(Running("step", 1.5, "controller"),),
    )
    found = rows(snap(proc(0, busy), proc(1, actor("trainers", 1), state="silent", incarnation=2)))
    assert [row.cells for row in found] == [
        ("host b7", "", "running", "", "", "", "", "", "load 0.4/2", "12% of 25.0 GB"),
        ("  workers[0] (gpus=0)", "4242", "running", "", "", "", "", "", "1.0 s", "8.0 MB"),
        ("    trainers[0] Trainer", "", "step for 1.5 s", "3", "1,200", "1", "40/s", "7 µs", "", ""),
        ("  workers[1] (gpus=1), life 3", "4243", "silent", "", "", "", "", "", "1.0 s", "8.0 MB"),
        ("    trainers[1] Trainer", "", "idle", "", "", "", "", "", "", ""),
    ]
    assert [row.is_bad for row in found] == [False, False, True, True, False]
    assert summary(snap(proc(0, busy))) == "1 host, 1 process, 1 actor, 3 waiting, 40 handled/s"


def test_the_processor_is_what_was_used_since_the_last_look() -> None:
    before, now = snap(proc(0, cpu=1.0), at=10.0), snap(proc(0, cpu=2.0), at=12.0)
    assert rows(now, before)[1].cells[8] == "50%"
    # Another process in the same place has used nothing before.
    assert rows(snap(proc(0, cpu=0.5, pid=9), at=12.0), before)[1].cells[8] == "0.5 s"


def test_actors_are_ordered_by_what_they_have_most_of_and_found_by_a_text() -> None:
    one, two = actor("trainers", 0, queue=1, rate=9.0), actor("readers", 1, queue=5, rate=2.0)
    both = snap(proc(0, one), proc(1, two))
    assert [row.cells[0] for row in rows(both, order=Order.QUEUE)] == [
        "readers[1] Trainer",
        "trainers[0] Trainer",
    ]
    assert [row.cells[0] for row in rows(both, order=Order.RATE)] == [
        "trainers[0] Trainer",
        "readers[1] Trainer",
    ]
    assert [row.key for row in rows(both, wanted="readers")] == [
        "host 0",
        "proc workers[1]",
        "actor workers[1] 101",
    ]
    assert Order.BUSY.next is Order.TREE


def test_numbers_are_in_the_text_format_of_prometheus() -> None:
    text = exposition(
        snap(proc(0, actor('odd "name"\\', 0, handled=7, mean=0.25)), proc(1, cpu=None, state="stopped"))
    )
    lines = text.splitlines()
    assert "# TYPE mesh_actor_handled_total counter" in lines
    assert "# TYPE mesh_actor_queue gauge" in lines
    labels = 'actor="odd \\"name\\"\\\\",class="Trainer",rank="0",process="workers[0]",id="100"'
    assert f"mesh_actor_handled_total{{{labels}}} 7" in lines
    assert f"mesh_actor_handling_seconds{{{labels}}} 0.25" in lines
    assert 'mesh_process_up{process="workers[1]",mesh="workers",rank="1",host="b7"} 0' in lines
    # Of what is not known there is no number.
    assert sum(line.startswith("mesh_process_cpu_seconds_total{") for line in lines) == 1
    assert all(
        re.fullmatch(r'[a-z_]+(\{([a-z]+="([^"\\]|\\.)*",?)*\})? \S+', line)
        for line in lines
        if line[0] != "#"
    )


@pytest.mark.slow
def test_a_job_serves_its_numbers() -> None:
    with this_host().spawn_procs({"gpus": 2}, name="workers") as procs:
        procs.initialized.get(timeout=WITHIN)
        with MetricsServer(0) as server:
            with urlopen(server.url, timeout=WITHIN) as answer:
                assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
                text = answer.read().decode()
            assert text.count("\nmesh_process_up{") == 3
            with pytest.raises(HTTPError, match="404"):
                urlopen(server.url.replace("metrics", "else"), timeout=WITHIN)
            port = int(server.url.rsplit(":", 1)[1].partition("/")[0])
            with pytest.raises(MeshError, match=f"cannot serve metrics at 127.0.0.1:{port}"):
                MetricsServer(port)


@pytest.mark.slow
def test_a_rank_that_has_died_stays_visible_until_it_is_respawned() -> None:
    """In the snapshot, in numbers, in rows and in the grid."""
    before = set_fault_handler(lambda _: True)
    try:
        with (
            this_host().spawn_procs({"gpus": 3}, name="workers") as procs,
            MetricsServer(0) as server,
        ):
            procs.initialized.get(timeout=WITHIN)
            [_, pid, _] = procs.pids
            assert pid is not None

            def numbers() -> dict[str, str]:
                text = urlopen(server.url, timeout=WITHIN).read().decode()
                return dict(line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")

            died = 'mesh_failures_total{kind="proc_died",mesh="workers"}'
            # Of meshes of that name before this one.
            count = int(numbers().get(died, "0"))
            os.kill(pid, signal.SIGKILL)
            until(procs.failed)

            def up(rank: int) -> str | None:
                return next(
                    (
                        value
                        for name, value in numbers().items()
                        if name.startswith(
                            f'mesh_process_up{{process="workers[{rank}]",mesh="workers",rank="{rank}"'
                        )
                    ),
                    None,
                )

            until(lambda: up(1) == "0")
            assert (up(0), up(2)) == ("1", "1")
            assert numbers()[died] == str(count + 1)
            snap = inspect.snapshot()
            assert [(each.name, each.state, each.point) for each in snap.dead] == [
                ("workers[1]", "dead", {"gpus": 1})
            ]
            assert [row.is_bad for row in rows(snap) if "workers[1]" in row.cells[0]] == [True]
            assert "1 dead rank" in summary(snap)
            shown = [each["state"] for each in view(snap)["hosts"][0]["procs"] if each["mesh"] == "workers"]
            assert shown == ["running", "dead", "running"]
            assert re.search(r"workers\[1\] \(gpus=1\) +- +dead", str(snap))
            procs.respawn().get(timeout=WITHIN)
            until(lambda: up(1) == "1")
            assert inspect.snapshot().dead == ()
            # A counter does not go back.
            assert numbers()[died] == str(count + 1)
            for pid in procs.pids:
                assert pid is not None
                os.kill(pid, signal.SIGKILL)
            until(lambda: [up(0), up(1), up(2)] == ["0", "0", "0"])
            assert [row.is_bad for row in rows(inspect.snapshot()) if "workers[" in row.cells[0]] == [
                True
            ] * 3
        # It is meant to be gone.
        assert inspect.snapshot().dead == ()
    finally:
        set_fault_handler(before)


def test_failures_are_counted_once_and_never_forgotten() -> None:
    def event(at: float) -> Event:
        return Event("proc_died", at, proc="workers[1]", host="b7")

    failures = Failures()
    for remembered, count in (([1.0], 1), ([1.0, 2.0], 2), ([2.0], 2), ([], 2), ([3.0], 3)):
        text = exposition(replace(snap(), failures=tuple(map(event, remembered))), failures)
        assert f'mesh_failures_total{{kind="proc_died",mesh="workers"}} {count}' in text.splitlines()


def until(met: Callable[[], object]) -> None:
    end = time.monotonic() + WITHIN
    while not met():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_job_that_does_not_answer_is_no_number() -> None:
    def silent() -> Snapshot:
        raise MeshError("it has ended")

    with MetricsServer(0, snapshot=silent) as server, pytest.raises(HTTPError, match="503"):
        urlopen(server.url, timeout=WITHIN)


def test_many_silent_connections_cost_a_script_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """LIM-1: every user of the machine can connect. Those that say nothing are cut off, and others are answered again."""
    monkeypatch.setattr(_limited.LimitedHandler, "timeout", 0.5)
    before = descriptors(), threading.active_count()
    with MetricsServer(0, snapshot=lambda: (_ for _ in ()).throw(MeshError("it has ended"))) as server:
        port = urlsplit(server.url).port
        crowd = [socket.create_connection(("127.0.0.1", port), timeout=WITHIN) for _ in range(100)]
        try:
            # The last ones are closed at once.
            assert crowd[-1].recv(1) == b""
            assert descriptors() - before[0] <= 2 + len(crowd) + _limited.MOST
            assert threading.active_count() - before[1] <= 1 + _limited.MOST
            assert crowd[0].recv(1) == b""
            until(lambda: answers(server.url, 503))
        finally:
            for each in crowd:
                each.close()
    until(lambda: threading.active_count() <= before[1])


def test_a_request_that_comes_byte_by_byte_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """LIM-1."""
    monkeypatch.setattr(_limited, "_LONGEST_S", 0.3)

    def drip(slow: socket.socket) -> None:
        while True:
            slow.sendall(b"x")
            time.sleep(0.02)

    with (
        MetricsServer(0) as server,
        socket.create_connection(("127.0.0.1", urlsplit(server.url).port), timeout=WITHIN) as slow,
        pytest.raises(OSError, match=r"Broken pipe|reset"),
    ):
        drip(slow)


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def answers(url: str, status: int) -> bool:
    try:
        urlopen(url, timeout=WITHIN).close()
    except HTTPError as error:
        error.close()
        return error.code == status
    except OSError:  # closed: there is no room yet
        return False
    return status == 200


def test_opentelemetry_reads_the_same_numbers() -> None:
    export = pytest.importorskip("opentelemetry.sdk.metrics.export")
    metrics = pytest.importorskip("opentelemetry.sdk.metrics")
    reader = export.InMemoryMetricReader()
    provider = metrics.MeterProvider([reader])
    looked: list[int] = []

    def look() -> Snapshot:
        looked.append(1)
        return snap(proc(0, actor("trainers", 0, handled=7)))

    export_metrics(provider.get_meter("mesh"), look)
    (resource,) = reader.get_metrics_data().resource_metrics
    found = {metric.name: metric for scope in resource.scope_metrics for metric in scope.metrics}
    (handled,) = found["mesh_actor_handled_total"].data.data_points
    assert handled.value == 7
    assert handled.attributes["actor"] == "trainers"
    assert found["mesh_process_resident_bytes"].unit == "By"
    assert looked == [1], "one snapshot for all"
    provider.shutdown()


class Job:
    """A job on paper."""

    info = JobInfo(
        pid=4711,
        script="/home/me/train.py",
        host="b7",
        began=0.0,
        folder="/home/me",
        version="0",
        id="0" * 16,
    )

    def __init__(self) -> None:
        self.snap = snap(proc(0, actor("trainers", 0, queue=1)), proc(1, actor("readers", 1, queue=5)))
        self.looks = 0

    def snapshot(self, timeout: float = 1.0, *, pss: bool = True) -> Snapshot:
        self.looks += 1
        if self.looks > 50:
            raise MeshError("job 4711 has ended")
        return self.snap

    def stacks(self, mesh: str = "", timeout: float = 2.0) -> tuple[ProcStacks, ...]:
        assert mesh == "workers"
        frame = StackFrame("train.py", 13, "step")
        thread = ThreadStack(ident=1, name="trainers", running=("trainers.step for 1.2 s",), frames=(frame,))
        return tuple(
            ProcStacks(proc=f"workers[{rank}]", pid=1, threads=(thread,), error="") for rank in range(2)
        )

    def logs(self) -> Iterator[LogText]:
        yield LogText("a line of a worker\n", False, 0)


def seen(app: Any) -> str:
    """The text that is on the screen now."""
    lines = app.screen._compositor.render_strips()  # noqa: SLF001 - there is no other way to see it
    return "\n".join(line.text.rstrip() for line in lines)


@pytest.mark.slow
def test_the_screen_is_driven_by_keys() -> None:
    top = pytest.importorskip("mesh_supervision._watching._top", reason="textual is not installed")

    async def until(pilot: Any, *wanted: str) -> str:
        end = time.monotonic() + WITHIN
        while not all(each in (text := seen(pilot.app)) for each in wanted):
            assert time.monotonic() < end, text
            await pilot.pause()
        return text

    async def drive() -> str | None:
        app = top.Top(Job(), interval=3600)
        async with app.run_test(size=(130, 30)) as pilot:
            text = await until(
                pilot, "train.py [4711]: 1 host, 2 processes, 2 actors, 6 waiting", "readers[1] Trainer"
            )
            assert text.index("trainers[0]") < text.index("readers[1]")
            await pilot.press("s")
            text = await until(pilot, "(by queue)")
            assert text.index("readers[1]") < text.index("trainers[0]")
            await pilot.press("enter")
            await until(pilot, "train.py", "line 13", "step")
            await pilot.press("escape", "slash", *"train", "enter")
            text = await until(pilot, "only 'train'")
            assert "readers[1]" not in text
            await pilot.press("l")
            await until(pilot, "a line of a worker")
            await pilot.press("p")
            await until(pilot, "paused")
            await pilot.press("q")
        return app.return_value

    assert asyncio.run(drive()) == ""


@pytest.mark.slow
def test_the_screen_ends_with_the_job() -> None:
    top = pytest.importorskip("mesh_supervision._watching._top", reason="textual is not installed")
    job = Job()
    job.looks = 50

    async def drive() -> str | None:
        app = top.Top(job, interval=3600)
        async with app.run_test():
            pass
        return app.return_value

    assert asyncio.run(drive()) == "job 4711 has ended"


JOB = """
import sys
import threading
from mesh_core import Actor, endpoint, this_host

class Trainer(Actor):
    @endpoint
    def step(self) -> int:
        return 1

with this_host().spawn_procs({"gpus": 2}, name="workers") as procs:
    trainers = procs.spawn("trainers", Trainer)
    trainers.step.call().get(timeout=30)
    print("ready", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def job(tmp_path: Path) -> Iterator[int]:
    """Another process that drives a job; its pid."""
    script = tmp_path / "train.py"
    script.write_text(JOB)
    ends = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, str(script)], **ends) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == b"ready\n"
        yield process.pid
        process.stdin.close()


MESH = [sys.executable, "-m", "mesh_core.cli"]


@pytest.mark.slow
def test_the_commands_show_another_job(job: int) -> None:
    once = subprocess.run(
        [*MESH, "metrics", "--job", str(job), "--once"], capture_output=True, text=True, timeout=WITHIN
    )
    assert once.returncode == 0, once.stderr
    assert 'mesh_actor_handled_total{actor="trainers",class="Trainer",rank="1"' in once.stdout
    piped = subprocess.run([*MESH, "top", "--job", str(job)], capture_output=True, text=True, timeout=WITHIN)
    if "Textual" not in piped.stderr:
        assert "needs a terminal" in piped.stderr
    nobody = subprocess.run(
        [*MESH, "metrics", "--job", "1", "--once"], capture_output=True, text=True, timeout=WITHIN
    )
    assert nobody.returncode != 0
    assert "1" in nobody.stderr


@pytest.mark.slow
def test_top_draws_another_job_on_a_terminal(job: int) -> None:
    pytest.importorskip("textual")
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ.update(TERM="xterm-256color", COLUMNS="120", LINES="30")
        os.execv(sys.executable, [*MESH, "top", "--job", str(job)])
    text, end = "", time.monotonic() + WITHIN
    try:
        while "trainers[1]" not in text:
            assert time.monotonic() < end, text
            if select.select([terminal], [], [], 1.0)[0]:
                text += os.read(terminal, 65536).decode(errors="replace")
        assert "train.py" in text
        os.write(terminal, b"q")
        while True:
            try:
                if not os.read(terminal, 65536):
                    break
            except OSError:
                break
    finally:
        os.close(terminal)
        _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
