"""Jobs that outlive their scripts, with the processes and actors on their hosts."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from counter import Counter, lives
from greeter import Greeter, kill_host
from launched import LIMIT, leftovers, until
from scripts import Script

from mesh_core import MeshError, SupervisionError, configured, set_fault_handler, shutdown, this_host
from mesh_launchers import JobExists, JobNotFound, LaunchError, attach_job, jobs, launch
from mesh_launchers._folder import LINK, JobFolder

pytestmark = [pytest.mark.slow, pytest.mark.sampled(2, of="file", full=True)]

FIRST = f"""
    import sys
    sys.path.insert(0, {str(Path(__file__).parent)!r})
    from counter import Counter
    job = launch("local", hosts=2, name="kept", keep="60s")
    procs = job.hosts.spawn_procs({{"gpus": 1}}, name="trainers")
    counters = procs.spawn("counters", Counter)
    print(*counters.add.call(5).get(timeout=60).values(), *procs.pids, flush=True)
"""


def first(folder: Path, more: str = "    input()\n") -> tuple[Script, list[int]]:
    """A script that has launched a job and spawned on it, and the pids of what it has spawned."""
    script = Script(folder, FIRST + more)
    said = script.heard().split()
    assert said[:2] == ["5", "5"]
    return script, [int(each) for each in said[2:]]


def let_go() -> None:
    until(lambda: jobs()[0].used_by is None, "the script's end is known")


@pytest.fixture(autouse=True)
def own_handler() -> Iterator[None]:
    """Have failures raised, as a script does that has set up nothing."""
    before = set_fault_handler(None)
    yield
    set_fault_handler(before)


@pytest.mark.parametrize("how", ["ends", "detaches", "is killed", "is interrupted"])
def test_processes_and_actors_outlive_the_script(tmp_path: Path, how: str) -> None:
    """KPT-1, GST-2, GST-3."""
    more = {
        "ends": "    input()\n",
        "detaches": "    input()\n    job.detach()\n",
        "is killed": "    input()\n",
        "is interrupted": "    counters.wait_for.call('/nonexistent').get()\n",
    }[how]
    if how == "is interrupted":
        more = f"    counters.wait_for.call({str(tmp_path / 'never')!r}).get()\n"
    script, pids = first(tmp_path, more)
    if how == "is killed":
        script.kill()
    elif how == "is interrupted":
        until((tmp_path / "never.begun").exists, "the call runs")
        script.process.send_signal(signal.SIGINT)
        status, _, error = script.end()
        assert status == -signal.SIGINT and "KeyboardInterrupt" in error
        (tmp_path / "never").touch()
    else:
        script.go()
        assert script.end() == (0, "", "")
    let_go()
    count = 105 if how == "is interrupted" else 5
    with attach_job("kept") as job:
        assert list(job.procs) == ["trainers"] and list(job.actors) == ["counters"]
        counters: Any = job.actors["counters"]
        assert counters.add.call(1).get(timeout=LIMIT).values() == [count + 1] * 2
        assert counters.pid.call().get(timeout=LIMIT).values() == pids
        # They are this script's as if it had spawned them.
        more_of_them: Any = job.procs["trainers"].spawn("greeters", Greeter)
        assert more_of_them.greet.call("you").get(timeout=LIMIT).values() == ["hello you"] * 2
        counters.stop().get(timeout=LIMIT)
        assert list(job.actors) == ["greeters"]
        job.procs["trainers"].stop().get(timeout=LIMIT)
        assert not job.procs and not job.actors
    until(lambda: not any(map(lives, pids)), "the processes end")


def test_scripts_that_follow_each_other(tmp_path: Path) -> None:
    script, _ = first(tmp_path)
    script.kill()
    for n in range(3):
        let_go()
        job = attach_job("kept")
        counters: Any = job.actors["counters"]
        assert counters.add.call(1).get(timeout=LIMIT).values() == [6 + n] * 2
        name = f"more-{n}"
        job.hosts.spawn_procs({"gpus": 1}, name=name).spawn(name, Counter).add.call(1).get(timeout=LIMIT)
        job.detach()
    let_go()
    with attach_job("kept") as job:
        assert list(job.procs) == ["trainers", "more-0", "more-1", "more-2"]
        for n in range(3):
            mine: Any = job.actors[f"more-{n}"]
            assert mine.add.call(1).get(timeout=LIMIT).values() == [2, 2]


def test_a_death_without_a_script_is_reported_once_to_the_next_script(tmp_path: Path) -> None:
    """GST-3."""
    script, pids = first(tmp_path)
    script.kill()
    let_go()
    os.kill(pids[1], signal.SIGKILL)
    until(lambda: not lives(pids[1]), "it has ended")
    job = attach_job("kept")
    counters: Any = job.actors["counters"]
    with pytest.raises(SupervisionError) as told:
        counters.add.call(1).get(timeout=LIMIT)
    assert told.value.failure is not None and told.value.failure.pid == pids[1]
    assert len(counters.failed()) == 1
    assert counters.slice(hosts=0).add.call_one(1).get(timeout=LIMIT) in (6, 7)
    job.detach()
    let_go()
    with attach_job("kept") as job:
        counters = job.actors["counters"]
        # This one is told of no failure: another script was.
        assert counters.slice(hosts=0).add.call_one(0).get(timeout=LIMIT) in (6, 7)
        until(lambda: len(job.procs["trainers"].failed()) == 1, "what has ended is known")
        with pytest.raises(SupervisionError):
            counters.slice(hosts=1).add.call_one(1).get(timeout=LIMIT)


def taken_over() -> Any:
    """Have the job, with failures handled by the test."""
    set_fault_handler(lambda failure: True)
    return attach_job("kept")


def test_a_later_script_respawns_what_an_earlier_one_has_spawned(tmp_path: Path) -> None:
    """GST-5: with what it was spawned with, and again for the script after that."""
    script, pids = first(tmp_path)
    script.kill()
    let_go()
    os.kill(pids[1], signal.SIGKILL)
    until(lambda: not lives(pids[1]), "it has ended")
    for turn in range(2):
        job = taken_over()
        procs, counters = job.procs["trainers"], job.actors["counters"]
        until(lambda procs=procs: len(procs.failed()) == 1, "what has ended is known")
        procs.respawn().get(timeout=LIMIT)
        counters.respawn().get(timeout=LIMIT)
        assert counters.add.call(1).get(timeout=LIMIT).values() == [6 + turn, 1]
        assert procs.incarnations == [0, turn + 1]
        assert (procs.failed(), counters.failed()) == ([], [])
        [_, pid] = counters.pid.call().get(timeout=LIMIT).values()
        job.detach()
        let_go()
        if turn == 0:
            os.kill(pid, signal.SIGKILL)
            until(lambda pid=pid: not lives(pid), "it has ended")
    # What was made again is as good as what was there before.
    with attach_job("kept") as job:
        assert job.actors["counters"].add.call(1).get(timeout=LIMIT).values() == [8, 2]
        job.procs["trainers"].stop().get(timeout=LIMIT)
    until(lambda: not lives(pid), "the processes end")


def test_a_later_script_heals_what_an_earlier_one_has_spawned(tmp_path: Path) -> None:
    """GST-5."""
    supervision = pytest.importorskip("mesh_supervision", reason="mesh-supervision is not installed here")
    script, pids = first(tmp_path)
    script.kill()
    let_go()
    os.kill(pids[0], signal.SIGKILL)
    with taken_over() as job:
        counters: Any = job.actors["counters"]
        until(lambda: len(job.procs["trainers"].failed()) == 1, "what has ended is known")
        assert supervision.heal_mesh(counters) == counters
        assert len(counters.add.call(1).get(timeout=LIMIT).values()) == 2
        assert (counters.failed(), job.procs["trainers"].failed()) == ([], [])


def test_a_later_script_grows_and_shrinks_what_an_earlier_one_has_spawned(tmp_path: Path) -> None:
    """GST-5."""
    script, pids = first(tmp_path)
    script.kill()
    let_go()
    job = taken_over()
    grown = job.procs["trainers"].grow(hosts=1)
    grown.initialized.get(timeout=LIMIT)
    more: Any = grown.spawn("more", Counter)
    assert more.add.call(3).get(timeout=LIMIT).values() == [3, 3, 3]
    job.detach()
    let_go()
    with taken_over() as job:
        procs, more = job.procs["trainers"], job.actors["more"]
        assert procs.sizes == {"hosts": 3, "gpus": 1}
        found = more.pid.call().get(timeout=LIMIT).values()
        assert found[:2] == pids
        os.kill(found[2], signal.SIGKILL)
        until(lambda: len(procs.failed()) == 1, "what has ended is known")
        procs.respawn().get(timeout=LIMIT)
        more.respawn().get(timeout=LIMIT)
        assert more.add.call(1).get(timeout=LIMIT).values() == [4, 4, 1]
        procs.shrink(hosts=2).initialized.get(timeout=LIMIT)
        assert job.procs["trainers"].sizes == {"hosts": 1, "gpus": 1}
        until(lambda: not lives(pids[1]), "what was taken away ends")
        assert lives(pids[0])


def test_a_mesh_that_a_later_script_cannot_repair_says_why(tmp_path: Path) -> None:
    script = Script(
        tmp_path,
        FIRST.replace(
            "    counters = procs.spawn",
            "    import threading\n"
            "    from counter import Held\n"
            "    held = procs.spawn('held', Held, bytes(70 << 20))\n"
            "    counters = procs.spawn",
        )
        + "    input()\n",
    )
    assert script.heard().split()[:2] == ["5", "5"]
    script.kill()
    let_go()
    with taken_over() as job:
        held: Any = job.actors["held"]
        assert held.length.call().get(timeout=LIMIT).values() == [70 << 20] * 2
        with pytest.raises(MeshError, match=r"arguments of \d+ bytes; at most 67108864 are kept"):
            held.respawn([0])
        # Others can be.
        job.actors["counters"].slice(hosts=0).stop().get(timeout=LIMIT)
        assert job.actors["counters"].slice(hosts=1).add.call_one(0).get(timeout=LIMIT) == 5


def test_an_actor_that_fails_while_there_is_no_script(tmp_path: Path) -> None:
    go = tmp_path / "go"
    script, _ = first(
        tmp_path,
        f"""
    counters.slice(hosts=1).wait_for.broadcast({str(go)!r})
    counters.slice(hosts=1).fail.broadcast()
    import os
    os.kill(os.getpid(), 9)
