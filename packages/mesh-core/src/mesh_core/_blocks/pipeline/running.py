"""One run of a pipeline: its items, the turns it asks for, and the loop that waits for results."""

from __future__ import annotations

import contextlib
import contextvars
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from mesh_core._blocks.pipeline.flow import Flow, Item
from mesh_core._blocks.pipeline.packed import Packed
from mesh_core._blocks.pipeline.quarantine import Quarantined, StageError, quarantined
from mesh_core._blocks.pipeline.stats import RESULTS, SOURCE, Clock, Meter, PipelineStats
from mesh_core._blocks.pool.tasks import _is_crash
from mesh_core._common.errors import MeshError
from mesh_core._futures.future import Future, Stream, StreamFuture
from mesh_core._futures.promise import Promise
from mesh_core._meshes.outcomes import error_of, value_of

if TYPE_CHECKING:
    from mesh_core._blocks.pipeline.replicas import Replicas
    from mesh_core._blocks.pool.following import Following
    from mesh_core._meshes.actors import ActorMesh
    from mesh_core._meshes.adverbs import Endpoint
    from mesh_core._native import Call, Message


class Rules(NamedTuple):
    """The options that all runs of a pipeline share."""

    max_bytes: int
    ordered: bool
    quarantine: bool
    most_quarantined: int


class Running:
    """The items of one stage in one run."""

    def __init__(self, number: int, replicas: Replicas, now: float) -> None:
        self.number = number
        self.replicas = replicas
        self.name = replicas.name
        self.asked = 0
        """Items that have a turn, or have asked for one."""
        self.meter = Meter(now)
        self.stuck: dict[Job, None] = {}
        """Those whose generators have yielded values that may not be read yet."""


class Job:
    """One item at one stage: it asks for a turn, and then calls the replica."""

    __slots__ = ("_future", "_held", "_place", "_stream", "core", "item", "read", "stage", "stuck_since")

    def __init__(self, core: Core, stage: Running, item: Item[Packed]) -> None:
        self.core = core
        self.stage = stage
        self.item = item
        self._place: int | None = None
        self._future: Future[Any] | None = None
        self._stream: Stream[Any] | None = None
        self.read = 0
        """How many of its generator's values were read."""
        self.stuck_since = 0.0
        self._held = 0.0
        """How many seconds its generator has waited for room; its deadline is extended by that."""

    @property
    def streams(self) -> bool:
        """Whether a generator works on it."""
        return self.stage.replicas.streams

    # As an asker.

    may_go_ahead = False
    """The pipeline decides itself how much work a replica gets."""

    def got(self, place: int, replica: ActorMesh[Any], *, ahead: bool = False) -> None:
        """Call this replica."""
        assert not ahead
        core = self.core
        with core.lock:
            wanted = self in core.jobs
            if wanted:
                self._place = place
                core.tick(self.stage)
                self.stage.meter.running += 1
                self.stage.meter.taken += 1
                if self.streams:
                    core.flow.opened(self.stage.number, self.item)
        if not wanted:
            self.stage.replicas.turns.back(place, None)
            return
        try:
            endpoint = self.stage.replicas.endpoint(place, replica)
            future = core.context.copy().run(self._send, endpoint)
            self._future = future
            core.following.follow(future, self._came)
        except BaseException as error:  # noqa: BLE001 - it is the item's outcome
            failed = error
            # On another thread: if many items failed at once, calls would nest as deeply as there are items.
            with contextlib.suppress(MeshError):
                core.following.soon(lambda: core.finished(self, failed, None))
            return
        if core.is_over:
            self.cancel()

    def take_back(self) -> None:
        """Nothing is sent ahead."""

    def refused(self, error: BaseException) -> None:
        """No replica can ever work on the item."""
        self.core.hopeless(self, error)

    def _send(self, endpoint: Endpoint[..., Any]) -> Future[Any]:
        args = (self.item.value,)
        if not self.streams:
            who = endpoint._who

            def whole(call: Call) -> Message:
                return _message(call.outcomes()[0], 0, who)

            future: Future[Any] = endpoint._begin("call_one", Future, whole, args, {})
            return future
        stream: Stream[Any] = endpoint._begin("stream", _streamed(endpoint), None, args, {}, stream=True)
        self._stream = stream
        return stream._make(0)

    # As a call.

    def _came(self) -> None:
        future = self._future
        assert future is not None
        if self._stream is not None:
            self.go_on()
            return
        error, packed = _outcome(future)
        self.core.finished(self, error, packed)

    def go_on(self) -> None:
        """Read the generator's values while there is room."""
        core, stream = self.core, self._stream
        assert stream is not None
        while True:
            future = self._future
            assert future is not None
            if future._is_pending() and stream._call.arrived() <= self.read:
                if not stream._call.done():
                    core.following.follow(future, self._came)
                    return
                core.finished(self, None, None)
                return
            if not core.may_read(self):
                return
            error, packed = _outcome(future)
            if packed is None:
                # Nobody reads the generator any longer.
                self.cancel()
                core.finished(self, error, None)
                return
            # Replace the future first: nothing may refer to the value that was read.
            self._future = stream._make(self.read + 1)
            if self._future._deadline is not None:
                self._future._deadline += self._held
            core.has_read(self, packed)

    def resume(self) -> None:
        """There is room again for its generator's values."""
        held = time.monotonic() - self.stuck_since
        self._held += held
        if self._future is not None and self._future._deadline is not None:
            self._future._deadline += held
        self.go_on()

    # The end.

    def cancel(self) -> None:
        """Cancel the call: the run is over."""
        if self._stream is not None:
            self._stream._call.look_away()
            self._stream.cancel()
        elif self._future is not None:
            self._future._call.look_away()
            self._future.cancel()

    def leave(self) -> bool:
        """Withdraw the request for a turn; false if the turn was given already."""
        return self._place is None and self.stage.replicas.turns.drop(self)

    def back(self, error: BaseException | None) -> None:
        """Give the turn back."""
        if self._place is not None:
            self.stage.replicas.turns.back(self._place, error)


