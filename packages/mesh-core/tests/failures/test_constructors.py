"""What constructors raise: who hears of it if nobody waits for the spawn."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from core_owners import WITHIN, Told
from core_samples import Broken, BrokenAsync

from mesh_core import (
    Actor,
    MeshError,
    MeshFailure,
    ProcMesh,
    SupervisionError,
    Undeliverable,
    endpoint,
    set_fault_handler,
    this_host,
    this_proc,
)
from mesh_core.policies import Event, Failed, Policy, Repaired, Restart

pytestmark = pytest.mark.usefixtures("runtime")


@pytest.fixture
def told(runtime: None) -> Iterator[Told]:
    """The failures that reach the script's fault handler."""
    found = Told()
    set_fault_handler(found.put)
    yield found
    set_fault_handler(None)


class Parent(Actor):
    """Spawns actors that cannot be made, and only broadcasts to them."""

    def __init__(self) -> None:
        self.failures: list[str] = []
        self.news = threading.Event()
        self.gate = threading.Event()

    @endpoint
    def bear(self, cls: type[Any], *args: Any) -> None:
        child: Any = this_proc().spawn("child", cls, *args)
        for _ in range(3):
            child.ping.broadcast()

    @endpoint
    def bear_and_leave(self) -> None:
        with this_host().spawn_procs() as procs:
            procs.spawn("child", Broken, "left")

    @endpoint
    def told(self) -> list[str]:
        return self.failures

    def __supervise__(self, failure: MeshFailure) -> bool:
        assert failure.unmade
        self.failures.append(failure.headline())
        return True


def heard(parent: Any) -> list[str]:
    """What the parent has been told, once it has been told anything."""
    while not (found := parent.told.call_one().get(WITHIN)):
        pass
    return list(found)


@pytest.mark.parametrize(
    ("cls", "args", "text"), [(Broken, ("no",), "ValueError: no"), (BrokenAsync, (), "KeyError")]
)
def test_an_owner_that_only_broadcasts_is_told_once(runtime: None, cls: Any, args: Any, text: str) -> None:
    """CON-1"""
    with this_host().spawn_procs() as procs:
        parent: Any = procs.spawn("parent", Parent)
        parent.bear.call_one(cls, *args).get(WITHIN)
        (line,) = heard(parent)
        assert f"its constructor raised {text}" in line
        # The other broadcasts have been handled by now, or are behind this one.
        parent.bear.call_one(Broken, "second").get(WITHIN)
        while len(lines := parent.told.call_one().get(WITHIN)) < 2:
            pass
        assert len(lines) == 2
        assert "second" in lines[1]


def test_an_owner_is_told_of_actors_that_it_stopped_without_looking(runtime: None) -> None:
    """CON-1"""
    with this_host().spawn_procs() as procs:
        parent: Any = procs.spawn("parent", Parent)
        parent.bear_and_leave.call_one().get(WITHIN)
        (line,) = heard(parent)
        assert "ValueError: left" in line


def test_the_fault_handler_is_told_of_every_rank(told: Told) -> None:
    """CON-1"""
    with this_host().spawn_procs({"gpus": 2}) as procs:
        broken: Any = procs.spawn("broken", Broken, "no")
        broken.ping.broadcast()
        failures = [told.next(), told.next()]
    assert {failure.rank for failure in failures} == {0, 1}
    assert all(failure.unmade and failure.mesh_name == "broken" for failure in failures)
    assert len(broken.failed()) == 2
    assert told.empty()


def test_who_has_looked_at_the_spawn_is_not_told_again(told: Told) -> None:
    with this_host().spawn_procs() as procs:
        broken: Any = procs.spawn("broken", Broken, "no")
        with pytest.raises(ValueError, match="no"):
            broken.initialized.get(WITHIN)
        broken.ping.broadcast()
        with pytest.raises(ValueError, match="no"):
            broken.ping.call_one().get(WITHIN)  # behind the broadcast
        last: Any = procs.spawn("last", Broken, "another")
        last.ping.broadcast()
        assert told.next().mesh_name == "last"
    assert told.empty()


def test_a_call_that_raises_it_is_enough(told: Told) -> None:
    with this_host().spawn_procs() as procs:
        broken: Any = procs.spawn("broken", Broken, "no")
        with pytest.raises(ValueError, match="no"):
            broken.ping.call_one().get(WITHIN)
    assert told.empty()


def test_the_next_call_of_the_script_raises_it_once(runtime: None) -> None:
    with this_host().spawn_procs() as procs:
        broken: Any = procs.spawn("broken", Broken, "no")
        broken.ping.broadcast()
        with pytest.raises(SupervisionError, match="its constructor raised ValueError: no"):
            call_on(procs)
        with pytest.raises(ValueError, match="no"):
            broken.ping.call_one().get(WITHIN)
        assert procs.spawn("more", Parent).told.call_one().get(WITHIN) == []


