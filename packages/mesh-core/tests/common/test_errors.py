"""The error classes, and exceptions that cross processes."""

from __future__ import annotations

import asyncio
import dataclasses
import pickle
import subprocess
import sys
import textwrap
import threading
import traceback
from typing import Any

import pytest

from mesh_core import Extent, Point
from mesh_core._common import errors
from mesh_core._common.errors import MeshError
from mesh_core._failures.failure import MeshFailure
from mesh_core._serialize.exceptions import ActorError, decode_exception, encode_exception

pytestmark = pytest.mark.python

WHERE: dict[str, Any] = {"actor": "trainer", "rank": 3, "point": {"gpus": 3}, "host": "b7", "pid": 4242}


def deliver(exc: BaseException, **where: Any) -> Any:
    """Encode ``exc`` as if raised in an actor, and return what the caller catches."""
    try:
        raise exc
    except BaseException as raised:
        data, buffers = encode_exception(raised, **(where or WHERE))
    return decode_exception(data, [bytearray(buffer) for buffer in buffers])


# --- the tree -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "builtin", "fields"),
    [
        ("ActorTimeout", TimeoutError, {"actor": "a", "rank": 1, "host": "h", "timeout": 2.5}),
        ("SupervisionError", Exception, {"failure": MeshFailure(mesh_name="m", exitcode=3)}),
        (
            "SpawnError",
            Exception,
            {"host": "h", "pid": 4, "exitcode": 1, "signal": None, "stderr_tail": "boom"},
        ),
        ("MailboxFull", Exception, {"actor": "a", "rank": 0, "host": "h", "budget": 100}),
        ("Undeliverable", ConnectionError, {"actor": "a", "rank": 0, "host": "h", "reason": "stopped"}),
        ("PluginError", Exception, {}),
        ("PluginLoadError", errors.PluginError, {}),
        ("AuthenticationError", PermissionError, {"host": "h", "remedy": "renew"}),
        ("SerializationError", TypeError, {"path": "args[0]", "type_name": "lock"}),
    ],
)
def test_every_error_has_bases_and_fields_and_can_be_sent(
    name: str, builtin: type, fields: dict[str, Any]
) -> None:
    kind = getattr(errors, name)
    assert issubclass(kind, MeshError)
    assert issubclass(kind, builtin)
    error = kind("what, who, why", **fields)
    error.results = "the outcomes"
    copy = pickle.loads(pickle.dumps(error))
    for one in (error, copy):
        assert type(one) is kind
        assert str(one) == "what, who, why"
        assert {field: getattr(one, field) for field in fields} == fields
    assert error.results == "the outcomes"
    assert copy.results is None


def test_eight_lost_ranks_are_named() -> None:
    class Lossy(list[Any]):
        name = "workers"

        def failed(self) -> list[Point]:
            return [Point(rank, Extent.of(gpus=len(self))) for rank in range(len(self) - 1)]

    told = [str(errors.DeviceMeshError.of(Lossy([0] * count))) for count in (9, 10)]
    assert "has lost 8 of its 9 ranks: gpus=0; gpus=1; " in told[0] and "; gpus=7; respawn" in told[0]
    assert "has lost 9 of its 10 ranks: " in told[1] and "; gpus=7 and 1 more; respawn" in told[1]


def test_a_supervision_error_without_text_shows_its_failure() -> None:
    failure = MeshFailure(mesh_name="m", rank=1, exitcode=3)
    error = errors.SupervisionError(failure=failure)
    assert str(error) == failure.report()
    assert pickle.loads(pickle.dumps(error)).failure == failure


# --- exceptions that arrive whole ---------------------------------------------------------------------------


class Signature(Exception):
    """Its constructor takes other arguments than those in its args."""

    def __init__(self, code: int, *, detail: str) -> None:
        super().__init__(f"code {code}")
        self.code = code
        self.detail = detail


class Slotted(ValueError):
    __slots__ = ("place",)

    def __init__(self, place: int) -> None:
        super().__init__("slotted")
        self.place = place


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    code: int
    rank: str = "general"


class Reducing(Exception):
    def __init__(self, left: int, right: int) -> None:
        super().__init__("reducing")
        self.total = left + right
        self.parts = (left, right)

    def __reduce__(self) -> Any:
        return Reducing, self.parts