""",
    )
    script.process.communicate()
    let_go()
    go.touch()
    until((tmp_path / "go.done").exists, "the call is over")
    job = attach_job("kept")
    counters: Any = job.actors["counters"]

    def call_until_told() -> None:
        while True:
            counters.slice(hosts=0).add.call_one(0).get(timeout=LIMIT)

    with pytest.raises(SupervisionError, match="a test"):
        call_until_told()
    job.stop()


def test_a_call_under_way_is_carried_out_once_and_answers_nobody(tmp_path: Path) -> None:
    go = tmp_path / "go"
    script, _ = first(tmp_path, f"    counters.slice(hosts=0).wait_for.call_one({str(go)!r}).get()\n")
    until((tmp_path / "go.begun").exists, "the call runs")
    script.kill()
    let_go()
    with attach_job("kept") as job:
        counters: Any = job.actors["counters"]
        ahead = counters.add.call(1)
        go.touch()
        assert ahead.get(timeout=LIMIT).values() == [106, 6]
        assert counters.add.call(0).get(timeout=LIMIT).values() == [106, 6]


def test_two_scripts_that_come_at_once(tmp_path: Path) -> None:
    """KPR-2, KPT-2."""
    script, _ = first(tmp_path)
    with pytest.raises(JobExists, match=rf"process {script.process.pid}.*take_over=True"):
        attach_job("kept")
    script.kill()
    let_go()
    folders = [tmp_path / "a", tmp_path / "b"]
    for each in folders:
        each.mkdir()
    both = [
        Script(
            each,
            """
            input()
            try:
                job = attach_job("kept")
                print("has it", flush=True)
            except JobExists as error:
                print(error, flush=True)
            input()
            """,
        )
        for each in folders
    ]
    for each in both:
        each.go()
    said = [each.heard() for each in both]
    winner = said.index("has it")
    assert f"used by process {both[winner].process.pid}" in said[1 - winner]
    for each in both:
        each.go()
        assert each.end()[0] == 0
    let_go()
    attach_job("kept").stop()


def test_a_script_that_was_taken_over_from_does_nothing_any_more(tmp_path: Path) -> None:
    """GST-1: a machine that slept, and wakes after another process has the job."""
    script, _ = first(
        tmp_path,
        """
    input()
    for _ in range(2):
        try:
            print(counters.add.call(1000).get(timeout=60).values(), flush=True)
        except Exception as error:
            print(" ".join(str(error).split()), flush=True)
    try:
        job.hosts.spawn_procs({"gpus": 1})
    except Exception as error:
        print(" ".join(str(error).split()), flush=True)
    for use in (job.state, lambda: job.scale(2)):
        try:
            use()
        except Exception as error:
            print(str(error), flush=True)
    input()
