"""Extensions of hosts: their processes, their messages, and what becomes of both (HPR-1, HPR-2); on one host."""

from __future__ import annotations

import asyncio
import os
import queue
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from core_owners import lines, write_down

from mesh_core import (
    Actor,
    FailureKind,
    MeshError,
    MeshFailure,
    SupervisionError,
    endpoint,
    set_fault_handler,
    shutdown,
    this_host,
)
from mesh_core._extensions.host_procs import Again
from mesh_core.extensions import NOT_CARRIED, Extension, Proc, ProcEnd, Spawning, find, install, uninstall
from mesh_core.policies import Ended, Failed

pytestmark = [pytest.mark.slow, pytest.mark.sampled(2, of="file", full=True)]
SOON = 30


@pytest.fixture(autouse=True)
def job() -> Iterator[None]:
    """A separate job for each test."""
    shutdown()
    yield
    shutdown()


class Ledger(Extension):
    """Keeps what it is told; hosts have one, too."""

    name = "ledger"
    on_hosts = True

    def for_spawn(self, spawning: Spawning) -> Any:
        return [spawning.mesh_name, len(spawning.hosts)] if spawning.is_host else self.payload

    def start(self) -> None:
        self.said: list[Any] = []
        self.ends: queue.SimpleQueue[ProcEnd] = queue.SimpleQueue()

    def receive(self, message: Any, sender: Proc) -> Any:
        match message:
            case "who":
                return self.proc, sender
            case "payload":
                return self.payload
            case "said":
                return self.said
            case "tell me of ends":
                self.told = sender
                return None
            case ProcEnd():
                self.ends.put(message)
                return None
            case "block":
                threading.Event().wait()
            case "fail":
                raise ValueError("as told")
        self.said.append(message)
        return None

    def proc_ended(self, end: ProcEnd) -> None:
        self.tell(self.told, end)


class Clerk(Actor):
    """Asks the ledgers."""

    @endpoint
    def ask(self, message: Any) -> Any:
        ledger = find(Ledger)
        assert ledger is not None
        return ledger.call(this_host(), message).get(timeout=SOON).item()

    @endpoint
    def tell_many(self, count: int) -> list[Any]:
        ledger = find(Ledger)
        assert ledger is not None
        for number in range(count):
            ledger.tell(this_host(), number)
        said: list[Any] = ledger.call(this_host(), "said").get(timeout=SOON).item()
        return said

    @endpoint
    def here(self) -> tuple[int, int, int]:
        ledger = find(Ledger)
        assert ledger is not None
        return ledger.proc.address

    @endpoint
    def spawn_with_own(self) -> bool:
        """Install one of this process's extensions, and ask from a child process whether the host has it."""
        install(Own)
        with this_host().spawn_procs() as procs:
            return bool(procs.spawn("below", Below).is_on_host.call_one().get(timeout=SOON))

    @endpoint
    def install_own(self) -> bool:
        own = install(Own)
        own.install_on(this_host()).get(timeout=SOON)
        return bool(own.call(this_host(), None).get(timeout=SOON).item())


class Own(Extension):
    name = "own"
    on_hosts = True

    def receive(self, message: Any, sender: Proc) -> bool:
        return self.proc.is_host


class Below(Actor):
    @endpoint
    def is_on_host(self) -> bool:
        own = find(Own)
        assert own is not None
        return bool(own.call(this_host(), None).get(timeout=SOON).item())


def died(ledger: Any, message: Any = "who") -> Any:
    """Ask repeatedly until the process is running again."""
    while True:
        try:
            return ledger.call(this_host(), message).get(timeout=SOON).item()
        except SupervisionError:
            continue


