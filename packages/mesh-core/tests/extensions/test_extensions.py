"""Process extensions: how they are carried, started, notified and stopped; and watches."""

from __future__ import annotations

import asyncio
import os
import queue
import signal
import threading
from pathlib import Path
from typing import Any, ClassVar

import pytest

from mesh_core import (
    Actor,
    ActorError,
    ActorTimeout,
    Channel,
    MeshError,
    MeshFailure,
    endpoint,
    shutdown,
    this_host,
)
from mesh_core.extensions import (
    NOT_CARRIED,
    ActorEnd,
    Extension,
    Proc,
    ProcEnd,
    Spawning,
    current_proc,
    find,
    install,
    uninstall,
    watch,
)

pytestmark = [pytest.mark.usefixtures("runtime"), pytest.mark.python]


@pytest.fixture(autouse=True)
def _uninstalled() -> Any:
    yield
    for name in ("notes", "second", "slow", "broken"):
        try:
            uninstall(name)
        except MeshError:
            continue


class Notes(Extension):
    """Remembers what it is told."""

    name = "notes"

    def start(self) -> None:
        self.said: list[Any] = []
        self.ends: list[tuple[str, int, str]] = []
        self.threads: set[str] = set()
        self.second_was_here = find(Second) is not None

    def receive(self, message: Any, sender: Proc) -> Any:
        self.threads.add(threading.current_thread().name)
        match message:
            case "payload":
                return self.payload
            case "said":
                return self.said
            case "ends":
                return self.ends
            case "who":
                return str(self.proc), str(sender)
            case "threads":
                return self.threads
            case "order":
                return self.second_was_here
            case "fail":
                raise ValueError("as told")
            case "exit":
                raise SystemExit(7)
            case "lock":
                return threading.Lock()
        self.said.append(message)
        return len(self.said)

    def actor_ended(self, end: ActorEnd) -> None:
        self.ends.append((end.name, end.point.rank, type(end.error).__name__))


class Second(Extension):
    name = "second"

    def receive(self, message: str, sender: Proc) -> list[str]:
        return order_of(self.payload)


def order_of(folder: str) -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir())


class Spawner(Actor):
    @endpoint
    def spawn_and_ask(self, message: str) -> list[Any]:
        notes = find(Notes)
        assert notes is not None
        with this_host().spawn_procs({"x": 2}) as procs:
            return notes.call(procs, message).get(timeout=30).values()

    @endpoint
    def send_to(self, proc: Proc, message: Any) -> Any:
        notes = find(Notes)
        assert notes is not None
        return notes.call(proc, message).get(timeout=30).values()[0]

    @endpoint
    def has_notes(self) -> bool:
        return find(Notes) is not None

    @endpoint
    def fail(self) -> None:
        raise RuntimeError("as told")


def test_each_process_has_an_instance_with_its_payload() -> None:
    notes = install(Notes, payload=[1, 2])
    assert notes.payload == [1, 2]
    assert notes.proc == current_proc()
    assert notes.proc.is_controller
    with this_host().spawn_procs({"gpus": 2}) as procs:
        assert notes.call(procs, "payload").get(timeout=30).values() == [[1, 2], [1, 2]]
        who = notes.call(procs, "who").get(timeout=30)
        assert who.item(gpus=1) == (f"{procs.name}[1]", "controller")


def test_grandchildren_carry_extensions_too() -> None:
    install(Notes, payload="deep")
    with this_host().spawn_procs() as procs:
        spawner = procs.spawn("spawner", Spawner)
        assert spawner.spawn_and_ask.call_one("payload").get(timeout=60) == ["deep", "deep"]


def test_a_worker_sends_to_the_script() -> None:
    notes = install(Notes)
    with this_host().spawn_procs() as procs:
        spawner = procs.spawn("spawner", Spawner)
        assert spawner.send_to.call_one(current_proc(), "hello").get(timeout=30) == 1
    assert notes.said == ["hello"]


def test_messages_arrive_in_order_on_one_thread() -> None:
    """EXT-2, for a plain ``receive``."""
    notes = install(Notes)
    with this_host().spawn_procs() as procs:
        for number in range(500):
            notes.tell(procs, number)
        assert notes.call(procs, "said").get(timeout=30).values() == [list(range(500))]
        assert notes.call(procs, "threads").get(timeout=30).values() == [{"mesh-ext-notes"}]


