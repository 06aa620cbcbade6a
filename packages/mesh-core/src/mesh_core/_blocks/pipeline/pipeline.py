"""The public part of pipelines: stages, pipelines and their runs."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal

from mesh_core._blocks.pipeline.flow import Item
from mesh_core._blocks.pipeline.replicas import Replicas
from mesh_core._blocks.pipeline.running import Core, Rules
from mesh_core._blocks.pool.following import Following, Steps
from mesh_core._blocks.pool.turns import OnCrash
from mesh_core._common.checks import one_of, seconds, whole
from mesh_core._common.closing import Closing
from mesh_core._common.errors import ActorTimeout, MeshError
from mesh_core._meshes.adverbs import Endpoint

if TYPE_CHECKING:
    from typing import Self

    from mesh_core._blocks.pipeline.packed import Packed
    from mesh_core._blocks.pipeline.quarantine import Quarantined
    from mesh_core._blocks.pipeline.stats import PipelineStats
    from mesh_core._futures.future import Future

_END: Any = object()
_SPOILED: Any = object()
_LEAST_AHEAD = 64 << 10


class Stage:
    """One stage of a :class:`Pipeline`: an endpoint of some actors that processes one item per call.

    What the endpoint returns is an item for the next stage. If it is a generator, each value that it yields is an item.

    Args:
        endpoint: an endpoint with one argument, such as ``models.infer``.
        per_rank: how many items each actor works on at the same time, as for a pool.
        retries: how often an item may be started again if its replica dies. A generator is started again only if none of its
            values has been read.
        timeout: seconds that one item may take. The time that a generator waits for room does not count.
        on_crash: what happens when a replica dies, as for a pool.
        name: the name of the stage in statistics and errors; by default ``"models.infer"``.
    """

    __slots__ = ("endpoint", "name", "on_crash", "per_rank", "retries", "timeout")

    def __init__(
        self,
        endpoint: Endpoint[..., Any],
        *,
        per_rank: int = 1,
        retries: int = 0,
        timeout: float | None = None,
        on_crash: Literal["raise", "retry", "respawn"] = "raise",
        name: str | None = None,
    ) -> None:
        if not isinstance(endpoint, Endpoint):
            raise TypeError(
                f"Stage() takes an endpoint of a mesh of actors, such as models.infer; got {endpoint!r}"
            )
        if endpoint._reducer is not None:
            raise ValueError(
                f"{endpoint!r} combines the results of several actors, but each item goes to one; remove "
                "reduce="
            )
        if not endpoint._arity.fits((None,), {}):
            raise TypeError(f"a stage is given one item: {endpoint._refuse((None,), {})}")
        one_of(on_crash, "Stage(on_crash=)", OnCrash)
        self.endpoint = endpoint
        self.per_rank = whole(per_rank, "Stage(per_rank=)", 1)
        self.retries = whole(retries, "Stage(retries=)", 0)
        self.timeout = seconds(timeout, "Stage(timeout=)")
        self.on_crash = on_crash
        self.name = endpoint._what() if name is None else name

    def __repr__(self) -> str:
        return f"<Stage {self.name!r} of {self.endpoint._mesh!r}>"


class Pipeline:
    """Stages that feed each other, with a limit on the bytes in flight.

    >>> from mesh_core import Actor, Pipeline, Stage, endpoint, this_host
    >>> class Words(Actor):
    ...     @endpoint
    ...     def cut(self, line: str):
    ...         yield from line.split()
    ...     @endpoint
    ...     def measure(self, word: str) -> int:
    ...         return len(word)
    >>> with this_host().spawn_procs({"gpus": 2}) as procs:
    ...     words = procs.spawn("words", Words)
    ...     pipeline = Pipeline(Stage(words.cut), Stage(words.measure), ordered=True)
    ...     list(pipeline.run(["a bb", "", "ccc"]))
    [1, 2, 3]

    Each item goes to a free replica of the next stage. This process passes values on without unpickling them; it unpickles only
    the results. A pipeline may be run several times, also at the same time; the runs then share the replicas. The owner of
    the actors does not change.

    Args:
        stages: the stages, in order. An endpoint, such as ``models.infer``, is a stage without options.
        max_bytes: how many pickled bytes may be in flight: waiting items, items being worked on, and results that
            nobody has taken. One output of each replica, and what generators produce ahead, may come on top.
        on_error: ``"raise"``: the first item that fails ends the run with a :class:`StageError`. ``"quarantine"``: the item is
            set aside, and the others continue.
        ordered: whether results come in the order of the source's items, or as soon as they are ready.
        most_quarantined: how many items may be set aside; one more ends the run.
    """

    def __init__(
        self,
        *stages: Stage | Endpoint[..., Any],
        max_bytes: int = 256 << 20,
        on_error: Literal["raise", "quarantine"] = "raise",
        ordered: bool = False,
        most_quarantined: int = 1000,
    ) -> None:
        if not stages:
            raise TypeError(
                "Pipeline() takes stages, such as Pipeline(Stage(readers.read), Stage(models.infer))"
            )
        made = tuple(Stage(stage) if isinstance(stage, Endpoint) else stage for stage in stages)
        for stage in made:
            if not isinstance(stage, Stage):
                raise TypeError(
                    f"Pipeline() takes stages, such as Stage(models.infer), and endpoints; got {stage!r}"
                )
        one_of(on_error, "Pipeline(on_error=)", ("raise", "quarantine"))
        names = [stage.name for stage in made]
        if len(set(names)) < len(names):
            raise ValueError(
                f"the stages of a pipeline must have names of their own, got {names}; use Stage(name=)"
            )
        self.stages = made
        self._rules = Rules(
            whole(max_bytes, "Pipeline(max_bytes=)", 1),
            bool(ordered),
            on_error == "quarantine",
            whole(most_quarantined, "Pipeline(most_quarantined=)", 0),
        )
        self._lock = threading.Lock()
        self._users = 0
        self._replicas: list[Replicas] = []

    def run(self, source: Iterable[Any] | AsyncIterable[Any]) -> PipelineRun:
        """Send the items of ``source`` through the stages; iterate over the results with ``for`` or ``async for``.

        That loop reads the source as items are needed, so the source may be endless. Nothing is read before the loop begins.
        """
        process = self.stages[0].endpoint._mesh._process
        # Raises in a forked copy, and after the process has left the mesh.
        process.runtime.completion()
        following = Following.of(process)
        if not isinstance(source, AsyncIterable):
            source = iter(source)
        name = f"the pipeline {' > '.join(stage.name for stage in self.stages)}"
        with Steps(), self._lock:
            if not self._users:
                self._begin(following)
            self._users += 1
            core = Core(name, self._replicas, self._rules, following, self._leave)
            for each in self._replicas:
                each.join(core)
        return PipelineRun(core, source, process.pid)

    def _begin(self, following: Following) -> None:
        made: list[Replicas] = []
        generators = sum(
            stage.per_rank * len(stage.endpoint._mesh)
            for stage in self.stages
            if stage.endpoint._arity.streams
        )
        ahead = max(_LEAST_AHEAD, self._rules.max_bytes // (4 * max(1, generators)))
        try:
            for stage in self.stages:
                made.append(Replicas(stage, following, ahead))  # noqa: PERF401 - closed if a later one fails
        except BaseException:
            for each in made:
                each.close()
            raise
        self._replicas = made

    def _leave(self) -> None:
        """A run is over, and has no items left."""
        with self._lock:
            self._users -= 1
            gone = [] if self._users else self._replicas
            if gone:
                self._replicas = []
        for each in gone:
            each.close()

    def __repr__(self) -> str:
        return f"<Pipeline {' > '.join(stage.name for stage in self.stages)}>"


class PipelineRun(Closing):
    """The results of a pipeline, for one ``for`` or ``async for`` loop. Leaving the loop early cancels the remaining items."""

    def __init__(self, core: Core, source: Iterable[Any] | AsyncIterable[Any], pid: int) -> None:
        self._core = core
        self._given_source = source
        self._source: Iterator[Any] | AsyncIterator[Any] | None = None
        self._pid = pid
        self._until: float | None = None
        self._limit: float | None = None

    # Taking.

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        with self._closing():
            self._turn("stages")
            while True:
                self._feed()
                with Steps() as steps:
                    found = self._core.take()
                    if found is not None and not isinstance(found, Item):
                        self._wait(found, steps)
                        continue
                if found is None:
                    raise StopIteration
                if (value := self._given(found)) is not _SPOILED:
                    return value

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        with self._closing():
            self._turn("stages")
            while True:
                await self._feed_async()
                found = self._core.take()
                if found is None:
                    raise StopAsyncIteration
                if not isinstance(found, Item):
                    await found
                elif (value := self._given(found)) is not _SPOILED:
                    return value

    def _given(self, item: Item[Packed]) -> Any:
        with Steps():
            self._core.pump()
        try:
            value = item.value.load()
        except MeshError as error:
            self._core.spoiled(item, error)
            return _SPOILED
        self._turn("loop")
        return value

    def _turn(self, to: str) -> None:
        self._core.clock.turn(to, time.monotonic())

    def _wait(self, news: Future[None], steps: Steps) -> None:
        following = self._core.following
        call: Any = news._call
        if self._until is None:
            following.help(call, None, steps)
            steps.wait(news.exception)
            return
        left = self._until - time.monotonic()
        try:
            steps.wait(lambda: news.get(max(0.0, left)))
        except ActorTimeout:
            stats = self.stats
            raise ActorTimeout(
                f"{self._core.name} has not finished within {self._limit} s; the slowest is {stats.slowest}: {stats.why}",
                timeout=self._limit,
            ) from None

    # The source.

    def _feed(self) -> None:
        """Read as much from the source as there is room for."""
        core = self._core
        while core.wants:
            if self._source is None:
                # Some sources support both kinds of loops, such as the results of another pipeline.
                if not isinstance(self._given_source, Iterable):
                    raise TypeError("the source is asynchronous: use `async for`")
                self._source = iter(self._given_source)
            source: Any = self._source
            self._turn("source")
            value = next(source, _END)
            self._turn("stages")
            with Steps():
                self._fed(value)

    async def _feed_async(self) -> None:
        core = self._core
        while core.wants:
            if self._source is None:
                given = self._given_source
                self._source = given.__aiter__() if isinstance(given, AsyncIterable) else iter(given)
            source = self._source
            self._turn("source")
            value = await anext(source, _END) if isinstance(source, AsyncIterator) else next(source, _END)
            self._turn("stages")
            self._fed(value)

    def _fed(self, value: Any) -> None:
        if value is _END:
            self._forget_source()
            self._core.end_source()
        else:
            self._core.feed(value)

    # The whole.

    def results(self, timeout: float | None = None) -> list[Any]:
        """Return all remaining results. After ``timeout`` seconds, raise an :class:`ActorTimeout` that names the slowest stage."""
        self._limit = seconds(timeout, "results(timeout=)")
        self._until = None if self._limit is None else time.monotonic() + self._limit
        return list(self)

    @property
    def stats(self) -> PipelineStats:
        """The progress of the stages, and which is the slowest. ``print(run.stats)`` shows it as text."""
        return self._core.stats()

    @property
    def quarantined(self) -> list[Quarantined]:
        """The items that were set aside so far, with their errors."""
        return list(self._core.quarantined)

    # The end.

    def close(self) -> None:
        """Cancel the remaining items."""
        with Steps():
            self._core.close()
        self._forget_source()

    def _forget_source(self) -> None:
        self._given_source = ()
        self._source = None

    @contextlib.contextmanager
    def _closing(self) -> Iterator[None]:
        try:
            yield
        except (StopIteration, StopAsyncIteration):
            self._forget_source()
            # What happens after the loop is not part of the run.
            self._turn("over")
            raise
        except BaseException:
            self.close()
            raise

    def __del__(self) -> None:
        # A forked copy has nothing to cancel.
        if getattr(self, "_pid", None) == os.getpid() and not self._core.is_over:
            with contextlib.suppress(MeshError):
                # On another thread: this may run during a garbage collection, at any point.
                self._core.following.soon(self._core.close)

    def __repr__(self) -> str:
        stats = self.stats
        return f"<run of {self._core.name}: {stats.results} results, {stats.held:,} bytes held; slowest: {stats.slowest}>"
