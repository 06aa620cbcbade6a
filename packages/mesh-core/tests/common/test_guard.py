"""Whatever a message does, it is answered (STG-2), and so are all messages behind it (STG-3)."""

from __future__ import annotations

import asyncio
import os
import resource
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from core_owners import WITHIN, Leaf, Soft, Told, lines

from mesh_core import (
    Actor,
    ActorError,
    ProcMesh,
    SpawnError,
    SupervisionError,
    endpoint,
    this_host,
)

pytestmark = pytest.mark.usefixtures("runtime")


@pytest.fixture
def own(runtime: None) -> Iterator[ProcMesh]:
    """A process of its own for a test that may break it."""
    with this_host().spawn_procs(name="mortal") as procs:
        procs.initialized.get(WITHIN)
        yield procs


class Str(str):
    """A str subclass that cannot be used as text."""

    __slots__ = ()

    def __len__(self) -> int:
        raise SystemExit(1)

    def __reduce__(self) -> Any:
        raise SystemExit(1)


def hostile(name: str) -> BaseException:
    """An exception whose own code does harm; created where it is raised."""

    def harm(*_: Any) -> Any:
        raise {"interrupts": KeyboardInterrupt, "cancels": asyncio.CancelledError}.get(how, SystemExit)

    what, _, how = name.partition(" ")
    if what == "meta":
        return type("Meta", (type,), {"__getattribute__": harm})("E", (Exception,), {})()  # type: ignore[no-any-return]
    if what == "text":
        harm = lambda _: Str("text")  # noqa: E731
        what = "__str__"
    if what == "__class__":
        return type("E", (Exception,), {"__class__": property(harm)})()  # type: ignore[no-any-return]
    return type("E", (Exception,), {what: harm})()  # type: ignore[no-any-return]


class Thrower(Actor):
    """Raises harmful exceptions, on its own thread."""

    @endpoint
    def throw(self, name: str) -> None:
        raise hostile(name)

    @endpoint
    def pid(self) -> int:
        return os.getpid()


class SoftThrower(Actor):
    """The same for coroutines."""

    @endpoint
    async def throw(self, name: str) -> None:
        raise hostile(name)

    @endpoint(concurrent=True)
    async def throw_beside(self, name: str) -> None:
        raise hostile(name)

    @endpoint
    async def pid(self) -> int:
        return os.getpid()


HOSTILE = [
    "__str__ exits",
    "__str__ interrupts",
    "__str__ cancels",
    "text broken",
    "__repr__ exits",
    "__reduce__ interrupts",
    "__reduce_ex__ exits",
    "__getattribute__ exits",
    "__class__ exits",
    "__class__ interrupts",
    "__getstate__ exits",
    "meta exits",
]


@pytest.mark.parametrize("cls", [Thrower, SoftThrower])
def test_an_exception_always_arrives(own: ProcMesh, told: Told, cls: type[Any]) -> None:
    actor: Any = own.spawn("actor", cls)
    pid = actor.pid.call_one().get(WITHIN)
    for name in HOSTILE:
        for adverb in ["throw", "throw_beside"][: 1 + (cls is SoftThrower)]:
            error = getattr(actor, adverb).call_one(name).exception(WITHIN)
            assert isinstance(error, ActorError), name
            assert actor.pid.call_one().get(WITHIN) == pid
    assert told.empty()


@pytest.mark.parametrize("cls", [Thrower, SoftThrower])
def test_failures_that_nobody_waits_for_are_reported(own: ProcMesh, told: Told, cls: type[Any]) -> None:
    for name in HOSTILE:
        actor: Any = own.spawn(f"actor {name}", cls)
        actor.throw.broadcast(name)
        assert told.next().mesh_name == f"actor {name}"


class Exits:
    """Exits the process when it is unpickled."""

    def __init__(self, kind: type[BaseException] = SystemExit) -> None:
        self.kind = kind

    def __reduce__(self) -> Any:
        return throw, (self.kind,)


def throw(kind: type[BaseException]) -> None:
    raise kind(1)


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, asyncio.CancelledError, GeneratorExit])
def test_an_argument_that_exits_affects_only_the_spawner(own: ProcMesh, kind: type[BaseException]) -> None:
    neighbour: Any = own.spawn("neighbour", Leaf)
    pid = neighbour.pid.call_one().get(WITHIN)
    broken: Any = own.spawn("broken", Leaf, Exits(kind))
    behind: Any = own.spawn("behind", Leaf)
    assert isinstance(broken.pid.call_one().exception(WITHIN), ActorError)
    assert isinstance(broken.initialized.exception(WITHIN), ActorError)
    assert behind.pid.call_one().get(WITHIN) == neighbour.pid.call_one().get(WITHIN) == pid


