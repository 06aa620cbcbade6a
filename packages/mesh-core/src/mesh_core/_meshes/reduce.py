"""A call whose replies are combined on the way up, so that its caller gets only one.

The call goes out like any other. Its ranks, in the order of the called region, form a tree in which each has at most
``FAN_OUT`` ranks below it. A rank combines its own result with the shares of those below it, in order, and passes the
combined share to the rank above; the first rank answers the caller. Only the ranks look at shares.

RED-1: a rank's share covers a run of ranks, and shares are combined in the order of runs: an associative function is enough.
RED-2: one failure is the call's outcome, and everything that ranks gathered for the call is dropped: the caller's
runtime notifies them, and what arrives later for such a call is dropped at once.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, ParamSpec, TypeVar, cast

from mesh_core._actors.reducers import Reducer, check, combine, first_share, result
from mesh_core._common.codes import Request
from mesh_core._futures.future import Future, not_here
from mesh_core._meshes.adverbs import Endpoint
from mesh_core._meshes.outcomes import load, value_of

if TYPE_CHECKING:
    from mesh_core._hosting.actor_host import ActorHost
    from mesh_core._native import Call, Message, Sender

P = ParamSpec("P")
R = TypeVar("R")

FAN_OUT = 16
# How many failed calls are remembered: later messages for them are dropped.
_REMEMBERED = 4096

Key = tuple[tuple[int, int, int] | None, int]
"""The caller of a call, and the number of the call there."""


class ReducedEndpoint(Endpoint[P, R], Generic[P, R]):
    """An endpoint whose ``call`` gives one value; made by ``with_options(reduce=...)``."""

    __slots__ = ("_combined", "_plan", "_reducer")

    def __init__(self, *args: Any, reduce: Reducer) -> None:
        check(reduce)
        super().__init__(*args)
        self._reducer = reduce
        if self._arity.port:
            raise ValueError(
                f"{self._what()} answers by a port, perhaps often; only results that endpoints return can be combined"
            )
        view = self._mesh._view
        self._plan = (
            self._mesh._procs_id,
            self._mesh._location.placement,
            reduce,
            view.offset,
            *view.sizes,
            *view.strides,
        )
        self._combined: Sender = self._sender(view, "+", Request.REDUCE)

    def call(self, *args: P.args, **kwargs: P.kwargs) -> Future[R]:  # type: ignore[override]  # one value, not a mesh
        """Call every actor of the mesh; the future's result is the combined result of all."""
        future: Future[R]
        # Ranks that were respawned or joined do not form a region in which they could find each other.
        if self._combined.is_whole():
            try:
                future = self._begin("call", Future, self._finish_combined, args, kwargs, combined=True)
            except LookupError:
                if self._combined.is_whole():
                    raise  # not because a rank was respawned just now
            else:
                return future
        future = self._begin("call", Future, self._finish_gathered, args, kwargs)
        return future

    def _finish_gathered(self, call: Call) -> R:
        """Combine here what the ranks answered one by one."""
        reducer, outcomes = self._reducer, call.outcomes()
        assert reducer is not None  # an endpoint of this class has one
        shares = [
            first_share(reducer, value_of(outcome, index, self._who))
            for index, outcome in enumerate(outcomes)
        ]
        return cast("R", result(reducer, shares[0] if len(shares) == 1 else combine(reducer, shares)))

    def _traced(self, context: str) -> Endpoint[P, R]:
        endpoint = super()._traced(context)
        assert isinstance(endpoint, ReducedEndpoint)
        endpoint._combined = self._combined.traced(context)
        return endpoint

    def _finish_combined(self, call: Call) -> R:
        for index, outcome in enumerate(call.outcomes()):
            # All but one are empty: the first reply or failure is the outcome of the call.
            if outcome is not None:
                value: R = value_of(outcome, index, self._who)
                return value
        raise not_here()

    def stream(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Refuse: a stream gives results one by one."""
        raise ValueError("reduce= is for call(), which waits for all; to fold over a stream use Accumulator")


class Place(NamedTuple):
    """The place of a rank in the tree."""

    above: int | None
    below: tuple[int, ...]


def place_of(index: int, count: int) -> Place:
    """Return the place of the ``index``-th of ``count`` ranks; each is followed by the runs of those below it.

    >>> place_of(0, 3)
    Place(above=None, below=(1, 2))
    >>> place_of(5, 40), place_of(6, 40)
    (Place(above=0, below=(6, 7)), Place(above=5, below=()))
    """
    above, first, end = None, 0, count
    while True:
        rest = end - first - 1
        runs = min(FAN_OUT, rest)
        starts = [first + 1 + rest * run // runs for run in range(runs)]
        if index == first:
            return Place(above, tuple(starts))
        above = first
        for start, after in zip(starts, [*starts[1:], end], strict=True):
            if start <= index < after:
                first, end = start, after
                break


class Plan:
    """What a call tells its ranks: how to combine, and which ranks were called."""

    __slots__ = ("mesh", "offset", "placement", "reducer", "sizes", "strides")

    def __init__(self, told: tuple[Any, ...]) -> None:
        self.mesh, self.placement, self.reducer, self.offset, *dims = told
        half = len(dims) // 2
        self.sizes, self.strides = dims[:half], dims[half:]

    def count(self) -> int:
        """Return how many ranks there are."""
        return math.prod(self.sizes)

    def rank(self, index: int) -> int:
        """Return the rank, in its mesh of processes, that has this place in the call."""
        rank: int = self.offset
        for size, stride in zip(reversed(self.sizes), reversed(self.strides), strict=True):
            index, at = divmod(index, size)
            rank += at * stride
        return rank


class _Gathering:
    """The shares of one call that have reached a rank so far."""

    __slots__ = ("arrived", "below", "message", "name", "own", "place", "plan")

    def __init__(self) -> None:
        self.arrived: dict[int, Message] = {}
        self.message: Message | None = None
        """The call itself, once this rank's own result is there."""
        self.name = ""
        self.own: Any = None
        self.plan: Plan | None = None
        self.place: Place | None = None


class Reductions:
    """What one process gathers for calls whose replies are combined."""

    def __init__(self, actor_host: ActorHost) -> None:
        self._actor_host = actor_host
        self._lock = threading.Lock()
        self._gathering: dict[Key, _Gathering] = {}
        self._forgotten: OrderedDict[Key, None] = OrderedDict()

    @classmethod
    def of(cls, actor_host: ActorHost) -> Reductions:
        """Return the one of a process; it is made when it is first needed."""
        found = actor_host.reductions
        if found is None:
            # Threads of several actors may get here first.
            with actor_host.process.settling:
                found = actor_host.reductions
                if found is None:
                    found = actor_host.reductions = cls(actor_host)
        return found

    def __len__(self) -> int:
        return len(self._gathering)

    def contribute(self, message: Message, name: str, told: tuple[Any, ...], value: Any) -> None:
        """Pass on what an endpoint returned here, or keep it until the shares of the ranks below have arrived."""
        if not message.call:
            return
        plan = Plan(told)
        place = place_of(message.index, plan.count())
        if not place.below:
            self._pass_on(message, plan, place, first_share(plan.reducer, value), printed=False)
            return
        key = (message.src, message.call)
        with self._lock:
            if key in self._forgotten:
                return
            state = self._gathering.setdefault(key, _Gathering())
            state.message, state.name, state.plan, state.place = message, name, plan, place
            state.own = value
            if len(state.arrived) < len(place.below):
                return
            del self._gathering[key]
        self._complete(state)

    def on_partial(self, message: Message) -> None:
        """Take the share of a rank below."""
        key = (message.caller, message.call)
        with self._lock:
            if key in self._forgotten:
                return
            state = self._gathering.setdefault(key, _Gathering())
            state.arrived[message.index] = message
            if state.place is None or len(state.arrived) < len(state.place.below):
                return
            del self._gathering[key]
        try:
            self._complete(state)
        except BaseException as error:  # noqa: BLE001 - reported to the caller
            assert state.message is not None
            self._actor_host.reply_error(state.message, error, state.name)

    def forget(self, cancel: Message) -> None:
        """Drop what was gathered for a call that failed or was given up, and gather nothing more for it."""
        key = (cancel.src, cancel.call)
        with self._lock:
            self._gathering.pop(key, None)
            self._forgotten[key] = None
            if len(self._forgotten) > _REMEMBERED:
                self._forgotten.popitem(last=False)

    def _complete(self, state: _Gathering) -> None:
        message, plan, place = state.message, state.plan, state.place
        assert message is not None and plan is not None and place is not None
        shares = [first_share(plan.reducer, state.own)]
        shares += [load(state.arrived[index]) for index in place.below]
        printed = any(part.has_printed for part in state.arrived.values())
        state.arrived.clear()
        self._pass_on(message, plan, place, combine(plan.reducer, shares), printed)

    def _pass_on(self, message: Message, plan: Plan, place: Place, share: Any, printed: bool) -> None:
        if place.above is None:
            held = message.pass_on(result(plan.reducer, share), None, printed)
        else:
            rank = plan.rank(place.above)
            held = message.pass_on(share, (plan.mesh, rank, plan.placement.host_of(rank)), printed)
        self._actor_host.hold_back(held)
