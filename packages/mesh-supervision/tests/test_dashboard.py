"""The page of a running job: what it is told, whom it is told to, and what a browser makes of it."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from browser import CHROMIUM, Browser
from watched import actor, proc, snap

from mesh_core import MeshError
from mesh_core.inspect import (
    Event,
    HostState,
    JobInfo,
    LogText,
    ProcStacks,
    Running,
    Snapshot,
    StackFrame,
    ThreadStack,
)
from mesh_supervision import Dashboard
from mesh_supervision._watching._dashboard import view

WITHIN = 30.0


class PaperJob:
    """A job that is where the test says."""

    info = JobInfo(4242, "/home/ada/train.py", "b7", 0.0, "/home/ada", "0.1.0")

    def __init__(self) -> None:
        self.looks = 0
        self.procs = [proc(0, actor("trainers", 0, handled=5)), proc(1, actor("trainers", 1))]
        self.failures: tuple[Event, ...] = ()
        self.trouble = ""
        self.over = threading.Event()

    def snapshot(self, timeout: float = 1.0, *, pss: bool = True) -> Snapshot:
        self.looks += 1
        if self.trouble:
            raise MeshError(self.trouble)
        hosts = snap(*self.procs).hosts
        return Snapshot(1000.0 + self.looks, hosts, self.failures)

    def stacks(self, mesh: str = "", timeout: float = 2.0) -> tuple[ProcStacks, ...]:
        assert mesh == "workers"
        frame = StackFrame("/home/ada/train.py", 17, "backward_of_loss")
        thread = ThreadStack(1, "trainers", ("trainers.step for 3.2 s",), (frame,))
        return tuple(ProcStacks(f"workers[{rank}]", 4242 + rank, (thread,)) for rank in range(8))

    def logs(self) -> Iterator[LogText]:
        yield LogText("[workers gpus=0] step 1\n[workers gpus=0] <b>step</b> 2\n", False)
        yield LogText("[workers gpus=1] no memory\n", True, 7)
        self.over.wait(WITHIN)


@pytest.fixture
def job() -> Iterator[PaperJob]:
    made = PaperJob()
    yield made
    made.over.set()


@pytest.fixture
def board(job: PaperJob) -> Iterator[Dashboard]:
    with Dashboard(job, interval=0.0) as made:
        yield made


def ask(
    board: Dashboard, path: str, *, token: str | None = None, method: str = "GET", **headers: str
) -> tuple[int, dict[str, str], bytes]:
    """The status, the headers and the body of an answer; with the dashboard's own token unless another is given."""
    parts = urlsplit(board.url)
    assert parts.hostname is not None
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=WITHIN)
    shown = parts.fragment if token is None else token
    try:
        connection.request(method, path, headers={"Authorization": f"Bearer {shown}", **headers})
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


def told(board: Dashboard, what: str) -> Any:
    status, _, body = ask(board, "/api/" + what)
    assert status == 200, body
    return json.loads(body)


def test_the_page_gets_all_places_and_states() -> None:
    busy = actor(
        "trainers", 0, queue=3, handled=12, rate=4.0, mean=0.5, running=(Running("step", 1.5, "controller"),)
    )
    before, now = snap(proc(0, busy, cpu=1.0), at=10.0), snap(proc(0, busy, cpu=2.0, incarnation=2), at=12.0)
    found = view(now, before)
    (host,) = found["hosts"]
    (one,) = host["procs"]
    assert (host["name"], host["state"], host["cpus"]) == ("b7", "running", 2)
    assert (one["mesh"], one["point"], one["cpu"], one["life"]) == ("workers", {"gpus": 0}, 0.5, 3)
    (shown,) = one["actors"]
    assert shown["running"] == [{"endpoint": "step", "seconds": 1.5, "caller": "controller"}]
    assert (shown["queue"], shown["handled"], shown["rate"], shown["mean"]) == (3, 12, 4.0, 0.5)
    # Numbers of actors are longer than those of the page's language.
    assert shown["id"] == "100"
    assert view(now)["hosts"][0]["procs"][0]["cpu"] is None
    json.dumps(found)


