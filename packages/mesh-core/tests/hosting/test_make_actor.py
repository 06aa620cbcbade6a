"""Extensions that make the actors of their process, and do something between two messages of them."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from mesh_core import Actor, MeshError, endpoint, this_host
from mesh_core.extensions import (
    Extension,
    LocalActor,
    Proc,
    actor_id,
    actor_ranks,
    install,
    procs_of,
    settled,
    uninstall,
)

pytestmark = [pytest.mark.usefixtures("runtime"), pytest.mark.slow]


@pytest.fixture(autouse=True)
def _uninstalled() -> Any:
    yield
    for name in ("makes", "outer"):
        with contextlib.suppress(MeshError):
            uninstall(name)


class Makes(Extension):
    """Makes actors in the way that its payload says, and keeps them."""

    name = "makes"

    def start(self) -> None:
        self.made: dict[int, LocalActor] = {}

    def make_actor(self, actor: LocalActor) -> Any:
        self.made[actor.id] = actor
        if self.payload == "instead":
            made = actor.cls.__new__(actor.cls)
            made.how = [f"made for {actor.name} on rank {actor.point.rank}"]
            return made
        if self.payload == "wrong":
            return object()
        if self.payload == "raise":
            raise ValueError("no")
        made = actor.construct()
        made.how.append("makes")
        if self.payload == "twice":
            actor.construct()
        return made

    async def receive(self, message: tuple[str, int], sender: Proc) -> Any:
        what, number = message
        actor = self.made[number]
        if what == "between":
            return await actor.between_messages(lambda made: (made.busy, threading.current_thread().name))
        if what == "raise":
            return await actor.between_messages(lambda made: 1 / 0)
        return actor.has_ended, actor.object is None


class Outer(Extension):
    name = "outer"

    def make_actor(self, actor: LocalActor) -> Any:
        made = actor.construct()
        made.how.append("outer")
        return made


class Plain(Actor):
    def __init__(self) -> None:
        self.how = ["constructed"]
        self.busy = False

    @endpoint
    def told(self) -> list[str]:
        return self.how

    @endpoint
    def work(self, path: str) -> None:
        self.busy = True
        Path(path).read_text()
        self.busy = False


class Awaits(Actor):
    def __init__(self) -> None:
        self.how = ["constructed"]
        self.busy = False

    @endpoint
    async def told(self) -> list[str]:
        return self.how

    @endpoint
    async def work(self, path: str) -> None:
        import asyncio

        self.busy = True
        # Its turn comes again and again, and between them those of others.
        for _ in range(1000):
            await asyncio.sleep(0)
        self.busy = False


@pytest.mark.parametrize("cls", [Plain, Awaits])
def test_actors_are_made_by_extensions(cls: Any) -> None:
    install(Makes)
    install(Outer)
    with this_host().spawn_procs({"gpus": 2}) as procs:
        actors: Any = procs.spawn("actors", cls)
        told = actors.told.call().get(timeout=30).values()
        assert told == [["constructed", "outer", "makes"]] * 2, "the first that was installed is asked first"
        assert actor_ranks(actors.slice(gpus=1)) == [1]
        assert procs_of(actors.slice(gpus=1)).pids == procs.pids[1:]


def test_an_actor_is_made_in_another_way() -> None:
    install(Makes, "instead")
    with this_host().spawn_procs({"gpus": 2}) as procs:
        actors: Any = procs.spawn("actors", Plain)
        told = actors.told.call().get(timeout=30).values()
        assert told == [[f"made for actors on rank {rank}"] for rank in range(2)]


@pytest.mark.parametrize(
    ("payload", "error"),
    [
        ("wrong", (TypeError, "make_actor.. of Makes must return an object of class Plain")),
        ("raise", (ValueError, "no")),
        ("twice", (MeshError, "cannot construct actor .* once")),
    ],
)
def test_errors_are_reported_to_the_spawner(payload: str, error: tuple[Any, str]) -> None:
    install(Makes, payload)
    with this_host().spawn_procs() as procs:
        actors: Any = procs.spawn("actors", Plain)
        with pytest.raises(error[0], match=error[1]):
            actors.initialized.get(timeout=30)


@pytest.mark.parametrize("cls", [Plain, Awaits])
def test_between_messages_no_endpoint_is_half_done(cls: Any, tmp_path: Any) -> None:
    makes = install(Makes)
    path = tmp_path / "pipe"
    with this_host().spawn_procs() as procs:
        actors: Any = procs.spawn("actors", cls)
        number = actor_id(actors)
        actors.initialized.get(timeout=30)
        if cls is Plain:
            os.mkfifo(path)
        working = actors.work.call_one(str(path))
        asked = makes.call(procs, ("between", number))
        last = actors.told.call_one()
        # Its turn is ahead of what waits, and behind what runs.
        if cls is Plain:
            path.write_text("")
        busy, thread = asked.get(timeout=30).item()
        assert not busy
        assert thread == ("mesh-actors" if cls is Plain else "mesh-coroutines")
        working.get(timeout=30)
        last.get(timeout=30)
        with pytest.raises(ZeroDivisionError):
            makes.call(procs, ("raise", number)).get(timeout=30)


def test_an_actor_that_has_ended_has_no_turn() -> None:
    makes = install(Makes)
    with this_host().spawn_procs() as procs:
        actors: Any = procs.spawn("actors", Plain)
        number = actor_id(actors)
        actors.initialized.get(timeout=30)
        actors.stop().get(timeout=30)
        assert makes.call(procs, ("ended", number)).get(timeout=30).item() == (True, True)
        with pytest.raises(MeshError, match="has ended"):
            makes.call(procs, ("between", number)).get(timeout=30)


def test_references_do_not_know_their_processes() -> None:
    with this_host().spawn_procs() as procs:
        actors: Any = procs.spawn("actors", Plain)
        with pytest.raises(TypeError, match="takes a mesh of actors"):
            procs_of(procs)
        with pytest.raises(TypeError, match="takes a mesh of actors"):
            actor_id(procs)
        actors.stop().get(timeout=30)
        with pytest.raises(MeshError, match="not known here"):
            procs_of(actors)


@pytest.mark.parametrize("cls", [Plain, Awaits])
def test_settled_is_behind_what_was_sent(cls: Any, tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    with this_host().spawn_procs({"gpus": 2}) as procs:
        actors: Any = procs.spawn("actors", cls)
        if cls is Plain:
            os.mkfifo(path)
        one = actors.slice(gpus=1)
        working = one.work.call_one(str(path))
        behind = settled(actors)
        settled(actors.slice(gpus=0)).get(timeout=30)
        if cls is Plain:
            assert not behind.done(), "rank 1 still works"
            path.write_text("")
        behind.get(timeout=30)
        assert working.done()
        procs.slice(gpus=1).stop().get(timeout=30)
        with pytest.raises(MeshError):
            settled(actors).get(timeout=30)
        with pytest.raises(TypeError, match="takes a mesh of actors"):
            settled(procs)