class Selective(Notes):
    def for_spawn(self, spawning: Spawning) -> Any:
        assert spawning.is_local
        assert len(spawning.hosts) == 1
        return spawning.mesh_name if spawning.mesh_name == "many" else NOT_CARRIED


def test_for_spawn_decides_which_processes_get_it_and_their_payload() -> None:
    notes = install(Selective)
    with this_host().spawn_procs() as without, this_host().spawn_procs({"gpus": 2}, name="many") as procs:
        assert notes.call(procs, "payload").get(timeout=30).values() == ["many", "many"]
        assert not without.spawn("spawner", Spawner).has_notes.call_one().get(timeout=30)
        with pytest.raises(MeshError, match="has no extension 'notes'"):
            notes.call(without, "payload").get(timeout=30)


def test_an_exception_of_receive_goes_to_the_caller_and_the_next_message_is_handled() -> None:
    notes = install(Notes)
    with this_host().spawn_procs() as procs:
        with pytest.raises(ActorError, match="as told") as caught:
            notes.call(procs, "fail").get(timeout=30)
        assert isinstance(caught.value, ValueError)
        assert notes.call(procs, "said").get(timeout=30).values() == [[]]


def test_whatever_receive_does_its_caller_gets_an_answer() -> None:
    """EXT-3."""
    notes = install(Notes)
    with this_host().spawn_procs() as procs:
        for message, said in (("exit", "SystemExit: 7"), ("lock", "cannot pickle")):
            with pytest.raises((ActorError, MeshError), match=said):
                notes.call(procs, message).get(timeout=30)
        assert notes.call(procs, "said").get(timeout=30).values() == [[]]


def test_extensions_are_notified_of_the_ends_of_actors() -> None:
    notes = install(Notes)
    with this_host().spawn_procs({"gpus": 2}) as procs:
        spawner = procs.spawn("short", Spawner)
        spawner.has_notes.call().get(timeout=30)
        spawner.stop().get(timeout=30)
        ends = notes.call(procs, "ends").get(timeout=30).values()
        assert ends == [[("short", 0, "NoneType")], [("short", 1, "NoneType")]]


class Listens(Extension):
    """Puts what it is notified of into a channel."""

    name = "notes"

    def actor_ended(self, end: ActorEnd) -> None:
        self.payload.send((end.name, str(end.error)))


def test_extensions_are_notified_of_failures_of_actors() -> None:
    port, heard = Channel[tuple[str, str]].open()
    install(Listens, payload=port)
    with this_host().spawn_procs() as procs:
        spawner = procs.spawn("failing", Spawner, supervise=lambda _: True)
        spawner.fail.broadcast()
        name, error = heard.recv().get(timeout=30)
        assert name == "failing"
        assert "as told" in error


RELEASED = threading.Event()


class Holds(Actor):
    """Blocks the event loop of its process, which its neighbour does not use."""

    @endpoint
    async def hold(self, begun: Any) -> None:
        begun.send("begun")
        RELEASED.wait(60)


class Releases(Actor):
    @endpoint
    def release(self) -> None:
        RELEASED.set()


def test_extensions_are_notified_before_the_stop_returns() -> None:
    """Whatever the event loop is busy with: the answer to the stop does not overtake the notification."""
    port, heard = Channel[tuple[str, str]].open()
    begins, begun = Channel[str].open()
    install(Listens, payload=port)
    with this_host().spawn_procs() as procs:
        short, releases = procs.spawn("short", Spawner), procs.spawn("releases", Releases)
        short.has_notes.call().get(timeout=30)
        releases.initialized.get(timeout=30)
        procs.spawn("holds", Holds).hold.broadcast(begins)
        begun.recv().get(timeout=30)
        short.stop().get(timeout=30)
        assert heard.recv().get(timeout=30) == ("short", "None")
        releases.release.call().get(timeout=30)