def test_nothing_of_the_job_is_told_without_the_token(board: Dashboard, job: PaperJob) -> None:
    """DSH-1."""
    for token in ("", "guess", urlsplit(board.url).fragment[:-1], urlsplit(board.url).fragment + "x", "ü"):
        for what in ("look", "logs", "stacks?proc=workers[0]", "else"):
            status, _, body = ask(board, f"/api/{what}", token=token.encode().decode("latin-1"))
            assert status == 403 and "token" in json.loads(body)["error"]
    assert job.looks == 0
    # The page itself holds nothing of it.
    token = urlsplit(board.url).fragment
    for path in ("/", "/page.js", "/page.css"):
        status, headers, body = ask(board, path, token="")
        assert status == 200 and token.encode() not in body
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert "unsafe" not in headers["Content-Security-Policy"]
        assert headers["Cache-Control"] == "no-store"
    with Dashboard(job) as other:
        assert ask(other, "/api/look", token=token)[0] == 403


def test_names_of_the_net_that_lead_here_are_refused(board: Dashboard, job: PaperJob) -> None:
    """DSH-2."""
    port = urlsplit(board.url).port
    assert ask(board, "/api/look", Host=f"localhost:{port}")[0] == 200
    for name in (f"evil.example:{port}", "127.0.0.1", "127.0.0.1:1", f"127.0.0.1.evil.example:{port}"):
        status, _, body = ask(board, "/api/look", Host=name)
        assert status == 421 and b"b7" not in body
    assert job.looks == 1
    assert ask(board, "/api/look", method="POST")[0] == 501
    for path in ("/page.py", "/../pyproject.toml", "/api", "/index.html"):
        assert ask(board, path)[0] == 404, path


def test_it_is_looked_at_when_asked_and_no_more_often_than_said(job: PaperJob) -> None:
    with Dashboard(job, interval=1000.0) as board:
        assert job.looks == 0
        looks = [told(board, "look") for _ in range(3)]
        assert job.looks == 1 and looks[0] == looks[1] == looks[2]
    with Dashboard(job, interval=0.0) as board:
        told(board, "look")
        told(board, "look")
    assert job.looks == 3


def test_stacks_and_lines_are_shown_on_demand(board: Dashboard) -> None:
    found = told(board, "stacks?proc=workers%5B1%5D")
    assert found["proc"] == "workers[1]" and "train.py" in found["text"] and "4243" in found["text"]
    assert "4242" not in found["text"]
    lines: list[dict[str, Any]] = []
    while len(lines) < 4:
        lines += told(board, f"logs?after={lines[-1]['number'] if lines else 0}")
    assert [each["number"] for each in lines] == [1, 2, 3, 4]
    assert [each["text"] for each in lines] == [
        "[workers gpus=0] step 1",
        "[workers gpus=0] <b>step</b> 2",
        "... 7 lines are missing here",
        "[workers gpus=1] no memory",
    ]
    assert [each["error"] for each in lines] == [False, False, True, True]
    assert told(board, "logs?after=4") == []
    assert len(told(board, "logs?after=-1")) == 4


def test_a_job_that_has_ended_is_said_to_have(board: Dashboard, job: PaperJob) -> None:
    job.trouble = "the job has ended"
    status, _, body = ask(board, "/api/look")
    assert (status, json.loads(body)) == (503, {"error": "the job has ended"})
    job.trouble = ""
    assert told(board, "look")["pid"] == 4242


def test_a_port_that_is_taken_is_named(board: Dashboard, job: PaperJob) -> None:
    port = urlsplit(board.url).port
    assert port is not None
    with pytest.raises(MeshError, match=f"cannot serve the dashboard at 127.0.0.1:{port}.*Choose another"):
        Dashboard(job, port)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed: apt install chromium")
