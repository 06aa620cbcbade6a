"""A run of all sessions: what failed runs once more at the end, and the minutes are counted."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import cargo_test
import crash_proof
import first_collects
import workspace
from again import TOO_MANY, try_again
from lanes import Ended, Lanes, Session, Shape
from minutes import OTHER, WHOLE, Budget, Minutes, Spent, budgets, over_budget, report
from records import VARIABLE, Failure, Record, read_all
from run_record import rerun_options
from tally import Tally


def failure(name: str, reason: str = "", times: int = 1) -> Failure:
    return Failure(name, reason, ["false"], times)


def record(*failures: Failure) -> Record:
    return Record("tests-3.11(x)", os.defpath, list(failures))


def test_a_test_that_passes_alone_is_flaky_and_another_is_broken(tmp_path):
    tried = []

    def run(record: Record, failure: Failure) -> bool:
        tried.append(failure.name)
        return failure.name == "test_a"

    broken = Failure("test_b", "1 != 2", ["false"], detail="assert 1 == 2\nin test_b")
    records = [record(failure("test_a", "timed out", times=2), broken)]
    outcome = try_again(records, run, tmp_path / "flaky.json")
    assert tried == ["test_a", "test_b"]
    assert outcome.flaky == ["FLAKY: test_a (tests-3.11(x)): timed out"]
    assert outcome.broken == ["FAILED test_b (tests-3.11(x)): 1 != 2"]
    assert outcome.forgiven == 2
    [cause] = outcome.causes
    assert "test_b" in cause and "assert 1 == 2\nin test_b" in cause


def test_flaky_in_two_runs_one_after_the_other_is_said(tmp_path):
    history = tmp_path / "new" / "flaky.json"
    said = [
        try_again([record(*failures)], lambda record, failure: True, history).flaky
        for failures in ([failure("test_a")], [failure("test_a"), failure("test_b")], [], [failure("test_a")])
    ]
    first, second = "FLAKY: {} (tests-3.11(x))", "FLAKY, as in the run before: mend it: {} (tests-3.11(x))"
    assert said == [
        [first.format("test_a")],
        [second.format("test_a"), first.format("test_b")],
        [],
        [first.format("test_a")],
    ]


def test_a_great_many_failures_are_no_accident(tmp_path):
    many = [failure(f"test_{n}") for n in range(TOO_MANY + 1)]
    outcome = try_again([record(*many)], lambda record, failure: pytest.fail("ran"), tmp_path / "flaky.json")
    assert not outcome.flaky
    assert len(outcome.broken) == len(many)


def test_a_flaky_test_counts_as_passed():
    tally = Tally()
    tally.feed("===== 1 failed, 7 passed, 1 error in 0.12s =====")
    tally.forgive(2, flaky=1)
    assert str(tally) == "8 passed, 0 failed, 0 skipped"
    assert tally.flaky == 1


@pytest.mark.slow
def test_pytest_leaves_what_failed_and_how_to_run_it_again(tmp_path):
    (tmp_path / "test_it.py").write_text(
        "import pathlib, pytest\n"
        "def test_good(): pass\n"
        "def test_flaky():\n"
        "    mark = pathlib.Path('been-here')\n"
        "    seen = mark.exists()\n"
        "    mark.touch()\n"
        "    assert seen, 'the first time'\n"
        "@pytest.fixture\n"
        "def torn():\n"
        "    yield\n"
        "    assert 0\n"
        "def test_twice(torn): assert 0\n"
    )
    (tmp_path / "run").mkdir()
    environment = {**os.environ, VARIABLE: str(tmp_path / "run"), "PYTHONPATH": str(workspace.ROOT / "tools")}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "run_record",
        "-p",
        "no:cacheprovider",
        "-q",
        "-m",
        "not x",
    ]
    done = subprocess.run(
        [*command, "test_it.py"], cwd=tmp_path, env=environment, capture_output=True, timeout=50
    )
    assert done.returncode == 1, done.stdout
    [left] = read_all(tmp_path / "run")
    assert {each.name: each.times for each in left.failures} == {
        "test_it.py::test_flaky": 1,
        "test_it.py::test_twice": 2,
    }
    assert "the first time" in left.failures[0].reason
    assert "assert seen, 'the first time'" in left.failures[0].detail
    assert {name for name, _ in left.slowest} == {
        f"test_it.py::test_{name}" for name in ("good", "flaky", "twice")
    }
    for each, status in zip(left.failures, [0, 1], strict=True):
        again = {**left.environment, "PYTHONPATH": environment["PYTHONPATH"]}
        assert (
            subprocess.run(each.command, cwd=tmp_path, env=again, capture_output=True, timeout=50).returncode
            == status
        )
    assert len(list(read_all(tmp_path / "run"))) == 1, "running again leaves no record"


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_worker_that_crashes_costs_its_test_and_not_the_run(tmp_path):
    pytest.importorskip("xdist")
    crash = "import os\ndef test_first(): pass\ndef test_crash(): os.abort()\n"
    (tmp_path / "test_a.py").write_text(crash + "def test_last(): pass\n")
    for name in "bc":
        (tmp_path / f"test_{name}.py").write_text("def test_good(): pass\n" * 3)
    (tmp_path / "test_f.py").write_text(crash)
    plugins = ["-p", "crash_proof", "-p", "no:cacheprovider", "-p", "no:faulthandler"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *plugins, "-q", "-n", "2", "--dist", "loadfile", "."],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(workspace.ROOT / "tools")},
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.stdout.splitlines()[-1].startswith("2 failed, 5 passed"), done.stdout


def worker(name: str, collected: Path) -> SimpleNamespace:
    """What pytest hands a plugin in one of several processes."""
    told = {"workerid": name, first_collects.FILE: str(collected)}
    return SimpleNamespace(config=SimpleNamespace(workerinput=told))


def test_one_process_reads_the_tests_before_the_others(tmp_path, monkeypatch):
    collected, waits = tmp_path / "run" / "collected", []
    collected.parent.mkdir()

    def sleep(_seconds):
        waits.append(collected.exists())
        ends = first_collects.pytest_collection(worker("gw0", collected))
        next(ends)
        assert not collected.exists()
        with pytest.raises(StopIteration):
            ends.send(None)

    monkeypatch.setattr(time, "sleep", sleep)
    next(first_collects.pytest_collection(worker("gw1", collected)))
    assert waits == [False]
    next(first_collects.pytest_collection(worker("gw2", collected)))
    assert waits == [False]


def test_no_process_waits_where_the_run_has_ended(tmp_path):
    next(first_collects.pytest_collection(worker("gw1", tmp_path / "gone" / "collected")))


@pytest.mark.full
@pytest.mark.slow
def test_processes_know_who_reads_first(tmp_path):
    pytest.importorskip("xdist")
    (tmp_path / "test_a.py").write_text(
        "def test_it(pytestconfig): assert pytestconfig.workerinput['mesh_collected']"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "first_collects", "-p", "no:cacheprovider", "-q", "-n", "2"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(workspace.ROOT / "tools"), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.stdout.splitlines()[-1].startswith("1 passed"), done.stdout + done.stderr
    assert not list(tmp_path.glob("mesh-collected-*"))


def test_files_stay_together_but_for_their_classes_and_those_that_may_be_split(tmp_path):
    (tmp_path / "test_a.py").write_text("pytestmark = pytest.mark.slow\n")
    (tmp_path / "test_b.py").write_text("pytestmark = [pytest.mark.slow, pytest.mark.split]\n")
    units = {
        "test_a.py::test_x[1]": "test_a.py",
        "test_a.py::TestY::test_x": "test_a.py::TestY",
        "test_b.py::test_x[1::2]": "test_b.py::test_x",
        "test_b.py::TestY::test_x": "test_b.py::TestY",
        "pages/page.md::page": "pages/page.md",
    }
    assert {test: crash_proof.unit(tmp_path, test) for test in units} == units


def test_options_that_choose_tests_are_not_for_the_second_time():
    given = [
        "-p",
        "doc_examples",
        "-n",
        "3",
        "--dist",
        "loadfile",
        "-m",
        "needs",
        "-k",
        "x",
        "docs",
        "--doctest-modules",
    ]
    assert rerun_options(given) == ["-p", "doc_examples", "--doctest-modules"]


CARGO = """\
     Running unittests src/lib.rs (target/debug/deps/mesh_proto-1)
