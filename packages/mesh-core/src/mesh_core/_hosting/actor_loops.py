"""The event loops of a process's coroutine actors, each with a thread of its own.

An actor is constructed where its endpoints will run, because much of what a constructor makes or sets belongs to its thread: a connection
of sqlite, a ``threading.local``, PyTorch's current device. A constructor that takes long must not hold up other actors, so
the first actor of a class is constructed on a loop where no other one lives. If its constructor turns out to be quick, the
class stays there, with all its later actors; otherwise each of them gets a loop where no other one lives, as long as there may be more.

The process's own loop (``_hosting.actor_host``) runs no constructors: it takes messages for the process, and assigns actors to loops.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeVarTuple

from mesh_core._futures.loop import BRIDGE, ActorSelector
from mesh_core._native import Waker

if TYPE_CHECKING:
    from mesh_core._hosting.actor_cell import ActorCell
    from mesh_core._hosting.actor_host import ActorHost
    from mesh_core._native import Deferral
    from mesh_core._process.process import Process

_Ts = TypeVarTuple("_Ts")
_QUICK_S = 0.05
"""A constructor that takes longer is slow: no other actor waits for it, if that can be helped."""
_LONG_S = 1.0
"""If a constructor holds up living actors for so long, that is worth a warning."""
_MOST = 32
"""How many loops there may be. Each has a thread and some descriptors."""
_SHARE_S = 0.001
"""How long constructors keep a loop from the actors that live there, or as long as one constructor takes."""


class ActorLoop(asyncio.SelectorEventLoop):
    """An event loop that messages reach directly."""

    def __init__(self, process: Process) -> None:
        self.waker = Waker()
        self._actors_selector = ActorSelector(process.runtime, self.waker)
        super().__init__(self._actors_selector)
        self.ident = 0
        """The thread that runs it."""
        self.held: Deferral | None = None
        """A reply that the loop has sent and that waits for its caller, if more wait than may (ANS-3)."""
        self._process = process
        # Now, so that all descriptors of the loop are opened together.
        self.mesh_bridge = process.bridge(self)
        # The loop itself keeps only weak references to tasks.
        self._tasks: set[asyncio.Task[object]] = set()

    @property
    def is_here(self) -> bool:
        """Whether the calling thread runs it."""
        return self.ident == threading.get_ident()

    def keep(self, task: asyncio.Task[object]) -> None:
        """Hold a task of this loop until it is done."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def room(self) -> None:
        """Wait until none of the loop's replies has to leave before the next message is handled."""
        while (held := self.held) is not None:
            if not held.done():
                await self._process.bridge().wait(held)
            if self.held is held:
                self.held = None

    def soon(self, function: Callable[[*_Ts], object], *arguments: *_Ts) -> None:
        """Call something on the loop soon, from any thread, unless the loop has ended."""
        with contextlib.suppress(RuntimeError):
            self.call_soon_threadsafe(function, *arguments)

    def serve(self, on_ready: Callable[[int], None]) -> None:
        """Run on the calling thread until the loop is stopped; ``on_ready`` is called for each inbox that has messages."""

        def on_tokens() -> None:
            for token in self.waker.drain():
                try:
                    if token == BRIDGE:
                        self.mesh_bridge.on_ready()
                    else:
                        on_ready(token)
                except (SystemExit, KeyboardInterrupt):
                    raise
                except BaseException as error:  # noqa: BLE001 - as in a callback, the loop goes on
                    self.call_exception_handler({"message": "a message was not handled", "exception": error})

        asyncio.set_event_loop(self)
        self.ident = threading.get_ident()
        self._actors_selector.on_tokens = on_tokens
        # It is written where the runtime does not wait for the loop: before it runs, and at the end.
        self.add_reader(self.waker.fileno(), on_tokens)
        self.run_forever()

    def end(self) -> None:
        """Cancel what still runs, and close the loop."""
        for task in asyncio.all_tasks(self):
            task.cancel()
        with contextlib.suppress(Exception):
            self.run_until_complete(self.shutdown_asyncgens())
        self.close()


class _Home(ActorLoop):
    """A loop where coroutine actors are constructed and live."""

    def __init__(self, loops: ActorLoops) -> None:
        super().__init__(loops.actor_host.process)
        self._loops = loops
        self._todo: deque[ActorCell] = deque()
        """Actors that are to be constructed here."""
        self._woken = False
        self.making: tuple[ActorCell, float] | None = None
        """What is being constructed here, and since when."""
        self.inhabitants = 0
        """How many actors live here or will; the process's loop counts them."""
        self.told = False
        """Whether somebody was warned of the constructor that runs."""
        self.thread = threading.Thread(target=self._serve, name="mesh-coroutines", daemon=True)

    def construct(self, cells: Iterable[ActorCell]) -> None:
        """Construct actors here, one after the other; called by the process's loop."""
        for cell in cells:
            cell.loop = self
            self.inhabitants += 1
            self._todo.append(cell)
        if not self._woken:
            self._woken = True
            self.soon(self._work)

    def take_back(self) -> list[ActorCell]:
        """Return the actors whose constructors have not begun, for other loops; called by the process's loop."""
        taken = []
        with contextlib.suppress(IndexError):
            while True:
                taken.append(self._todo.popleft())
        self.inhabitants -= len(taken)
        return taken

    def stuck_for(self, now: float) -> float:
        """For how many seconds the constructor that runs has been running, beyond what is quick; 0 if none has."""
        making = self.making
        return 0.0 if making is None else max(0.0, now - making[1] - _QUICK_S)

    def _serve(self) -> None:
        self.serve(self._on_ready)
        self.end()

    def _on_ready(self, token: int) -> None:
        cell = self._loops.actor_host.actors.get(token)
        # An actor that was respawned may live elsewhere.
        if cell is not None and cell.loop is self:
            cell.on_loop.pump()

    def _work(self) -> None:
        self._woken = False
        until = time.monotonic() + _SHARE_S
        while True:
            try:
                cell = self._todo.popleft()
            except IndexError:
                return
            self._construct(cell)
            if time.monotonic() > until and self._todo:
                self._woken = True
                self.call_soon(self._work)
                return

    def _construct(self, cell: ActorCell) -> None:
        began = time.monotonic()
        self.making = cell, began
        try:
            if not cell.over:  # its stop did not wait so long
                contextvars.copy_context().run(cell.be_made)
        except BaseException as error:  # noqa: BLE001 - whatever it is, others wait to be constructed
            cell.lost(error)
        self.making = None
        cell.join()
        self._loops.made(self, cell, time.monotonic() - began)


