"""Log records of workers in the script's own logging."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
from core_samples import Echo

from mesh_core import ProcMesh, configured, this_host
from mesh_core._features.logs.records import LONGEST, Encoder, Records

pytestmark = pytest.mark.usefixtures("runtime")


class Weird:
    def __repr__(self) -> str:
        return "a weird one"


def log(level: int, text: str, **extra: Any) -> None:
    logging.getLogger("lib.part").log(level, text, extra=extra)


def log_by_module() -> None:
    """Use the functions of the module, which configure logging by themselves in a plain program."""
    logging.info("1")  # noqa: LOG015 - the functions of the module are what is tested
    logging.warning("2")  # noqa: LOG015
    logging.getLogger("lib").warning("3")


def configure_and_log() -> None:
    logging.basicConfig(format="mine:%(message)s")
    logging.warning("4")  # noqa: LOG015


def log_all() -> None:
    lib = logging.getLogger("lib.part")
    lib.debug("debug")
    lib.info("%s of %d", "info", 2, extra={"step": 7, "shape": (1, 2), "weird": Weird(), "by": {1: "a"}})
    try:
        raise ValueError("bad\nbatch")
    except ValueError:
        lib.exception("failed")
    sys.stderr.write("printed\n")
    lib.warning("after it", stack_info=True)


def large(count: int) -> None:
    logging.getLogger("lib").warning("x" * count, extra={f"f{n}": "y" * 1000 for n in range(1000)})


def garbage() -> None:
    """Write anything to the worker's stderr, even Mesh's own markers."""
    for raw in (
        b"\x1eR40\x1f\x1f\x1f\x1ftext\x1fnot json",
        b"\x1eR40\x1f\x1f\x1f\x1ftext\x1f[1, 2]",
        b"\x1eR40\x1f\x1f\x1f\x1ftext\x1f" + b"[" * 100_000,
        b"\x1eR40\x1f\x1f\x1f\x1ftext",
        b"\x1eRx\x1f\x1f\x1f\x1ftext\x1f{}",
        b"\x1eR40\x1f\x1f\x1f\x1ftext\x1f\xff\xfe{",
        b"\x1eR40\x1f\x1f\x1f\x1ftext\x1f"
        + json.dumps(
            {
                "name": ["x"],
                "msg": {"a": 1},
                "levelno": 10**30,
                "created": 1e300,
                "lineno": "1",
                "extra": {"msg": "forged", "getMessage": 1, "__class__": 2, "_private": 3},
            }
        ).encode(),
    ):
        os.write(2, raw + b"\n")


class Kept(logging.Handler):
    """Keeps the records that it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[Any] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@contextmanager
def plain() -> Iterator[None]:
    """Remove pytest's handlers, as in a script that has not set up logging; pytest adds them for each part of a test."""
    before, logging.root.handlers = logging.root.handlers, []
    try:
        yield
    finally:
        logging.root.handlers = before


@pytest.fixture
def kept() -> Iterator[Kept]:
    """Add a handler of the script."""
    handler = Kept()
    logging.root.addHandler(handler)
    yield handler
    logging.root.removeHandler(handler)


@pytest.fixture
def procs(runtime: None) -> Iterator[ProcMesh]:
    with this_host().spawn_procs({"gpus": 2}, name="procs") as procs:
        yield procs