test flow::tests::a ... ok
     Running tests/flow.rs (target/debug/deps/flow-1)
test credit ... FAILED
test window - should panic ... FAILED
   Doc-tests mesh_topology
test crates/mesh-topology/src/slice.rs - slice (line 12) ... FAILED
error: 2 targets failed:
    `-p mesh-proto --test flow`
    `-p mesh-topology --doc`
"""


def test_cargo_leaves_its_failures_by_target():
    found = cargo_test.failures(CARGO.splitlines())
    assert [(each.command[3:], each.times) for each in found] == [
        (["-p", "mesh-proto", "--test", "flow", "--", "--exact", "credit", "window"], 2),
        (
            [
                "-p",
                "mesh-topology",
                "--doc",
                "--",
                "--exact",
                "crates/mesh-topology/src/slice.rs - slice (line 12)",
            ],
            1,
        ),
    ]


def test_what_has_failed_is_compiled_as_before_when_it_runs_again():
    first, _ = cargo_test.failures(CARGO.splitlines(), ["--profile", "testing", "--locked"])
    assert first.command[:7] == ["cargo", "test", "--profile", "testing", "--locked", "-p", "mesh-proto"]


def test_cargo_without_a_failed_test_leaves_nothing():
    assert (
        cargo_test.failures(["error[E0425]: cannot find value `x`", "error: could not compile `mesh-proto`"])
        == []
    )


NOX = [
    (0, "nox > Running session tests-3.11(mesh-core)"),
    (0, "nox > Creating virtual environment (uv) using python3.11 in .nox/tests-3-11"),
    (6, "nox > building mesh-core 0.1.0"),
    (6, "nox > uv build --wheel"),
    (66, "nox > uv pip install x"),
    (72, "nox > pytest -p run_record packages/mesh-core/tests"),
    (100, "some output of a test"),
    (192, "\x1b[32mnox > Session tests-3.11(mesh-core) was successful in 3 minutes.\x1b[0m"),
    (192, "nox > Running session rust"),
    (192, "nox > cargo clippy --workspace"),
    (252, "nox > python3 tools/cargo_test.py --workspace"),
    (270, "nox > Session rust failed."),
]


def test_minutes_are_those_of_sessions_without_what_compiles():
    minutes = Minutes(known=["mesh-core"])
    for at, line in NOX:
        minutes.feed(line, at)
    assert minutes.by_package() == {"mesh-core": pytest.approx(132 / 60), OTHER: pytest.approx(18 / 60)}
    assert minutes.compiling == {"tests-3.11(mesh-core)": pytest.approx(1), "rust": pytest.approx(1)}
    allowed = {"mesh-core": Budget(1, 2), OTHER: Budget(4, 8), WHOLE: Budget(5, 9)}
    slowest = [("test_slow", 12.5), ("test_slower", 13.0)]
    page = report(Spent(minutes, 2.5, others=0.5), allowed, slowest)
    assert "other programs had 50% of the processors" in page
    assert "2.2 of 2 OVER" in page
    assert "0.3 of 8\n" in page
    assert "2.5 of 9\n" in page
    assert page.endswith("13.0 test_slower\n    12.5 test_slow")


def test_more_minutes_than_the_budget_are_a_failure_on_an_idle_machine():
    minutes = Minutes(known=["mesh-core"])
    for at, line in NOX:
        minutes.feed(line, at)
    allowed = {"mesh-core": Budget(2, 9), OTHER: Budget(1, 9), WHOLE: Budget(4, 9)}
    [said] = over_budget(Spent(minutes, 4.0, others=0.05), allowed)
    assert said.startswith("FAILED budget: mesh-core took 2.2 minutes")
    assert over_budget(Spent(minutes, 4.0, others=0.2), allowed) == []
    assert len(over_budget(Spent(minutes, 4.1, others=0.05), allowed)) == 2


def test_contributing_has_a_budget_for_every_part():
    page = (workspace.ROOT / "CONTRIBUTING.md").read_text()
    parts = {*(package.name for package in workspace.packages()), OTHER, WHOLE}
    quick, full = budgets(page, "quick"), budgets(page, "full")
    assert set(quick) == set(full) == parts
    assert quick[WHOLE].idle <= 12
    assert full[WHOLE].idle <= 36
    assert full[WHOLE].busy == 45
    assert budgets(page, "all") == {}


class Sessions:
    """Runs shell commands as if they were sessions, and keeps what lanes report."""

    def __init__(self, folder: Path, **commands: str) -> None:
        self.lines: list[str] = []
        self.ended: dict[str, Ended] = {}
        self._lanes = Lanes(
            Shape(wide=2, workers=3, narrow=1),
            lambda session: ["sh", "-c", commands[session.name]],
            folder=folder,
            env=os.environ,
            on_line=lambda session, line: self.lines.append(f"{session.name}: {line}"),
            on_end=lambda ended: self.ended.setdefault(ended.session.name, ended),
        )
        self._lanes.run(Session(name, name.startswith("narrow")) for name in commands)


def test_lanes_run_sessions_side_by_side(tmp_path):
    # Each waits for what the other writes: one after the other they would wait for ever.
    first, second = tmp_path / "first", tmp_path / "second"
    os.mkfifo(first)
    os.mkfifo(second)
    found = Sessions(
        tmp_path,
        a=f"echo a > {first}; cat {second}",
        b=f"cat {first}; echo b > {second}",
        narrow="echo no newline at the end | tr -d '\\n'; exit 3",
    )
    assert sorted(found.lines) == ["a: b\n", "b: a\n", "narrow: no newline at the end\n"]
    assert {name: ended.status for name, ended in found.ended.items()} == {"a": 0, "b": 0, "narrow": 3}
    assert (tmp_path / "a.log").read_text() == "b\n"
    assert list(found.ended["narrow"].tail) == ["no newline at the end"]


def test_a_lane_without_narrow_sessions_takes_the_last_of_the_others(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    os.mkfifo(first)
    os.mkfifo(second)
    workers = "echo $MESH_TEST_WORKERS"
    # Both wide lanes are busy until the last session runs.
    found = Sessions(
        tmp_path,
        narrow=workers,
        a=f"{workers}; cat {first}",
        b=f"{workers}; cat {second}",
        c=workers,
        d=f"{workers}; echo d > {first}; echo d > {second}",
    )
    assert {"a: 3\n", "b: 3\n", "narrow: 2\n", "d: 2\n"} < set(found.lines)
    # The one before it begins when any lane is free again.
    begun = [line.partition(":")[0] for line in found.lines]
    assert begun.index("narrow") < begun.index("d") < begun.index("c")


def test_nothing_starts_without_wheels(tmp_path):
    found = Sessions(tmp_path, a="echo ran", wheels="echo building; exit 1")
    assert found.lines == ["wheels: building\n"]
    assert set(found.ended) == {"wheels"}


def test_a_process_that_a_session_leaves_behind_does_not_hold_it_up(tmp_path):
    found = Sessions(tmp_path, a="sleep 1000 & echo $!")
    [line] = found.lines
    os.kill(int(line.removeprefix("a: ")), signal.SIGKILL)
    assert found.ended["a"].status == 0


@pytest.mark.parametrize("number", [1, 2, 3, 4, 8, 16, 64])
def test_processes_of_tests_are_one_and_a_half_times_the_processors(number):
    shape = Shape.of(number)
    assert min(shape.wide, shape.narrow) >= 1
    assert number <= shape.wide * shape.workers <= max(2, 1.5 * number)


def test_history_that_cannot_be_read_is_none(tmp_path):
    history = tmp_path / "flaky.json"
    history.write_text("{")
    assert try_again([record(failure("test_a"))], lambda record, failure: True, history).flaky
    assert json.loads(history.read_text()) == ["test_a"]


def test_records_of_other_programs_are_of_no_interest(tmp_path: Path):
    (tmp_path / "notes.txt").write_text("not a record")
    assert list(read_all(tmp_path)) == []