class Network(OSError):
    def __init__(self, host: str, number: int) -> None:
        super().__init__(number, f"no way to {host}")
        self._host = host

    @property
    def host(self) -> str:
        return self._host


class Hooked(Exception):
    def __str__(self) -> str:
        return f"hooked {self.args[0]}"


@pytest.mark.parametrize(
    ("exc", "message", "fields"),
    [
        (ValueError("bad batch", 7), "('bad batch', 7)", {}),
        (KeyError("seven"), "'seven'", {}),
        (Signature(7, detail="more"), "code 7", {"code": 7, "detail": "more"}),
        (Slotted(4), "slotted", {"place": 4}),
        (Frozen(3), "3", {"code": 3}),
        (Reducing(1, 2), "reducing", {"total": 3, "parts": (1, 2)}),
        (Hooked("up"), "hooked up", {}),
        (FileNotFoundError(2, "gone", "/x"), "[Errno 2] gone: '/x'", {"errno": 2, "filename": "/x"}),
        (Network("b9", 113), "[Errno 113] no way to b9", {"errno": 113, "_host": "b9"}),
        (ImportError("no x", name="x"), "no x", {"name": "x"}),
        (
            UnicodeDecodeError("utf-8", b"\xff", 0, 1, "why"),
            "'utf-8' codec can't decode byte 0xff",
            {"reason": "why"},
        ),
        (TimeoutError("late"), "late", {}),
        (errors.SpawnError("no more", host="x9"), "no more", {}),
        (errors.Undeliverable("gone", reason="dead"), "gone", {"reason": "dead"}),
        (
            subprocess.CalledProcessError(3, ["ls"]),
            "non-zero exit status 3",
            {"returncode": 3, "cmd": ["ls"]},
        ),
    ],
)
def test_an_error_is_both_types_and_keeps_everything(
    exc: Exception, message: str, fields: dict[str, Any]
) -> None:
    error = deliver(exc)
    # Once more, as if an actor passed on what it caught.
    for one in (error, pickle.loads(pickle.dumps(error))):
        assert isinstance(one, ActorError)
        assert isinstance(one, type(exc))
        assert type(one) is type(error)
        assert one.args == exc.args
        assert {field: getattr(one, field) for field in fields} == fields
        assert (one.actor, one.rank, one.point, one.host, one.pid) == ("trainer", 3, {"gpus": 3}, "b7", 4242)
        assert one.cause_type is type(exc)
        assert type(one.original) is type(exc)
        assert one.original.args == exc.args
        assert message in one.message
        assert message in str(one)
        assert "actor 'trainer' on rank 3 (gpus=3), host b7, pid 4242" in str(one)
        assert "in deliver" in one.remote_traceback
        assert "remote traceback:\n    Traceback" in str(one)
        assert "\n" not in str(one).split("\n  raised as ")[0]


def test_an_error_is_caught_by_its_original_type() -> None:
    with pytest.raises(KeyError) as caught:
        raise deliver(KeyError("x"))
    shown = "".join(traceback.format_exception(caught.value))
    assert "mesh_core.ActorError[KeyError]: 'x'\n  raised as KeyError by actor 'trainer'" in shown


def test_notes_and_causes_are_shown() -> None:
    exc = ValueError("outer")
    exc.add_note("look at the learning rate")
    exc.__cause__ = OSError("inner")
    error = deliver(exc)
    assert error.__notes__ == ["look at the learning rate"]
    assert "OSError: inner" in error.remote_traceback
    assert "direct cause" in error.remote_traceback


def test_groups_can_be_split() -> None:
    group = ExceptionGroup("two", [ValueError(1), ExceptionGroup("in", [Signature(2, detail="d")])])
    error = deliver(group)
    assert isinstance(error, ActorError)
    caught = []
    try:
        raise error
    except* Signature as part:
        caught.append(part.exceptions[0].exceptions[0].detail)  # type: ignore[union-attr]
    except* ValueError as part:
        caught.append(part.exceptions[0].args)
    assert caught == ["d", (1,)]


def test_combined_types_are_cached() -> None:
    assert type(deliver(KeyError(1))) is type(deliver(KeyError(2)))


