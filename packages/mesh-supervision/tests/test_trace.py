"""The timeline of a job: what Perfetto asks of a file, and what is seen in it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from watched import actor, proc, snap

from mesh_core import Actor, MeshError, endpoint, inspect, this_host
from mesh_core.inspect import Event, Running, Snapshot
from mesh_supervision import JobTrace, OneForOne
from mesh_supervision._watching._trace import Timeline

WITHIN = 30.0
Entry = dict[str, Any]


def checked(entries: Iterable[Entry]) -> list[Entry]:
    """Check the rules of the format, and that spans of a row do not overlap (TRL-1)."""
    found = list(entries)
    named, used, rows = set(), set(), defaultdict(list)
    for each in found:
        assert each["ph"] in ("M", "X", "C", "i"), each
        assert isinstance(each["name"], str) and each["name"]
        assert isinstance(each["pid"], int) and isinstance(each["tid"], int)
        assert isinstance(each["ts"], int | float) and each["ts"] >= 0
        place = each["pid"], each["tid"]
        if each["ph"] == "M":
            assert each["args"]
            named.add(each["pid"] if each["name"] == "process_name" else place)
        elif each["ph"] == "X":
            assert each["dur"] >= 0
            used.add(place)
            rows[place].append((each["ts"], each["ts"] + each["dur"]))
        elif each["ph"] == "C":
            assert all(isinstance(value, int | float) for value in each["args"].values())
        else:
            assert each["s"] in ("g", "p", "t")
    assert {each["pid"] for each in found} | used <= named, "each group and row has a name"
    for spans in rows.values():
        spans.sort()
        assert all(one[1] <= other[0] + 1e-3 for one, other in pairwise(spans)), spans
    json.dumps(found, allow_nan=False)
    return found


def spans(entries: list[Entry], kind: str) -> list[tuple[str, int, int]]:
    """Names, begins and lengths in ms."""
    return [
        (each["name"], round(each["ts"] / 1e3), round(each["dur"] / 1e3))
        for each in entries
        if each["ph"] == "X" and each["cat"] == kind
    ]


def handling(*messages: tuple[str, float], at: float, **more: Any) -> Snapshot:
    running = tuple(Running(name, seconds, "controller") for name, seconds in messages)
    return snap(proc(0, actor("trainers", 0, running=running, **more)), at=at)


def recorded(*snaps: Snapshot, took: float = 0.0) -> list[Entry]:
    timeline = Timeline()
    for each in snaps:
        timeline.add(each, took)
    return checked(timeline.entries())


def test_a_message_that_is_seen_again_is_one_span() -> None:
    entries = recorded(
        handling(at=100.0),
        handling(("step", 0.05), at=100.1),
        handling(("step", 0.154), at=100.2),  # 4 ms of the time of looking
        handling(at=100.3),
        took=0.01,
    )
    assert spans(entries, "call") == [("step", 50, 150)]
    (span,) = [each for each in entries if each.get("cat") == "call"]
    assert span["args"]["caller"] == "controller"
    assert round(span["args"]["at_most_ms"]) == 250


def test_messages_that_follow_each_other_are_spans_of_one_row() -> None:
    entries = recorded(
        handling(at=100.0), handling(("step", 0.05), at=100.1), handling(("step", 0.05), at=100.2)
    )
    assert spans(entries, "call") == [("step", 50, 50), ("step", 150, 50)]
    assert len({each["tid"] for each in entries if each.get("cat") == "call"}) == 1


def test_messages_at_the_same_time_have_rows_of_their_own() -> None:
    entries = recorded(
        handling(at=100.0),
        handling(("read", 0.05), ("step", 0.02), at=100.1),
        handling(("read", 0.15), ("read", 0.04), at=100.2),
    )
    assert sorted(spans(entries, "call")) == [("read", 50, 150), ("read", 160, 40), ("step", 80, 20)]
    names = [each["args"]["name"] for each in entries if each["name"] == "thread_name"]
    assert names[-2:] == ["trainers[0]", "trainers[0] (2)"]


def test_what_was_begun_before_the_recording_begins_with_it() -> None:
    entries = recorded(handling(("step", 60.0), at=100.0), handling(("step", 60.5), at=100.5))
    assert spans(entries, "call") == [("step", 0, 500)]
    (span,) = [each for each in entries if each.get("cat") == "call"]
    assert round(span["args"]["at_least_ms"]) == 60_500


def test_queues_and_rates_are_recorded_when_they_change() -> None:
    entries = recorded(
        handling(at=100.0, queue=2, handled=10),
        handling(at=100.5, queue=2, handled=60),
        handling(at=101.0, queue=0, handled=110, failed=2),
    )
    values = [(each["name"], each["args"]["value"]) for each in entries if each["ph"] == "C"]
    assert [value for name, value in values if name == "trainers[0] waiting"] == [2, 0]
    assert [value for name, value in values if name == "trainers[0] handled/s"] == [100.0]
    assert [each["name"] for each in entries if each["ph"] == "i"] == ["raised 2 times"]


def test_a_restarted_process_continues_in_its_rows() -> None:
    step = actor("trainers", 0, running=(Running("step", 0.1, "controller"),))
    dead = Event(kind="failure_handled", time=100.9, actor="trainers", rank=0, text="by OneForOne")
    after = snap(proc(0, replace(step, actor_id=7), pid=9, incarnation=1), at=101.0)
    old = Event(kind="failure", time=50.0, actor="readers", rank=3)
    entries = recorded(
        replace(snap(proc(0, step), at=100.0), failures=(old,)),
        snap(proc(0, step, state="stopped"), at=100.5),
        replace(after, failures=(old, dead)),
        snap(at=102.0),
    )
    assert spans(entries, "state")[:2] == [("running", 0, 500), ("stopped", 500, 0)]
    assert [each["name"] for each in entries if each["ph"] == "i"] == [
        "restarted, life 2",
        "failure_handled trainers[0]",
        "ended",
    ]
    assert len([each for each in entries if each["name"] == "process_name"]) == 3, "job, host, process"


def test_a_process_that_was_away_before_its_restart() -> None:
    entries = recorded(
        snap(proc(0), at=100.0), snap(at=100.5), snap(proc(0, pid=9, incarnation=1), at=101.0), snap(at=101.5)
    )
    assert [each["name"] for each in entries if each["ph"] == "i"] == ["ended", "restarted, life 2", "ended"]


def test_a_host_released_before_the_recording_is_not_shown() -> None:
    at_work = handling(at=100.0)
    (host, *_) = at_work.hosts
    gone = replace(host, number=7, name="gone", state="stopped", procs=())

    def hosts(*looks: Snapshot) -> list[str]:
        names = [each["args"]["name"] for each in recorded(*looks) if each["name"] == "process_name"]
        return [each for each in names if each == "host gone"]

    assert hosts(replace(at_work, hosts=(host, gone))) == []
    # One that ends meanwhile is.
    there = replace(gone, state="running")
    assert hosts(replace(at_work, hosts=(host, there)), replace(at_work, hosts=(host, gone))) == ["host gone"]


def test_meshes_with_the_same_name_are_distinguished() -> None:
    entries = recorded(snap(proc(0), proc(0, pid=9), at=1.0), snap(proc(0), proc(0, pid=9), at=2.0))
    assert spans(entries, "state").count(("running", 0, 1000)) == 3
    assert not [each for each in entries if each["ph"] == "i"]


def test_a_clock_that_is_set_back_stands_still_until_then() -> None:
    entries = recorded(
        handling(("step", 1.0), at=100.0), handling(("step", 1.3), at=100.3), handling(("step", 1.4), at=90.0)
    )
    assert spans(entries, "state") == [("running", 0, 300)] * 2
    assert all(each["ts"] + each.get("dur", 0) <= 300_001 for each in entries)


def test_what_has_no_room_is_counted() -> None:
    timeline = Timeline(limit=12)
    for number in range(50):
        timeline.add(handling(at=100.0 + number, queue=number))
    assert timeline.left_out > 30
    checked(timeline.entries())


def test_nothing_is_recorded_when_nobody_asks() -> None:
    looks: list[float] = []
    looked = threading.Event()

    def look(*, pss: bool) -> Snapshot:
        assert not pss
        looks.append(100.0 + len(looks))
        if len(looks) > 2:
            looked.set()
        return handling(at=looks[-1])

    trace = JobTrace(0.001, snapshot=look)
    assert looks == []
    with pytest.raises(MeshError, match="behind the with block"):
        trace.save("nowhere.json")
    with trace:
        assert looked.wait(WITHIN)
    count = len(looks)
    assert not [thread for thread in threading.enumerate() if thread.name == "mesh-trace"]
    assert len(looks) == count
    with pytest.raises(MeshError, match="records once"):
        trace.__enter__()
    with pytest.raises(ValueError, match="positive number"):
        JobTrace(0.0)


def test_a_job_that_ends_ends_the_recording(tmp_path: Path) -> None:
    looks: list[int] = []

    def look(*, pss: bool) -> Snapshot:
        looks.append(1)
        if len(looks) > 2:
            raise MeshError("job 4711 has ended")
        return handling(at=100.0 + len(looks))

    with JobTrace(0.001, snapshot=look) as trace:
        assert trace.over.wait(WITHIN)
    assert (trace.why, trace.missed) == ("job 4711 has ended", 3)
    (full := tmp_path / "full.json").symlink_to("/dev/full")
    with pytest.raises(OSError, match=f"No space left on device: '{full}'"):
        trace.save(full)
    trace.save(tmp_path / "job.json")
    checked(json.loads((tmp_path / "job.json").read_text())["traceEvents"])


class Sleeper(Actor):
    """Handles one message until its process is killed."""

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def sleep(self) -> None:
        threading.Event().wait(WITHIN)


@pytest.mark.slow
def test_a_kill_and_a_restart_are_seen(tmp_path: Path) -> None:
    seen_busy, seen_again = threading.Event(), threading.Event()

    def look(*, pss: bool) -> Snapshot:
        found = inspect.snapshot(WITHIN, pss=pss)
        for each in found.procs:
            states = {actor.state for actor in each.actors}
            if "busy" in states:
                seen_busy.set()
            if each.incarnation == 1 and "idle" in states:
                seen_again.set()
        return found

    with this_host().spawn_procs({"gpus": 1}, name="workers") as procs:
        sleepers = procs.spawn("sleepers", Sleeper, supervise=OneForOne(intensity=3, period=60.0))
        pid = sleepers.pid.call_one().get(timeout=WITHIN)
        with JobTrace(0.02, snapshot=look) as trace:
            asleep = sleepers.sleep.call_one()
            assert seen_busy.wait(WITHIN)
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(MeshError):
                asleep.get(timeout=WITHIN)
            assert seen_again.wait(WITHIN)
    trace.save(tmp_path / "job.json")
    entries = checked(json.loads((tmp_path / "job.json").read_text())["traceEvents"])
    assert [name for name, _, _ in spans(entries, "call")] == ["sleep"]
    names = [each["name"] for each in entries if each["ph"] == "i"]
    assert "restarted, life 2" in names
    assert "proc_died workers[0]" in names


JOB = """
import sys
from mesh_core import Actor, endpoint, this_host

class Trainer(Actor):
    @endpoint
    def wait(self) -> None:
        print("ready", flush=True)
        import threading
        threading.Event().wait(60)

with this_host().spawn_procs({"gpus": 1}, name="workers") as procs:
    trainers = procs.spawn("trainers", Trainer)
    trainers.wait.broadcast()
    sys.stdin.read()
"""


@pytest.mark.slow
def test_the_command_records_another_job(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(JOB)
    with subprocess.Popen(
        [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert b"ready" in process.stdout.readline()
        mesh = [sys.executable, "-m", "mesh_core.cli", "trace", "--job", str(process.pid)]
        for file, status in (("job.json", 0), ("none/job.json", 1)):
            done = subprocess.run(
                [*mesh, "-o", str(tmp_path / file), "--seconds", "0.3"],
                capture_output=True,
                text=True,
                timeout=WITHIN,
            )
            assert (done.returncode != 0) == bool(status), done.stderr
        assert "cannot write the trace" in done.stderr
        process.kill()
    entries = checked(json.loads((tmp_path / "job.json").read_text())["traceEvents"])
    assert [name for name, _, _ in spans(entries, "call")] == ["wait"]