def _outcome(future: Future[Any]) -> tuple[BaseException | None, Packed | None]:
    error = future.exception()
    if error is None:
        try:
            return None, Packed.come(future.get())
        except BaseException as failed:  # noqa: BLE001 - it is the item's outcome
            error = failed
    return error, None


def _message(outcome: Any, index: int, who: Any) -> Message:
    error = error_of(outcome, index, who)
    if error is not None:
        raise error
    message: Message = outcome
    return message


def _streamed(endpoint: Endpoint[..., Any]) -> Callable[..., Stream[Any]]:
    """Like the endpoint's own streams, but with messages instead of values."""

    def streamed(
        process: Any, call: Call, _finish: None, what: Callable[[], str], limit: float | None
    ) -> Any:
        deadline = None if limit is None else time.monotonic() + limit

        def make(n: int) -> StreamFuture[Any]:
            def finish(call: Call) -> Message:
                arrived = call.take_nth(n)
                if arrived is None:
                    value_of(None, 0, endpoint._who)  # raises
                    raise AssertionError
                index, outcome = arrived
                return _message(outcome, index, endpoint._who)

            future: StreamFuture[Any] = StreamFuture(n, process, call, finish, what, limit)
            future._deadline = deadline
            return future

        return Stream(call, make, open_ended=True, closes=True)

    return streamed


