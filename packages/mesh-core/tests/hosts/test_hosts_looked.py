"""Looking into a job from another machine, through its hosts: who may, what they see, and what happens to the rest."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from core_hosts import Wire, cluster, end_job, free_address  # noqa: F401 - a fixture
from core_processes import Watch, family

from mesh_core import (
    Actor,
    AuthenticationError,
    Credentials,
    HostAgent,
    MeshError,
    attach_to_workers,
    endpoint,
    inspect,
    shutdown,
)
from mesh_core._features.debug.wire import Wire as Lines
from mesh_core._native import VisitEnd, jobs_of_host, visit_job
from mesh_core.inspect._socket_server import MOST
from mesh_core.testing import LocalCluster

pytestmark = [pytest.mark.slow]
SOON = 30.0


class Talker(Actor):
    @endpoint
    def say(self, text: str) -> None:
        sys.stdout.write(f"{text}\n")

    @endpoint
    def wait_here(self) -> None:
        threading.Event().wait()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < deadline
        os.sched_yield()


def visits(pid: int) -> int:
    """Return how many threads of a process serve observers."""
    names = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            names.append((task / "comm").read_text().strip())
    return sum(name in ("mesh-visit", "mesh-look", "mesh-inspect", "mesh-greet") for name in names)


def guests() -> int:
    """Return how many observers this process serves as a controller."""
    return sum(thread.name == "mesh-look" for thread in threading.enumerate())


@pytest.fixture
def talkers(cluster: LocalCluster) -> Iterator[Talker]:  # noqa: F811
    """A job of this process on all hosts."""
    shutdown()
    procs = cluster.attach().spawn_procs(name="workers")
    talkers = procs.spawn("talkers", Talker)
    talkers.initialized.get(timeout=60)
    yield talkers
    end_job(cluster)
    until(lambda: visits(os.getpid()) == 0 and all(visits(pid) == 0 for pid in cluster.pids))


@pytest.fixture(scope="module")
def observer(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    """Credentials that can only look."""
    folder = tmp_path_factory.mktemp("credentials") / "observer"
    Credentials.load(cluster.credentials).issue_observer(folder)
    return folder


def test_any_host_leads_to_the_job(
    cluster: LocalCluster,  # noqa: F811
    talkers: Talker,
    observer: Path,
) -> None:
    for address in cluster.addresses:
        (info,) = inspect.jobs(host=address, credentials=observer)
        assert info.pid == os.getpid() and len(info.id) == 16
    for credentials in (observer, cluster.credentials):
        job = inspect.connect(host=cluster.addresses[1], credentials=credentials)
        shot = job.snapshot(timeout=10)
        assert [proc.name for proc in shot.procs] == [
            "controller",
            *(f"workers[{rank}]" for rank in range(3)),
        ]
        assert len(shot.hosts) == 4 and len(shot.actors) == 3
    # By its pid and by its id, which the local door reports too.
    (here,) = (each for each in inspect.jobs() if each.pid == os.getpid())
    assert here == info
    for name in (info.pid, info.id):
        assert inspect.connect(name, host=cluster.addresses[0], credentials=observer).info == info
    with pytest.raises(MeshError, match=r"no job 1 can be looked into through tcp://"):
        inspect.connect(1, host=cluster.addresses[0], credentials=observer)


@pytest.mark.full
def test_stacks_events_and_logs(
    cluster: LocalCluster,  # noqa: F811
    talkers: Talker,
    observer: Path,
) -> None:
    job = inspect.connect(host=cluster.addresses[2], credentials=observer)
    talkers.slice(hosts=1).wait_here.broadcast()
    until(lambda: any(actor.running for actor in job.snapshot(timeout=10).actors))
    stacks = {one.proc: one for one in job.stacks("workers", timeout=10)}
    assert "wait_here" in [frame.function for frame in stacks["workers[1]"].of("talkers").frames]
    events = job.events(past=True)
    assert next(event for event in events if event.kind == "procs_spawned")
    events.close()  # type: ignore[attr-defined]
    texts: list[str] = []
    heard = threading.Event()

    def listen() -> None:
        for each in job.logs():
            texts.append(each.text)
            if "the last" in each.text:
                heard.set()
                return

    listener = threading.Thread(target=listen)
    listener.start()
    deadline = time.monotonic() + SOON
    while not texts and time.monotonic() < deadline:
        talkers.slice(hosts=0).say.call_one("hello").get(timeout=SOON)
    talkers.slice(hosts=0).say.call_one("the last").get(timeout=SOON)
    assert heard.wait(SOON)
    listener.join(SOON)


def test_a_host_that_others_relay_for(cluster: LocalCluster, observer: Path) -> None:  # noqa: F811
    shutdown()
    # The controller is connected only to the first, and each host to the next.
    hosts = attach_to_workers(cluster.addresses, credentials=cluster.credentials, fan_out=1)
    hosts.spawn_procs(name="workers").initialized.get(timeout=SOON)
    job = inspect.connect(host=cluster.addresses[2], credentials=observer)
    followed = job.events(past=True)
    assert next(followed)
    assert len(job.snapshot(timeout=10).hosts) == 4
    end_job(cluster)
    assert all(event.kind != "host_died" for event in followed)
    until(lambda: visits(os.getpid()) == 0)


def test_a_controller_that_hosts_dial(cluster: LocalCluster, observer: Path) -> None:  # noqa: F811
    shutdown()
    address = free_address()
    hosts = attach_to_workers(listen=address, expect=1, credentials=cluster.credentials)
    command = [sys.executable, "-m", "mesh_core.cli", "host", "--dial", address]
    command += ["--credentials", f"{cluster.credentials}/host", "--name", "inside"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as agent:
        hosts.initialized.get(timeout=SOON)
        hosts.spawn_procs(name="workers").initialized.get(timeout=SOON)
        # Nobody can connect to the host: the controller's own address leads there.
        job = inspect.connect(host=address, credentials=observer)
        assert [proc.name for proc in job.snapshot(timeout=10).procs] == ["controller", "workers[0]"]
        followed = job.events(past=True)
        assert next(followed)
        shutdown()
        assert all(event.kind != "host_died" for event in followed)
        agent.terminate()
        agent.communicate()
    until(lambda: visits(os.getpid()) == 0)


def test_more_than_fits_at_once(
    cluster: LocalCluster,  # noqa: F811
    talkers: Talker,
    observer: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from mesh_core.inspect import _socket_server

    # Several times what may be in transit through the job.
    text = "x" * (3 << 20)
    monkeypatch.setattr(
        _socket_server.Guest, "_describe", lambda self, _told: self.wire.tell(ok={"text": text})
    )
    with visit(cluster.addresses[0], observer) as talk:
        talk.tell(do="describe")
        heard = talk.hear(SOON)
        assert heard is not None and heard[0]["ok"]["text"] == text


@contextlib.contextmanager
def visit(address: str, credentials: Path | str) -> Iterator[Talk]:
    """A connection to the one job behind a host, with nothing said yet."""
    (job,) = jobs_there(address, credentials)
    talk = Talk(*visit_job(address, Path(credentials), job, SOON))
    try:
        yield talk
    finally:
        talk.close()


def jobs_there(address: str, credentials: Path | str) -> list[int]:
    return jobs_of_host(address, Path(credentials), SOON)


class Talk(Lines):
    """A visit, for tests that say what nobody should say."""

    def __init__(self, descriptor: int, end: VisitEnd) -> None:
        super().__init__(socket.socket(fileno=descriptor))
        self.end = end


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "invalid question"),
        (b"x" * (9 << 20), "invalid question: a line is too long"),
        (b'{"do": "stop"}\n', "unknown question 'stop'"),
    ],
)
def test_garbage_is_answered_and_changes_nothing(
    cluster: LocalCluster,  # noqa: F811
    talkers: Talker,
    observer: Path,
    sent: bytes,
    said: str,
) -> None:
    """INS-1."""
    with visit(cluster.addresses[0], observer) as talk:
        talk.peer.settimeout(SOON)
        try:
            talk.peer.sendall(sent)
        except OSError:
            assert len(sent) > 1 << 20
        heard = talk.hear(SOON)
        assert heard is not None and said in heard[0]["error"]
    talkers.say.call("still there").get(timeout=SOON)


def test_hosts_may_not_look(
    cluster: LocalCluster,  # noqa: F811
    talkers: Talker,
    tmp_path: Path,
) -> None:
    """VIS-1."""
    host = tmp_path / "host"
    Credentials.load(cluster.credentials).issue_host(host)
    with pytest.raises(
        AuthenticationError, match=r"no credentials of an observer.*a host's cannot look into jobs"
    ):
        inspect.jobs(host=cluster.addresses[0], credentials=host)


def test_strangers_may_not_look(
    cluster: LocalCluster,  # noqa: F811
    talkers: Talker,
    tmp_path: Path,
) -> None:
    """VIS-1."""
    other = Credentials.new(tmp_path / "other")
    other.issue_observer(tmp_path / "observer")
    for folder in (tmp_path / "other", tmp_path / "observer"):
        with pytest.raises(AuthenticationError, match="another job"):
            inspect.connect(host=cluster.addresses[0], credentials=folder)
    with pytest.raises(AuthenticationError, match="does not exist"):
        inspect.connect(host=cluster.addresses[0], credentials=tmp_path / "nothing")
    with pytest.raises(TypeError, match="must be given together"):
        inspect.connect(host=cluster.addresses[0])


def test_an_observer_can_only_look(
    cluster: LocalCluster,  # noqa: F811
    talkers: Talker,
    observer: Path,
) -> None:
    """VIS-1."""
    with pytest.raises(AuthenticationError, match="holds no credentials of a controller"):
        attach_to_workers(cluster.addresses, credentials=str(observer)).initialized.get(timeout=SOON)
    with pytest.raises(MeshError, match="holds no credentials of a host"), HostAgent(observer):
        pass


def test_a_revoked_observer_is_sent_away(
    cluster: LocalCluster,  # noqa: F811
    talkers: Talker,
    tmp_path: Path,
) -> None:
    """VIS-1."""
    credentials = Credentials.load(cluster.credentials)
    made = credentials.issue_observer(tmp_path / "observer")
    job = inspect.connect(host=cluster.addresses[0], credentials=tmp_path / "observer")
    followed = job.events(past=True)
    next(followed)
    credentials.revoke(made)
    with pytest.raises(
        MeshError, match=r"can no longer be looked into: .*certificate is no longer valid: .*revoked"
    ):
        for _ in followed:
            pass
    with pytest.raises(AuthenticationError, match="revoked"):
        inspect.connect(host=cluster.addresses[0], credentials=tmp_path / "observer")
    talkers.say.call("still there").get(timeout=SOON)


def test_places_are_bounded(
    cluster: LocalCluster,  # noqa: F811
    talkers: Talker,
    observer: Path,
) -> None:
    """VIS-2, INS-3."""
    with contextlib.ExitStack() as crowd:
        for _ in range(32):
            talk = crowd.enter_context(visit(cluster.addresses[0], observer))
            talk.tell(do="describe")
            assert talk.hear(SOON)
        with pytest.raises(
            MeshError, match="32 others, the maximum, are looking into jobs through this host"
        ):
            inspect.jobs(host=cluster.addresses[0], credentials=observer)
        # The controller has as many for all hosts together.
        assert MOST == 32
        with visit(cluster.addresses[1], observer) as late:
            heard = late.hear(SOON)
            assert heard is not None and "32 programs are looking into this job" in heard[0]["error"]
    until(lambda: visits(cluster.pids[0]) == 0)
    assert inspect.connect(host=cluster.addresses[0], credentials=observer).snapshot(timeout=10).procs


@pytest.mark.full
def test_a_reader_that_does_not_read_delays_nobody(
    cluster: LocalCluster,  # noqa: F811
    talkers: Talker,
    observer: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """VIS-2, INS-3."""
    from mesh_core._features.debug import wire as _wire
    from mesh_core.inspect import _socket_server

    # It waits for somebody who does not read, which is not what takes long here.
    monkeypatch.setattr(_wire, "_SEND_LIMIT", struct.pack("ll", 0, 500_000))
    # More than the system's buffers on the way hold.
    monkeypatch.setattr(
        _socket_server.Guest, "_stacks", lambda self, _told: self.wire.tell(ok="x" * (1 << 20))
    )
    with Wire(cluster.addresses[0]) as wire, visit(cluster.addresses[0], observer) as other:
        (job,) = jobs_there(wire.address, observer)
        slow = Talk(*visit_job(wire.address, observer, job, SOON))
        number = wire.wait_for(2)
        until(lambda: guests() == 2)
        with wire.hold(number, mute=True):
            # Answers no longer get through, but questions do.
            for _ in range(100):
                slow.tell(do="stacks")
            other.tell(do="describe")
            assert other.hear(SOON)
            talkers.say.call("goes on").get(timeout=SOON)
            # It loses its connection at the job, which does not wait for it.
            until(lambda: guests() == 1)
        slow.close()


def test_an_observer_that_dies_leaves_nothing(
    cluster: LocalCluster,  # noqa: F811
    talkers: Talker,
    observer: Path,
) -> None:
    command = [sys.executable, "-m", "mesh_core.cli", "look", "events", "--past", "--json"]
    command += ["--host", cluster.addresses[0], "--credentials", str(observer)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as looker:
        assert looker.stdout is not None
        assert json.loads(looker.stdout.readline())["kind"]
        assert visits(cluster.pids[0]) == 1
        looker.kill()
    until(lambda: visits(cluster.pids[0]) == 0 and visits(os.getpid()) == 0)


def test_the_end_of_the_job_ends_what_follows_it(
    cluster: LocalCluster,  # noqa: F811
    talkers: Talker,
    observer: Path,
) -> None:
    job = inspect.connect(host=cluster.addresses[0], credentials=observer)
    followed = job.events(past=True)
    assert next(followed)
    shutdown()
    # In order, so it is no failure.
    assert all(event.kind != "host_died" for event in followed)
    until(lambda: inspect.jobs(host=cluster.addresses[0], credentials=observer) == [])
    with pytest.raises(MeshError, match="there is no such job here"):
        job.snapshot()


def test_two_jobs_of_one_agent(
    cluster: LocalCluster,  # noqa: F811
    talkers: Talker,
    observer: Path,
    tmp_path: Path,
) -> None:
    with another_job(cluster, tmp_path) as other:
        address = cluster.addresses[0]
        found = inspect.jobs(host=address, credentials=observer)
        assert [info.pid for info in found] == [os.getpid(), other.pid]
        with pytest.raises(
            MeshError, match=rf"(?s)there are 2 jobs.*\n +{os.getpid()} .*\n +{other.pid} +other.py"
        ):
            inspect.connect(host=address, credentials=observer)
        names = [
            [
                proc.name
                for proc in inspect.connect(info.id, host=address, credentials=observer).snapshot(10).procs
            ]
            for info in found
        ]
        assert names[0][1:] == ["workers[0]", "workers[1]", "workers[2]"] and names[1][1:] == ["others[0]"]
        there = inspect.connect(other.pid, host=address, credentials=observer)
        followed = there.events(past=True)
        next(followed)
        # It dies: the other goes on, and its observers are told that it is over.
        other.kill()
        other.wait()
        with contextlib.suppress(MeshError):
            list(followed)
        until(lambda: len(inspect.jobs(host=address, credentials=observer)) == 1)
    talkers.say.call("still there").get(timeout=SOON)


def test_a_released_host_says_so(
    cluster: LocalCluster,  # noqa: F811
    observer: Path,
) -> None:
    shutdown()
    hosts = cluster.attach()
    hosts.spawn_procs(name="workers").initialized.get(timeout=SOON)
    followed = inspect.connect(host=cluster.addresses[2], credentials=observer).events(past=True)
    assert next(followed)
    hosts.detach(hosts.slice(hosts=2)).get(timeout=SOON)
    # The job goes on, so this is not its end.
    with pytest.raises(MeshError, match="this host has left the job"):
        list(followed)
    until(lambda: inspect.jobs(host=cluster.addresses[2], credentials=observer) == [])
    assert inspect.connect(host=cluster.addresses[0], credentials=observer).snapshot(timeout=10).procs
    end_job(cluster)
    until(lambda: visits(os.getpid()) == 0)


def test_a_stopped_controller_is_reported(
    cluster: LocalCluster,  # noqa: F811
    observer: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from mesh_core.inspect import _remote

    monkeypatch.setattr(_remote, "_ANSWER_S", 0.3)
    where = {"host": cluster.addresses[0], "credentials": observer}
    with another_job(cluster, tmp_path, heartbeat_timeout=60) as other:
        there = inspect.connect(**where)
        os.kill(other.pid, signal.SIGSTOP)
        try:
            assert inspect.jobs(**where) == []
            with pytest.raises(MeshError, match=f"job {there.info.id} does not answer: it may be stopped"):
                inspect.connect(**where)
            with pytest.raises(MeshError, match=r"did not answer within 0\.4 s"):
                there.snapshot(timeout=0.1)
        finally:
            os.kill(other.pid, signal.SIGCONT)
        until(lambda: len(inspect.jobs(**where)) == 1)
        monkeypatch.undo()
        assert there.snapshot(timeout=10).procs
        left = Watch(pid for agent in cluster.pids for pid in family(agent))
        assert other.stdin is not None
        other.stdin.close()
        assert other.wait(SOON) == 0
    assert left.wait() == []


OTHER = """
import sys
from mesh_core import attach_to_workers
if __name__ == "__main__":
    hosts = attach_to_workers([sys.argv[1]], credentials=sys.argv[2], heartbeat_timeout=float(sys.argv[3]))
    with hosts.spawn_procs(name="others") as procs:
        procs.initialized.get(timeout=60)
        print("up", flush=True)
        sys.stdin.read()