def test_records_reach_the_handlers_of_the_script(
    kept: Kept, procs: ProcMesh, capfd: pytest.CaptureFixture[str]
) -> None:
    trainers = procs.spawn("trainers", Echo)
    trainers.slice(gpus=1).call.call_one(log_all).get(timeout=30)
    procs.stop().get(timeout=30)
    info, failed, after = kept.records
    assert (info.actor, info.rank, info.point, info.host) == ("trainers", 1, {"gpus": 1}, os.uname().nodename)
    assert (info.name, info.levelno, info.levelname) == ("lib.part", logging.INFO, "INFO")
    assert (info.getMessage(), info.funcName, info.module) == ("info of 2", "log_all", "test_records")
    assert (info.step, info.shape, info.weird, info.by) == (7, [1, 2], "a weird one", {"1": "a"})
    assert info.process != os.getpid() and info.processName == "MainProcess"
    assert abs(failed.created - info.created) < 60
    assert failed.exc_info is None
    text = logging.Formatter("%(levelname)s %(message)s").format(failed)
    assert text.startswith("ERROR failed\nTraceback (most recent call last):\n")
    assert text.endswith("ValueError: bad\nbatch")
    assert "log_all" in after.stack_info
    # Only printed text is on stderr.
    assert capfd.readouterr().err == "[trainers gpus=1] printed\n"


def test_each_rank_has_its_own_record(kept: Kept, procs: ProcMesh) -> None:
    procs.spawn("trainers", Echo).call.call(log, logging.WARNING, "equal").get(timeout=30)
    procs.stop().get(timeout=30)
    assert sorted(record.rank for record in kept.records) == [0, 1]


def test_functions_of_the_module_leave_the_way_of_records_as_it_is(
    kept: Kept, procs: ProcMesh, capfd: pytest.CaptureFixture[str]
) -> None:
    trainer: Any = procs.spawn("trainers", Echo).slice(gpus=0)
    trainer.call.call_one(log_by_module).get(timeout=30)
    # What a program configures itself keeps its meaning.
    trainer.call.call_one(configure_and_log).get(timeout=30)
    procs.stop().get(timeout=30)
    assert [record.getMessage() for record in kept.records] == ["1", "2", "3"]
    assert capfd.readouterr().err == "[trainers gpus=0] mine:4\n"


def test_records_are_text_without_handlers(procs: ProcMesh, capfd: pytest.CaptureFixture[str]) -> None:
    with plain():
        procs.spawn("trainers", Echo).slice(gpus=0).call.call_one(log, 30, "hello").get(timeout=30)
        procs.stop().get(timeout=30)
    assert capfd.readouterr().err == "[trainers gpus=0] WARNING lib.part: hello\n"


def test_the_setting_makes_records_text(kept: Kept, capfd: pytest.CaptureFixture[str]) -> None:
    with configured(log_records=False), this_host().spawn_procs(name="procs") as procs:
        procs.spawn("one", Echo).call.call_one(log, 30, "hello").get(timeout=30)
    assert kept.records == []
    assert capfd.readouterr().err == "[one] WARNING lib.part: hello\n"


def test_pytest_captures_records(procs: ProcMesh, caplog: pytest.LogCaptureFixture) -> None:
    procs.spawn("trainers", Echo).slice(gpus=0).call.call_one(partial(log, 30, "hello", step=3)).get(
        timeout=30
    )
    procs.stop().get(timeout=30)
    assert caplog.record_tuples == [("lib.part", 30, "hello")]
    assert (caplog.records[0].actor, caplog.records[0].step) == ("trainers", 3)  # type: ignore[attr-defined]


def test_handlers_of_one_logger(procs: ProcMesh, capfd: pytest.CaptureFixture[str]) -> None:
    handler, logger = Kept(), logging.getLogger("lib")
    logger.addHandler(handler)
    try:
        with plain():
            one = procs.spawn("one", Echo).slice(gpus=0)
            one.call.call_one(log, 30, "lib's").get(timeout=30)
            one.call.call_one(logging.getLogger("other").warning, "not lib's").get(timeout=30)
            procs.stop().get(timeout=30)
    finally:
        logger.removeHandler(handler)
    assert [record.getMessage() for record in handler.records] == ["lib's"]
    assert capfd.readouterr().err == "[one gpus=0] WARNING other: not lib's\n"


