"""Output and logging of workers: that it arrives, from whom, how often, and at what cost to workers that do not print."""

# ruff: noqa: T201 - printing is what is tested

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from core_processes import Watch, search_path
from core_samples import Caller, Coroutines, Echo

from mesh_core import ProcMesh, SpawnError, SupervisionError, configured, this_host, this_proc

pytestmark = pytest.mark.usefixtures("runtime")


def say(text: str) -> None:
    print(text)


def warm_up() -> None:
    """Make sure this module is imported, which takes longer than the window for equal lines."""


def complain(text: str) -> None:
    print(text, file=sys.stderr)


def say_ranks(attempt: str) -> None:
    from mesh_core import current_rank

    print(f"loss of rank {current_rank().rank} is 0.{current_rank().rank} in try {attempt}")


def log(level: int, text: str, name: str = "") -> None:
    import logging

    logging.getLogger(name).log(level, text)


def lines(text: str) -> list[str]:
    return text.splitlines()


@pytest.fixture
def one(runtime: None) -> Any:
    """One process, and an actor on it."""
    with this_host().spawn_procs(name="single") as procs:
        yield procs.spawn("one", Echo)


def run(script: Any, source: str, *args: str) -> tuple[list[str], list[str]]:
    """Run a script to its end; return the lines of its stdout and stderr."""
    started = script(HEADER + source, *args)
    out, err = started.finish()
    assert started.process.returncode == 0, err
    return lines(out), lines(err)


HEADER = """
    import ctypes, logging, os, subprocess, sys, threading
    import test_logs
    from core_samples import Caller, Coroutines, Echo
    from mesh_core import MeshError, SupervisionError, shutdown, this_host
"""


@pytest.mark.slow
def test_lines_arrive_with_their_actor_and_rank(script: Any) -> None:
    out, err = run(
        script,
        """
    with this_host().spawn_procs(per_host={"hosts": 2, "gpus": 2}, name="workers") as procs:
        trainers = procs.spawn("trainers", Echo)
        trainers.slice(hosts=1, gpus=0).call.call_one(test_logs.say, "to stdout").get()
        trainers.slice(hosts=0, gpus=1).call.call_one(test_logs.complain, "to stderr").get()
        trainers.slice(hosts=0, gpus=1).call.call_one(os.system, "echo of a child").get()
        single = this_host().spawn_procs(name="alone")
        single.spawn("solo", Echo).call.call_one(test_logs.say, "a\\nb").get()
        single.stop().get()
        print("at the end")
        """,
    )
    assert out[-1] == "at the end"
    assert sorted(out[:-1]) == [
        "[solo] a",
        "[solo] b",
        "[trainers hosts=1,gpus=0] to stdout",
        "[workers hosts=0,gpus=1] of a child",
    ]
    assert err == ["[trainers hosts=0,gpus=1] to stderr"]


# Equal lines are merged if the second comes before the first is shown, which depends on the machine's load.
HELLO_OF_TWO = {
    "[pair gpus=0-1 x2] hello\n",
    "[pair gpus=0] hello\n[pair gpus=1] hello\n",
    "[pair gpus=1] hello\n[pair gpus=0] hello\n",
}


def test_all_is_shown_before_a_stop_returns(capfd: pytest.CaptureFixture[str]) -> None:
    with this_host().spawn_procs(per_host={"gpus": 2}, name="brief") as procs:
        procs.spawn("pair", Echo).call.call(say, "hello").get()
    assert capfd.readouterr().out in HELLO_OF_TWO
    with this_host().spawn_procs(name="briefer") as procs:
        procs.spawn("one", Echo).call.call_one(complain, "goodbye").get()
    assert capfd.readouterr().err == "[one] goodbye\n"


