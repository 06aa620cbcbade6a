"""What a user sees of other hosts: lines, listings, stacks, events, breakpoints, spans, and names in errors."""

# ruff: noqa: T201 - printing is what is tested

from __future__ import annotations

import gc
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from core_processes import Script, Traces
from core_samples import Echo

from mesh_core import (
    ActorError,
    ActorTimeout,
    HostMesh,
    ProcMesh,
    SupervisionError,
    configured,
    inspect,
    set_fault_handler,
    shutdown,
    this_host,
)
from mesh_core.cli._debug import JobDebugger
from mesh_core.testing import LocalCluster

LONG = 30.0


def say(text: str) -> None:
    print(text)


def say_one(text: str) -> int:
    print(text)
    return 1


def say_alone(text: str, rank: int) -> int:
    if is_rank(rank):
        print(text)
    return 1


def is_rank(rank: int) -> bool:
    from mesh_core import current_rank

    return current_rank().rank == rank


def say_and_raise(text: str, rank: int) -> int:
    if say_alone(text, rank) and is_rank(rank):
        raise ValueError("no share")
    return 1


def say_and_die(text: str) -> None:
    print(text)
    os._exit(1)


def warm_up() -> None:
    """Import this module, which takes longer than similar lines wait for each other."""


def say_rank() -> None:
    from mesh_core import current_rank

    print(f"rank {current_rank().rank} is here")


def flood(lines: int) -> None:
    for number in range(lines):
        print(f"{number} {'x' * 90}")


def log(level: int, text: str) -> None:
    import logging

    logging.getLogger("app").log(level, text)


def die(status: int) -> None:
    print("the last words", file=sys.stderr)
    os._exit(status)


def wait_for(seconds: float) -> None:
    threading.Event().wait(seconds)


def stack_here(pipe: str) -> None:
    Path(pipe).read_text()


def see() -> list[tuple[str, str, str]]:
    return [(proc.name, proc.host, proc.state) for proc in inspect.snapshot(LONG).procs]


def quiet_spawn() -> list[str]:
    """Spawn from a worker a mesh that is not to be shown, and one that is."""
    with this_host().spawn_procs(name="hidden") as procs:
        procs.logging_option(stream_to_client=False)
        procs.spawn("hidden", Echo).call.call(say, "this is hidden").get(LONG)
    with this_host().spawn_procs(name="open") as procs:
        procs.spawn("open", Echo).call.call(say, "this is open").get(LONG)
    return []


def until(true: Callable[[], bool]) -> None:
    """Wait for something that nobody reports."""
    end = time.monotonic() + LONG
    while not true():
        assert time.monotonic() < end, "it has not come to that"
        time.sleep(0.01)


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    gc.collect()
    before = Traces()
    with LocalCluster(hosts=3) as cluster:
        yield cluster
    gc.collect()
    left = Traces().left_since(before)
    assert not left, f"left behind: {left}"


@pytest.fixture(scope="module")
def hosts(cluster: LocalCluster) -> HostMesh:
    hosts = cluster.attach()
    # Every host has fork servers, one for the script and one for its workers.
    with hosts.spawn_procs() as procs:
        procs.spawn("warm", Echo).call.call(quiet_spawn).get(LONG)
    return hosts


@pytest.fixture
def procs(hosts: HostMesh) -> Iterator[ProcMesh]:
    with hosts.spawn_procs({"gpus": 2}, name="procs") as procs:
        procs.initialized.get(LONG)
        yield procs


@pytest.fixture
def echo(procs: ProcMesh) -> Any:
    echo = procs.spawn("echo", Echo)
    echo.call.call(warm_up).get(LONG)
    return echo


@pytest.fixture
def calm() -> Iterator[None]:
    """A failure that nobody handled is no reason to stop."""
    before = set_fault_handler(lambda failure: None)
    yield
    set_fault_handler(before)


# Lines.


