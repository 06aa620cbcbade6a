"""Enums shared by Python and the native layer: both sides have the same members, and return the same objects."""

from __future__ import annotations

import enum
import os
import queue
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from core_owners import suspend

from mesh_core import FailureKind, MeshFailure, _native, set_fault_handler, this_host
from mesh_core._common import codes
from mesh_core._common.codes import HostState, MessageKind, Question, Request, Undelivered
from mesh_core._common.current import current
from mesh_core._native import Lost, Message, Placement, Target

pytestmark = pytest.mark.usefixtures("runtime")

WITHIN = 30.0
HERE = Target.one(0, 0, Placement.on(0))

ALL = {
    name: cls
    for name, cls in vars(codes).items()
    if isinstance(cls, enum.EnumType) and cls.__module__ == codes.__name__
}


@pytest.fixture
def heard(runtime: None) -> Iterator[queue.Queue[MeshFailure]]:
    """What the script's fault handler receives."""
    failures: queue.Queue[MeshFailure] = queue.Queue()
    before = set_fault_handler(failures.put)
    yield failures
    set_fault_handler(before)


def sent(request: Any, name: str = "") -> Any:
    """Send something to an actor that does not exist, and return the outcome."""
    call = current().runtime.sender(HERE, 77, name, request).call(None)
    assert call.wait(WITHIN)
    return call.outcomes()[0]


@pytest.mark.parametrize("name", sorted(ALL))
def test_both_sides_name_the_same_members(name: str) -> None:
    native = dict(_native.codes())
    assert native.keys() == ALL.keys()
    # Only Python knows that an actor failed in a running process.
    assert set(native[name]) == {member.name for member in ALL[name]} - {"ACTOR_FAILED"}
    assert len(set(native[name])) == len(native[name])


def test_host_states_are_named_as_in_snapshots() -> None:
    assert [state.value for state in HostState] == [state.name.lower() for state in HostState]


def test_a_returned_message_has_a_kind_and_a_reason() -> None:
    outcome = sent(Request.CALL, "echo")
    assert isinstance(outcome, Message)
    assert outcome.kind is MessageKind.UNDELIVERABLE
    undelivered = outcome.undelivered()
    assert undelivered is not None
    assert undelivered[0] is Undelivered.NO_ACTOR


def test_an_answer_has_its_kind() -> None:
    call = current().runtime.asker(HERE, Question.TREE).call(None)
    assert call.wait(WITHIN)
    (outcome,) = call.outcomes()
    assert isinstance(outcome, Message)
    assert outcome.kind is MessageKind.REPLY
    assert outcome.undelivered() is None


@pytest.mark.slow
def test_the_end_of_a_process_has_its_kind(heard: queue.Queue[MeshFailure]) -> None:
    with this_host().spawn_procs(name="mortal") as procs:
        procs.initialized.get(WITHIN)
        pid = procs.pids[0]
        assert pid is not None
        suspend(pid)
        call = current().runtime.asker(procs._target(), Question.STATE).call(None)
        os.kill(pid, signal.SIGKILL)
        assert call.wait(WITHIN)
        (outcome,) = call.outcomes()
        assert isinstance(outcome, Lost)
        assert outcome.kind is FailureKind.KILLED
        assert heard.get(timeout=WITHIN).kind is FailureKind.KILLED


@pytest.mark.parametrize("wrong", ["call", 1, None, Question.TREE, MessageKind.CALL])
def test_invalid_requests_are_not_sent(wrong: Any) -> None:
    with pytest.raises(ValueError, match="expected a Request, got"):
        current().runtime.sender(HERE, 77, "", wrong)


@pytest.mark.parametrize("wrong", ["tree", Request.CALL])
def test_invalid_questions_are_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match="expected a Question, got"):
        current().runtime.asker(HERE, wrong)


def test_a_missing_callable_is_named() -> None:
    with pytest.raises(KeyError, match="dumps"):
        _native.hold({}, [])
