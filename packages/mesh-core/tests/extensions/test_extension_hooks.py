"""How extensions see exceptions of actors, and replace the classes that are spawned."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from mesh_core import Actor, ActorError, Channel, MeshError, Port, endpoint, send, shutdown, this_host
from mesh_core._common.slots import Slots
from mesh_core.extensions import Extension, Proc, Raised, install, uninstall
from mesh_core.testing import patch_actor

pytestmark = [pytest.mark.usefixtures("runtime"), pytest.mark.python]


@pytest.fixture(autouse=True)
def _uninstalled() -> Any:
    yield
    for name in ("hearing", "deaf", "swap"):
        with contextlib.suppress(MeshError):
            uninstall(name)


class Hearing(Extension):
    """Records what actors raise, and on which thread."""

    name = "hearing"

    def start(self) -> None:
        self.heard: list[tuple[str, str, int, str, str]] = []
        self.threads: list[str] = []

    def endpoint_raised(self, raised: Raised) -> None:
        what = f"{type(raised.error).__name__}: {raised.error}"
        self.heard.append((raised.name, raised.class_name, raised.point.rank, raised.endpoint, what))
        self.threads.append(threading.current_thread().name)

    def receive(self, message: str, sender: Proc) -> Any:
        return self.threads if message == "threads" else self.heard


class Deaf(Extension):
    """Raises when it is notified."""

    name = "deaf"

    def endpoint_raised(self, raised: Raised) -> None:
        raise RuntimeError("too loud")


class Odd(Actor):
    """Raises in every way."""

    def __init__(self, fails: bool = False) -> None:
        if fails:
            raise ValueError("constructor")

    @endpoint
    def plain(self) -> None:
        raise ValueError("plain")

    @endpoint
    async def awaited(self) -> None:
        raise ValueError("awaited")

    @endpoint
    def items(self) -> Iterator[int]:
        yield 1
        raise ValueError("items")

    @endpoint
    def endless(self) -> Iterator[int]:
        while True:
            yield 1

    @endpoint
    async def more(self) -> AsyncIterator[int]:
        yield 1
        raise ValueError("more")

    @endpoint(explicit_response_port=True)
    def by_port(self, port: Port[int]) -> None:
        raise ValueError("by port")

    @endpoint
    def well(self) -> int:
        return 1


class Untidy(Actor):
    """Raises in its cleanup."""

    def __cleanup__(self, error: BaseException | None) -> None:
        raise ValueError("cleanup")


def test_extensions_are_notified_of_exceptions_before_the_caller() -> None:
    hearing = install(Hearing)
    with this_host().spawn_procs() as procs:
        odd: Any = procs.spawn("odd", Odd)
        assert odd.well.call_one().get(timeout=30) == 1

        def heard() -> Any:
            return hearing.call(procs, "heard").get(timeout=30).item()

        assert heard() == []
        for name in ("plain", "awaited", "items", "more", "by_port"):
            ask = getattr(odd, name)
            with pytest.raises(ValueError, match=name.replace("_", " ")):
                _ = (
                    [each.get(30) for each in ask.stream()]
                    if name in ("items", "more")
                    else ask.call_one().get(30)
                )
            # It was notified before the answer was sent, so there is nothing to wait for.
            assert heard()[-1] == ("odd", "Odd", 0, name, f"ValueError: {name.replace('_', ' ')}")
        assert len(heard()) == 5
        port, receiver = Channel[Any].open()
        send(odd.plain, port=port)
        with pytest.raises(ValueError, match="plain"):
            receiver.recv().get(timeout=30)
        assert heard()[5:] == [("odd", "Odd", 0, "plain", "ValueError: plain")]
        with pytest.raises(ValueError, match="cleanup"):
            procs.spawn("untidy", Untidy).stop().get(timeout=30)  # type: ignore[attr-defined]
        assert heard()[-1][3:] == ("__cleanup__", "ValueError: cleanup")
        broken: Any = procs.spawn("broken", Odd, True)
        with pytest.raises(ValueError, match="constructor"):
            broken.well.call_one().get(timeout=30)
        assert heard()[-1] == ("broken", "Odd", 0, "__init__", "ValueError: constructor")
        assert "mesh-ext-hearing" not in hearing.call(procs, "threads").get(timeout=30).item()


def test_an_abandoned_generator_has_not_raised() -> None:
    hearing = install(Hearing)
    with this_host().spawn_procs() as procs:
        odd: Any = procs.spawn("odd", Odd)
        for item in odd.endless.stream():
            assert item.get(timeout=30) == 1
            break
        # It runs after the generator ended.
        odd.well.call_one().get(timeout=30)
        assert hearing.call(procs, "heard").get(timeout=30).item() == []


def test_a_hook_that_raises_is_logged_and_the_answer_is_the_actors(
    caplog: pytest.LogCaptureFixture,
) -> None:
    install(Deaf)
    with this_host().spawn_procs() as procs:
        odd: Any = procs.spawn("odd", Odd)
        with pytest.raises(ActorError, match="plain"):
            odd.plain.call_one().get(timeout=30)
        assert odd.well.call_one().get(timeout=30) == 1
    assert "a hook raised when notified of the exception of actor 'odd'" in caplog.text
    assert "too loud" in caplog.text


class Real(Actor):
    @endpoint
    def who(self) -> str:
        return "real"

    @endpoint
    def spawn(self) -> str:
        with this_host().spawn_procs() as procs:
            return str(procs.spawn("inner", Real).who.call_one().get(timeout=30))


class Other(Actor):
    @endpoint
    def who(self) -> str:
        return f"other in {os.getpid()}"

    @endpoint
    def spawn(self) -> str:
        return ""


class Swap(Extension):
    """Spawns the class in its payload instead of ``Real``."""

    name = "swap"

    def actor_class(self, cls: type) -> Any:
        return self.payload if cls is Real else cls


def test_an_extension_says_which_class_is_spawned() -> None:
    with this_host().spawn_procs() as procs:
        install(Swap, Other)
        swapped: Any = procs.spawn("one", Real)
        assert swapped.who.call_one().get(timeout=30) == f"other in {procs.pids[0]}"
        uninstall("swap")
        real: Any = procs.spawn("two", Real)
        assert real.who.call_one().get(timeout=30) == "real"
        assert real.spawn.call_one().get(timeout=60) == "real"


def test_actor_class_applies_in_processes_that_carry_the_extension() -> None:
    with this_host().spawn_procs() as bare:
        install(Swap, Other)
        with this_host().spawn_procs() as procs:
            uninstall("swap")
            assert procs.spawn("outer", Real).spawn.call_one().get(timeout=60).startswith("other in ")
        assert bare.spawn("outer", Real).spawn.call_one().get(timeout=60) == "real"


@pytest.mark.parametrize("wrong", [None, int, "Other"])
def test_classes_that_are_not_actors_are_refused_by_the_spawn(wrong: Any) -> None:
    install(Swap, wrong)
    with (
        this_host().spawn_procs() as procs,
        pytest.raises(TypeError, match="extension 'swap' must return an actor"),
    ):
        procs.spawn("one", Real)


def test_a_patch_outlives_the_runtime() -> None:
    with patch_actor(Real, Other):
        for _ in range(2):
            with this_host().spawn_procs() as procs:
                assert procs.spawn("one", Real).who.call_one().get(timeout=30).startswith("other in ")
            shutdown()
    with this_host().spawn_procs() as procs:
        assert procs.spawn("one", Real).who.call_one().get(timeout=30) == "real"


def test_a_slot_is_created_once() -> None:
    made: list[int] = []
    begin = threading.Barrier(8)
    slots = Slots()
    found: list[object] = []

    class Kept:
        def __init__(self) -> None:
            made.append(1)

    def look() -> None:
        begin.wait(30)
        found.append(slots.of(Kept))

    threads = [threading.Thread(target=look) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(made) == 1
    assert len(set(map(id, found))) == 1
    assert slots.find(Slots) is None