def test_similar_lines_of_all_hosts_are_one(
    procs: ProcMesh, echo: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    echo.call.call(say, "hello").get(LONG)
    echo.slice(hosts=1, gpus=0).call.call_one(say, "alone").get(LONG)
    procs.stop().get(LONG)
    out = capfd.readouterr().out.splitlines()
    # Those of a slow machine may come in two groups, shown as several lines; all ranks are counted.
    hello = [line for line in out if line.endswith("] hello")]
    assert sum(int(found[1]) if (found := re.search(r" x(\d+)", line)) else 1 for line in hello) == 6, out
    assert len(hello) < 6, out
    assert "[echo hosts=1,gpus=0 on host-1] alone" in out


def test_options_hold_on_every_host_from_then_on(
    procs: ProcMesh, echo: Any, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    procs.logging_option(aggregate_window_sec=None)
    echo.call.call(say, "each").get(LONG)
    procs.logging_option(stream_to_client=False)
    echo.call.call(say, "none").get(LONG)
    procs.logging_option(aggregate_window_sec=None, level=40)
    echo.call.call(log, 30, "a warning").get(LONG)
    echo.call.call(log, 40, "an error").get(LONG)
    procs.stop().get(LONG)
    out, err = capfd.readouterr()
    names = [f"[echo hosts={rank // 2},gpus={rank % 2} on host-{rank // 2}]" for rank in range(6)]
    assert sorted(line for line in out.splitlines() if "each" in line) == [f"{name} each" for name in names]
    assert "none" not in out
    # Records reach the handlers of the script, pytest's here.
    assert "error" not in out + err
    assert caplog.messages == ["an error"] * 6
    places = [(record.rank, record.host, record.point) for record in caplog.records]  # type: ignore[attr-defined]
    expected = [(rank, f"host-{rank // 2}", {"hosts": rank // 2, "gpus": rank % 2}) for rank in range(6)]
    assert sorted(places, key=lambda place: place[0]) == expected


def test_an_owner_on_another_host_sets_options_too(
    procs: ProcMesh, echo: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    echo.slice(hosts=2, gpus=0).call.call_one(quiet_spawn).get(LONG)
    procs.stop().get(LONG)
    out = capfd.readouterr().out
    assert "[open" in out
    assert "this is open" in out
    assert "hidden" not in out


def test_all_output_is_shown_before_a_stop_returns(
    hosts: HostMesh, capfd: pytest.CaptureFixture[str]
) -> None:
    for _ in range(5):
        with hosts.spawn_procs(name="brief") as procs:
            procs.logging_option(aggregate_window_sec=None)
            procs.spawn("brief", Echo).call.call(flood, 500).get(LONG)
        out = capfd.readouterr().out
        assert len(out.splitlines()) == 1500
        for host in range(3):
            mine = [line.partition("] ")[2] for line in out.splitlines() if f"hosts={host} " in line]
            assert mine == [f"{number} {'x' * 90}" for number in range(500)]


def test_output_of_other_hosts_comes_before_the_result(
    procs: ProcMesh, echo: Any, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """LOG-8."""
    far = echo.slice(hosts=1, gpus=0)
    with configured(log_wait=60):
        for n in range(10):
            far.call.call_one(say, f"line {n}").get(LONG)
            assert f"] line {n}\n" in capfd.readouterr().out
            echo.call.call(log, 40, f"record {n}").get(LONG)
            assert caplog.messages == [f"record {n}"] * 6
            caplog.clear()
        with pytest.raises(SupervisionError):
            echo.slice(hosts=2, gpus=1).call.call_one(say_and_die, "last words").get(LONG)
        assert "] last words\n" in capfd.readouterr().out


def test_output_of_other_hosts_comes_before_a_combined_result(
    procs: ProcMesh, echo: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """LOG-8: whoever printed, its share is part of the result."""
    procs.logging_option(aggregate_window_sec=None)
    combined = echo.call.with_options(reduce="sum")
    far = echo.slice(hosts=slice(1, 3)).call.with_options(reduce="sum")
    with configured(log_wait=60):
        for n in range(10):
            assert combined.call(say_one, f"line {n}").get(LONG) == 6
            assert capfd.readouterr().out.count(f"] line {n}\n") == 6
            assert far.call(say_one, f"far {n}").get(LONG) == 4
            assert capfd.readouterr().out.count(f"] far {n}\n") == 4
        for rank in range(6):
            assert combined.call(say_alone, f"rank {rank}", rank).get(LONG) == 6
            assert f"] rank {rank}\n" in capfd.readouterr().out
        with pytest.raises(ActorError, match="no share"):
            combined.call(say_and_raise, "and then", 5).get(LONG)
        assert "] and then\n" in capfd.readouterr().out


def test_a_flood_on_one_host_is_slowed_down_and_stalls_nobody(
    cluster: LocalCluster, script: Callable[..., Script], tmp_path: Path
) -> None:
    run = script(FLOOD, cluster.credentials, str(tmp_path / "progress"), *cluster.addresses)
    # Nobody reads the script's output now: what cannot be shown stays where it is printed.
    assert run.process.stderr is not None
    told = run.process.stderr.readline().split()
    assert told[:2] == ["calls", "200"], told
    # The pipes, the agent of the flooded host and the controller hold what is printed and not shown.
    assert int(told[2]) * 1600 < 8 << 20
    out, _ = run.process.communicate("on\n", timeout=120)
    assert out.count("\n") == 14_000


LAST = """
import sys
from core_samples import Echo
from mesh_core import attach_to_workers

if __name__ == "__main__":
    hosts = attach_to_workers(sys.argv[2:], credentials=sys.argv[1])
    procs = hosts.spawn_procs(name="procs")
    procs.logging_option(aggregate_window_sec=None)
    echo = procs.spawn("echo", Echo)
    echo.call.call(print, "beginning").get()
    echo.call.call(exec, "print('end', end='')").get()
"""


def test_the_end_of_a_script_shows_all_and_leaves_nothing_at_the_agents(
    cluster: LocalCluster, script: Callable[..., Script]
) -> None:
    def threads() -> list[int]:
        return [len(list(Path(f"/proc/{pid}/task").iterdir())) for pid in cluster.pids]

    # This test's own job, if there is one, goes on meanwhile.
    before = threads()
    for _ in range(3):
        run = script(LAST, cluster.credentials, *cluster.addresses)
        out, err = run.process.communicate(timeout=60)
        assert (run.process.returncode, err) == (0, "")
        shown = [f"[echo hosts={host} on host-{host}]" for host in range(3)]
        assert sorted(line for line in out.splitlines() if "beginning" in line) == [
            f"{one} beginning" for one in shown
        ]
        assert sorted(line for line in out.splitlines() if "end" in line) == [f"{one} end" for one in shown]
    until(lambda: threads() == before)


FLOOD = """
import os, sys, time
from pathlib import Path
from mesh_core import Actor, attach_to_workers, endpoint

class Some(Actor):
    @endpoint
    def flood(self, progress):
        with open(progress, "wb", buffering=0) as file:
            for number in range(14_000):
                print(number, "x" * 1600)
                file.write(b".")
    @endpoint
    def ping(self):
        return os.getppid()

if __name__ == "__main__":
    credentials, progress, *addresses = sys.argv[1:]
    Path(progress).touch()
    hosts = attach_to_workers(addresses, credentials=credentials)
    with hosts.spawn_procs(name="procs") as procs:
        some = procs.spawn("some", Some)
        some.ping.call().get()
        procs.logging_option(aggregate_window_sec=None)
        flood = some.slice(hosts=0).flood.call(progress)
        printed = still = 0
        # Until it stands still: from then on nothing gets through that waits behind it.
        while still < 25:
            time.sleep(0.02)
            last, printed = printed, os.stat(progress).st_size
            still = still + 1 if printed == last > 0 else 0
        for _ in range(200):
            some.slice(hosts=1).ping.call_one().get()
        assert not flood.done()
        sys.stderr.write(f"calls 200 {printed}\\n")
        sys.stderr.flush()
        input()
        flood.get()
"""


# Inspection.


def test_a_snapshot_has_all_hosts_whoever_takes_it(hosts: HostMesh, procs: ProcMesh, echo: Any) -> None:
    seen = inspect.snapshot(LONG)
    assert [host.number for host in seen.hosts] == [0, 1, 2, 3]
    assert [host.name for host in seen.hosts[1:]] == hosts.names == ["host-0", "host-1", "host-2"]
    for host in seen.hosts[1:]:
        assert host.state == "running"
        assert host.memory > host.memory_free > 0
        assert host.cpus > 0
        assert len(host.procs) == 2
        for proc in host.procs:
            assert (proc.state, proc.host, proc.mesh) == ("running", host.name, "procs")
            assert proc.rss
            assert proc.pss
            assert proc.threads
            assert proc.cpu is not None
            assert [actor.name for actor in proc.actors] == ["echo"]
    assert [proc.pid for proc in seen.procs if proc.mesh == "procs"] == procs.pids
    assert all(f"host host-{number}: " in str(seen) for number in range(3))
    assert "host-2" in seen._repr_html_()
    there = echo.slice(hosts=2, gpus=1).call.call_one(see).get(LONG)
    assert there == [(proc.name, proc.host, proc.state) for proc in seen.procs]


def test_pids_of_other_hosts_are_known_everywhere(procs: ProcMesh, echo: Any) -> None:
    pids = echo.call.call(os.getpid).get(LONG).values()
    assert procs.pids == pids
    assert procs.slice(hosts=1).pids == pids[2:4]
    assert echo.slice(hosts=0, gpus=1).call.call_one(pids_of, procs).get(LONG) == pids
    assert str(pids[5]) in procs._repr_html_()
    procs.stop().get(LONG)
    assert procs.pids == [None] * 6


def pids_of(procs: ProcMesh) -> list[int | None]:
    return procs.pids


def test_stacks_of_processes_of_other_hosts(procs: ProcMesh, echo: Any, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    echo.slice(hosts=1, gpus=1).call.broadcast(stack_here, str(tmp_path / "pipe"))
    pids = procs.pids
    frozen = pids[5]
    assert frozen is not None
    until(lambda: any(actor.running for actor in inspect.snapshot(LONG, pss=False).actors))
    os.kill(frozen, signal.SIGSTOP)
    try:
        seen = inspect.stacks(procs, timeout=LONG).values()
    finally:
        os.kill(frozen, signal.SIGCONT)
        (tmp_path / "pipe").write_text("")
    assert [one.pid for one in seen] == pids
    assert "stack_here" in [frame.function for frame in seen[3].of("echo").frames]
    assert "stopped by a signal" in seen[5].error
    assert not any(one.error for one in seen[:5])


def test_events_of_all_hosts_arrive(hosts: HostMesh) -> None:
    with inspect.events() as happening:
        with hosts.spawn_procs(name="workers") as procs:
            procs.spawn("echo", Echo).initialized.get(LONG)
        seen = []
        while len(seen) < 3 * 5:
            event = happening.get(LONG)
            assert event is not None, seen
            seen.append(event)
    for kind in ("procs_spawned", "proc_up", "actor_created", "proc_stopped"):
        assert sorted(event.host for event in seen if event.kind == kind) == ["host-0", "host-1", "host-2"], (
            seen
        )
    ups = {event.proc: event.host for event in seen if event.kind == "proc_up"}
    assert ups == {f"workers[{rank}]": f"host-{rank}" for rank in range(3)}


def test_reprs_name_the_hosts(hosts: HostMesh, procs: ProcMesh) -> None:
    assert repr(hosts) == "<HostMesh 'hosts': hosts=3 on host-0, host-1, host-2>"
    assert repr(hosts.slice(hosts=1)) == "<HostMesh 'hosts': a single one on host-1>"
    shown = hosts._repr_html_()
    assert all(f"<td>host-{number}</td>" in shown for number in range(3))
    assert "3 hosts" in procs._repr_html_()


# Errors.


def test_errors_name_the_host(procs: ProcMesh, echo: Any) -> None:
    with pytest.raises(ActorError, match="host host-1") as raised:
        echo.slice(hosts=1, gpus=1).fail.call_one(ValueError("no")).get(LONG)
    assert raised.value.host == "host-1"
    assert isinstance(raised.value, ValueError)
    with pytest.raises(ActorTimeout, match="host host-2,") as late:
        echo.slice(hosts=2, gpus=0).call.with_options(timeout=0.2).call_one(wait_for, 2.0).get(LONG)
    assert late.value.host == "host-2"
    with pytest.raises(ActorTimeout, match="hosts host-0, host-1,"):
        echo.slice(gpus=0, hosts=slice(0, 2)).call.with_options(timeout=0.2).call(wait_for, 1.0).get(LONG)


@pytest.mark.usefixtures("calm")
def test_a_death_names_the_host_and_shows_its_last_words(procs: ProcMesh, echo: Any) -> None:
    with pytest.raises(SupervisionError) as raised:
        echo.slice(hosts=2, gpus=1).call.call_one(die, 7).get(LONG)
    failure = raised.value.failure
    assert failure is not None
    assert (failure.host, failure.exitcode, failure.point) == ("host-2", 7, {"hosts": 2, "gpus": 1})
    assert "the last words" in failure.stderr_tail
    assert "on host host-2" in failure.report()


@pytest.mark.usefixtures("calm")
def test_dead_and_stopped_hosts_are_shown_as_such_and_hold_up_nothing() -> None:
    shutdown()
    with LocalCluster(hosts=3) as cluster, inspect.events() as happening:
        hosts = cluster.attach()
        procs = hosts.spawn_procs(name="procs")
        procs.initialized.get(LONG)
        cluster.kill(0)
        kinds = []
        while "host_died" not in kinds:
            event = happening.get(LONG)
            assert event is not None, kinds
            kinds.append(event.kind)
        assert (event.host, kinds.count("host_attached")) == ("host-0", 3)
        assert event.text
        with pytest.raises(SupervisionError, match="died on host host-0: its host is dead"):
            procs.spawn("late", Echo).call.call(warm_up).get(LONG)
        os.kill(cluster.pids[1], signal.SIGSTOP)
        try:
            stat = Path(f"/proc/{cluster.pids[1]}/stat")
            until(lambda: stat.read_text().rpartition(") ")[2][0] == "T")
            seen = inspect.snapshot(2.0)
        finally:
            os.kill(cluster.pids[1], signal.SIGCONT)
        assert [host.state for host in seen.hosts] == ["running", "dead", "silent", "running"]
        assert "host host-0, dead (" in str(seen)
        assert "host host-1, silent" in str(seen)
        assert [proc.name for proc in seen.procs if proc.state == "running"] == ["controller", "procs[2]"]
        assert "1 dead" in repr(hosts)
        assert "<td>dead</td>" in hosts._repr_html_()
        assert repr(hosts.slice(hosts=2)) == "<HostMesh 'hosts': a single one on host-2>"


# Breakpoints.

STOPPED = """
from mesh_core import Actor, endpoint
from mesh_core.testing import LocalCluster

class Trainer(Actor):
    @endpoint
    def step(self, n):
        breakpoint()
        return n + 1

if __name__ == "__main__":
    with LocalCluster(hosts=2) as cluster:
        procs = cluster.attach().spawn_procs()
        # What they say is alike, and would be one line.
        procs.logging_option(aggregate_window_sec=None)
        trainers = procs.spawn("trainers", Trainer)
        print(trainers.step.call(5).get().values(), flush=True)
        input()
"""


def test_breakpoints_on_hosts_of_this_machine(
    script: Callable[..., Script],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    run = script(STOPPED)
    assert run.process.stderr is not None
    said = []
    while len(said) < 2:
        line = run.process.stderr.readline()
        assert line, "the script has ended"
        if "stopped at" in line:
            said.append(line)
    assert any("attach, on host host-1, with: mesh debug attach trainers,hosts=1" in line for line in said)

    debugger = JobDebugger(run.process.pid)
    debugger.show()
    listing = capsys.readouterr().out.splitlines()
    assert "HOST" in listing[0]
    assert ["host-0" in listing[1], "host-1" in listing[2]] == [True, True]
    debugger.cast("all", "p n")
    assert capsys.readouterr().out == "trainers hosts=0:2 (2 alike):\n  5\n"
    debugger.continue_("all")
    out, _ = run.process.communicate("\n", timeout=60)
    assert "[6, 6]" in out


# Spans.

SPANS = """
import sys
from test_traces import Worker, begin_recording, record

from mesh_core import Actor, endpoint
from mesh_core.testing import LocalCluster

class Middle(Actor):
    @endpoint
    def ask(self, other, n):
        return other.step.call_one(n).get()
    @endpoint
    def spans(self):
        from test_traces import Seen
        return [Seen(span) for span in record().get_finished_spans()]

if __name__ == "__main__":
    record()
    from opentelemetry import trace
    with LocalCluster(hosts=2) as cluster:
        hosts = cluster.attach()
        hosts.initialized.get(timeout=30)  # from then on their names are known
        procs = hosts.spawn_procs(bootstrap=begin_recording)
        middle = procs.slice(hosts=0).spawn("middle", Middle)
        worker = procs.slice(hosts=1).spawn("worker", Worker)
        with trace.get_tracer("test").start_as_current_span("root") as root:
            assert middle.ask.call_one(worker, 1).get() == 2
        here = [span for span in record().get_finished_spans() if span.name == "Middle/ask"]
        there = middle.spans.call_one().get()
        beyond = worker.spans.call_one().get()
        one = {(span.kind, span.name): span for span in there}
        asked, asks = one["SERVER", "Middle/ask"], one["CLIENT", "Worker/step"]
        (step,) = [span for span in beyond if span.name == "Worker/step"]
        assert asked.parent == here[0].context.span_id
        assert asks.parent == asked.id
        assert step.parent == asks.id
        assert {span.trace for span in (asked, asks, step)} == {root.get_span_context().trace_id}
        assert asks.attributes["server.address"] == "host-1", asks.attributes
        print("well", flush=True)
"""


def test_spans_know_their_parents_on_other_hosts(script: Callable[..., Script]) -> None:
    pytest.importorskip("opentelemetry.sdk", reason="opentelemetry-sdk is not installed")
    run = script(SPANS)
    out, err = run.process.communicate(timeout=60)
    assert "well" in out, err