def test_lines_go_to_the_stdout_of_the_moment(one: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    for _ in range(2):
        stream = io.StringIO()
        monkeypatch.setattr(sys, "stdout", stream)
        one.call.call_one(say, "now").get()
        flush(one)
        assert stream.getvalue() == "[one] now\n"


def flush(mesh: Any) -> None:
    mesh._process.flush_console()


def test_a_closed_stdout_loses_lines_and_nothing_else(
    one: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    import io

    closed = io.StringIO()
    closed.close()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", closed)
        one.call.call_one(say, "to nobody").get()
        flush(one)
    one.call.call_one(say, "to somebody").get()
    flush(one)
    assert capfd.readouterr().out == "[one] to somebody\n"


def test_a_stdout_of_ascii_gets_escapes(one: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with (tmp_path / "out").open("w", encoding="ascii") as ascii_only, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", ascii_only)
        one.call.call_one(say, "caf\u00e9").get()
        flush(one)
    assert (tmp_path / "out").read_text() == "[one] caf\\xe9\n"


@pytest.mark.parametrize("start", ["fork", "exec"])
def test_a_script_without_stdout_and_stderr(tmp_path: Path, start: str) -> None:
    """Their descriptor numbers may then belong to other files, in the script and in the fork server."""
    path = tmp_path / "closed.py"
    path.write_text(CLOSED)
    subprocess.run(
        [
            "/bin/sh",
            "-c",
            'exec "$0" "$@" <&- >&- 2>&-',
            sys.executable,
            str(path),
            start,
            str(tmp_path / "done"),
        ],
        check=True,
        timeout=50,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(search_path()),
        },
    )
    assert (tmp_path / "done").read_text() == "[1, 1]"


CLOSED = """
import sys
import test_logs
from core_samples import Echo
from mesh_core import this_host
with this_host().spawn_procs(per_host={"gpus": 2}, start=sys.argv[1]) as procs:
    echo = procs.spawn("echo", Echo)
    echo.call.call(test_logs.say, "to nobody").get()
    open(sys.argv[2], "w").write(str(echo.echo.call(1).get().values()))
"""


def test_equal_lines_of_many_ranks_are_merged(capfd: pytest.CaptureFixture[str]) -> None:
    with this_host().spawn_procs(per_host={"gpus": 4}, name="four") as procs:
        trainers = procs.spawn("trainers", Echo)
        trainers.call.call(warm_up).get()
        every = together(capfd, trainers, lambda attempt: trainers.call.call(say, f"try {attempt}").get())
        assert re.fullmatch(r"\[trainers gpus=0-3 x4\] try [a-z]+", every)
        some = trainers.slice(gpus=slice(0, 4, 2))
        pair = together(capfd, trainers, lambda attempt: some.call.call(say, f"twice in try {attempt}").get())
        assert re.fullmatch(r"\[trainers gpus=0,2 x2\] twice in try [a-z]+", pair)
        # Lines of a single rank are not merged.
        for step in range(3):
            trainers.slice(gpus=3).call.call(say, f"step {step}").get()
    assert lines(capfd.readouterr().out) == [f"[trainers gpus=3] step {step}" for step in range(3)]


def test_lines_with_different_numbers_are_shown_separately(capfd: pytest.CaptureFixture[str]) -> None:
    with this_host().spawn_procs(per_host={"gpus": 4}, name="four") as procs:
        trainers = procs.spawn("trainers", Echo)
        trainers.call.call(say_ranks, "a").get()
    assert sorted(lines(capfd.readouterr().out)) == [
        f"[trainers gpus={n}] loss of rank {n} is 0.{n} in try a" for n in range(4)
    ]


@pytest.mark.parametrize("how", ["option", "setting"])
def test_lines_with_different_numbers_are_merged_on_request(
    capfd: pytest.CaptureFixture[str], how: str
) -> None:
    with (
        configured(log_ignore_numbers=how == "setting"),
        this_host().spawn_procs(per_host={"gpus": 4}, name="four") as procs,
    ):
        if how == "option":
            procs.logging_option(ignore_numbers=True)
        trainers = procs.spawn("trainers", Echo)
        trainers.call.call(warm_up).get()
        every = together(capfd, trainers, lambda attempt: trainers.call.call(say_ranks, attempt).get())
        assert re.fullmatch(
            r"\[trainers gpus=0-3 x4\] loss of rank \d is 0\.\d in try [a-z]+ \(and 3 alike, other numbers\)",
            every,
        )


def fail_alike(kind: str) -> None:
    import logging
    import traceback

    from mesh_core import current_rank

    rank = 0 if kind == "equal" else current_rank().rank
    try:
        try:
            raise KeyError("first")
        except KeyError as error:
            raise ValueError(f"bad batch\non rank {rank}") from error
    except ValueError:
        if kind == "logged":
            logging.getLogger("lib").exception("failed")
        else:
            traceback.print_exc()
    complain("after it")


@pytest.mark.parametrize("kind", ["printed", "logged"])
def test_a_traceback_is_not_torn(capfd: pytest.CaptureFixture[str], kind: str) -> None:
    with (
        configured(log_records=False),
        this_host().spawn_procs(per_host={"gpus": 3}, name="three") as procs,
    ):
        procs.spawn("t", Echo).call.call(fail_alike, kind).get()
    # If others have said that before, it may be counted sooner or later.
    shown = [line for line in lines(capfd.readouterr().err) if "after it" not in line]
    for rank in range(3):
        label = f"[t gpus={rank}] "
        begin = next(n for n, line in enumerate(shown) if line.startswith(label))
        unit = shown[begin : begin + (12 if kind == "printed" else 13)]
        # In one piece, and all of it from this rank.
        assert all(line.startswith(label.rstrip()) for line in unit), shown
        assert unit[-2:] == [f"{label}ValueError: bad batch", f"{label}on rank {rank}"]
        assert sum("Traceback" in line for line in unit) == 2


def test_equal_tracebacks_are_one(capfd: pytest.CaptureFixture[str]) -> None:
    with this_host().spawn_procs(per_host={"gpus": 3}, name="three") as procs:
        procs.logging_option(aggregate_window_sec=30)
        t = procs.spawn("t", Echo)
        t.call.call(fail_alike, "equal").get()
        flush(t)
    shown = lines(capfd.readouterr().err)
    # Those too late for the first are counted at the end, never line by line.
    labels = [line.partition("]")[0] for line in shown if "after it" not in line]
    whole = len([line for line in shown if "on rank 0" in line])
    assert len(labels) == 12 * whole
    assert all(len(set(labels[at : at + 12])) == 1 for at in range(0, len(labels), 12)), shown


def test_notices_of_mesh_are_shown_for_each_process(capfd: pytest.CaptureFixture[str]) -> None:
    with this_host().spawn_procs(per_host={"gpus": 3}, name="three") as procs:
        t = procs.spawn("t", Echo)
        t.call.call(notice_of_mesh).get()
    assert sorted(lines(capfd.readouterr().err)) == [f"[t gpus={n}] mesh: a notice" for n in range(3)]


def notice_of_mesh() -> None:
    from mesh_core._system.streams import notice

    notice("mesh: a notice")


def together(capfd: pytest.CaptureFixture[str], mesh: Any, print_all: Callable[[str], Any]) -> str:
    """What is shown of lines that came together; on a busy machine they may come apart, and then are printed again."""
    # Letters, because numbers make no difference.
    for attempt in "abcdefghijklmnopqrst":
        print_all(attempt)
        flush(mesh)
        shown = lines(capfd.readouterr().out)
        if len(shown) == 1:
            return shown[0]
    raise AssertionError(f"twenty times apart, at last as {shown}")


def test_without_a_window_every_line_is_shown(capfd: pytest.CaptureFixture[str]) -> None:
    with this_host().spawn_procs(per_host={"gpus": 3}, name="three") as procs:
        trainers = procs.spawn("trainers", Echo)
        procs.logging_option(aggregate_window_sec=None)
        trainers.call.call(say, "hello").get()
    assert sorted(lines(capfd.readouterr().out)) == [f"[trainers gpus={n}] hello" for n in range(3)]
    with configured(log_window=0), this_host().spawn_procs(per_host={"gpus": 2}) as procs:
        procs.spawn("pair", Echo).call.call(say, "hello").get()
    assert sorted(lines(capfd.readouterr().out)) == [f"[pair gpus={n}] hello" for n in range(2)]


def test_output_that_is_not_streamed_is_kept_for_a_failure(capfd: pytest.CaptureFixture[str]) -> None:
    with this_host().spawn_procs(name="quiet") as procs:
        procs.logging_option(stream_to_client=False)
        one = procs.spawn("one", Echo)
        one.call.call_one(say, "hello").get()
        one.call.call_one(complain, "last words").get()
        with pytest.raises(SupervisionError) as caught:
            one.call.call_one(os._exit, 3).get()
    assert caught.value.failure is not None
    assert caught.value.failure.stderr_tail == ("last words",)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    "options",
    [
        {"aggregate_window_sec": -1},
        {"aggregate_window_sec": -1e-300},
        {"aggregate_window_sec": 86_400.1},
        {"aggregate_window_sec": "3"},
        {"level": "LOUD"},
        {"level": -1},
        {"level": 1001},
        {"level": True},
    ],
)
def test_bad_options_are_refused(procs: ProcMesh, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        procs.logging_option(**options)
    with pytest.raises(ValueError, match="the script's"):
        this_proc().logging_option()


@pytest.mark.parametrize(("window", "level"), [(0, 0), (86_400.0, 1000)])
def test_the_least_and_the_largest_options(procs: ProcMesh, window: float, level: int) -> None:
    procs.logging_option(aggregate_window_sec=window, level=level)


def test_records_come_with_their_level(capfd: pytest.CaptureFixture[str]) -> None:
    # pytest has its own handlers, which would receive them.
    with configured(log_records=False), this_host().spawn_procs(name="logged") as procs:
        one = procs.spawn("one", Logging)
        one.log.call_one().get()
        one._process.flush_console()  # an option holds for what is shown from then on
        procs.logging_option(level=10)
        one.log.call_one().get()
        one._process.flush_console()
        procs.logging_option(level=40)
        one.log.call_one().get()
    info = ["[one] INFO lib: info", "[one] INFO own info"]
    error = ["[one] ERROR lib: error", "[one] over two lines"]
    assert lines(capfd.readouterr().err) == [
        *info, *error, "[one] DEBUG lib: debug", "[one] DEBUG own debug", *info, *error, *error,
    ]  # fmt: skip


def test_a_program_sets_up_its_own_logging(capfd: pytest.CaptureFixture[str]) -> None:
    with this_host().spawn_procs(name="own") as procs:
        one = procs.spawn("one", Logging)
        one.basic_config.call_one().get()
        one.log.call_one().get()
    assert lines(capfd.readouterr().err) == [
        "[one] mine:debug", "[one] mine:own debug", "[one] mine:info", "[one] mine:own info", "[one] mine:error",
        "[one] over two lines",
    ]  # fmt: skip


def test_a_program_redirects_stderr_to_see_what_is_logged(
    one: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    assert one.call.call_one(redirected).get() == "WARNING caught\n"
    flush(one)
    assert capfd.readouterr().err == ""


def redirected() -> str:
    import contextlib
    import io
    import logging

    with contextlib.redirect_stderr(io.StringIO()) as caught:
        logging.getLogger().warning("caught")
    return caught.getvalue()


class Logging(Echo):
    """Logs at every level."""

    from mesh_core import endpoint

    @endpoint
    def log(self) -> None:
        import logging

        lib = logging.getLogger("lib")
        for level in ("debug", "info"):
            getattr(lib, level)(level)
            getattr(self.logger, level)(f"own {level}")
        lib.error("error\nover two lines")

    @endpoint
    def basic_config(self) -> None:
        import logging

        logging.basicConfig(level=logging.DEBUG, format="mine:%(message)s")


# The end of a process.


def crash() -> None:
    complain("before the crash")
    ctypes.string_at(0)


def killed() -> None:
    complain("before the kill")
    sys.stdout.write("begun and flushed")
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)


def exits() -> None:
    os.write(1, b"raw and without an end")
    complain("before the exit")
    os._exit(3)


def aborts() -> None:
    ctypes.CDLL(None).printf(b"of C\n")
    ctypes.CDLL(None).abort()


@pytest.mark.parametrize(
    ("end", "out", "tail"),
    [
        (crash, [], ["before the crash", "Fatal Python error: Segmentation fault", "test_logs.py"]),
        (killed, ["[one] begun and flushed"], ["before the kill"]),
        (exits, ["[single] raw and without an end"], ["before the exit"]),
        (aborts, ["[single] of C"], ["Fatal Python error: Aborted"]),
    ],
)
def test_last_words(
    one: Any, end: Any, out: list[str], tail: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SupervisionError) as caught:
        one.call.call_one(end).get()
    failure = caught.value.failure
    assert failure is not None
    for words in tail:
        assert any(words in line for line in failure.stderr_tail), failure.stderr_tail
        assert words in failure.report()
    flush(one)
    shown = capfd.readouterr()
    assert lines(shown.out) == out
    for line in failure.stderr_tail:
        assert line.rstrip() in shown.err


def test_only_the_last_lines_are_kept(one: Any, capfd: pytest.CaptureFixture[str]) -> None:
    one.call.call_one(complain, "\n".join(map(str, range(1000)))).get()
    with pytest.raises(SupervisionError) as caught:
        one.call.call_one(os._exit, 1).get()
    assert caught.value.failure is not None
    assert caught.value.failure.stderr_tail == tuple(map(str, range(960, 1000)))
    flush(one)
    assert lines(capfd.readouterr().err) == [f"[one] {n}" for n in range(1000)]


@pytest.mark.usefixtures("fault_tolerant")
def test_another_worker_gets_the_last_lines_too(capfd: pytest.CaptureFixture[str]) -> None:
    with this_host().spawn_procs(per_host={"gpus": 2}, name="two") as procs:
        victim = procs.slice(gpus=0).spawn("victim", Echo)
        asker = procs.slice(gpus=1).spawn("asker", Asker)
        assert asker.ask.call_one(victim).get() == ("before the exit",)


class Asker(Echo):
    """Calls an actor that dies, from a worker."""

    from mesh_core import endpoint

    @endpoint
    def ask(self, victim: Any) -> tuple[str, ...]:
        error = victim.call.call_one(exits).exception()
        assert isinstance(error, SupervisionError)
        assert error.failure is not None
        return error.failure.stderr_tail


def test_a_process_that_cannot_start_says_why(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no such library >&2\nexit 7\n")
    broken.chmod(0o755)
    procs = this_host().spawn_procs(name="broken", start="exec", python=str(broken))
    with pytest.raises(SpawnError, match="no such library") as caught:
        procs.initialized.get()
    assert caught.value.stderr_tail == "no such library"
    assert caught.value.exitcode == 7
    flush(procs)
    assert capfd.readouterr().err == "[broken] no such library\n"


def test_a_new_interpreter_identifies_itself(capfd: pytest.CaptureFixture[str]) -> None:
    with this_host().spawn_procs(per_host={"gpus": 2}, name="fresh", start="exec") as procs:
        procs.slice(gpus=1).spawn("one", Echo).call.call_one(say, "hello").get()
    assert capfd.readouterr().out == "[one] hello\n"


def test_a_surviving_grandchild_delays_no_notice(one: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """It keeps the pipes open, and what it writes later still arrives."""
    pid = one.call.call_one(start_sleeper).get()
    watch = Watch([pid])
    with pytest.raises(SupervisionError):
        one.call.call_one(os._exit, 1).get(timeout=5)
    os.kill(pid, signal.SIGUSR1)
    assert watch.wait() == []
    flush(one)
    assert capfd.readouterr().out == "[single] of the child\n"


def start_sleeper() -> int:
    code = "import signal; print('ready', file=open('/dev/stderr', 'w')); signal.sigwait([signal.SIGUSR1]); print('of the child')"
    # SIGTERM is what processes are sent that a worker leaves behind.
    code = (
        f"import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1, signal.SIGTERM]); {code}"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE)
    assert child.stderr is not None
    child.stderr.readline()
    return child.pid


# Whole lines.


def race(threads: int, count: int) -> None:
    def write(number: int) -> None:
        for n in range(count):
            # In pieces, some longer than what the kernel writes at once.
            print(number, n, "x" * (5000 if n % 50 == 0 else 10), number, n)

    started = [threading.Thread(target=write, args=(number,)) for number in range(threads)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()


def test_threads_never_tear_lines(one: Any, capfd: pytest.CaptureFixture[str]) -> None:
    one.call.call_one(race, 8, 500).get()
    flush(one)
    seen = set()
    for line in lines(capfd.readouterr().out):
        match = re.fullmatch(r"\[single\] (\d+) (\d+) (x{10}|x{5000}) (\d+) (\d+)", line)
        assert match is not None, line
        assert match[1] == match[4]
        assert match[2] == match[5]
        seen.add((int(match[1]), int(match[2])))
    assert seen == {(thread, n) for thread in range(8) for n in range(500)}


def test_incomplete_lines_are_kept_apart(capfd: pytest.CaptureFixture[str]) -> None:
    """Two actors whose coroutines alternate on one thread, each in the middle of a line."""
    with this_host().spawn_procs(name="turns") as procs:
        first, second = procs.spawn("first", Halves), procs.spawn("second", Halves)
        for flushed in (False, True):
            first.begin.call_one("one, ", flushed).get()
            second.begin.call_one("two, ", flushed).get()
            first.end.call_one("one").get()
            second.end.call_one("two").get()
    assert sorted(lines(capfd.readouterr().out)) == ["[first] one, one"] * 2 + ["[second] two, two"] * 2


class Halves(Coroutines):
    """Prints lines in two halves."""

    from mesh_core import endpoint

    @endpoint
    async def begin(self, text: str, flushed: bool) -> None:
        print(text, end="", flush=flushed)

    @endpoint
    async def end(self, text: str) -> None:
        print(text)


def test_a_progress_bar_shows_its_last_state(one: Any, capfd: pytest.CaptureFixture[str]) -> None:
    one.call.call_one(progress).get()
    flush(one)
    assert lines(capfd.readouterr().err) == ["[one] 100%"]


def progress() -> None:
    for percent in (10, 50, 100):
        print(f"\r{percent}%", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)


def test_the_streams_are_files_as_programs_expect(one: Any, capfd: pytest.CaptureFixture[str]) -> None:
    one.call.call_one(use_streams).get()
    flush(one)
    assert (
        capfd.readouterr().out
        == "[single] bytes\n[one] a\n[one] b\n[one] \\udc80\u00e9\n[single] of a fork\n"
    )


def use_streams() -> None:
    assert (sys.stdout.fileno(), sys.stderr.fileno()) == (1, 2)
    assert not sys.stdout.isatty()
    assert sys.stdout.writable()
    sys.stdout.buffer.write(b"bytes\n")
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.stdout.writelines(["a\n", "b\n"])
    print("\udc80\u00e9")
    pid = os.fork()
    if pid == 0:
        os.write(1, b"of a fork\n")
        os._exit(0)
    os.waitpid(pid, 0)


# Large amounts.


def flood(count: int, rank: int = 0, more: str = "") -> None:
    for n in range(count):
        print(f"{rank}:{n}{more}")


@pytest.mark.slow
def test_nothing_is_lost_of_a_hundred_thousand_lines(script: Any) -> None:
    out, _ = run(
        script,
        """
    with this_host().spawn_procs(per_host={"gpus": 2}, name="loud") as procs:
        procs.logging_option(aggregate_window_sec=None)
        loud = procs.spawn("loud", Echo)
        first = loud.slice(gpus=0).call.call_one(test_logs.flood, 50_000, 0)
        second = loud.slice(gpus=1).call.call_one(test_logs.flood, 50_000, 1)
        first.get(), second.get()
        """,
    )
    for rank in range(2):
        mark = f"[loud gpus={rank}] {rank}:"
        assert [line for line in out if line.startswith(mark)] == [f"{mark}{n}" for n in range(50_000)]
    assert len(out) == 100_000


def test_nothing_is_lost_when_a_script_just_ends(script: Any) -> None:
    out, _ = run(
        script,
        """
    loud = this_host().spawn_procs(name="loud").spawn("loud", Echo)
    loud.call.call_one(test_logs.flood, 5000).get()
        """,
    )
    assert out == [f"[loud] 0:{n}" for n in range(5000)]


@pytest.mark.full
@pytest.mark.slow
def test_a_full_stdout_blocks_only_workers_that_print(script: Any) -> None:
    """The script's own stdout is not read: its workers' prints wait, calls to others do not, and nothing is lost."""
    started = script(
        HEADER
        + """
    with this_host().spawn_procs(per_host={"gpus": 2}, name="two") as procs:
        loud, quiet = (procs.slice(gpus=n).spawn(f"a{n}", Echo) for n in range(2))
        quiet.echo.call_one(1).get()
        # Twice what may wait on the way if nobody reads (MOST_WAITING in Rust), and half as much again.
        flooding = loud.call.call_one(test_logs.flood, 24_000, 0, "x" * 500)
        while procs._process.runtime.logs().flush(0.05):
            pass
        for n in range(200):
            assert quiet.echo.call_one(n).get(timeout=30) == n
        assert not flooding.done()
        print("held back", file=sys.stderr, flush=True)
        flooding.get()
        """
    )
    assert started.process.stderr.readline() == "held back\n"
    out, err = started.finish()
    assert (started.process.returncode, err) == (0, "")
    assert lines(out) == [f"[a0] 0:{n}{'x' * 500}" for n in range(24_000)]


def test_a_worker_that_owns_a_mesh_sets_its_options(capfd: pytest.CaptureFixture[str]) -> None:
    with this_host().spawn_procs(name="outer") as procs:
        owner = procs.spawn("owner", Owner)
        owner.run.call_one().get()
    assert sorted(lines(capfd.readouterr().out)) == ["[inner gpus=0] shown", "[inner gpus=1] shown"]


class Owner(Caller):
    """Spawns from a worker."""

    from mesh_core import endpoint

    @endpoint
    def run(self) -> None:
        with this_host().spawn_procs(per_host={"gpus": 2}, name="within") as procs:
            procs.logging_option(aggregate_window_sec=None)
            inner = procs.spawn("inner", Echo)
            inner.call.call(say, "shown").get()


def test_in_a_notebook_lines_are_shown_before_the_cell_ends(script: Any) -> None:
    """Does not need IPython itself: only what IPython calls at the end of a cell."""
    out, _ = run(
        script,
        """
    from types import SimpleNamespace
    hooks = {}
    events = SimpleNamespace(register=hooks.__setitem__, unregister=lambda name, hook: hooks.pop(name))
    sys.modules["IPython"] = SimpleNamespace(get_ipython=lambda: SimpleNamespace(events=events))
    pair = this_host().spawn_procs(per_host={"gpus": 2}, name="pair").spawn("pair", Echo)
    for cell in range(2):
        for rank in range(2):
            pair.slice(gpus=rank).call.call(test_logs.say, "in the cell").get()
        hooks["post_run_cell"](None)
        print("after the cell")
    shutdown()
    assert not hooks
        """,
    )
    cells = "\n".join(out).split("after the cell")
    assert len(cells) == 3 and cells[2] == ""
    for cell in cells[:2]:
        assert cell.strip().split("\n") in (
            ["[pair gpus=0-1 x2] in the cell"],
            ["[pair gpus=0] in the cell", "[pair gpus=1] in the cell"],
        )


@pytest.mark.slow
def test_lines_after_a_shutdown_and_a_new_beginning(script: Any) -> None:
    out, _ = run(
        script,
        """
    for n in range(2):
        this_host().spawn_procs(name="again").spawn("one", Echo).call.call_one(test_logs.say, n).get()
        shutdown()
        print("shut down")
        """,
    )
    assert out == ["[one] 0", "shut down", "[one] 1", "shut down"]


def test_equal_lines_within_the_window_are_counted_at_its_end(capfd: pytest.CaptureFixture[str]) -> None:
    """Those that come after the first was shown. The clock is real; the state machine has its own tests."""
    with this_host().spawn_procs(per_host={"gpus": 3}, name="late") as procs:
        procs.logging_option(aggregate_window_sec=30)
        trainers = procs.spawn("trainers", Echo)
        trainers.call.call(warm_up).get()
        trainers.slice(gpus=0).call.call(say, "epoch").get()
        flush(trainers)
        assert capfd.readouterr().out == "[trainers gpus=0] epoch\n"
        # Within thirty seconds nothing more of this kind is shown, however far apart these three come.
        trainers.call.call(say, "epoch").get()
    assert capfd.readouterr().out == "[trainers gpus=0-2 x3] epoch\n"