""",
    )
    os.kill(script.process.pid, signal.SIGSTOP)
    job = attach_job("kept", take_over=True)
    assert jobs()[0].used_by == os.getpid()
    counters: Any = job.actors["counters"]
    assert counters.add.call(1).get(timeout=LIMIT).values() == [6, 6]
    script.go()
    os.kill(script.process.pid, signal.SIGCONT)
    for _ in range(3):
        assert "no longer part of its job" in script.heard()
    for _ in range(2):
        assert script.heard().startswith(
            f"job 'kept' was taken over by process {os.getpid()}, and goes on there"
        )
    assert counters.add.call(0).get(timeout=LIMIT).values() == [6, 6]
    script.go()
    assert script.end()[0] == 0
    assert counters.add.call(0).get(timeout=LIMIT).values() == [6, 6]
    job.stop()


def test_the_lease_runs_out(tmp_path: Path, jobs_folder: Path) -> None:
    """KPR-1, KPT-1."""
    script = Script(tmp_path, FIRST.replace("60s", "0.5s") + "    input()\n")
    pids = [int(each) for each in script.heard().split()[2:]]
    script.kill()
    until(lambda: not leftovers(jobs_folder), "the job ends")
    assert not any(map(lives, pids))
    with pytest.raises(JobNotFound):
        attach_job("kept")


def test_the_death_of_the_keeper_ends_all(tmp_path: Path, jobs_folder: Path) -> None:
    script, pids = first(
        tmp_path,
        """
    try:
        input()
        counters.add.call(1).get(timeout=60)
    except Exception as error:
        print(" ".join(str(error).split()), flush=True)