def test_extensions_can_be_installed_in_running_processes() -> None:
    with this_host().spawn_procs({"gpus": 2}) as procs:
        procs.initialized.get(timeout=30)
        notes = install(Notes, payload="late")
        with pytest.raises(MeshError, match="has no extension 'notes'"):
            notes.call(procs, "payload").get(timeout=30)
        first = notes.install_on(procs.slice(gpus=0))
        assert notes.call(procs.slice(gpus=0), 5).get(timeout=30).values() == [1]
        first.get(timeout=30)
        # One already has it, and keeps it.
        notes.install_on(procs)
        assert notes.call(procs, "said").get(timeout=30).values() == [[5], []]
        assert notes.call(procs, "payload").get(timeout=30).values() == ["late", "late"]


class Unloadable:
    def __reduce__(self) -> Any:
        return int, ("no number",)


def test_an_extension_that_cannot_be_loaded_is_named() -> None:
    install(Notes, payload=Unloadable())
    procs = this_host().spawn_procs(supervise=lambda _: True)
    with pytest.raises(MeshError, match=r"extension 'notes' could not start: .*ValueError"):
        procs.initialized.get(timeout=30)
    procs.stop().get(timeout=30)


class Slow(Extension):
    """Its messages wait for each other on the event loop."""

    name = "slow"

    def start(self) -> None:
        self.waiting: asyncio.Event | None = None
        self.cancelled = 0

    async def receive(self, message: str, sender: Proc) -> int:  # type: ignore[override]
        if message == "cancelled":
            return self.cancelled
        if message == "release":
            assert self.waiting is not None
            self.waiting.set()
            return 0
        self.waiting = asyncio.Event()
        try:
            await self.waiting.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return 7


def test_coroutines_overlap_and_are_cancelled_with_their_call() -> None:
    """EXT-2, for an ``async receive``: messages begin in the order sent."""
    slow = install(Slow)
    with this_host().spawn_procs() as procs:
        first = slow.call(procs, "wait")
        slow.call(procs, "release").get(timeout=30)
        assert first.get(timeout=30).values() == [7]
        second = slow.call(procs, "wait")
        # After it began.
        assert slow.call(procs, "cancelled").get(timeout=30).values() == [0]
        assert second.cancel()
        # After the cancellation.
        assert slow.call(procs, "cancelled").get(timeout=30).values() == [1]


def test_a_deadline_ends_the_wait() -> None:
    slow = install(Slow)
    with this_host().spawn_procs() as procs, pytest.raises(ActorTimeout, match="extension 'slow'"):
        slow.call(procs, "wait", timeout=0.1).get()


class Broken(Extension):
    name = "broken"

    def start(self) -> None:
        if not self.proc.is_controller:
            raise OSError("no such device")


def test_a_process_whose_extension_cannot_start_says_why() -> None:
    install(Broken)
    procs = this_host().spawn_procs(supervise=lambda _: True)
    with pytest.raises(MeshError, match="extension 'broken' could not start: OSError: no such device"):
        procs.initialized.get(timeout=30)
    error = (
        procs.spawn("spawner", Spawner, supervise=lambda _: True).has_notes.call_one().exception(timeout=30)
    )
    assert "extension 'broken' could not start: OSError: no such device" in str(error)
    procs.stop().get(timeout=30)


class Here(Extension):
    name = "broken"

    def start(self) -> None:
        raise OSError("not here")


def test_an_extension_that_cannot_start_is_not_installed() -> None:
    with pytest.raises(OSError, match="not here"):
        install(Here)
    assert find(Here) is None


class Traced(Extension):
    """Writes to a file when it starts and when it stops."""

    name = "notes"
    after: ClassVar = ("second",)

    def start(self) -> None:
        assert self.proc.is_controller or find(TracedSecond) is not None
        self._leave("a-notes-start")

    def stop(self) -> None:
        self._leave("c-notes-stop")

    def _leave(self, name: str) -> None:
        if not self.proc.is_controller:
            left = order_of(self.payload)
            Path(self.payload, f"{len(left)}-{name}").touch()


class TracedSecond(Traced):
    name = "second"
    after: ClassVar = ()

    def start(self) -> None:
        self._leave("second-start")

    def stop(self) -> None:
        self._leave("second-stop")


class Cleans(Actor):
    def __init__(self, folder: str) -> None:
        self.folder = folder
        left = order_of(folder)
        Path(folder, f"{len(left)}-made").touch()

    @endpoint
    def ready(self) -> None:
        pass

    def __cleanup__(self, exc: BaseException | None) -> None:
        left = order_of(self.folder)
        Path(self.folder, f"{len(left)}-cleanup").touch()


