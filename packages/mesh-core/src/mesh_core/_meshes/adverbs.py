"""How to call an endpoint: the adverbs of :class:`Endpoint`."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Literal, ParamSpec, TypeVar, cast, overload

from mesh_core._common.codes import Request
from mesh_core._common.elsewhere import Elsewhere
from mesh_core._common.errors import ActorTimeout, MeshError
from mesh_core._common.tracing import notice
from mesh_core._futures.deadlines import inherited
from mesh_core._futures.future import _FAILED, Future, Stream, StreamFuture
from mesh_core._futures.sending import SENT, Sending
from mesh_core._geometry.values import ValueMesh, lazy
from mesh_core._meshes.outcomes import Addressee, error_of, load, value_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Self

    from mesh_core._actors.endpoint import Arity
    from mesh_core._actors.reducers import Reducer
    from mesh_core._futures.awaited import Awaited
    from mesh_core._meshes.actors import ActorMesh
    from mesh_core._meshes.reduce import ReducedEndpoint
    from mesh_core._meshes.refs import Ref
    from mesh_core._native import Call, Completion, Deferral, Message, Region, Sender
    from mesh_core._process.process import Process

P = ParamSpec("P")
R = TypeVar("R")


# How long a call waits for other ranks' answers, which its error should include, after one rank died: too short to notice.
_AFTER_A_DEATH = 0.01
_OTHERS_MISSING = "other ranks have not answered yet; get(return_exceptions=True) waits for them, and cancel() gives them up"
_KEEP_OR_REDUCE = "with_options() takes keep=True or reduce=, but not both: combined results do not stay where they were made"


class ManyFuture(Future[ValueMesh[R]]):
    """The results of a call to many actors."""

    __slots__ = ("_lost_at", "_rest")

    _call: Call
    # Set only if the death of a rank became the outcome before all others had answered: its place, and the outcomes
    # of all once they have arrived.
    _lost_at: int
    _rest: ValueMesh[Any] | None

    if TYPE_CHECKING:

        @overload
        def get(self, timeout: float | None = None) -> ValueMesh[R]: ...
        @overload
        def get(self, timeout: float | None = None, *, return_exceptions: Literal[False]) -> ValueMesh[R]: ...
        @overload
        def get(
            self, timeout: float | None = None, *, return_exceptions: bool
        ) -> ValueMesh[R | BaseException]: ...

    def get(self, timeout: float | None = None, *, return_exceptions: bool = False) -> Any:
        """Wait for every rank. The first failure is raised, with all outcomes in its ``.results``.

        With ``return_exceptions`` nothing is raised: the mesh holds exceptions where ranks failed. Without it, a
        death is raised at once, without results if other ranks have not answered by then; wait for those with
        ``return_exceptions``. ``get()`` raises the same error every time, whatever arrives later.
        """
        if not return_exceptions:
            return super().get(timeout)
        until = None if timeout is None else time.monotonic() + timeout
        try:
            return super().get(timeout)
        except BaseException as error:
            if self._is_loss() and error is self._value:
                self._wait_for_rest(timeout, until)
            results = getattr(error, "results", None)
            if results is not None:
                return results
            raise

    def cancel(self) -> bool:
        """Cancel the call; return false if it was done. Coroutines that work on it are cancelled, and their replies dropped."""
        return super().cancel() or (self._is_loss() and self._call.cancel())

    def _is_loss(self) -> bool:
        return self._state == _FAILED and hasattr(self, "_lost_at")

    def _has_news(self) -> bool:
        # One of its own ranks died.
        return self._call.done() or self._call.arrived() > 0

    def _wait(self, timeout: float | None, heed: bool = True) -> bool:
        ready = self._call.wait(timeout, 0, heed)
        if ready and not self._call.done() and not self._call.wait(_AFTER_A_DEATH, None, False):
            self._settle_loss()
        return ready

    async def _arrive(self) -> None:
        bridge = self._process.bridge()
        await bridge.wait(self._call, 0)
        if not self._call.done():
            import asyncio

            try:
                async with asyncio.timeout(_AFTER_A_DEATH):
                    await bridge.wait(self._call)
            except TimeoutError:
                self._settle_loss()

    def _listen(self, listener: Completion, token: int) -> None:
        self._call.note(listener, token, 0)

    def _progress(self) -> bool:
        if self._is_pending() and not self._call.done() and self._call.arrived():
            self._settle_loss()
        return self.done()

    def _settle_loss(self) -> None:
        """Make the death of a rank the outcome while others have not answered: nobody needs to wait for them."""
        with self._process.settling:
            lost, endpoint = self._call.lost(), self._what.__self__  # type: ignore[attr-defined]
            if lost is None or not self._is_pending():
                return
            error = error_of(lost[1], lost[0], endpoint._who)
            assert error is not None
            error.add_note(_OTHERS_MISSING)
            self._lost_at, self._rest = lost[0], None
            self._fail(error)

    def _wait_for_rest(self, timeout: float | None, until: float | None) -> None:
        """Wait for the ranks that had not answered when the death of another became the outcome."""
        ends = [end for end in (until, self._deadline) if end is not None]
        late: dict[int, BaseException] = {}
        # Deaths of other ranks may be among the outcomes, and are reported with them.
        if not self._call.wait(max(0.0, min(ends) - time.monotonic()) if ends else None, None, False):
            if self._deadline is None or time.monotonic() < self._deadline:
                raise self._not_yet(timeout)
            error = self._too_late(None)
            late = dict.fromkeys(self._call.missing(), error)
            self._call.cancel()
        self._complete_loss(late)

    def _complete_loss(self, late: dict[int, BaseException] | None = None) -> None:
        """Add the outcomes of all ranks, once they have arrived, to the error that was raised for one."""
        with self._process.settling:
            if self._rest is not None or not self._call.done():
                return
            endpoint = self._what.__self__  # type: ignore[attr-defined]
            self._rest, _ = collect(self._call, endpoint._who, {**(late or {}), self._lost_at: self._value})
            self._value.__notes__.remove(_OTHERS_MISSING)
            self._value.results = self._rest

    def _tell(self) -> None:
        if self._is_loss():
            self._complete_loss()
        super()._tell()


class _Shown:
    """An attribute of the user's own method that an endpoint shows to ``help`` and IPython."""

    def __init__(self, show: Callable[[Endpoint[..., Any]], Any], of_class: Any) -> None:
        self._show = show
        self._of_class = of_class

    def __get__(self, endpoint: Endpoint[..., Any] | None, owner: type) -> Any:
        found = self._of_class if endpoint is None else self._show(endpoint)
        if found is None:
            raise AttributeError(
                "only endpoints whose actor class is known in this process have this attribute"
            )
        return found


