"""Why a job makes no progress: real hangs, each of which is named with who causes it, and where."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hangs import Hanging, look, wait_aside
from supervised import WITHIN
from test_health import actor, snap

from mesh_core import MeshError, MeshFailure, Pool, Queue, inspect, set_fault_handler, this_host
from mesh_core.inspect import ProcStacks, StackFrame, ThreadStack
from mesh_supervision._watching._why import Culprit, Reason, confirmed, why

pytestmark = [pytest.mark.slow]


@pytest.fixture
def workers() -> Iterator[Any]:
    with this_host().spawn_procs({"gpus": 3}, name="hosts", supervise=lambda failure: True) as procs:
        made = procs.spawn("workers", Hanging, supervise=lambda failure: True)
        made.initialized.get(timeout=WITHIN)
        yield made
        for pid in procs.pids:
            if pid is not None:
                os.kill(pid, signal.SIGKILL)


def waiting(future: Any) -> None:
    wait_aside(future, WITHIN)


def reason(is_it: Callable[[Reason], bool]) -> Reason:
    """Ask until the hang is there."""
    end = time.monotonic() + WITHIN
    while True:
        found = confirmed(look)
        if is_it(found):
            return found
        assert time.monotonic() < end, found


@pytest.mark.sampled(3, full=True)
@pytest.mark.parametrize(
    ("method", "line"),
    [
        ("lock", "in lock"),
        ("spin", "in spin"),
        ("slow", "in slow"),
        ("regex", "in regex"),
        ("block_loop", "in block_loop"),
        ("child", "in child"),
        ("pipe", "in pipe"),
    ],
)
def test_a_handler_that_does_not_end_is_named_with_its_line(workers: Any, method: str, line: str) -> None:
    waiting(getattr(workers.slice(gpus=1), method).call_one())
    found = reason(
        lambda found: (
            bool(found.culprits) and line in found.culprits[0].line and bool(found.culprits[0].chain)
        )
    )
    (culprit,) = found.culprits
    assert culprit.who == "workers[1]"
    assert f"runs {method} for" in culprit.text
    assert "hangs.py" in culprit.line
    assert culprit.chain == ("controller", "workers[1]")


def test_a_coroutine_that_waits_forever_is_named(workers: Any) -> None:
    waiting(workers.slice(gpus=2).forget.call_one())
    (culprit,) = reason(lambda found: bool(found.culprits)).culprits
    assert culprit.who == "workers[2]"
    assert "has begun forget" in culprit.text
    assert "it awaits something" in culprit.text


def test_a_chain_of_calls_is_followed_to_its_end(workers: Any) -> None:
    first, second, third = (workers.slice(gpus=each) for each in range(3))
    waiting(first.chain.call_one(second, third))
    (culprit,) = reason(lambda found: bool(found.culprits) and "in lock" in found.culprits[0].line).culprits
    assert culprit.who == "workers[2]"
    assert culprit.chain == ("controller", "workers[0]", "workers[1]", "workers[2]")
    assert culprit.waiting == 3


def test_coroutines_are_followed_too(workers: Any) -> None:
    first, second = workers.slice(gpus=0), workers.slice(gpus=1)
    waiting(first.chain_async.call_one(second))
    (culprit,) = reason(lambda found: bool(found.culprits) and len(found.culprits[0].chain) == 3).culprits
    assert culprit.who == "workers[1]"
    assert "in lock" in culprit.line


def test_senders_that_cannot_send_learn_which_receiver_is_behind(workers: Any) -> None:
    first, second = workers.slice(gpus=0), workers.slice(gpus=1)
    waiting(first.flood.call_one(second))
    # At first its process may be too busy to answer, and be named itself.
    culprits = reason(
        lambda found: (
            bool(found.culprits)
            and found.culprits[0].who == "workers[1]"
            and len(found.culprits[0].chain) == 3
        )
    ).culprits
    assert "runs slow for" in culprits[0].text
    assert re.search(r", (\d+ messages wait|1 message waits) behind it", culprits[0].text)


def test_a_queue_that_nobody_fills_is_named(workers: Any) -> None:
    with Queue[int]() as queue:
        waiting(workers.slice(gpus=1).take.call_one(queue))
        found = reason(lambda found: bool(found.culprits) and bool(found.culprits[0].chain))
        assert found.culprits[0].chain[:2] == ("controller", "workers[1]")


def test_a_task_of_a_pool_that_does_not_end_is_named(workers: Any) -> None:
    pool = Pool(workers)
    waiting(pool.submit(workers.task, -1))
    found = reason(lambda found: bool(found.culprits) and "in held" in found.culprits[0].line)
    assert found.culprits[0].who.startswith("workers[")


def test_a_circle_is_named(workers: Any) -> None:
    first, second = workers.slice(gpus=0), workers.slice(gpus=1)
    waiting(first.circle.call_one(second, first))
    found = reason(lambda found: bool(found.circles))
    assert (
        "workers[0] -> workers[1] -> workers[0]" in found.circles[0]
        or "workers[1] -> workers[0] -> workers[1]" in found.circles[0]
    )
    assert found.culprits == ()
    # Each of them with its endpoint and its line.
    _, *each = found.circles[0].splitlines()
    assert sorted(line.split(",")[0].strip() for line in each) == ["workers[0]", "workers[1]"]
    for line in each:
        assert re.search(
            r"^  workers\[\d\], in circle, has waited .* for workers\[\d\]\.\w+, at File .*hangs\.py.*, in circle",
            line,
        ), line


def test_a_value_that_nobody_sends_is_named(workers: Any) -> None:
    waiting(workers.slice(gpus=1).channel.call_one())
    (culprit,) = reason(lambda found: bool(found.culprits) and "channel" in found.culprits[0].text).culprits
    assert culprit.who == "workers[1]"
    assert "in channel" in culprit.line


def test_a_promise_that_nobody_keeps_is_named(workers: Any) -> None:
    waiting(workers.slice(gpus=1).promise.call_one())
    (culprit,) = reason(
        lambda found: bool(found.culprits) and "everything" in found.culprits[0].text
    ).culprits
    assert culprit.who == "workers[1]"
    assert "in promise" in culprit.line


def test_an_answer_that_was_kept_back_is_named(workers: Any) -> None:
    waiting(workers.slice(gpus=0).keep.call_one())
    (culprit,) = reason(lambda found: bool(found.culprits)).culprits
    assert culprit.who == "workers[0]"
    assert "has begun keep" in culprit.text
    assert "has not answered by its port" in culprit.text


def test_a_process_that_was_stopped_is_named(workers: Any) -> None:
    pid = inspect.snapshot().procs[2].pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        answer = workers.slow.call()
        waiting(answer)
        found = reason(lambda found: any("stopped by a signal" in each.text for each in found.culprits))
    finally:
        os.kill(pid, signal.SIGCONT)
        answer.cancel()
    assert {each.who for each in found.culprits} == {"workers[0]", "workers[1]", "workers[2]"}


def test_a_constructor_that_does_not_end_is_named() -> None:
    with this_host().spawn_procs(name="hosts", supervise=lambda failure: True) as procs:
        made = procs.spawn("late", Hanging, True, supervise=lambda failure: True)
        waiting(made.slow.call_one())
        (culprit,) = reason(
            lambda found: bool(found.culprits) and "in __init__" in found.culprits[0].line
        ).culprits
        assert "its constructor has run for" in culprit.text
        pid = procs.pids[0]
        assert pid is not None
        os.kill(pid, signal.SIGKILL)


def test_what_goes_on_between_two_looks_is_not_named() -> None:
    def culprit(who: str, about: str = "") -> Culprit:
        return Culprit(who, "", "is late", about=about)

    def looks(*reasons: Reason) -> Reason:
        waited: list[float] = []
        found = confirmed(iter(reasons).__next__, waited.append)
        assert len(waited) == len(reasons) - 1
        return found

    nobody = Reason(())
    assert looks(nobody) == nobody
    assert looks(Reason((culprit("a"),)), nobody) == nobody
    assert looks(Reason((culprit("a"),)), Reason((culprit("b"),))) == nobody
    assert looks(Reason((culprit("a"),)), Reason((culprit("b"), culprit("a")))).culprits == (culprit("a"),)
    assert looks(Reason((culprit("a", "7"),)), Reason((culprit("a", "8"),))) == nobody, "another collective"
    assert looks(Reason((culprit("a", "7"),)), Reason((culprit("a", "7"),))).culprits == (culprit("a", "7"),)
    circle = Reason((), ("a -> b -> a",))
    assert looks(circle, circle) == circle


@pytest.mark.sampled(3, full=True)
@pytest.mark.parametrize("seed", range(3))
def test_a_seeded_hang_is_named_while_others_work(workers: Any, seed: int) -> None:
    chance = random.Random(seed)
    method = chance.choice(["lock", "spin", "pipe", "regex", "promise", "forget"])
    rank, other = chance.sample(range(3), 2)
    beside, over = workers.slice(gpus=other), threading.Event()

    def work() -> None:
        while not over.is_set():
            beside.task.call_one(1).get(timeout=WITHIN)

    working = threading.Thread(target=work)
    working.start()
    try:
        waiting(getattr(workers.slice(gpus=rank), method).call_one())
        found = reason(lambda found: any(each.who == f"workers[{rank}]" for each in found.culprits))
    finally:
        over.set()
        working.join()
    assert [each.who for each in found.culprits] == [f"workers[{rank}]"]


@pytest.mark.full
@pytest.mark.parametrize("what", ["the policy of 'asked'", "the fault handler"])
def test_what_is_asked_about_a_failure_and_does_not_return_is_named(workers: Any, what: str) -> None:
    go, over = threading.Event(), threading.Event()

    def blocks(_: MeshFailure) -> bool:
        go.wait(2 * WITHIN)
        over.set()
        return True

    before = set_fault_handler(blocks if what == "the fault handler" else None)
    try:
        asked = this_host().spawn_procs(
            name="asked", supervise=blocks if what != "the fault handler" else None
        )
        pid = asked.pids[0]
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        (culprit,) = reason(lambda found: bool(found.culprits)).culprits
        assert culprit.who == "controller"
        assert culprit.text.startswith(f"{what} was asked about a failure and has not returned")
        assert "test_why.py" in culprit.line and "in blocks" in culprit.line
        go.set()
        assert over.wait(WITHIN)
        reason(lambda found: not found.culprits)
        # Until then its dead process is shown, to tests that look at all of this job.
        asked.stop().get(timeout=WITHIN)
    finally:
        go.set()
        set_fault_handler(before)


def test_calm_jobs_have_no_culprit(workers: Any) -> None:
    for _ in range(20):
        workers.keep.broadcast()
        found = confirmed(look)
        assert (found.culprits, found.circles) == ((), ())
    assert "nobody waits for long" in str(found)


def test_the_rank_that_does_not_come_to_a_collective_is_named() -> None:
    """On paper, without PyTorch."""
    from mesh_core.inspect import Running, Wait, Waits

    running = (Running("step", 5.0, "controller"),)
    ranks = [actor(rank, state="busy", running=running) for rank in range(3)]
    meeting = (
        StackFrame("/x/site-packages/torch/distributed/distributed_c10d.py", 9, "all_reduce"),
        StackFrame("train.py", 7, "step"),
    )
    loading = (StackFrame("train.py", 3, "load"), StackFrame("train.py", 6, "step"))
    stacks = [
        ProcStacks(
            f"workers[{rank}]",
            1,
            (ThreadStack(1, "trainers", (), loading if rank == 1 else meeting, ("trainers",)),),
        )
        for rank in range(3)
    ]
    whom = tuple(f"trainers[{rank}]" for rank in range(3))
    wait = Wait("controller", "", "call", "for trainers.step", whom, 3, 5.0, "controller")
    found = why(snap(*ranks), Waits(0.0, (wait,), (), (), 0), stacks)
    (culprit,) = found.culprits
    assert culprit.who == "trainers[1]"
    assert "has not come to the collective in which 2 of 3 ranks wait" in culprit.text
    assert culprit.line == 'File "train.py", line 3, in load'


JOB = """
import threading
from mesh_core import Actor, endpoint, this_host

class Worker(Actor):
    @endpoint
    def step(self) -> None:
        print("begun", flush=True)
        threading.Event().wait()

with this_host().spawn_procs({"gpus": 2}, name="hosts") as procs:
    procs.spawn("workers", Worker).step.call().get()
"""


def test_the_command_says_it_of_another_job(tmp_path: Any) -> None:
    script = tmp_path / "\x1b]0;mine.py"
    script.write_text(JOB)
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE) as job:
        assert job.stdout is not None
        job.stdout.readline()
        command = [sys.executable, "-m", "mesh_core.cli", "why", "--job", str(job.pid), "--stacks"]
        end, said = time.monotonic() + WITHIN, ""
        try:
            while "workers[1]: runs step" not in said:
                assert time.monotonic() < end, said
                done = subprocess.run(command, capture_output=True, text=True, timeout=WITHIN)
                assert done.returncode == 0, done.stderr
                said = done.stdout
        finally:
            job.kill()
    assert "in step" in said
    assert "controller -> workers[1]" in said
    # What files are called does not control the terminal.
    assert r"\x1b]0;mine.py" in said
    assert "\x1b" not in said


def test_a_job_that_is_not_there_is_an_error() -> None:
    with pytest.raises(MeshError):
        inspect.connect(1)