def test_extensions_start_in_order_and_stop_in_reverse_after_the_actors(tmp_path: Path) -> None:
    """EXT-1: they start before the actors are created, and stop after these ended."""
    install(Traced, str(tmp_path))
    install(TracedSecond, str(tmp_path))
    with this_host().spawn_procs() as procs:
        procs.spawn("cleans", Cleans, str(tmp_path)).ready.call_one().get(timeout=30)
    assert order_of(str(tmp_path)) == [
        "0-second-start",
        "1-a-notes-start",
        "2-made",
        "3-cleanup",
        "4-c-notes-stop",
        "5-second-stop",
    ]


def test_names_of_extensions_are_checked() -> None:
    install(Notes)
    with pytest.raises(MeshError, match="extension 'notes' is installed in this process already"):
        install(Notes)
    with pytest.raises(TypeError, match="derived from Extension"):
        install(Actor)  # type: ignore[type-var]
    with pytest.raises(TypeError, match="name must be a non-empty string"):
        install(type("Nameless", (Extension,), {}))
    uninstall("notes")
    with pytest.raises(MeshError, match="no extension 'notes' is installed"):
        uninstall("notes")


def test_a_dead_process_fails_messages_to_it() -> None:
    slow = install(Slow)
    with this_host().spawn_procs({"gpus": 2}, supervise=lambda _: True) as procs:
        waiting = slow.call(procs, "wait")
        pid = procs.pids[1]
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(MeshError, match="killed by signal 9"):
            waiting.get(timeout=30)


def test_a_class_of_the_script_is_sent_by_value() -> None:
    class Local(Notes):
        def receive(self, message: Any, sender: Proc) -> Any:
            return f"local {message}"

    local = install(Local)
    with this_host().spawn_procs() as procs:
        assert local.call(procs, "x").get(timeout=30).values() == ["local x"]


# Watches.


def ends_of(procs: Any) -> queue.SimpleQueue[ProcEnd]:
    told: queue.SimpleQueue[ProcEnd] = queue.SimpleQueue()
    watch(procs, told.put)
    return told


def test_each_end_is_reported_once() -> None:
    with this_host().spawn_procs({"gpus": 3}, supervise=lambda _: True) as procs:
        told = ends_of(procs)
        pid = procs.pids[1]
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        first = told.get(timeout=30)
        assert first.point == {"gpus": 1}
        assert isinstance(first.failure, MeshFailure)
        assert first.failure.signal == signal.SIGKILL
        assert first.failure.pid == pid
        procs.stop().get(timeout=30)
        others = [told.get(timeout=30), told.get(timeout=30)]
        assert sorted(end.point["gpus"] for end in others if end.point is not None) == [0, 2]
        assert [end.failure for end in others] == [None, None]
        assert told.empty()


class Known(Actor):
    @endpoint
    def address(self) -> tuple[int, int, int]:
        return current_proc().address


def test_the_address_is_that_of_the_ended_incarnation() -> None:
    """It is not that of the rank, which may have been respawned."""
    with this_host().spawn_procs({"gpus": 2}, supervise=lambda _: True) as procs:
        for life in range(3):
            known = procs.slice(gpus=1).spawn("known", Known, supervise=lambda _: True)
            address = known.address.call_one().get(timeout=30)
            told = ends_of(procs)
            pid = procs.pids[1]
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            end = told.get(timeout=30)
            assert (end.address, end.incarnation) == (address, life)
            procs.respawn().get(timeout=30)


def test_earlier_ends_are_reported_too() -> None:
    with this_host().spawn_procs({"gpus": 2}) as procs:
        procs.initialized.get(timeout=30)
        procs.stop().get(timeout=30)
        told = ends_of(procs)
        assert {told.get(timeout=30).address[1] for _ in range(2)} == {0, 1}


class Watcher(Actor):
    def __init__(self) -> None:
        self.ended: asyncio.Queue[int] = asyncio.Queue()

    @endpoint
    async def begin(self, procs: Any) -> None:
        watch(procs, lambda end: self.ended.put_nowait(end.address[1]))

    @endpoint
    async def wait(self) -> int:
        return await self.ended.get()