class Core:
    """A run, apart from the object that its user holds. It is freed when that is gone and nothing is in progress."""

    def __init__(
        self,
        name: str,
        replicas: list[Replicas],
        rules: Rules,
        following: Following,
        left: Callable[[], None],
    ) -> None:
        self.name = name
        self.rules = rules
        self.following = following
        self.lock = threading.RLock()
        now = time.monotonic()
        self.stages = [Running(i, each, now) for i, each in enumerate(replicas)]
        self.flow: Flow[Packed] = Flow(len(replicas), rules.max_bytes, ordered=rules.ordered)
        self.clock = Clock()
        self.jobs: dict[Job, None] = {}
        # Deadlines and spans are those of the code that started the run.
        self.context = contextvars.copy_context()
        self.quarantined: list[Quarantined] = []
        self.is_over = False
        """Nothing more is started: everything is done or was given up."""
        self.exhausted = False
        """The source has ended."""
        self._error: BaseException | None = None
        self._numbers = 0
        self._taken = 0
        self._most_held = 0
        self._kept = 0
        self._retries: dict[tuple[int, tuple[int, ...]], int] = {}
        """How often items were started again, by stage and key."""
        self._news: Promise[None] | None = None
        self._left: Callable[[], None] | None = left
        following.join(self)

    # What is done next.

    def tick(self, stage: Running) -> None:
        """Count the time up to now. Call this before anything that is measured changes."""
        stage.meter.tick(time.monotonic())

    def pump(self) -> None:
        """Start and read everything that may be started and read."""
        begun: list[Job] = []
        reads: list[Job] = []
        with self.lock:
            if not self.is_over:
                for stage in reversed(self.stages):
                    self._begin(stage, begun)
                    reads += [job for job in stage.stuck if self._may_read(job)]
                    for job in reads:
                        job.stage.stuck.pop(job, None)
                self._end_if_done()
            news, left = self._told()
        for job in begun:
            job.stage.replicas.turns.ask(job)
        for job in reads:
            job.resume()
        if news is not None:
            news.set_result(None)
        if left is not None:
            left()

    def _begin(self, stage: Running, begun: list[Job]) -> None:
        flow, streams, number = self.flow, stage.replicas.streams, stage.number
        turns = max(1, stage.replicas.count)
        meter = stage.meter
        self.tick(stage)
        while stage.asked < turns:
            item = flow.begin(number, last=streams and stage.asked + 1 >= turns)
            if item is None:
                break
            stage.asked += 1
            job = Job(self, stage, item)
            self.jobs[job] = None
            begun.append(job)
        meter.turns = stage.replicas.count
        meter.stuck = len(stage.stuck)
        meter.held_back = stage.asked < turns and flow.waiting(number) > 0

    def _told(self) -> tuple[Promise[None] | None, Callable[[], None] | None]:
        news = left = None
        if self._news is not None and self._is_news():
            news, self._news = self._news, None
        if self.is_over and not self.jobs:
            left, self._left = self._left, None
        return news, left

    def _is_news(self) -> bool:
        return self.is_over or self.flow.ready or self.wants

    def _end_if_done(self) -> None:
        if self.exhausted and self.flow.is_empty and not self.jobs:
            self.is_over = True

    def _may_read(self, job: Job) -> bool:
        stage = job.stage
        return self.flow.may_read(
            stage.number, job.item, job.read, full=stage.asked >= max(1, stage.replicas.count)
        )

    def may_read(self, job: Job) -> bool:
        """Whether a generator's next value may be read; if not, :meth:`pump` resumes it later."""
        with self.lock:
            if self.is_over or self._may_read(job):
                return True
            self.tick(job.stage)
            job.stuck_since = time.monotonic()
            job.stage.stuck[job] = None
            job.stage.meter.stuck = len(job.stage.stuck)
        return False

    def has_read(self, job: Job, packed: Packed) -> None:
        """A value was read."""
        with self.lock:
            if not self.is_over:
                self.flow.read(job.stage.number, job.item, job.read, packed.size, packed)
                job.stage.meter.made += 1
                self._most_held = max(self._most_held, self.flow.held)
            job.read += 1
        self.pump()

    # Outcomes.

    def finished(self, job: Job, error: BaseException | None, packed: Packed | None) -> None:
        """A replica has finished an item."""
        lost = error if _is_crash(error) else None
        stage, item = job.stage, job.item
        with self.lock:
            if self.jobs.pop(job, False) is False:
                return
            self.tick(stage)
            stage.asked -= 1
            stage.meter.running -= 1
            if self.is_over:
                pass
            elif error is not None:
                self._failed(job, error, lost)
            elif packed is not None:
                stage.meter.made += 1
                self.flow.passed(stage.number, item, packed.size, packed)
                self._most_held = max(self._most_held, self.flow.held)
            else:
                self.flow.over(stage.number, item, job.read)
            if not self.is_over:
                if error is None:
                    self._retries.pop((stage.number, item.key), None)
                self._end_if_done()
        job.back(lost)
        self.pump()

    def _failed(self, job: Job, error: BaseException, lost: BaseException | None) -> None:
        stage, item = job.stage, job.item
        at = stage.number, item.key
        attempts = self._retries.get(at, 0)
        if lost is not None and attempts < stage.replicas.retries and job.read == 0:
            self._retries[at] = attempts + 1
            stage.meter.retried += 1
            self.flow.again(stage.number, item, opened=job.streams)
            return
        self._retries.pop(at, None)
        self.flow.over(stage.number, item, job.read if job.streams else None)
        stage.meter.quarantined += self.rules.quarantine
        self._stop(self._set_aside(stage.name, item.value, item.key[0], error, attempts + 1))

    def _set_aside(
        self, stage: str, packed: Packed | None, index: int, error: BaseException, attempts: int
    ) -> StageError | None:
        """Set an item aside; returns the error that ends the run, if it must end."""
        size = 0 if packed is None else packed.size
        keep = self._kept + size <= self.rules.max_bytes
        bad = quarantined(stage, packed, index, error, attempts=attempts, keep=keep)
        if not self.rules.quarantine:
            return StageError.of(bad)
        self._kept += size if keep else 0
        self.quarantined.append(bad)
        if len(self.quarantined) <= self.rules.most_quarantined:
            return None
        return StageError.of(
            bad, f"; {len(self.quarantined)} items have failed, and most_quarantined is less"
        )

    def hopeless(self, job: Job, error: BaseException) -> None:
        """A stage has no replicas left."""
        with self.lock:
            if self.jobs.pop(job, False) is False:
                return
            job.stage.asked -= 1
            item = job.item
            attempts = self._retries.get((job.stage.number, item.key), 0)
            bad = quarantined(job.stage.name, item.value, item.key[0], error, attempts=attempts, keep=False)
            self._stop(StageError.of(bad))
        self.close()

    # The source.

    @property
    def wants(self) -> bool:
        """Whether to read an item from the source."""
        if self.is_over or self.exhausted:
            return False
        return self.flow.wants(2 * max(1, self.stages[0].replicas.count))

    def feed(self, value: object) -> None:
        """The source has returned a value."""
        number, self._numbers = self._numbers, self._numbers + 1
        try:
            packed = Packed.of(value)
        except MeshError as error:
            with self.lock:
                if not self.is_over:
                    self._stop(self._set_aside(SOURCE, None, number, error, 0))
            self.pump()
            return
        with self.lock:
            if self.is_over:
                return
            self.flow.add(Item((number,), packed.size, packed))
            self._most_held = max(self._most_held, self.flow.held)
        self.pump()

    def end_source(self) -> None:
        """The source has ended."""
        with self.lock:
            self.exhausted = True
        self.pump()

    # Results.

    def take(self) -> Item[Packed] | Future[None] | None:
        """The next result; None at the end; or a future that is done when there is something to do."""
        with self.lock:
            if self._error is not None:
                # Only once, as a generator does; afterwards the run has ended.
                error, self._error = self._error, None
                raise error
            if self.is_over:
                return None
            if self.flow.ready:
                self._taken += 1
                return self.flow.take()
            if self._news is None:
                self._news = Promise(f"a result of {self.name}")
                if self._is_news():
                    self._news.set_result(None)
                    news, self._news = self._news, None
                    return news.future
            return self._news.future

    def spoiled(self, item: Item[Packed], error: MeshError) -> None:
        """A result that was taken cannot be unpickled here."""
        with self.lock:
            self._taken -= 1
            # This may end the run.
            ends = self._set_aside(RESULTS, item.value, item.key[0], error, 1)
        if ends is not None:
            raise ends

    # The end.

    def _stop(self, error: BaseException | None) -> None:
        """End the run with this error, if there is one and the run has not ended before."""
        if error is not None and not self.is_over:
            self._error = error
            self.is_over = True

    def close(self) -> None:
        """Cancel the remaining items."""
        with self.lock:
            for stage in self.stages:
                self.tick(stage)
            self.is_over = True
            jobs = list(self.jobs)
            stuck = [job for stage in self.stages for job in stage.stuck]
            for stage in self.stages:
                stage.stuck.clear()
            self.flow = Flow(len(self.stages), self.rules.max_bytes, ordered=self.rules.ordered)
        for job in jobs:
            if job.leave():
                with self.lock:
                    if self.jobs.pop(job, False) is None:
                        job.stage.asked -= 1
            else:
                job.cancel()
        for job in stuck:
            self.finished(job, None, None)
        self.pump()

    def end(self) -> None:
        """The process leaves the mesh."""
        with self.lock:
            self._stop(MeshError(f"{self.name} has ended with this process's part in the mesh (shutdown())"))
            self.jobs.clear()
            news, _ = self._told()
        if news is not None:
            news.set_result(None)

    def stats(self) -> PipelineStats:
        """The statistics up to now."""
        with self.lock:
            if not self.is_over:
                self.clock.tick(time.monotonic())
                for stage in self.stages:
                    self.tick(stage)
            return PipelineStats(
                tuple(stage.meter.stats(stage.name, self.flow.bytes[stage.number]) for stage in self.stages),
                self._taken,
                self.flow.held,
                self._most_held,
                self.rules.max_bytes,
                self.clock.share("source"),
                self.clock.share("loop"),
            )
