"""Look into a job from another process: who may, what is answered, and how misuse ends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mesh_core import Actor, MeshError, endpoint, inspect, shutdown, this_host
from mesh_core._common import peers
from mesh_core._features.debug import places as _places
from mesh_core._features.debug.wire import Wire
from mesh_core.cli import main
from mesh_core.inspect._socket_server import MOST

pytestmark = [pytest.mark.slow]
SOON = 30.0

JOB = """
import sys
from mesh_core import Actor, endpoint, this_host

class Talker(Actor):
    @endpoint
    def say(self, text: str) -> None:
        print(text)
    @endpoint
    def wait_here(self) -> None:
        import threading
        threading.Event().wait()

if __name__ == "__main__":
    procs = this_host().spawn_procs({"gpus": 2}, name="workers")
    talkers = procs.spawn("talkers", Talker)
    talkers.initialized.get(timeout=60)
    print("up", flush=True)
    for line in sys.stdin:
        do, _, rest = line.strip().partition(" ")
        if do == "say":
            talkers.slice(gpus=0).say.call_one(rest).get(timeout=60)
        elif do == "wait":
            talkers.slice(gpus=1).wait_here.broadcast()
        elif do == "spawn":
            with this_host().spawn_procs(name=rest) as more:
                more.initialized.get(timeout=60)
        sys.stdout.write(f"did {do}\\n")  # at once: workers' lines are written by another thread
        sys.stdout.flush()