"""


@contextlib.contextmanager
def another_job(
    cluster: LocalCluster,  # noqa: F811
    folder: Path,
    heartbeat_timeout: float = 1.0,
) -> Iterator[subprocess.Popen[str]]:
    script = folder / "other.py"
    script.write_text(OTHER)
    command = [sys.executable, str(script), cluster.addresses[0], cluster.credentials, str(heartbeat_timeout)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None and job.stdout.readline() == "up\n"
        try:
            yield job
        finally:
            job.kill()


def test_the_agent_dies_meanwhile(
    cluster: LocalCluster,  # noqa: F811
    observer: Path,
    tmp_path: Path,
) -> None:
    shutdown()
    host = tmp_path / "host"
    Credentials.load(cluster.credentials).issue_host(host)
    with HostAgent(host, name="mortal") as agent:
        hosts = attach_to_workers([*cluster.addresses[:1], agent.address], credentials=cluster.credentials)
        procs = hosts.spawn_procs(name="workers", supervise=lambda _failure: True)
        procs.initialized.get(timeout=SOON)
        followed = inspect.connect(host=agent.address, credentials=observer).events(past=True)
        next(followed)
        os.kill(agent.pid, signal.SIGKILL)
        with pytest.raises(MeshError, match=r"the connection to tcp://.* was lost"):
            list(followed)
        # Another host still leads there.
        job = inspect.connect(host=cluster.addresses[0], credentials=observer)
        until(lambda: any(host.state == "dead" for host in job.snapshot(timeout=10).hosts))
    until(lambda: visits(os.getpid()) == 0)
    end_job(cluster)


def test_an_agent_that_is_stopped_says_so(cluster: LocalCluster, observer: Path, tmp_path: Path) -> None:  # noqa: F811
    shutdown()
    host = tmp_path / "host"
    Credentials.load(cluster.credentials).issue_host(host)
    with HostAgent(host, name="leaving") as agent:
        hosts = attach_to_workers([agent.address], credentials=cluster.credentials)
        procs = hosts.spawn_procs(name="workers", supervise=lambda _failure: True)
        procs.initialized.get(timeout=SOON)
        followed = inspect.connect(host=agent.address, credentials=observer).events(past=True)
        next(followed)
        os.kill(agent.pid, signal.SIGTERM)
        with pytest.raises(
            MeshError, match=r"has ended it: this host has left the job: its agent was stopped"
        ):
            list(followed)
    until(lambda: visits(os.getpid()) == 0)
    shutdown()


@pytest.mark.full
def test_the_command(cluster: LocalCluster, talkers: Talker, observer: Path) -> None:  # noqa: F811
    where = ["--host", cluster.addresses[1], "--credentials", str(observer)]

    def mesh(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "mesh_core.cli", "look", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    listed = mesh(*where)
    assert listed.returncode == 0 and str(os.getpid()) in listed.stdout and "ID" in listed.stdout
    (told,) = json.loads(mesh("list", "--json", *where).stdout)["jobs"]
    shown = mesh(*where, "snapshot", "--json", "--job", told["id"], "--timeout", "10")
    assert json.loads(shown.stdout)["hosts"][0]["procs"][0]["name"] == "controller"
    refused = mesh("--host", cluster.addresses[1])
    assert refused.returncode != 0 and "--host and --credentials must be given together" in refused.stderr
    wrong = mesh("--host", "tcp://127.0.0.1:1", "--credentials", str(observer))
    assert wrong.returncode != 0 and "127.0.0.1:1" in wrong.stderr
