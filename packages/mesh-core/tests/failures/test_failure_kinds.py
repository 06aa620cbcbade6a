"""The kind and id of a failure: fields that programs decide by."""

from __future__ import annotations

import os
import pickle
import queue
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from core_samples import Caller, Echo, exit_now

from mesh_core import (
    ActorError,
    AuthenticationError,
    FailureKind,
    MailboxFull,
    MeshError,
    MeshFailure,
    ProcMesh,
    SpawnError,
    SupervisionError,
    Undeliverable,
    set_fault_handler,
    this_host,
)
from mesh_core._common import errors
from mesh_core._common.codes import NativeError

WITHIN = 30


@pytest.fixture
def heard(runtime: None) -> Iterator[queue.Queue[MeshFailure]]:
    """The failures that the script's fault handler receives."""
    failures: queue.Queue[MeshFailure] = queue.Queue()
    before = set_fault_handler(failures.put)
    yield failures
    set_fault_handler(before)


@pytest.fixture
def own(heard: queue.Queue[MeshFailure]) -> Iterator[ProcMesh]:
    with this_host().spawn_procs(per_host={"gpus": 2}, name="mortal") as procs:
        procs.initialized.get(WITHIN)
        yield procs


def failure_of(call: Any) -> MeshFailure:
    with pytest.raises(SupervisionError) as caught:
        call.get(WITHIN)
    assert caught.value.failure is not None
    return caught.value.failure


def test_python_has_an_answer_to_every_native_error() -> None:
    assert set(errors._OF_NATIVE) == set(NativeError)


@pytest.mark.parametrize(
    ("kind", "cls", "fields"),
    [
        (NativeError.FULL, MailboxFull, {"rank": 3, "budget": 7}),
        (NativeError.NO_SUCH_PROC, Undeliverable, {"rank": 3}),
        (NativeError.PORT_CLOSED, Undeliverable, {"reason": "its receiver is closed"}),
        (NativeError.SPAWN, SpawnError, {}),
        (NativeError.CREDENTIALS, AuthenticationError, {}),
        (NativeError.CLOSED, MeshError, {}),
    ],
)
def test_a_native_error_becomes_its_class_with_its_fields(
    kind: NativeError, cls: type[MeshError], fields: dict[str, Any]
) -> None:
    error = errors.of_native(kind, "what happened", fields)
    assert type(error) is cls
    assert str(error) == "what happened"
    assert {name: getattr(error, name) for name in fields} == fields


def test_a_killed_process_is_the_same_failure_for_everybody_notified(
    own: ProcMesh, heard: queue.Queue[MeshFailure]
) -> None:
    first, second = own.spawn("first", Echo), own.spawn("second", Echo)
    first.initialized.get(WITHIN)
    pid = own.pids[1]
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    told = heard.get(timeout=WITHIN)
    failures = [failure_of(actors.slice(gpus=1).echo.call_one(1)) for actors in (first, second)]
    assert {failure.kind for failure in (told, *failures)} == {FailureKind.KILLED}
    assert {failure.id for failure in failures} == {told.id} != {""}
    assert told.id in told.report()
    # Another process is notified of the same failure.
    with pytest.raises(ActorError) as caught:
        own.slice(gpus=0).spawn("caller", Caller).ask_one.call_one(first.slice(gpus=1), 1).get(WITHIN)
    assert isinstance(caught.value, SupervisionError)
    assert caught.value.failure is not None
    assert caught.value.failure.id == told.id


def test_two_deaths_are_two_failures(own: ProcMesh, heard: queue.Queue[MeshFailure]) -> None:
    echo = own.spawn("echo", Echo)
    failures = [failure_of(echo.slice(gpus=rank).call.call_one(exit_now, 3)) for rank in (0, 1)]
    assert [failure.kind for failure in failures] == [FailureKind.EXITED] * 2
    assert failures[0].id != failures[1].id


def test_a_users_exit_status_is_not_mistaken_for_a_failed_bootstrap(heard: queue.Queue[MeshFailure]) -> None:
    with this_host().spawn_procs(name="leaver", bootstrap=_nothing) as procs:
        echo = procs.spawn("echo", Echo)
        failure = failure_of(echo.call.call_one(exit_now, errors.BOOTSTRAP_FAILED))
        told = heard.get(timeout=WITHIN)
    assert failure.kind is told.kind is FailureKind.EXITED
    assert failure.exitcode == errors.BOOTSTRAP_FAILED


def test_a_failed_bootstrap_is_reported(heard: queue.Queue[MeshFailure]) -> None:
    with this_host().spawn_procs(name="stillborn", bootstrap=_raise) as procs:
        with pytest.raises(ActorError, match="no such device"):
            procs.initialized.get(WITHIN)
        failure = failure_of(procs.spawn("echo", Echo).echo.call_one(1))
    assert failure.kind is FailureKind.BOOTSTRAP_FAILED
    assert "its bootstrap raised ValueError: no such device" in failure.headline()


def test_kind_and_id_are_pickled_and_shown() -> None:
    made = MeshFailure(mesh_name="m", signal=9, _key=(255, 3, 16))
    failure = pickle.loads(pickle.dumps(made))
    assert (failure.kind, failure.id) == (FailureKind.KILLED, "ff.3.10")
    assert repr(failure).startswith("<MeshFailure ff.3.10 killed: ")
    assert "  failure: ff.3.10 (killed)" in failure.report().splitlines()


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"signal": 9, "out_of_memory": True}, FailureKind.OUT_OF_MEMORY),
        ({"signal": 9}, FailureKind.KILLED),
        ({"exitcode": 0}, FailureKind.EXITED),
        ({"exception": ValueError()}, FailureKind.ACTOR_FAILED),
        ({"exitcode": 1, "kind": FailureKind.BOOTSTRAP_FAILED}, FailureKind.BOOTSTRAP_FAILED),
        ({}, FailureKind.UNKNOWN),
    ],
)
def test_a_kind_that_is_not_given_follows_from_the_fields(fields: dict[str, Any], kind: FailureKind) -> None:
    failure = MeshFailure(mesh_name="m", **fields)
    assert (failure.kind, failure.id) == (kind, "")


def test_an_undeliverable_message_has_fields(own: ProcMesh) -> None:
    echo = own.spawn("echo", Echo)
    echo.initialized.get(WITHIN)
    echo.stop().get(WITHIN)
    with pytest.raises(Undeliverable, match="came back") as caught:
        echo.slice(gpus=1).echo.call_one(1).get(WITHIN)
    error = caught.value
    assert (error.actor, error.rank, error.host) == ("echo", 1, this_host()._name)
    assert error.reason == "the actor has stopped, or was never spawned there"


def _nothing() -> None:
    pass


def _raise() -> None:
    raise ValueError("no such device")
