"""A running policy for one mesh: it is asked about events, and its actions are turned into a :class:`Decision`.

No clock, process or timer is used here: the caller carries the decision out.

POL-1: every failure that a policy is asked about is handled, passed on, put off, or handled by a repair; none is lost.
POL-2: a policy that raises or returns something invalid passes on what it was asked about.
POL-3: a failed repair is reported to a policy that handles repair events, and is passed on for all others.
POL-4: a policy or fault handler that does not return is passed over after a limit, with what it is asked about meanwhile; other meshes do not
wait for it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

from mesh_core._failures import patience
from mesh_core._failures.policies import (
    Action,
    Escalate,
    Event,
    Failed,
    Ignore,
    Later,
    Policy,
    Repaired,
    RepairEvent,
    RepairFailed,
    Respawn,
    Restart,
    Stop,
    checked_actions,
)

if TYPE_CHECKING:
    from asyncio import TimerHandle

    from mesh_core._failures.failure import MeshFailure

Supervise: TypeAlias = "Policy | str | Callable[[MeshFailure], bool | Awaitable[bool]]"
"""The type of ``supervise=``."""


def policy_of(supervise: object) -> Policy:
    """Return the policy for ``supervise=``; raise if there is none."""
    if isinstance(supervise, str):
        from mesh_core._common.current import current

        return current().hooks.find_policy(supervise)
    if isinstance(supervise, type) and hasattr(supervise, "on"):
        raise TypeError(
            f"supervise= must be a policy object, got the class {supervise.__qualname__}. "
            f"Try {supervise.__qualname__}(...)."
        )
    if is_policy(supervise):
        return supervise
    if callable(supervise):
        return _Function(supervise)
    raise TypeError(
        "supervise= must be a function of a MeshFailure, a policy with on(event, now), or the name of an installed policy, "
        f"got {supervise!r}"
    )


def is_policy(value: object) -> TypeGuard[Policy]:
    """Return whether ``supervise=`` treats this as a policy."""
    return callable(getattr(value, "on", None)) and not isinstance(value, type)


def can_repair(policy: Policy) -> bool:
    """Return whether it may ask for repairs, which a function of the failure cannot."""
    return not isinstance(policy, _Function)


class _Function:
    """Makes a policy of a function of the failure: a true result means handled."""

    def __init__(self, function: Callable[[MeshFailure], object]) -> None:
        self._function = function

    def on(self, event: Event, now: float) -> tuple[Policy, Sequence[Action]]:
        if not isinstance(event, Failed):
            return self, ()
        return self, self._function(event.failure)  # type: ignore[return-value]  # a verdict; see PolicyRun


@dataclasses.dataclass(frozen=True, slots=True)
class Decision:
    """What to carry out."""

    handled: tuple[MeshFailure, ...] = ()
    passed_on: tuple[MeshFailure, ...] = ()
    timers: tuple[Later, ...] = ()
    stop: bool = False
    repairs: tuple[Restart | Respawn, ...] = ()
    """The repairs to make."""
    repaired: tuple[MeshFailure, ...] = ()
    """The failures that the repairs handle; passed on if they do not succeed."""


class PolicyRun:
    """A running policy of one mesh. Only :meth:`close` is thread-safe: its owner asks it one event at a time."""

    def __init__(self, policy: Policy, mesh: str) -> None:
        self._state = policy
        self._mesh = mesh
        self._put_off: list[MeshFailure] = []
        self.closed = False
        """Set when its mesh is being stopped."""
        self.overdue = ""
        """Why it is not asked: it has not returned from an earlier question, and was passed over (POL-4)."""
        self.timers: set[TimerHandle] = set()
        """Running timers; used on their event loop only."""
        self.on_close: Callable[[], object] | None = None
        """Cancels the timers; set with the first of them."""

    @property
    def put_off(self) -> tuple[MeshFailure, ...]:
        """The failures that are neither handled nor passed on yet."""
        return tuple(self._put_off)

    @property
    def hears_repairs(self) -> bool:
        """Whether it is asked what to do after a repair."""
        return callable(getattr(self._state, "on_repair", None))

    def close(self) -> None:
        """Stop passing events to it. Failures that it put off are reported when the script ends."""
        self.closed = True
        if self.on_close is not None:
            with contextlib.suppress(RuntimeError):  # the event loop with the timers has ended already
                self.on_close()

    def ask(self, event: Event | RepairEvent, now: float) -> object:
        """Ask about an event; the result, awaited if it is awaitable, goes to :meth:`settle`."""
        if isinstance(event, (Repaired, RepairFailed)):
            return self._state.on_repair(event, now)  # type: ignore[attr-defined]  # see `hears_repairs`
        if isinstance(self._state, _Function):
            return self._state.on(event, now)[1]
        return self._state.on(event, now)

    def settle(self, event: Event | RepairEvent, answer: object) -> Decision:
        """Turn the answer to an event into a decision."""
        if isinstance(self._state, _Function):
            actions: tuple[Action, ...] = ()
            if isinstance(event, Failed):
                actions = (Ignore() if answer else Escalate(),)
            return self._decide(event, actions)
        if not isinstance(answer, tuple) or len(answer) != 2 or not is_policy(answer[0]):
            raise TypeError(f"on() of a policy must return (policy, actions), got {answer!r}")
        actions = checked_actions(answer[1])
        self._state = answer[0]
        return self._decide(event, actions)

    def broken(self, event: Event | RepairEvent, error: BaseException) -> Decision:
        """Return the decision after the policy raised ``error`` (POL-2)."""
        from mesh_core._serialize.exceptions import format_traceback

        # Text only: a log record that held the error or the event would keep the mesh alive.
        logging.getLogger("mesh").error(
            "the policy of %r raised for %s; %s:\n%s",
            self._mesh,
            repr(event),
            "it stays as it was" if isinstance(event, Repaired) else "the failure is passed on",
            format_traceback(error),
        )
        if isinstance(event, Repaired):
            # There is no failure to pass on, and what is put off stays so.
            return Decision()
        return self._decide(event, (Escalate(),))

    def pass_over(self, event: Event | RepairEvent, why: str) -> Decision:
        """Return the decision instead of that of a policy that does not return (POL-4)."""
        if isinstance(event, Repaired):
            return Decision()
        return self._decide(event, (Escalate(why),))

    def answer(
        self, event: Event | RepairEvent, now: float, wait: Callable[[Any], object]
    ) -> Callable[[], Decision]:
        """Ask without an event loop; return what settles the answer. ``wait`` returns the result of an awaitable."""
        if self.closed:
            return Decision
        try:
            answer = wait(self.ask(event, now))
        except BaseException as error:  # noqa: BLE001 - a policy is somebody else's code
            return partial(self.broken, event, error)
        return partial(self._settled, event, answer)

    def decide(self, event: Event | RepairEvent, now: float, wait: Callable[[Any], object]) -> Decision:
        """Ask and settle without an event loop."""
        return self.answer(event, now, wait)()

    def _settled(self, event: Event | RepairEvent, answer: object) -> Decision:
        try:
            return self.settle(event, answer)
        except Exception as error:  # noqa: BLE001 - the policy has returned something invalid
            return self.broken(event, error)

    async def decide_async(self, event: Event | RepairEvent, now: float) -> Decision:
        """Ask and settle on an event loop."""
        import asyncio

        if self.closed:
            return Decision()
        try:
            answer = self.ask(event, now)
            if inspect.isawaitable(answer):
                async with asyncio.timeout(patience.LIMIT_S):
                    answer = await answer
            return self.settle(event, answer)
        except BaseException as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise  # the loop is ending; a policy that raises this itself is no different from any other error
            return self.broken(event, error)

    def _decide(self, event: Event | RepairEvent, actions: tuple[Action, ...]) -> Decision:
        if isinstance(event, Failed):
            # It may have been put off earlier.
            self._put_off = [each for each in self._put_off if each is not event.failure]
            concerned = [event.failure]
        elif isinstance(event, RepairFailed):
            concerned = list(event.failures)
        else:
            concerned, self._put_off = self._put_off, []
        timers = tuple(each for each in actions if isinstance(each, Later))
        stop = any(isinstance(each, Stop) for each in actions)
        repairs = tuple(each for each in actions if isinstance(each, (Restart, Respawn)))
        repaired: list[MeshFailure] = []
        escalate = next((each for each in actions if isinstance(each, Escalate)), None)
        handled: list[MeshFailure] = []
        passed_on: list[MeshFailure] = []
        if escalate is not None:
            passed_on = [self._escalated(each, escalate) for each in concerned]
        elif repairs:
            repaired = concerned
        elif stop or any(isinstance(each, Ignore) for each in actions):
            handled = concerned
        elif isinstance(event, (Failed, RepairFailed)) and not timers:
            passed_on = concerned
        else:
            self._put_off = [*self._put_off, *concerned]
        if stop:
            handled, self._put_off = [*handled, *self._put_off], []
            self.close()
            timers = ()
        return Decision(tuple(handled), tuple(passed_on), timers, stop, repairs, tuple(repaired))

    def _escalated(self, failure: MeshFailure, action: Escalate) -> MeshFailure:
        return self.passed_on(failure, action.reason) if action.reason else failure

    def passed_on(self, failure: MeshFailure, reason: str) -> MeshFailure:
        """Return a failure with the reason why it was passed on added to its chain."""
        return dataclasses.replace(failure, chain=(*failure.chain, f"the policy of {self._mesh!r}: {reason}"))


def failed(failure: MeshFailure, mesh: str) -> Failed:
    """Return a failure as an event for a policy."""
    return Failed(mesh, failure.rank, failure.kind, failure)