def test_levels_filters_and_loggers_of_the_script(kept: Kept, procs: ProcMesh) -> None:
    one = procs.spawn("one", Echo).slice(gpus=0)
    lib = logging.getLogger("lib")
    before = set(logging.root.manager.loggerDict)
    try:
        one.call.call_one(log, 20, "by the default of the root's level").get(timeout=30)
        procs.logging_option(level=10)
        one.call.call_one(log, 10, "debug").get(timeout=30)
        one._process.flush_console()  # an option holds for what is shown from then on
        procs.logging_option(level=40)
        one.call.call_one(log, 30, "left out by the option").get(timeout=30)
        one._process.flush_console()
        procs.logging_option(level=20)
        lib.setLevel(logging.ERROR)
        one.call.call_one(log, 30, "left out by the logger's level").get(timeout=30)
        one._process.flush_console()
        lib.setLevel(logging.NOTSET)
        kept.setLevel(logging.ERROR)
        one.call.call_one(log, 30, "left out by the handler's level").get(timeout=30)
        one.call.call_one(log, 40, "error").get(timeout=30)
        procs.stop().get(timeout=30)
    finally:
        lib.setLevel(logging.NOTSET)
    said = [record.getMessage() for record in kept.records]
    assert said == ["by the default of the root's level", "debug", "error"]
    # Names from a worker create no loggers here.
    assert "lib.part" not in set(logging.root.manager.loggerDict) - before


def test_a_handler_that_raises_loses_its_records_and_nothing_else(
    kept: Kept, procs: ProcMesh, capfd: pytest.CaptureFixture[str]
) -> None:
    class Raises(Kept):
        def emit(self, record: logging.LogRecord) -> None:
            super().emit(record)
            raise RuntimeError("no space left")

    handler = Raises()
    logging.root.addHandler(handler)
    one = procs.spawn("one", Echo).slice(gpus=0)
    for n in range(3):
        one.call.call_one(log, 30, f"hello {n}").get(timeout=30)
    one.call.call_one(print, "printed").get(timeout=30)
    procs.stop().get(timeout=30)
    logging.root.removeHandler(handler)
    assert len(handler.records) == len(kept.records) == 3
    assert capfd.readouterr().out == "[one gpus=0] printed\n"


def test_garbage_is_text_or_a_harmless_record(
    kept: Kept, procs: ProcMesh, capfd: pytest.CaptureFixture[str]
) -> None:
    """RCD-2."""
    one = procs.spawn("one", Echo).slice(gpus=0)
    one.call.call_one(garbage).get(timeout=30)
    one.call.call_one(log, 30, "after it").get(timeout=30)
    procs.stop().get(timeout=30)
    forged, after = kept.records
    assert (forged.name, forged.levelno, forged.getMessage(), forged.lineno) == ("root", 1000, "", 0)
    logging.Formatter("%(asctime)s %(actor)s %(message)s").format(forged)
    assert after.getMessage() == "after it"
    shown = capfd.readouterr().err.split("\n")[:-1]
    assert len([line for line in shown if line.endswith("] text")]) == 4
    assert len(shown) == 6


def test_a_record_is_bounded(kept: Kept, procs: ProcMesh, capfd: pytest.CaptureFixture[str]) -> None:
    """RCD-1."""
    one = procs.spawn("one", Echo).slice(gpus=0)
    one.call.call_one(large, 20_000).get(timeout=30)
    one.call.call_one(large, 200_000).get(timeout=30)
    procs.stop().get(timeout=30)
    (record,) = kept.records
    assert record.getMessage().startswith("xxx") and record.getMessage().endswith("more characters)")
    assert record.f0 == "y" * 512 + "… (490 more characters)" or record.f0.startswith("'yyy")
    # Longer lines are text.
    assert "x" * 200_000 in capfd.readouterr().err