def test_processes_share_their_hosts_extension() -> None:
    ledger = install(Ledger, "from the script")
    with this_host().spawn_procs({"gpus": 2}) as procs:
        clerks: Any = procs.spawn("clerks", Clerk)
        first, second = clerks.ask.call("who").get(timeout=SOON).values()
        mine = ledger.call(this_host(), "who").get(timeout=SOON).item()
        assert first[0] == second[0] == mine[0]
        proc = mine[0]
        assert proc.is_host
        assert not proc.is_controller
        assert str(proc) == f"host {proc.host}"
        assert proc.pid not in {os.getpid(), *procs.pids}
        assert [str(sender) for _, sender in (first, second, mine)] == [
            f"{procs.name}[0]",
            f"{procs.name}[1]",
            "controller",
        ]
        assert not ledger.proc.is_host
        assert ledger.call(this_host(), "payload").get(timeout=SOON).item() == ["host", 1]
        assert ledger.call(procs, "payload").get(timeout=SOON).values() == ["from the script"] * 2
        # And by its address.
        assert ledger.call(proc, "who").get(timeout=SOON).item()[0] == proc


def test_one_senders_messages_arrive_in_order() -> None:
    install(Ledger)
    with this_host().spawn_procs() as procs:
        clerk: Any = procs.spawn("clerk", Clerk)
        assert clerk.tell_many.call_one(200).get(timeout=SOON) == list(range(200))
        with pytest.raises(ValueError, match="as told"):
            clerk.ask.call_one("fail").get(timeout=SOON)


class Plain(Extension):
    """Runs only where it is installed explicitly."""

    name = "plain"

    def receive(self, message: Any, sender: Proc) -> Any:
        return self.payload, self.proc.is_host


def test_hosts_get_an_extension_when_it_is_installed_there() -> None:
    plain = install(Plain, 7)
    with this_host().spawn_procs() as procs:
        procs.initialized.get(timeout=SOON)
        with pytest.raises(MeshError, match=r"does not have extension 'plain'.*install_on"):
            plain.call(this_host(), None)
        plain.install_on(this_host()).get(timeout=SOON)
        assert plain.call(this_host(), None).get(timeout=SOON).item() == (7, True)
        # Installing it again does nothing, and another one goes to the same process.
        plain.install_on(this_host()).get(timeout=SOON)
        ledger = install(Ledger)
        ledger.install_on(this_host()).get(timeout=SOON)
        ledger.tell(this_host(), "kept")
        ledger.install_on(this_host()).get(timeout=SOON)
        assert ledger.call(this_host(), "said").get(timeout=SOON).item() == ["kept"]


class Declining(Plain):
    name = "declining"
    on_hosts = True

    def for_spawn(self, spawning: Spawning) -> Any:
        return NOT_CARRIED if spawning.is_host else None


def test_an_extension_may_decline_hosts() -> None:
    declining = install(Declining)
    with this_host().spawn_procs() as procs:
        assert declining.call(procs, None).get(timeout=SOON).values() == [(None, False)]
        with pytest.raises(MeshError, match="does not have extension"):
            declining.call(this_host(), None)
        with pytest.raises(MeshError, match="returned NOT_CARRIED"):
            declining.install_on(this_host())


def test_workers_bring_extensions_to_their_hosts() -> None:
    install(Ledger)
    with this_host().spawn_procs({"x": 2}) as procs:
        clerks: Any = procs.spawn("clerks", Clerk)
        assert clerks.slice(x=0).spawn_with_own.call_one().get(timeout=SOON)
        assert clerks.slice(x=1).install_own.call_one().get(timeout=SOON)


class Broken(Extension):
    name = "broken"
    on_hosts = True

    def start(self) -> None:
        if self.proc.is_host:
            raise ValueError("not on hosts")

    def receive(self, message: Any, sender: Proc) -> str:
        return "there"


def test_an_extension_that_cannot_start_leaves_the_others_alone() -> None:
    ledger = install(Ledger)
    broken = install(Broken)
    with this_host().spawn_procs() as procs:
        assert broken.call(procs, None).get(timeout=SOON).values() == ["there"]
        pid = ledger.call(this_host(), "who").get(timeout=SOON).item()[0].pid
        with pytest.raises(MeshError, match="not on hosts"):
            broken.call(this_host(), None).get(timeout=SOON)
        # Each attempt says why.
        for _ in range(2):
            with pytest.raises((MeshError, ValueError), match="not on hosts"):
                broken.install_on(this_host()).get(timeout=SOON)
        assert ledger.call(this_host(), "who").get(timeout=SOON).item()[0].pid == pid