def test_processes_that_do_not_own_a_mesh_may_watch_it() -> None:
    with (
        this_host().spawn_procs({"gpus": 2}, supervise=lambda _: True) as procs,
        this_host().spawn_procs() as own,
    ):
        watcher = own.spawn("watcher", Watcher)
        watcher.begin.call_one(procs).get(timeout=30)
        pid = procs.pids[1]
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        assert watcher.wait.call_one().get(timeout=30) == 1


def test_a_cancelled_watch_is_not_notified() -> None:
    with this_host().spawn_procs() as procs:
        told: list[ProcEnd] = []
        cancelled = watch(procs, told.append)
        cancelled.cancel()
        other = ends_of(procs)
        procs.stop().get(timeout=30)
        other.get(timeout=30)
        assert told == []
        assert cancelled.living == 0


def test_watch_lists_what_it_accepts() -> None:
    with pytest.raises(TypeError, match=r"takes a ProcMesh or an ActorMesh, got int"):
        watch(3, print)  # type: ignore[arg-type]
    with this_host().spawn_procs() as procs, pytest.raises(TypeError, match="callback must be callable"):
        watch(procs, 3)  # type: ignore[arg-type]


class Farewell(Extension):
    """Says goodbye, when stopped, to the process that installed it."""

    name = "farewell"

    def start(self) -> None:
        self.heard: queue.SimpleQueue[str] = queue.SimpleQueue()

    def for_spawn(self, spawning: Spawning) -> Proc:
        return self.proc

    def receive(self, message: str, sender: Proc) -> str:
        self.heard.put(message)
        return "goodbye"

    def stop(self) -> None:
        if self.payload is not None:
            (answer,) = self.call(self.payload, f"{self.proc} ends").get(timeout=30).values()
            self.tell(self.payload, f"it was told {answer}, found {type(find(Farewell)).__name__}")


def test_messages_can_be_sent_and_answered_while_an_extension_stops() -> None:
    farewell = install(Farewell)
    try:
        with this_host().spawn_procs(name="workers") as procs:
            procs.initialized.get(timeout=30)
        assert [farewell.heard.get(timeout=30) for _ in range(2)] == [
            "workers[0] ends",
            "it was told goodbye, found Farewell",
        ]
    finally:
        uninstall("farewell")
    assert find(Farewell) is None
    with pytest.raises(MeshError, match="this instance is not installed in this process"):
        farewell.tell(current_proc(), "late")


class Relying(Extension):
    """Needs another extension until its end."""

    name = "relying"
    after = ("farewell",)

    def stop(self) -> None:
        Path(self.payload, str(find(Farewell) is not None)).touch()


def test_an_extension_can_be_found_until_those_after_it_have_stopped(tmp_path: Path) -> None:
    install(Farewell)
    install(Relying, str(tmp_path))
    try:
        with this_host().spawn_procs() as procs:
            procs.initialized.get(timeout=30)
    finally:
        uninstall("relying")
        uninstall("farewell")
    assert order_of(str(tmp_path)) == ["True"]


class Patient(Extension):
    """Answers when it is told to."""

    name = "patient"

    def start(self) -> None:
        self.answers = threading.Event()

    def receive(self, message: str, sender: Proc) -> str:
        self.answers.wait(30)
        return message


def test_a_message_to_one_process_that_is_not_answered_in_time_says_so() -> None:
    patient = install(Patient)
    try:
        future = patient.call(patient.proc, "hello")
        with pytest.raises(
            ActorTimeout, match=r"a message to extension 'patient' has not finished within 0.01 s"
        ):
            future.get(timeout=0.01)
        patient.answers.set()
        assert future.get(timeout=30).item() == "hello"
    finally:
        uninstall("patient")


def test_a_script_that_has_spawned_nothing_can_send_to_itself() -> None:
    shutdown()
    patient = install(Patient)
    try:
        patient.answers.set()
        assert patient.call(patient.proc, "hello").get(timeout=30).item() == "hello"
    finally:
        uninstall("patient")


class Closes(Extension):
    name = "closes"

    def start(self) -> None:
        self.said: list[str] = []

    def stop(self) -> None:
        self.said.append("stop")

    def closed(self) -> None:
        self.said.append("closed")


def test_extensions_of_the_script_are_notified_of_the_closed_runtime() -> None:
    said = install(Closes).said
    shutdown()
    assert said == ["stop", "closed"]