class ActorLoops:
    """The loops of a process's coroutine actors. The process's loop calls everything here, unless said otherwise."""

    def __init__(self, actor_host: ActorHost) -> None:
        self.actor_host = actor_host
        self._all: list[_Home] = []
        self._homes: dict[type, _Home] = {}
        """Where the actors of a class live, if its constructor is quick."""
        self._slow: set[type] = set()
        self._tried: dict[type, list[ActorCell]] = {}
        """Classes whose first constructor runs, with the actors that wait to see how long it takes."""
        self._watched = False

    def start(self) -> None:
        """Start the first loop before it is needed; called from any thread."""
        self._another()

    def construct(self, cell: ActorCell) -> None:
        """Assign an actor to a loop, and construct it there soon."""
        cls = type_of(cell)
        home = self._homes.get(cls)
        if home is not None and not home.stuck_for(time.monotonic()):
            home.construct([cell])
        elif home is None and cls not in self._slow:
            if (waiting := self._tried.get(cls)) is not None:
                waiting.append(cell)
                return
            self._tried[cls] = []
            self._place(cell)
        else:
            self._place(cell)
        self._watch()

    def made(self, home: _Home, cell: ActorCell, took: float) -> None:
        """Note how long a constructor took; called on the loop where it ran."""
        cls = type_of(cell)
        # A look without a lock: the process's loop decides.
        if cls in self._tried or (took > _QUICK_S and cls not in self._slow):
            self.actor_host.loop.soon(self._learn, home, cls, took)

    def left(self, cell: ActorCell) -> None:
        """Note that an actor has ended."""
        if isinstance(cell.loop, _Home):
            cell.loop.inhabitants -= 1

    def end(self, limit: float) -> None:
        """Stop the loops, and wait for those that are not in users' code; called from any thread."""
        until = time.monotonic() + limit
        homes = list(self._all)
        for home in homes:
            home.soon(home.stop)
        for home in homes:
            if home.thread is not threading.current_thread():
                home.thread.join(max(0.0, until - time.monotonic()))

    def _learn(self, home: _Home, cls: type, took: float) -> None:
        if took > _QUICK_S:
            self._found_slow(cls)
        elif (waiting := self._tried.pop(cls, None)) is not None:
            self._homes[cls] = home
            home.construct(waiting)

    def _found_slow(self, cls: type) -> None:
        self._slow.add(cls)
        self._homes.pop(cls, None)
        for cell in self._tried.pop(cls, ()):
            self._place(cell)

    def _place(self, cell: ActorCell) -> None:
        """Construct an actor where no other lives, if there may be such a loop, or where the fewest do."""
        home = next((home for home in self._all if home.inhabitants == 0 and home.making is None), None)
        home = home or self._another()
        if home is None and self._all:
            now = time.monotonic()
            home = min(self._all, key=lambda home: (home.stuck_for(now) > 0, home.inhabitants))
        if home is not None:
            home.construct([cell])
            return
        # No thread can be started. This holds up the process's loop, but the actor is constructed.
        cell.be_made()
        cell.join()
        self._learn_here(cell)

    def _learn_here(self, cell: ActorCell) -> None:
        for waiting in self._tried.pop(type_of(cell), ()):
            self.construct(waiting)

    def _another(self) -> _Home | None:
        if len(self._all) >= _MOST:
            return None
        try:
            home = _Home(self)
        except OSError:  # no descriptors are left
            return None
        try:
            home.thread.start()
        except RuntimeError:
            home.close()
            return None
        self._all.append(home)
        return home

    def _watch(self) -> None:
        if not self._watched:
            self._watched = True
            self.actor_host.loop.call_later(_QUICK_S, self._look)

    def _look(self) -> None:
        """Find new loops for those that wait behind a slow constructor."""
        now = time.monotonic()
        self._watched = False
        for home in self._all:
            making = home.making
            if making is None:
                home.told = False
                continue
            self._watch()
            if not (stuck := home.stuck_for(now)):
                continue
            self._found_slow(type_of(making[0]))
            for cell in home.take_back():
                self.construct(cell)
            if stuck > _LONG_S and home.inhabitants > 1 and not home.told:
                home.told = True
                _warn(making[0], home.inhabitants - 1)
        if self._tried:
            self._watch()


def type_of(cell: ActorCell) -> type:
    """Return the class of an actor that has one."""
    assert cell._cls is not None
    return cell._cls


def _warn(cell: ActorCell, others: int) -> None:
    logging.getLogger("mesh").warning(
        "the constructor of %s takes long, and holds up %s that %s on the same event loop. Spawn it on processes of its own, or "
        "do the long work in an endpoint, which can await",
        cell.describe(),
        "another coroutine actor" if others == 1 else f"{others} other coroutine actors",
        "lives" if others == 1 else "live",
    )