"""


class Job:
    """A script that follows instructions, line by line."""

    def __init__(self, path: Path) -> None:
        path.write_text(JOB)
        self.process = subprocess.Popen(
            [sys.executable, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pid = self.process.pid
        self.line("up")

    def line(self, wanted: str) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.strip() == wanted:
                return
        raise AssertionError(f"the job has ended without saying {wanted!r}")

    def do(self, what: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{what}\n")
        self.process.stdin.flush()
        self.line(f"did {what.partition(' ')[0]}")

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        _places.forget_job(self.pid)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path / "train.py")
    yield job
    job.end()


def mesh(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mesh_core.cli", "look", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < deadline
        os.sched_yield()


def test_a_job_is_found_and_looked_into(job: Job) -> None:
    (info,) = (each for each in inspect.jobs() if each.pid == job.pid)
    assert info.script.endswith("train.py") and info.folder == str(Path.cwd()) and info.began <= time.time()
    there = inspect.connect(job.pid)
    assert there.info == info
    shot = there.snapshot(timeout=10)
    assert [proc.name for proc in shot.procs] == ["controller", "workers[0]", "workers[1]"]
    assert [(actor.name, dict(actor.point)) for actor in shot.actors] == [
        ("talkers", {"gpus": 0}),
        ("talkers", {"gpus": 1}),
    ]
    assert shot.procs[0].pid == job.pid and "talkers" in str(shot)
    job.do("wait wait")
    until(lambda: any(actor.running for actor in there.snapshot(timeout=10).actors))
    by_name = {one.proc: one for one in there.stacks(timeout=10)}
    assert list(by_name) == ["controller", "workers[0]", "workers[1]"]
    assert "wait_here" in [frame.function for frame in by_name["workers[1]"].of("talkers").frames]
    assert [one.proc for one in there.stacks("workers", timeout=10)] == ["workers[0]", "workers[1]"]
    with pytest.raises(MeshError, match="no mesh of processes is called 'worker'; did you mean 'workers'"):
        there.stacks("worker")


def test_what_happens_is_followed_until_the_end(job: Job) -> None:
    there = inspect.connect(job.pid)
    # From the connection on; the events still kept show that it is established.
    followed = there.events(past=True)
    assert next(followed).kind == "procs_spawned"
    seen: list[str] = []
    job.do("spawn later")
    for event in followed:
        seen.append(f"{event.kind} {event.proc}")
        if seen[-1] == "proc_stopped later[0]":
            break
    assert "proc_up later[0]" in seen and there.missed == 0
    assert job.process.stdin is not None
    job.process.stdin.close()
    # The job ends, and so does the iteration.
    rest = [event.kind for event in followed]
    assert rest.count("proc_stopped") == 2 and set(rest) <= {"actor_stopped", "proc_stopped"}
    job.process.wait(SOON)
    with pytest.raises(MeshError, match=f"job {job.pid} cannot be reached: .*It has ended"):
        there.snapshot()
    assert job.pid not in [each.pid for each in inspect.jobs()]


def test_what_is_printed_is_followed(job: Job) -> None:
    texts: list[str] = []
    followed = inspect.connect(job.pid).logs()
    heard = threading.Event()

    def listen() -> None:
        for each in followed:
            texts.append(each.text)
            if "the last" in each.text:
                heard.set()
                return

    listener = threading.Thread(target=listen)
    listener.start()
    # Output from before it follows is not for it.
    deadline = time.monotonic() + SOON
    while not texts and time.monotonic() < deadline:
        job.do("say hello")
    job.do("say the last")
    assert heard.wait(SOON)
    listener.join(SOON)
    assert any("hello" in text for text in texts)


def test_a_killed_job_is_not_listed(job: Job) -> None:
    there = inspect.connect(job.pid)
    followed = there.events(past=True)
    next(followed)
    place = next(
        Path(folder, str(job.pid)) for folder in _places.folders() if Path(folder, str(job.pid)).is_dir()
    )
    assert (place / _places.INSPECTION).is_socket() and place.stat().st_mode & 0o077 == 0
    job.process.kill()
    job.process.wait()
    list(followed)
    assert (place / _places.INSPECTION).exists()
    assert job.pid not in [each.pid for each in inspect.jobs()]
    assert not place.exists()
    with pytest.raises(MeshError, match=f"no job {job.pid} of this user runs on this machine"):
        inspect.connect(job.pid)


def test_a_stopped_job_is_reported(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    from mesh_core.inspect import _remote

    monkeypatch.setattr(_remote, "_ANSWER_S", 0.3)
    there = inspect.connect(job.pid)
    os.kill(job.pid, signal.SIGSTOP)
    try:
        until(lambda: Path(f"/proc/{job.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
        assert job.pid not in [each.pid for each in inspect.jobs()]
        with pytest.raises(MeshError, match="does not answer: it may be stopped by a signal"):
            inspect.connect(job.pid)
        with pytest.raises(MeshError, match=r"did not answer within 0\.4 s"):
            there.snapshot(timeout=0.1)
    finally:
        os.kill(job.pid, signal.SIGCONT)
    assert there.snapshot(timeout=10).procs


class Idle(Actor):
    @endpoint
    def step(self) -> int:
        return 1


@pytest.fixture
def here() -> Iterator[str]:
    """Return the socket of a job that is this very process."""
    shutdown()
    procs = this_host().spawn_procs(name="workers")
    procs.spawn("idle", Idle).initialized.get(timeout=SOON)
    until(lambda: os.getpid() in [each.pid for each in inspect.jobs()])
    ((_, path, peer),) = _places.find_inspected(os.getpid())
    assert peer is not None
    peer.close()
    yield path
    shutdown()
    assert not Path(path).exists()


def looks() -> int:
    return sum(thread.name in ("mesh-look", "mesh-inspect") for thread in threading.enumerate())


def test_without_observers_there_is_no_cost(here: str) -> None:
    """INS-2."""
    until(lambda: looks() == 0)
    guest = Wire(_places.connect(here))
    guest.tell(do="describe")
    assert guest.hear(SOON)[0]["ok"]["pid"] == os.getpid()  # type: ignore[index]
    guest.close()
    until(lambda: looks() == 0)


@pytest.mark.parametrize("timeout", [0, 60])
def test_a_question_may_take_up_to_a_minute(here: str, timeout: float) -> None:
    guest = Wire(_places.connect(here))
    guest.tell(do="snapshot", timeout=timeout)
    heard = guest.hear(SOON)
    assert heard is not None and heard[0].keys() == {"ok"}
    guest.close()


@pytest.mark.sampled(3, full=True)
@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "invalid question"),
        (b"[1]\n", "invalid question: not an object"),
        (b"[" * 100_000 + b"\n", "invalid question"),
        (b"x" * (9 << 20), "invalid question: a line is too long"),
        (b"{}\n", "unknown question None; the questions are describe, snapshot"),
        (b'{"do": ["describe"]}\n', "unknown question ['describe']"),
        (b'{"do": "stop"}\n', "unknown question 'stop'"),
        (b'{"do": "snapshot", "timeout": "long"}\n', "timeout must be between 0 and 60 seconds, got 'long'"),
        (b'{"do": "snapshot", "timeout": 60.01}\n', "timeout must be between 0 and 60 seconds, got 60.01"),
        (b'{"do": "snapshot", "timeout": -0.01}\n', "timeout must be between 0 and 60 seconds, got -0.01"),
        (b'{"do": "stacks", "mesh": 7}\n', "mesh must be the name of a mesh of processes, got 7"),
    ],
)
def test_garbage_is_answered_and_changes_nothing(here: str, sent: bytes, said: str) -> None:
    """INS-1."""
    peer = _places.connect(here)
    peer.settimeout(SOON)
    # It may hang up before everything was sent.
    try:
        peer.sendall(sent)
    except OSError:
        assert len(sent) > 1 << 20
    heard = Wire(peer).hear(SOON)
    assert heard is not None and said in heard[0]["error"]
    peer.close()
    assert inspect.connect(os.getpid()).snapshot(timeout=10).procs


class Masked(Actor):
    @endpoint
    def stop_in(self, file: str, fifo: str) -> None:
        """Run code that is said to be in this file, until the other end of a fifo is closed."""
        exec(compile("open(fifo, 'wb').close(); open(fifo, 'rb').read()", file, "exec"), {"fifo": fifo})


def test_stacks_cannot_control_the_terminal(
    here: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fifo = str(tmp_path / "fifo")
    os.mkfifo(fifo)
    with this_host().spawn_procs(name="masked") as procs:
        running = procs.spawn("masked", Masked).stop_in.call_one("\x1b]0;title\x07.py", fifo)
        Path(fifo).read_bytes()
        assert main(["look", "stacks", "masked", "--job", str(os.getpid()), "--timeout", "10"]) == 0
        Path(fifo).write_bytes(b"")
        running.get(SOON)
    shown = capsys.readouterr().out
    assert r"\x1b]0;title\x07.py" in shown
    assert "\x1b" not in shown


def test_another_users_process_is_refused(here: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """INS-1."""
    with monkeypatch.context() as other:
        other.setattr(peers, "peer_of", lambda _: (os.getpid(), 12345))
        with pytest.raises(PermissionError, match="belongs to uid 12345"):
            _places.connect(here)
        assert list(_places.find_inspected(os.getpid())) == []
        # A client that does not check the other end is refused too.
        with socket.socket(socket.AF_UNIX) as peer:
            peer.connect(here)
            peer.settimeout(SOON)
            assert peer.recv(1) == b""


def test_a_process_in_another_namespace_is_refused(here: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """PER-1."""
    there = {"user": (1, 1), "pid": (1, 2)}
    found = peers.namespaces
    monkeypatch.setattr(peers, "namespaces", lambda process: found(process) if process == "self" else there)
    with _places.connect(here) as peer:
        peer.settimeout(SOON)
        assert peer.recv(1) == b""


@pytest.mark.full
def test_too_many_and_too_slow(here: str) -> None:
    """INS-3."""
    crowd: list[Wire] = []
    for _ in range(MOST):
        crowd.append(Wire(_places.connect(here)))
        crowd[-1].tell(do="describe")
        assert crowd[-1].hear(SOON)
    refused = Wire(_places.connect(here))
    assert f"{MOST} programs are looking into this job" in refused.hear(SOON)[0]["error"]  # type: ignore[index]
    refused.close()
    # Only its own thread waits for a client that does not read.
    crowd[0].peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    for _ in range(2_000):
        crowd[0].tell(do="describe")
    crowd[1].tell(do="describe")
    assert crowd[1].hear(SOON)
    for guest in crowd:
        guest.close()
    until(lambda: looks() == 0)
    assert inspect.connect(os.getpid()).snapshot(timeout=10).procs


def test_the_end_of_the_job_ends_followers(here: str) -> None:
    guests = [Wire(_places.connect(here)) for _ in range(2)]
    for guest, do in zip(guests, ("events", "logs"), strict=True):
        guest.tell(do=do)
        assert guest.hear(SOON) is not None
    shutdown()
    for guest in guests:
        while guest.hear(SOON) is not None:
            pass
        guest.close()
    until(lambda: looks() == 0)


def test_an_unexpected_answer_is_reported(here: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from mesh_core.inspect import _socket_server

    there = inspect.connect(os.getpid())
    for answer in ({"time": "now"}, {}, [], {"time": 1.0, "hosts": [{"name": 3}], "failures": []}):
        monkeypatch.setattr(
            _socket_server.Guest,
            "_snapshot",
            lambda self, _told, answer=answer: self.wire.tell(ok=answer),
        )
        with pytest.raises(MeshError, match=r"an answer that this version of Mesh .* does not understand"):
            there.snapshot()


@pytest.mark.full
def test_the_command(job: Job) -> None:
    listed = mesh("--job", str(job.pid))
    assert listed.returncode == 0 and "train.py" in listed.stdout and str(job.pid) in listed.stdout
    told = json.loads(mesh("list", "--json").stdout)
    assert told["schema"] == 1 and job.pid in [each["pid"] for each in told["jobs"]]
    shown = mesh("snapshot", "--job", str(job.pid), "--timeout", "10")
    assert "workers[0]" in shown.stdout or "workers" in shown.stdout, shown
    tree = json.loads(mesh("snapshot", "--json", "--job", str(job.pid), "--timeout", "10").stdout)
    assert tree["schema"] == 1 and next(proc["name"] for proc in tree["hosts"][0]["procs"]) == "controller"
    stacks = mesh("stacks", "workers", "--job", str(job.pid), "--timeout", "10")
    assert stacks.stdout.startswith("workers[0], pid "), stacks
    gone = mesh("snapshot", "--job", "1")
    assert gone.returncode != 0 and "no job 1 of this user runs on this machine" in gone.stderr


def test_the_command_follows_until_the_end(job: Job) -> None:
    command = [
        sys.executable,
        "-m",
        "mesh_core.cli",
        "look",
        "events",
        "--past",
        "--json",
        "--job",
        str(job.pid),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as follower:
        assert follower.stdout is not None
        assert json.loads(follower.stdout.readline())["kind"] == "procs_spawned"
        assert job.process.stdin is not None
        job.process.stdin.close()
        kinds = [json.loads(line)["kind"] for line in follower.stdout]
        assert kinds.count("proc_stopped") == 2
        assert follower.stderr is not None and follower.stderr.read() == ""
        assert follower.wait(SOON) == 0
    job.process.wait(SOON)


def test_ctrl_c_ends_following(job: Job) -> None:
    command = [sys.executable, "-m", "mesh_core.cli", "look", "events", "--past", "--job", str(job.pid)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as follower:
        assert follower.stdout is not None
        assert "procs_spawned" in follower.stdout.readline()
        follower.send_signal(signal.SIGINT)
        _, err = follower.communicate(timeout=SOON)
        assert follower.returncode == 0 and err == ""
    job.do("say still here")


def test_a_script_without_a_folder_for_it_still_runs(tmp_path: Path) -> None:
    script = """
import mesh_core._features.debug.places as places
places.folders = lambda: ["/proc/nowhere"]
from mesh_core import this_host
with this_host().spawn_procs() as procs:
    procs.initialized.get(timeout=60)
print("done")
"""
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert (run.stdout, run.stderr, run.returncode) == ("done\n", "", 0)