def call_on(procs: ProcMesh) -> None:
    """Call another actor until a call raises a failure."""
    other: Any = procs.spawn("other", Parent)
    while True:
        other.told.call_one().get(WITHIN)


def test_what_a_call_has_raised_is_not_due_any_more(runtime: None) -> None:
    """SUP-1"""
    with this_host().spawn_procs() as procs:
        for _ in range(10):
            broken: Any = procs.spawn("broken", Broken, "no")
            broken.ping.broadcast()
            with pytest.raises((ValueError, SupervisionError), match="no"):
                broken.initialized.get(WITHIN)
            with pytest.raises((ValueError, SupervisionError), match="no"):
                broken.ping.call_one().get(WITHIN)
            with pytest.raises(ValueError, match="no"):
                broken.ping.call_one().get(WITHIN)


def test_a_block_raises_it(runtime: None) -> None:
    """CON-1"""
    with (
        pytest.raises(SupervisionError, match="its constructor raised ValueError: unheard"),
        this_host().spawn_procs() as procs,
    ):
        procs.spawn("broken", Broken, "unheard")
    with this_host().spawn_procs():
        pass  # once


class Restarting:
    """A policy that restarts whatever failed."""

    def on(self, event: Event | Repaired, now: float) -> tuple[Policy, list[Restart]]:
        return self, [Restart()] if isinstance(event, Failed) else []  # type: ignore[return-value]


def test_a_policy_restarts_what_could_not_be_made(told: Told, tmp_path: Any) -> None:
    policy = Restarting()
    with this_host().spawn_procs() as procs:
        actor: Any = procs.spawn("fickle", Fickle, str(tmp_path / "made"), supervise=policy)
        actor.ping.broadcast()
        while True:
            try:
                assert actor.ping.call_one().get(WITHIN) == "pong"
                break
            except (ValueError, MeshError):
                pass  # not restarted yet
    assert told.empty()


def test_a_respawned_actor_may_fail_again(runtime: None, tmp_path: Any) -> None:
    """SUP-2: an actor has the same number after a respawn in its process."""
    with this_host().spawn_procs() as procs:
        actor: Any = procs.spawn("fickle", Fickle, str(tmp_path / "made"))
        with pytest.raises(ValueError, match="not yet"):
            actor.initialized.get(WITHIN)
        actor.respawn([0]).get(WITHIN)
        actor.fail.broadcast()
        with pytest.raises(SupervisionError, match="later"):
            call_on(procs)


class Fickle(Actor):
    """Cannot be made the first time."""

    def __init__(self, path: str) -> None:
        first = not Path(path).exists()
        Path(path).touch()
        if first:
            raise ValueError("not yet")

    @endpoint
    def ping(self) -> str:
        return "pong"

    @endpoint
    def fail(self) -> None:
        raise ValueError("later")


ENDS = {
    "with": "with this_host().spawn_procs() as procs: procs.spawn('bad', Bad)",
    "stop": "procs = this_host().spawn_procs(); procs.spawn('bad', Bad); procs.stop().get(timeout=30)",
    "actors": "bad = this_host().spawn_procs().spawn('bad', Bad); bad.stop().get(timeout=30)",
    "broadcast": "bad = this_host().spawn_procs().spawn('bad', Bad); bad.work.broadcast()",
    "nothing": "this_host().spawn_procs().spawn('bad', Bad)",
}


@pytest.mark.parametrize(
    "how",
    [how if how in ("with", "broadcast") else pytest.param(how, marks=pytest.mark.full) for how in ENDS],
)
def test_the_script_ends_with_status_one(script: Any, how: str) -> None:
    """SUP-2"""
    run = script(
        f"""
        from mesh_core import Actor, endpoint, this_host

        class Bad(Actor):
            def __init__(self):
                raise RuntimeError("no such file")
            @endpoint
            def work(self):
                pass

        if __name__ == "__main__":
            {ENDS[how]}
        """
    )
    _, err = run.finish()
    assert run.process.returncode == 1, err
    assert "no such file" in err


def test_a_stopped_mesh_refuses_spawns_at_once(runtime: None) -> None:
    procs: ProcMesh = this_host().spawn_procs({"gpus": 2}, "short")
    procs.stop().get(WITHIN)
    for mesh in (procs, procs.slice(gpus=1)):
        with pytest.raises(
            Undeliverable,
            match="cannot spawn 'late' on 'short': it has been stopped; spawn new processes first",
        ):
            mesh.spawn("late", Parent)