def test_a_dead_process_is_restarted_with_its_state() -> None:
    ledger = install(Ledger)
    plain = install(Plain, "kept")
    with this_host().spawn_procs() as procs:
        clerk: Any = procs.spawn("clerk", Clerk)
        plain.install_on(this_host()).get(timeout=SOON)
        before = clerk.ask.call_one("who").get(timeout=SOON)[0]
        waiting = ledger.call(this_host(), "block")
        ledger.tell(this_host(), "forgotten")
        os.kill(before.pid, signal.SIGKILL)
        with pytest.raises(SupervisionError, match="SIGKILL"):
            waiting.get(timeout=SOON)
        after = died(ledger)[0]
        assert after.is_host
        assert after.pid != before.pid
        assert after.address != before.address
        assert ledger.call(this_host(), "said").get(timeout=SOON).item() == []
        assert plain.call(this_host(), None).get(timeout=SOON).item() == ("kept", True)
        # Workers find the new process; nobody has the old address.
        assert clerk.ask.call_one("who").get(timeout=SOON)[0] == after
        # And nobody else was notified.
        assert procs.failed() == []


def test_a_process_that_keeps_dying_is_reported_to_the_script() -> None:
    heard: queue.SimpleQueue[MeshFailure] = queue.SimpleQueue()
    before = set_fault_handler(heard.put)
    try:
        ledger = install(Ledger)
        ledger.install_on(this_host()).get(timeout=SOON)
        for _ in range(4):
            os.kill(died(ledger)[0].pid, signal.SIGKILL)
        failure = heard.get(timeout=SOON)
        assert failure.mesh_name == "host"
        assert "4 times" in failure.report()
        with pytest.raises(SupervisionError):
            ledger.call(this_host(), "who").get(timeout=SOON)
        # It can still be installed.
        ledger.install_on(this_host()).get(timeout=SOON)
        assert ledger.call(this_host(), "who").get(timeout=SOON).item()[0].is_host
    finally:
        set_fault_handler(before)


def test_a_host_is_notified_once_of_the_end_of_each_process() -> None:
    ledger = install(Ledger)
    with this_host().spawn_procs({"x": 2}, supervise=lambda _: True) as procs:
        clerks: Any = procs.spawn("clerks", Clerk, supervise=lambda _: True)
        addresses = clerks.here.call().get(timeout=SOON).values()
        ledger.call(this_host(), "tell me of ends").get(timeout=SOON)
        pid = procs.pids[1]
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        end = ledger.ends.get(timeout=SOON)
        assert end.address == addresses[1]
        assert (end.point, end.mesh) == (None, None)
        assert (end.failure.signal, end.failure.pid) == (signal.SIGKILL, pid)
        procs.respawn().get(timeout=SOON)
        again = clerks.respawn()
        again.get(timeout=SOON)
        third = clerks.slice(x=1).here.call_one().get(timeout=SOON)
        # The host's process is respawned, and is notified as well.
        os.kill(ledger.call(this_host(), "who").get(timeout=SOON).item()[0].pid, signal.SIGKILL)
        died(ledger, "tell me of ends")
        procs.stop().get(timeout=SOON)
        ends = [ledger.ends.get(timeout=SOON) for _ in range(2)]
        assert {each.address for each in ends} == {addresses[0], third}
        assert [each.failure for each in ends] == [None, None]


class Diary(Extension):
    """Writes down when it stops; processes say goodbye to their host."""

    name = "diary"
    on_hosts = True

    def receive(self, message: Any, sender: Proc) -> None:
        write_down(self.payload, message)

    def stop(self) -> None:
        if self.proc.is_host:
            write_down(self.payload, "host stops")
        elif not self.proc.is_controller:
            self.call(this_host(), "goodbye").get(timeout=SOON)
        else:
            write_down(self.payload, "script stops")