def test_a_browser_shows_it(job: PaperJob, tmp_path: Path) -> None:
    rows = [
        proc(
            rank,
            actor("trainers", rank),
            name=f"workers[{rank}]",
            point={"hosts": rank // 4, "gpus": rank % 4},
        )
        for rank in range(8)
    ]
    rows[5] = proc(
        5, actor("<i>odd</i>", 5), name="workers[5]", point={"hosts": 1, "gpus": 1}, state="silent"
    )
    job.procs = rows
    with Dashboard(job, interval=0.05) as board, Browser(tmp_path / "profile") as browser:
        browser.open(board.url.partition("#")[0])
        browser.until("document.querySelector('#state').textContent.includes('token')")
        browser.open("about:blank")
        browser.open(board.url)
        browser.until("document.querySelectorAll('.cell').length === 8")
        assert (
            browser.run(
                "getComputedStyle(document.querySelector('.grid')).gridTemplateColumns.split(' ').length"
            )
            == 5
        )
        assert browser.run("document.querySelectorAll('.cell.bad').length") == 1
        assert browser.run("document.title") == "mesh: train.py"
        browser.until("document.querySelector('#logs pre').textContent.includes('<b>step</b> 2')")
        # By the keyboard alone: to the process that is silent, its details, its stacks.
        for _ in range(6):
            browser.press("ArrowRight")
        browser.until("document.activeElement.dataset.proc === 'workers[5]'")
        browser.press("Enter")
        browser.until("!document.querySelector('#details').hidden")
        said = browser.run("document.querySelector('#details').textContent")
        assert "<i>odd</i>[5]" in said and "silent" in said and "null" not in said
        browser.press("s")
        browser.until("document.querySelector('#details pre')?.textContent.includes('backward_of_loss')")
        # What is new comes by itself, and nothing that was chosen is lost.
        job.failures = (
            Event("failure", 1.0, proc="workers[3]", text="RuntimeError: no memory\n  caused by: rank 3"),
        )
        browser.until("document.querySelector('#failures summary')?.textContent.includes('no memory')")
        assert browser.run("document.title") == "(1) mesh: train.py"
        assert browser.run("document.querySelector('.cell.chosen').dataset.proc") == "workers[5]"
        browser.press("Escape")
        browser.until("document.querySelector('#details').hidden")
        job.trouble = "the job has ended"
        browser.until("document.querySelector('#state').textContent === 'the job has ended'")


@pytest.mark.slow
def test_the_command_serves_a_job_until_it_is_interrupted(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(
        "import sys\n"
        "from mesh_core import this_host\n"
        "with this_host().spawn_procs({'gpus': 2}, name='workers') as procs:\n"
        "    procs.initialized.get(timeout=30)\n"
        "    print('ready', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None and running.stdout.readline() == "ready\n"
        words = [sys.executable, "-m", "mesh_core", "dashboard", "--job", str(running.pid)]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as command:
            assert command.stdout is not None
            line = command.stdout.readline()
            assert line.startswith(f"job {running.pid} is shown at http://127.0.0.1:"), line

            class At:
                url = line.split()[-1]

            found = told(At, "look")  # type: ignore[arg-type]
            assert sorted(each["name"] for each in found["hosts"][0]["procs"]) == [
                "controller",
                "workers[0]",
                "workers[1]",
            ]
            assert "workers[1]" in told(At, "stacks?proc=workers%5B1%5D")["text"]  # type: ignore[arg-type]
            os.kill(command.pid, signal.SIGINT)
            assert command.wait(WITHIN) == 0
        running.communicate("", timeout=WITHIN)


def test_hosts_that_are_gone_are_shown_as_that() -> None:
    host = HostState("b9", 0, 0.0, 0, 0, (), state="dead", number=3)
    (shown,) = view(Snapshot(1.0, (host,), ()))["hosts"]
    assert (shown["state"], shown["procs"]) == ("dead", [])