def test_an_error_passed_on_shows_both_tracebacks() -> None:
    inner = deliver(Signature(7, detail="d"), actor="leaf", rank=0, host="a1", pid=1)
    error = deliver(inner, actor="root", rank=None, host="b2", pid=2)
    error = pickle.loads(pickle.dumps(error))
    assert issubclass(type(error), Signature)
    assert error.cause_type is Signature
    assert error.cause_name.endswith("Signature")
    assert error.message == "code 7"
    assert (error.actor, error.original.actor, type(error.original.original)) == ("root", "leaf", Signature)
    text = str(error)
    assert text.index("by actor 'root', host b2") < text.index("by actor 'leaf' on rank 0, host a1, pid 1")
    assert text.count("Traceback (most recent call last)") == 2


def test_large_fields_travel_beside_the_stream() -> None:
    exc = ValueError(bytearray(1_000_000))
    data, buffers = encode_exception(exc, **WHERE)
    assert len(data) < 70_000 * 3
    assert [buffer.nbytes for buffer in buffers] == [1_000_000]
    assert deliver(exc).args == exc.args
    assert len(deliver(ValueError("x" * 1_000_000)).args[0]) == 1_000_000


def test_a_callers_point_replaces_the_received_one() -> None:
    data, buffers = encode_exception(ValueError(), **WHERE)
    assert decode_exception(data, buffers, point={"hosts": 1, "gpus": 2}).point == {"hosts": 1, "gpus": 2}


# --- exceptions that do not -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "exc",
    [
        SystemExit(3),
        KeyboardInterrupt(),
        GeneratorExit(),
        asyncio.CancelledError("stopped"),
        StopIteration(5),
        StopAsyncIteration(),
        BaseExceptionGroup("g", [KeyboardInterrupt()]),
    ],
)
def test_exceptions_that_end_the_caller_become_plain_actor_errors(exc: BaseException) -> None:
    error = deliver(exc)
    assert type(error) is ActorError
    assert error.cause_type is type(exc)
    assert type(error.original) is type(exc)
    assert f"raised as {error.cause_name} by actor 'trainer'" in str(error)


def test_arguments_that_cannot_be_sent_become_text() -> None:
    exc = ValueError("bad", threading.Lock())
    exc.lock = threading.Lock()  # type: ignore[attr-defined]
    exc.batch = 5  # type: ignore[attr-defined]
    error = deliver(exc)
    assert isinstance(error, ValueError)
    assert error.args[0] == "bad"
    assert error.args[1].startswith("<unlocked _thread.lock")
    assert error.batch == 5  # type: ignore[attr-defined]
    assert not hasattr(error, "lock")


class Refusing(Exception):
    def __init_subclass__(cls) -> None:
        raise TypeError("final")