""",
    )
    import subprocess

    keeper = subprocess.run(
        ["pgrep", "-f", f"_keeper {jobs_folder / 'kept'}"], capture_output=True, text=True, check=True
    )
    os.kill(int(keeper.stdout), signal.SIGKILL)
    until(lambda: not any(map(lives, pids)), "the processes end")
    script.go()
    assert "no longer part of its job" in script.heard()
    assert script.end()[0] == 0
    jobs()


def test_what_is_printed_while_there_is_no_script(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """KPT-3."""
    go = tmp_path / "go"
    script, _ = first(
        tmp_path,
        f"""
    counters.slice(hosts=0).wait_for.broadcast({str(go)!r})
    counters.slice(hosts=0).say.broadcast("while nobody was there")
    import os
    os.kill(os.getpid(), 9)
""",
    )
    script.process.communicate()
    let_go()
    go.touch()
    until((tmp_path / "go.done").exists, "the call is over")
    with attach_job("kept") as job:
        counters: Any = job.actors["counters"]
        counters.say.call("while somebody is").get(timeout=LIMIT)
    out = capfd.readouterr().out
    assert out.count("while nobody was there") == 1 and "while somebody is" in out


def test_output_comes_before_the_result(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """LOG-8, also where the job's keeper collects the output: in the script that launches, and in the next one."""

    def check(counters: Any, word: str) -> None:
        for n in range(10):
            counters.say.call(f"{word} {n}").get(timeout=LIMIT)
            assert f" {word} {n}\n" in capfd.readouterr().out
        one = counters.slice(hosts=1)
        for n in range(10):
            one.say.call_one(f"{word} alone {n}").get(timeout=LIMIT)
            assert f" {word} alone {n}\n" in capfd.readouterr().out
        combined = counters.say.with_options(reduce=lambda a, b: None)
        for n in range(10):
            combined.call(f"{word} combined {n}").get(timeout=LIMIT)
            assert capfd.readouterr().out.count(f" {word} combined {n}\n") == 2

    with configured(log_wait=LIMIT, log_window=0):
        job = launch("local", hosts=2, name="kept", keep="60s")
        check(job.hosts.spawn_procs().spawn("counters", Counter), "first")
        job.detach()
        with attach_job("kept") as job:
            check(job.actors["counters"], "second")