@pytest.mark.parametrize(
    "extra", [{"a": float("nan")}, {"a": {(1, 2): 3}}, {"a": b"x"}, {"a": "\udc80\n\x1e"}]
)
def test_extra_fields_become_json(extra: dict[str, Any]) -> None:
    record = logging.makeLogRecord({"name": "a", "msg": "m", "levelno": 30, "created": 1.5, **extra})
    data = Encoder().encode(record)
    assert data.isascii() and data.decode().isprintable()
    assert len(data) < LONGEST
    read = Records()._read(("actor", 3, "hosts=1,gpus=3", "b7", data.decode()))
    assert read is not None
    assert hasattr(read, "a") and (read.actor, read.point) == ("actor", {"hosts": 1, "gpus": 3})  # type: ignore[attr-defined]


def read(told: dict[str, Any], point: str = "") -> Any:
    return Records()._read(("actor", 3, point, "b7", json.dumps(told)))


def test_a_record_is_whole_up_to_64_ki() -> None:
    def encoded(size: int) -> bytes:
        return Encoder().encode(logging.makeLogRecord({"msg": "x" * size, "created": 1.5}))

    fixed = len(encoded(0))
    longest = encoded(LONGEST - fixed)
    assert len(longest) == LONGEST == 65_536
    assert len(json.loads(longest)["msg"]) == LONGEST - fixed
    cut = json.loads(encoded(LONGEST - fixed + 1))["msg"]
    assert cut == "x" * 4096 + f"… ({LONGEST - fixed + 1 - 4096:,} more characters)"


def test_a_record_that_is_cut_keeps_32_fields_of_512_characters() -> None:
    fields = {"f0": "y" * 510, "f1": "y" * 511, **{f"f{n}": 0 for n in range(2, 40)}}
    told = json.loads(Encoder().encode(logging.makeLogRecord({"msg": "x" * LONGEST, **fields})))["extra"]
    assert list(told) == [f"f{n}" for n in range(32)]
    assert told["f0"] == repr("y" * 510)
    assert told["f1"] == "'" + "y" * 511 + "… (1 more characters)"


def test_numbers_of_a_record_are_taken_up_to_their_limits() -> None:
    """A time that no clock has becomes the first or the last one that can be shown."""
    last = 2.0**35
    for number, taken in ((1, 1.0), (last, last), (last + 1, last), (1e300, last), (-1, 0.0), (1 << 60, 0.0)):
        assert read({"created": number}).created == taken
    for level, taken in ((0, 0), (-1, 0), (1000, 1000), (1001, 1000), (True, logging.INFO)):
        assert read({"levelno": level}).levelno == taken


def test_coordinates_of_a_record_are_taken_up_to_their_limits() -> None:
    longest = 10**19 - 1
    assert read({}, f"a={longest},b={longest + 1},c=-1,d,=1").point == {"a": longest}
    assert len(read({}, ",".join(f"l{n}={n}" for n in range(65))).point) == 64


def test_a_circular_extra_field() -> None:
    loop: list[Any] = []
    loop.append(loop)
    data = Encoder().encode(logging.makeLogRecord({"msg": "m", "loop": loop}))
    assert json.loads(data)["extra"] == {"loop": "[[...]]"}


def test_a_file_handler_gets_everything_when_the_script_ends(script: Any, tmp_path: Any) -> None:
    path = tmp_path / "app.log"
    run = script(
        """
        import logging, logging.config, sys
        from functools import partial
        from core_samples import Echo
        from test_records import log
        from mesh_core import this_host

        logging.config.dictConfig({
            "version": 1,
            "formatters": {"f": {"format": "%(levelname)s %(actor)s %(rank)s %(message)s %(step)s"}},
            "handlers": {"h": {"class": "logging.FileHandler", "filename": sys.argv[1], "mode": "w", "formatter": "f"}},
            "root": {"handlers": ["h"], "level": "INFO"},
        })
        one = this_host().spawn_procs().spawn("one", Echo)
        for n in range(100):
            one.call.call_one(partial(log, 20, "hello", step=n)).get()
        """,
        str(path),
    )
    out, err = run.finish()
    assert (run.process.returncode, out, err) == (0, "", "")
    assert path.read_text().splitlines() == [f"INFO one 0 hello {n}" for n in range(100)]