class LateDiary(Diary):
    on_hosts = False


@pytest.mark.parametrize("late", [False, True], ids=["wanted", "installed later"])
def test_a_hosts_extension_stops_after_those_of_its_processes(tmp_path: Path, late: bool) -> None:
    path = str(tmp_path / "diary")
    diary = install(LateDiary if late else Diary, path)
    procs = this_host().spawn_procs({"x": 2})
    procs.initialized.get(timeout=SOON)
    if late:
        diary.install_on(this_host()).get(timeout=SOON)
    shutdown()
    assert lines(tmp_path / "diary") == ["goodbye", "goodbye", "host stops", "script stops"]


class Early(Extension):
    """Asks its host at once, and waits for the answer."""

    name = "early"
    on_hosts = True

    def start(self) -> None:
        self.asked = 0
        if not (self.proc.is_host or self.proc.is_controller):
            self.place: int = self.call(this_host(), "place").get(timeout=SOON).item()

    def receive(self, message: str, sender: Proc) -> int:
        if message == "mine":
            return self.place
        self.asked += 1
        return self.asked


def test_an_extension_that_starts_asks_its_host() -> None:
    early = install(Early)
    with this_host().spawn_procs({"x": 3}) as procs:
        assert sorted(early.call(procs, "mine").get(timeout=SOON).values()) == [1, 2, 3]


class Asking(Extension):
    """Asks whoever asked it."""

    name = "asking"
    on_hosts = True
    answers: ClassVar[int] = 21

    async def receive(self, message: Any, sender: Proc) -> Any:
        if message == "double":
            answers = await self.call(sender, "number")
            return 2 * answers.item()
        await asyncio.sleep(0)
        return self.answers


class Asker(Actor):
    @endpoint
    async def double(self) -> int:
        asking = find(Asking)
        assert asking is not None
        answers = await asking.call(this_host(), "double")
        found: int = answers.item()
        return found


def test_a_host_asks_its_processes() -> None:
    asking = install(Asking)
    with this_host().spawn_procs({"x": 3}) as procs:
        askers: Any = procs.spawn("askers", Asker)
        assert askers.double.call().get(timeout=SOON).values() == [42] * 3
        assert asking.call(this_host(), "double").get(timeout=SOON).item() == 42


def test_a_stopped_extension_is_installed_on_no_more_hosts() -> None:
    plain = install(Plain)
    plain.install_on(this_host()).get(timeout=SOON)
    uninstall("plain")
    with pytest.raises(MeshError, match="not installed in this process"):
        plain.call(this_host(), None)
    with pytest.raises(MeshError, match="not installed in this process"):
        plain.install_on(this_host())
    assert install(Plain).call(this_host(), None).get(timeout=SOON).item() == (None, True)


def _dies(policy: Any, now: float, kind: FailureKind = FailureKind.KILLED) -> tuple[Any, list[str]]:
    policy, actions = policy.on(Failed("host", 0, kind), now)
    return policy, [type(each).__name__ for each in actions]


def test_the_fourth_death_within_a_minute_is_escalated() -> None:
    policy: Any = Again()
    for now in (0.0, 10.0, 20.0):
        policy, actions = _dies(policy, now)
        assert actions == ["Respawn"]
    assert _dies(policy, 59.0)[1] == ["Escalate"]
    # The first death no longer counts.
    policy, actions = _dies(policy, 61.0)
    assert actions == ["Respawn"]
    assert _dies(policy, 62.0)[1] == ["Escalate"]


def test_a_dead_host_is_not_asked_for_another_process() -> None:
    assert _dies(Again(), 0.0, FailureKind.HOST_DEAD)[1] == ["Ignore"]
    assert Again().on(Ended("host", 0), 0.0) == (Again(), ())