def test_meshes_of_the_scripts_actors_end_with_it(tmp_path: Path) -> None:
    """GST-4; and actors elsewhere keep what is theirs."""
    script, _ = first(
        tmp_path,
        """
    from mesh_core import this_proc
    here = this_proc().spawn("here", Counter)
    print(*here.spawn.call_one().get(timeout=60), *counters.slice(hosts=0).spawn.call_one().get(timeout=60), flush=True)
    input()
""",
    )
    own, others = map(int, script.heard().split())
    script.kill()
    let_go()
    until(lambda: not lives(own), "what belonged to the script's actor ends")
    with attach_job("kept") as job:
        assert lives(others) and list(job.actors) == ["counters"]
    until(lambda: not lives(others), "all ends with the job")


def test_a_process_takes_part_in_one_job_at_a_time(tmp_path: Path) -> None:
    procs = this_host().spawn_procs({"gpus": 1})
    with pytest.raises(LaunchError, match=r"uses Mesh already.*shutdown"):
        launch("local", hosts=1, name="kept", keep="60s")
    procs.stop().get(timeout=LIMIT)
    shutdown()
    with launch("local", hosts=1, name="kept", keep="60s") as job:
        with pytest.raises(LaunchError, match="a part of a job that is kept"):
            launch("local", hosts=1)
        with pytest.raises(LaunchError, match="uses Mesh already"):
            attach_job("kept")
        with pytest.raises(MeshError, match=r"sync_workspace.*without keep="):
            job.hosts.sync_workspace(tmp_path)
        job.detach()
        with launch("local", hosts=1) as other, pytest.raises(LaunchError, match=r"job.procs .*keep='8h'"):
            _ = other.procs
        shutdown()
        let_go()
        attach_job("kept").stop()
        with pytest.raises(MeshError):
            job.hosts.spawn_procs({"gpus": 1})