def test_an_unsendable_name_is_refused_at_the_call(own: ProcMesh) -> None:
    for name in ("a\0b", "two\nlines", "\x1b[31m", "\x9b31m", "two\u2028lines"):
        with pytest.raises(ValueError, match="control characters"):
            own.spawn(name, Leaf)
        with pytest.raises(ValueError, match="control characters"):
            this_host().spawn_procs(name=name)
    with pytest.raises(TypeError, match="name must be a string"):
        own.spawn(3, Leaf)  # type: ignore[arg-type]
    for label in ("a,b", "a=b"):
        with pytest.raises(ValueError, match="comma or an equals sign"):
            this_host().spawn_procs({label: 2})


def test_an_unreadable_spawn_and_later_messages_are_answered(
    own: ProcMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mesh_core._meshes.procs.check_name", lambda name: None)
    broken: Any = own.spawn("a\0b", Leaf)
    behind: Any = own.spawn("behind", Leaf)
    assert isinstance(broken.pid.call_one().exception(WITHIN), ActorError)
    assert behind.pid.call_one().get(WITHIN) == own.pids[0]


def no_more_threads() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (600 << 20, resource.RLIM_INFINITY))
    threading.stack_size(1 << 30)  # more than there may be


@pytest.mark.once
def test_an_actor_for_which_there_is_no_thread_says_so(runtime: None) -> None:
    with this_host().spawn_procs(bootstrap=no_more_threads) as procs:
        threaded: Any = procs.spawn("threaded", Leaf)
        soft: Any = procs.spawn("soft", Soft)
        with pytest.raises(SpawnError, match="no thread can be started for actor 'threaded'"):
            threaded.initialized.get(WITHIN)
        assert isinstance(threaded.pid.call_one().exception(WITHIN), SpawnError)
        # The loop already has its thread, and if necessary runs the constructor itself.
        assert soft.pid.call_one().get(WITHIN) == procs.pids[0]
        threaded.stop().get(WITHIN)


class Mortal(Leaf):
    """Its thread can be made to die between two messages."""

    @endpoint
    def die_of_the_next(self) -> None:
        def die(_: Any, event: str, called: Any) -> None:
            if event == "c_call" and getattr(called, "__name__", "") == "take":
                raise SystemExit(1)

        sys.setprofile(die)

    @endpoint
    async def soft(self) -> None: ...


def test_a_thread_that_dies_is_the_actors_failure(own: ProcMesh, told: Told, tmp_path: Any) -> None:
    log = tmp_path / "log"
    actor: Any = own.spawn("actor", Mortal, "it", str(log))
    neighbour: Any = own.spawn("neighbour", Leaf)
    actor.die_of_the_next.call_one().get(WITHIN)
    assert told.next().mesh_name == "actor"
    for call in (actor.pid.call_one(), actor.soft.call_one()):
        assert isinstance(call.exception(WITHIN), SupervisionError)
    assert neighbour.pid.call_one().get(WITHIN) == own.pids[0]
    actor.stop().get(WITHIN)
    assert lines(log) == ["it SystemExit"]


def test_a_module_that_exits_affects_only_the_spawner(own: ProcMesh, tmp_path: Any) -> None:
    (tmp_path / "exits_at_its_end.py").write_text(
        "import os, sys\nfrom mesh_core import Actor, endpoint\nclass A(Actor):\n"
        "    @endpoint\n    def f(self): pass\nif os.getpid() != int(os.environ['TEST_PID']): sys.exit(3)\n"
    )
    sys.path.insert(0, str(tmp_path))
    os.environ["TEST_PID"] = str(os.getpid())
    try:
        import exits_at_its_end  # type: ignore[import-not-found]

        with this_host().spawn_procs() as procs:
            neighbour: Any = procs.spawn("neighbour", Leaf)
            broken = procs.spawn("broken", exits_at_its_end.A)
            assert isinstance(broken.f.call_one().exception(WITHIN), ActorError)
            assert neighbour.pid.call_one().get(WITHIN) == procs.pids[0]
    finally:
        sys.path.remove(str(tmp_path))
        del os.environ["TEST_PID"]
        sys.modules.pop("exits_at_its_end", None)