class Silent(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")

    __repr__ = __str__


class Unpickling(Exception):
    def __reduce__(self) -> Any:
        return sys.exit, (1,)


class Stateful(Exception):
    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(name)


def test_a_type_that_cannot_be_extended_is_reported() -> None:
    error = deliver(Refusing("so there"))
    assert type(error) is ActorError
    assert error.cause_type is Refusing
    assert isinstance(error.original, Refusing)
    assert error.message == "so there"


@pytest.mark.parametrize("kind", [Silent, Unpickling, Stateful])
def test_hostile_classes_cost_detail_only(kind: type[Exception]) -> None:
    error = deliver(kind("x"))
    assert isinstance(error, ActorError)
    assert error.cause_name.endswith(kind.__name__)
    assert "in deliver" in error.remote_traceback
    assert "by actor 'trainer'" in str(error)


def test_a_group_with_a_member_that_cannot_be_sent() -> None:
    error = deliver(ExceptionGroup("g", [ValueError("fine"), ValueError(threading.Lock())]))
    assert isinstance(error, ExceptionGroup)
    assert error.exceptions[0].args == ("fine",)
    assert "lock" in error.exceptions[1].args[0]


def test_a_type_that_only_the_actors_process_has() -> None:
    code = """
        import sys, types
        from mesh_core._serialize.exceptions import encode_exception
        only_there = types.ModuleType("only_there")
        exec("class Oops(ValueError): pass", only_there.__dict__)
        sys.modules["only_there"] = only_there
        try:
            raise only_there.Oops("hm")
        except ValueError as exc:
            data, buffers = encode_exception(exc, actor="a", rank=0, host="h", pid=1)
        sys.stdout.buffer.write(data)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, timeout=50, check=True
    )
    error = decode_exception(done.stdout)
    assert type(error) is ActorError
    assert (error.message, error.cause_name, error.cause_type, error.original) == (
        "hm",
        "only_there.Oops",
        None,
        None,
    )
    assert "only_there.Oops: hm" in error.remote_traceback


def test_garbage_becomes_an_error() -> None:
    error = decode_exception(b"\x00garbage")
    assert type(error) is ActorError
    assert "cannot be read" in str(error)


def test_an_endless_text_is_cut() -> None:
    error = deliver(ValueError("y" * 10_000_000))
    assert len(str(error)) < 300_000
    assert "characters left out" in str(error)


def test_a_text_is_whole_up_to_64_ki() -> None:
    longest = "y" * 65_536
    assert deliver(ValueError(longest)).args == (longest,)
    assert "[... 1 characters left out ...]" in str(deliver(ValueError(longest + "y")))


def test_an_exception_that_was_never_raised() -> None:
    data, buffers = encode_exception(ValueError("made, not raised"))
    error = decode_exception(data, buffers)
    assert error.remote_traceback == "ValueError: made, not raised\n"
    assert str(error).startswith("made, not raised\n  raised as ValueError by an actor")


def test_frames_of_mesh_are_left_out() -> None:
    scope: dict[str, Any] = {"__name__": "mesh_core._process.worker"}
    exec(compile("def dispatch(f):\n    f()", "dispatch.py", "exec"), scope)

    def user_code() -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine") as caught:
        scope["dispatch"](user_code)
    here = caught.value.__traceback__
    assert here is not None
    text = decode_exception(encode_exception(caught.value.with_traceback(here.tb_next))[0]).remote_traceback
    assert "user_code" in text
    assert "dispatch.py" not in text


# --- failures -------------------------------------------------------------------------------------------------


def test_a_failure_reports_everything_it_knows() -> None:
    failure = MeshFailure(
        mesh_name="trainers",
        rank=3,
        point={"hosts": 0, "gpus": 3},
        host="b7",
        pid=4242,
        exception=deliver(ValueError("bad")),
        stderr_tail=("one", "two"),
        chain=("trainers[3]", "procs", "controller"),
        since=0.0,
    )
    report = failure.report().splitlines()
    assert report[0] == (
        "rank 3 (hosts=0, gpus=3) of mesh 'trainers' failed on host b7, pid 4242: raised ValueError: bad"
    )
    assert report[1].startswith("  since: 19")
    assert report[2] == "  arrived by: trainers[3] -> procs -> controller"
    assert report[3] == "  exception:"
    assert report.count("    ValueError: bad") == 1
    assert report[-2:] == ["    one", "    two"]
    assert isinstance(pickle.loads(pickle.dumps(failure)).exception, ValueError)


NAME = f"{__name__}.Silent"


def test_an_actor_fails_while_a_process_dies() -> None:
    failure = MeshFailure(mesh_name="m", pid=7, exception=Silent(), reason="of its own accord")
    assert failure.report().splitlines()[:2] == [
        f"mesh 'm' failed in pid 7: raised {NAME}: ({NAME}, whose text is not available)",
        "  of its own accord",
    ]
    assert failure.headline() == failure.report().splitlines()[0]


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"signal": 9}, "killed by signal 9 (SIGKILL)"),
        ({"signal": 200}, "killed by signal 200 (unnamed)"),
        ({"exitcode": 3}, "exited with status 3"),
        ({}, "no reason is known"),
    ],
)
def test_a_failure_says_why(fields: dict[str, Any], why: str) -> None:
    failure = MeshFailure(mesh_name="m", pid=7, **fields)
    assert failure.report().splitlines()[0] == f"mesh 'm' died in pid 7: {why}"
    with pytest.raises(dataclasses.FrozenInstanceError):
        failure.pid = 8  # type: ignore[misc]