def test_a_connection_that_is_not_the_scripts_is_refused(tmp_path: Path) -> None:
    """KPT-2."""
    script, _ = first(tmp_path)
    script.kill()
    let_go()
    child = os.fork()
    if not child:
        JobFolder.of("kept").connect(10, LINK)
        signal.pause()
    try:
        with attach_job("kept") as job:
            counters: Any = job.actors["counters"]
            assert counters.add.call(1).get(timeout=LIMIT).values() == [6, 6]
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_hosts_come_and_go_in_a_kept_job(tmp_path: Path) -> None:
    script, _ = first(tmp_path)
    script.kill()
    let_go()
    job = attach_job("kept")
    assert job.hosts.names == ["kept-0", "kept-1"]
    assert job.scale(3).sizes == {"hosts": 3}
    every: Any = job.hosts.spawn_procs({"gpus": 1}, name="all").spawn("all", Counter)
    assert every.add.call(1).get(timeout=LIMIT).values() == [1, 1, 1]
    job.detach()
    let_go()
    with attach_job("kept") as job:
        assert job.hosts.sizes == {"hosts": 3} and job.hosts.names[2] == "kept-2"
        assert job.actors["all"].add.call(1).get(timeout=LIMIT).values() == [2, 2, 2]  # type: ignore[attr-defined]
        job.scale(1)
        assert job.actors["counters"].slice(hosts=0).add.call_one(1).get(timeout=LIMIT) == 6  # type: ignore[attr-defined]
        assert job.hosts.sizes == {"hosts": 1}


def test_labels_and_resources_in_a_kept_job(tmp_path: Path) -> None:
    """Of hosts that are there, as the process knows them that keeps the job."""
    with launch("local", meshes={"a": 1, "b": 2}, name="kept", keep="60s", resources={"gpus": 2}) as job:
        everything = job.meshes["a"].join(job.meshes["b"])
        everything.initialized.get(timeout=LIMIT)
        assert [each["mesh"] for each in everything.labels] == ["a", "b", "b"]
        assert [each["gpus"] for each in everything.resources] == [2, 2, 2]
        assert everything.select(mesh="b").names == ["kept-1", "kept-2"]
        kill_host("kept-1")
        until(lambda: everything.select(mesh="b").names == ["kept-2"], "a host that has died is not selected")
        with pytest.raises(ValueError, match="has the label mesh='c'; there are: a, b"):
            everything.select(mesh="c")


def test_several_meshes_and_a_spare(tmp_path: Path) -> None:
    with launch("local", meshes={"a": 1, "b": 2}, spares=1, name="kept", keep="60s") as job:
        procs = job.meshes["b"].spawn_procs({"gpus": 1}, name="trainers", supervise=lambda failure: True)
        pid = procs.pids[1]
        assert pid is not None and job.spares is not None
        os.kill(pid, signal.SIGKILL)
        until(procs.failed, "the death is told")
        procs.respawn(on=job.spares).get(timeout=LIMIT)
        job.detach()
        shutdown()
        let_go()
        again = attach_job("kept")
        assert sorted(again.meshes) == ["a", "b", "spares"]
        counters: Any = again.procs["trainers"].spawn("counters", Counter)
        assert counters.add.call(1).get(timeout=LIMIT).values() == [1, 1]
        again.stop()


@pytest.mark.parametrize(
    ("there", "words"),
    [
        ({"packages": {"mesh-core": "0.0.9"}}, "it has mesh-core 0.0.9, and the script mesh-core "),
        ({"python": "3.9.1"}, r"it has Python 3.9.1 \(.*\), and the script Python "),
    ],
)
def test_a_script_of_another_version_does_not_attach(there: dict[str, Any], words: str) -> None:
    launch("local", hosts=1, name="kept", keep="60s").wait(LIMIT).detach()
    let_go()
    folder = JobFolder.of("kept")
    told = folder.read()
    folder.write({**told, "environment": {**told["environment"], **there}})
    with pytest.raises(LaunchError, match=f"job 'kept' cannot be attached: {words}.*mesh stop kept"):
        attach_job("kept")
    folder.write(told)
    with attach_job("kept") as again:
        assert again.hosts.names == ["kept-0"]