def _doc_of(endpoint: Endpoint[..., Any]) -> str:
    method = endpoint._mesh._interface.method(endpoint._name)
    said = getattr(method, "__doc__", None)
    how = "call, call_one, choose, broadcast or stream it"
    return (
        said
        or f"Endpoint {endpoint._name}{endpoint._arity.text} of {endpoint._mesh._interface.class_name}; {how}."
    )


def _signature_of(endpoint: Endpoint[..., Any]) -> Any:
    import inspect

    method = endpoint._mesh._interface.method(endpoint._name)
    if method is None:
        return None
    signature = inspect.signature(method)
    # Callers do not pass `self`, nor the port of an endpoint that answers through one.
    hidden = 2 if endpoint._arity.port and not endpoint._arity.streams else 1
    return signature.replace(parameters=list(signature.parameters.values())[hidden:])


class Endpoint(Generic[P, R]):
    """An endpoint of some actors, called with an adverb: ``trainers.step.call(batch)``.

    ============== ==================================================================
    ``call``       every actor; a future of a :class:`ValueMesh` of all results
    ``call_one``   exactly one actor; a future of its result
    ``choose``     one of many, the less busy of two picked at random
    ``broadcast``  every actor, without replies
    ``stream``     every actor; results as they arrive
    ============== ==================================================================
    """

    __slots__ = (
        "_arity",
        "_block",
        "_busy",
        "_keeps",
        "_limit",
        "_mesh",
        "_name",
        "_one",
        "_senders",
        "_spanned",
        "_who",
    )

    _reducer: Reducer | None = None
    # Only with ``reduce=``, see ReducedEndpoint.
    _combined: Sender
    _plan: tuple[Any, ...]

    if not TYPE_CHECKING:
        __doc__ = _Shown(_doc_of, __doc__)
        __signature__ = _Shown(_signature_of, None)

        rref = Elsewhere("write remote(actors.endpoint)(...) with mesh_tensor")

    def __init__(  # noqa: PLR0917
        self,
        mesh: ActorMesh[Any],
        name: str,
        arity: Arity,
        limit: float | None = None,
        block: bool = True,
        keeps: str = "",
    ) -> None:
        self._mesh = mesh
        self._name = name
        self._arity = arity
        self._limit = limit
        self._block = block
        self._keeps = keeps
        self._who = mesh._addressee()
        self._senders: Sender = self._sender(mesh._view)
        self._one = len(mesh._view) == 1
        self._busy: dict[int, deque[Awaited]] | None = None
        self._spanned = False
        notice(mesh._process)

    def _sender(self, view: Region, mark: str = "", request: Request = Request.CALL) -> Sender:
        mesh = self._mesh
        target = mesh._location.target(mesh._procs_id, view)
        name = mark + self._keeps + self._arity.mark + self._name
        return mesh._process.runtime.sender(target, mesh._actor_id, name, request, self._block, self._who)

    @property
    def actors(self) -> ActorMesh[Any]:
        """The actors whose endpoint this is."""
        return self._mesh

    @property
    def name(self) -> str:
        """Its name in the actors' class."""
        return self._name

    def _what(self) -> str:
        return f"{self._who.name}.{self._name}"

    def _refuse(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TypeError:
        complaint = self._arity.complaint(args, kwargs)
        return TypeError(f"{self._mesh._interface.class_name}.{self._name}{self._arity.text} {complaint}")

    def _begin(
        self,
        adverb: str,
        kind: Callable[..., Any],
        finish: Callable[[Call], Any] | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        stream: bool = False,
        combined: bool = False,
    ) -> Any:
        """Begin a call, whatever its adverb: check the arguments, trace, set the deadline, send.

        ``kind`` makes a future of the call; ``finish`` makes the future's result of the call's outcomes.
        """
        if (kwargs or len(args) not in self._arity.counts) and not self._arity.fits(args, kwargs):
            raise self._refuse(args, kwargs)
        process = self._mesh._process
        if process.tracer is not None and not self._spanned:
            # Not a closure: its variables would slow down every call.
            again = partial(
                Endpoint._begin,
                adverb=adverb,
                kind=kind,
                finish=finish,
                args=args,
                kwargs=kwargs,
                stream=stream,
                combined=combined,
            )
            return process.tracer.call(self, adverb, again)
        limit = inherited(self._limit) if process.deadlines else self._limit
        if combined:
            call = self._combined.call(((self._plan, *args), kwargs), stream, limit)
        else:
            call = self._senders.call((args, kwargs), stream, limit)
        return kind(process, call, finish, self._what, limit)

    def _attends(self) -> bool:
        """Whether a call is currently more than its message: it has a deadline or is traced."""
        process = self._mesh._process
        return self._limit is not None or process.deadlines or process.tracer is not None

    def call_one(self, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Call exactly one actor. Raises ``ValueError`` for a mesh of several: slice it first."""
        if not self._one:
            raise ValueError(
                f"call_one() is for exactly one actor, and {self._mesh!r} has {len(self._mesh)}; "
                "slice it first, or use call() or choose()"
            )
        future: Future[R] = self._begin("call_one", Future, self._finish_one, args, kwargs)
        return future

    def _finish_one(self, call: Call) -> R:
        outcome = call.outcomes()[0]
        value: R = value_of(outcome, 0, self._who)
        return value

    def call(self, *args: P.args, **kwargs: P.kwargs) -> ManyFuture[R]:
        """Call every actor of the mesh; the future's result is a :class:`ValueMesh` of the mesh's shape."""
        future: ManyFuture[R] = self._begin("call", ManyFuture, self._finish_all, args, kwargs)
        return future

    def _finish_all(self, call: Call) -> ValueMesh[R]:
        return finish_all(call, self._who)

    def choose(self, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Call one actor of the mesh: of two picked at random, the one with fewer of our calls in progress.

        Actors whose process is known to be dead are skipped, as long as there are others.
        """
        if not self._arity.fits(args, kwargs):
            raise self._refuse(args, kwargs)
        import random

        if self._busy is None:
            self._busy = {}
        view = self._mesh._view
        count = len(view)
        picked = {random.randrange(count), random.randrange(count)}
        living = [index for index in picked if self._lives(index)]
        if not living:
            living = [index for index in range(count) if self._lives(index)] or list(picked)
            living = random.sample(living, min(2, len(living)))
        index = min(living, key=self._load_of)
        future = self._single(index).call_one(*args, **kwargs)
        self._busy.setdefault(index, deque()).append(future._call)
        return future

    def _single(self, index: int) -> Endpoint[P, R]:
        """Return the same endpoint of one of the actors."""
        return Endpoint(self._mesh._at(index), self._name, self._arity, self._limit, self._block, self._keeps)

    def _plain(self) -> Endpoint[P, R]:
        """Return the same endpoint with each call being a single message."""
        return self

    def _lives(self, index: int) -> bool:
        mesh = self._mesh
        return not mesh._process.runtime.is_gone(
            *mesh._location.addr(mesh._procs_id, mesh._view.rank_at(index))
        )

    def _load_of(self, index: int) -> int:
        calls = (self._busy or {}).get(index)
        if not calls:
            return 0
        while calls and calls[0].done():
            calls.popleft()
        return len(calls)

    def broadcast(self, *args: P.args, **kwargs: P.kwargs) -> Sending:
        """Send to every actor of the mesh, without replies. If the endpoint raises, its actor fails and the owner is notified.

        On a thread, this waits while an actor lags behind. In a coroutine it returns at once; the result can be
        awaited until the message is on its way, or ignored.
        """
        if (kwargs or len(args) not in self._arity.counts) and not self._arity.fits(args, kwargs):
            raise self._refuse(args, kwargs)
        tracer = self._mesh._process.tracer
        if tracer is not None and not self._spanned:
            deferral = tracer.call(self, "broadcast", lambda traced: traced._senders.tell((args, kwargs)))
        else:
            deferral = self._senders.tell((args, kwargs))
        return SENT if deferral is None else self._sending(deferral)

    def _sending(self, deferral: Deferral) -> Sending:
        return Sending(self._mesh._process, deferral, f"broadcast to {self._what()}")

    def stream(self, *args: P.args, **kwargs: P.kwargs) -> Stream[R]:
        """Call every actor; iterate over the results in order of arrival, with ``for`` or ``async for``.

        Items of a generator endpoint arrive in order for each rank; leaving the loop early ends the generators. An
        endpoint with an explicit response port may send any number of results; the stream ends when every rank has closed
        or dropped its port. Nothing else is cancelled if you leave the loop early; see ``Stream.cancel``.
        """
        stream: Stream[R] = self._begin("stream", self._streamed, None, args, kwargs, stream=True)
        return stream

    def _streamed(
        self, process: Process, call: Call, _finish: None, what: Callable[[], str], limit: float | None
    ) -> Stream[R]:
        # One deadline for all results, however late they are asked for.
        deadline = None if limit is None else time.monotonic() + limit

        def make(n: int) -> StreamFuture[R]:
            def finish(call: Call) -> R:
                # Items of a generator are read once and not kept.
                arrived = call.take_nth(n) if self._arity.streams else call.nth(n)
                if arrived is None and deadline is not None and time.monotonic() >= deadline:
                    # The first future whose wait timed out gave up the call for all of them.
                    raise ActorTimeout(
                        f"{what()} did not finish within its deadline of {round(limit or 0.0, 6)} s; it was cancelled",
                        actor=self._who.name,
                        host=self._who.location.called(self._who.view),
                        timeout=limit,
                    )
                if arrived is None:
                    return value_of(None, 0, self._who)  # type: ignore[no-any-return]  # raises
                index, outcome = arrived
                value: R = value_of(outcome, index, self._who)
                return value

            future: StreamFuture[R] = StreamFuture(n, process, call, finish, what, limit)
            future._deadline = deadline
            return future

        return Stream(call, make, open_ended=self._arity.port, closes=self._arity.streams)

    @overload
    def with_options(self, *, timeout: float | None = ..., block: bool = ...) -> Self: ...
    @overload
    def with_options(
        self, *, keep: Literal[True], timeout: float | None = ..., block: bool = ...
    ) -> Endpoint[P, Ref[R]]: ...
    @overload
    def with_options(
        self, *, reduce: Reducer, timeout: float | None = ..., block: bool = ...
    ) -> ReducedEndpoint[P, R]: ...
    @overload
    def with_options(
        self, *, reduce: None, timeout: float | None = ..., block: bool = ...
    ) -> Endpoint[P, R]: ...
    def with_options(
        self, *, timeout: Any = ..., block: Any = ..., reduce: Any = ..., keep: Any = ...
    ) -> Any:
        """Return the same endpoint with other options for its calls, such as a deadline.

        A call that has not finished after ``timeout`` seconds raises :class:`ActorTimeout` where it is waited for, and
        is cancelled where it runs; calls made while it is handled inherit the remaining time. With ``block=False``, a
        receiver that lags too far behind makes the call raise :class:`MailboxFull`, and the message is not sent.

        With ``reduce``, ``call`` gives one value: the results of all ranks, which the ranks themselves combine on the
        way. It is ``"sum"``, ``"mean"``, ``"concat"``, or an associative function of two results;
        the order of ranks is kept.

        With ``keep=True``, results stay in the processes that made them, and the caller gets a :class:`Ref` to each.

        Options that are not named stay as they are; ``None`` removes a deadline or ``reduce``.
        """
        limit = self._limit if timeout is ... else _seconds(timeout)
        if block is ...:
            block = self._block
        elif not isinstance(block, bool):
            raise TypeError(f"with_options(block=) must be True or False, got {block!r}")
        reducer = self._reducer if reduce is ... else reduce
        if keep is ...:
            return self._like(limit, block, reducer)
        if not isinstance(keep, bool):
            raise TypeError(f"with_options(keep=) must be True or False, got {keep!r}")
        if keep and self._arity.port and not self._arity.streams:
            raise ValueError(
                f"{self._what()} answers by its port, so that there is no result to keep; send what put() returns there"
            )
        if keep and reducer is not None:
            raise ValueError(_KEEP_OR_REDUCE)
        # An endpoint that keeps its results combines none, so it has to stop keeping them first.
        kept = self._keeps
        other = self._like(limit, block, None if kept else reducer)
        other._keeps = "&" if keep else ""
        other._senders = other._sender(other._mesh._view)
        return other._like(limit, block, reducer) if kept and reducer is not None else other

    def _like(self, limit: float | None, block: bool, reducer: Reducer | None) -> Endpoint[P, R]:
        if reducer is not None:
            if self._keeps:
                raise ValueError(_KEEP_OR_REDUCE)
            made: Endpoint[P, R] = self._mesh._combining(
                self._name, self._arity, limit, block, reduce=reducer
            )
            return made
        return Endpoint(self._mesh, self._name, self._arity, limit, block, self._keeps)

    def _traced(self, context: str) -> Endpoint[P, R]:
        """Return the same endpoint for the messages of one span."""
        endpoint = self._like(self._limit, self._block, self._reducer)
        endpoint._senders = self._senders.traced(context)
        endpoint._spanned = True
        return endpoint

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse: an endpoint of a mesh is called with an adverb."""
        raise TypeError(
            f"say how to call {self._what()}: .call(...) for all replies, .call_one(...) for a single actor, "
            ".choose(...), .broadcast(...) or .stream(...)"
        )

    def __repr__(self) -> str:
        return (
            f"<endpoint {self._mesh._interface.class_name}.{self._name}{self._arity.text} of {self._mesh!r}>"
        )


class ItemsEndpoint(Endpoint[P, R]):
    """A generator endpoint: only ``stream`` reads what it yields."""

    __slots__ = ()

    def _only_stream(self, adverb: str) -> TypeError:
        return TypeError(
            f"{self._what()} is a generator, and {adverb}() takes one result: iterate over "
            f"{self._mesh._name}.{self._name}.stream(...), whose futures give the items"
        )

    def call(self, *args: P.args, **kwargs: P.kwargs) -> ManyFuture[R]:
        """Refuse: see ``stream``."""
        raise self._only_stream("call")

    def call_one(self, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Refuse: see ``stream``."""
        raise self._only_stream("call_one")

    def choose(self, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Refuse: see ``stream``."""
        raise self._only_stream("choose")

    def broadcast(self, *args: P.args, **kwargs: P.kwargs) -> Sending:
        """Refuse: nobody would read the items."""
        raise self._only_stream("broadcast")

    def _like(self, limit: float | None, block: bool, reducer: Reducer | None) -> Endpoint[P, R]:
        if reducer is not None:
            raise ValueError(
                f"{self._what()} is a generator; only results that endpoints return can be combined"
            )
        return ItemsEndpoint(self._mesh, self._name, self._arity, limit, block, self._keeps)


def collect(
    call: Call, who: Addressee, known: Mapping[int, BaseException]
) -> tuple[ValueMesh[Any], BaseException | None]:
    """Return the outcomes of all ranks and the first error among them. ``known`` has errors that are known already."""
    cells: list[Any] = []
    first: BaseException | None = None
    for index, outcome in enumerate(call.outcomes()):
        error = known.get(index) or error_of(outcome, index, who)
        if error is None:
            cells.append(lazy(partial(load, cast("Message", outcome))))
        else:
            cells.append(error)
            first = first or error
    return ValueMesh.of(who.view.extent, cells), first


def finish_all(call: Call, who: Addressee) -> ValueMesh[Any]:
    """Return the results of all ranks, or raise the first error, with all outcomes in its ``results``."""
    mesh, first = collect(call, who, {})
    if first is not None:
        if isinstance(first, MeshError):
            first.results = mesh
        raise first
    return mesh


def addressee(mesh: ActorMesh[Any]) -> Addressee:
    """Return the addressee of a mesh of actors, for error messages."""
    return Addressee(mesh._name, mesh._location, mesh._root, mesh._view, mesh)


def _seconds(timeout: object) -> float | None:
    """Check ``with_options(timeout=)``."""
    if timeout is None:
        return None
    if isinstance(timeout, (str, bytes, bool)) or not hasattr(timeout, "__float__"):
        raise TypeError(f"with_options(timeout=) must be a number of seconds or None, got {timeout!r}")
    seconds = float(timeout)
    if not seconds > 0:
        raise ValueError(f"with_options(timeout=) must be a positive number of seconds, got {timeout!r}")
    return seconds
