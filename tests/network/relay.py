"""A relay for TCP that delays, throttles, freezes and breaks what it carries: what the kernel here cannot do to a link.

    with Relay(target=("10.77.0.2", 7171), host=network.hosts[1], seed=7) as relay:
        connect(relay.address)
        relay.impair(delay=0.05, jitter=0.02)
        relay.freeze("up")
        relay.reset()

It is a process of its own, on a machine of a `Network` or on this one, and ends with the `with` or with its owner.
"Up" is what comes from the side that connected. A seed fixes the jitter of the n-th piece of each connection and
direction; into which pieces a stream falls is the kernel's matter. `reset_after` counts bytes, and is exact.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import random
import socket
import struct
import subprocess
import sys
import threading
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

if TYPE_CHECKING:
    from cluster import Host

Direction = Literal["up", "down"]
New = Literal["forward", "refuse", "reset", "hold"]
"""What becomes of new connections: carried; refused, as nobody listens; accepted and reset; accepted, and nothing more."""

PIECE = 64 * 1024
HELD = 4 * 1024 * 1024
"""How much one direction of a connection holds back before its sender has to wait: 80 MB/s at 50 ms, at most."""
LIMIT = 30.0


@dataclass
class Impairment:
    """What is wrong with one direction."""

    delay: float = 0.0
    """Seconds that each piece comes later."""
    jitter: float = 0.0
    """Up to so many seconds more, at random; the order stays."""
    rate: float | None = None
    """Bytes per second and connection."""
    frozen: bool = False
    """Nothing is forwarded; connections stay open."""
    reset_after: int | None = None
    """Each new connection is reset when it has carried so many bytes in this direction."""


class Relay:
    """A relay that runs in a process of its own, and its remote control."""

    def __init__(
        self,
        target: tuple[str, int],
        *,
        host: Host | None = None,
        listen: tuple[str, int] | None = None,
        seed: int = 0,
    ) -> None:
        self.target = target
        self.address = listen or (host.address if host is not None else "127.0.0.1", 0)
        """Where it listens."""
        self._host = host
        self._seed = seed
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        words = [str(Path(__file__)), json.dumps([self.address, self.target, self._seed])]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        if self._host is not None:
            self._process = self._host.python(*words, **pipes)
        else:
            # A session of its own: Ctrl-C is for the test, which then ends its relays.
            self._process = subprocess.Popen([sys.executable, *words], start_new_session=True, **pipes)
        try:
            host, port = self._answer()
        except BaseException:
            self.close()
            raise
        self.address = (host, port)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def impair(
        self,
        direction: Direction | None = None,
        *,
        delay: float = 0.0,
        jitter: float = 0.0,
        rate: float | None = None,
        reset_after: int | None = None,
    ) -> None:
        """Set what is wrong with one direction, or with both; what is not given is in order again."""
        self._ask("impair", direction, delay=delay, jitter=jitter, rate=rate, reset_after=reset_after)

    def freeze(self, direction: Direction | None = None) -> None:
        """Forward nothing more for now; connections stay open, and their senders wait when buffers are full."""
        self._ask("freeze", direction, frozen=True)

    def thaw(self, direction: Direction | None = None) -> None:
        """Forward again, first what was held back."""
        self._ask("freeze", direction, frozen=False)

    def reset(self) -> int:
        """Break all connections with RST to both sides; how many there were. What is held back is lost."""
        return int(self._ask("reset"))

    def half_close(self, direction: Direction) -> int:
        """End one direction of all connections (FIN) after what is held back, the other goes on; how many there were."""
        return int(self._ask("half_close", direction))

    def new_connections(self, become: New) -> None:
        """Set what becomes of new connections."""
        self._ask("new", become)

    def heal(self) -> None:
        """Take everything back; connections that were broken stay broken."""
        self._ask("heal")

    def stats(self) -> dict[str, int]:
        """Connections `open`, `accepted` and `reset`, and bytes forwarded `up` and `down`, since it began."""
        found: dict[str, int] = self._ask("stats")
        return found

    def close(self) -> None:
        """End the relay; its connections end with it."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _ask(self, what: str, *words: Any, **options: Any) -> Any:
        with self._lock:
            if self._process is None or self._process.stdin is None:
                raise RuntimeError("the relay is not there: use it in its `with`")
            self._process.stdin.write(json.dumps([what, words, options]) + "\n")
            self._process.stdin.flush()
            return self._answer()

    def _answer(self) -> Any:
        assert self._process is not None and self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the relay has ended with {self._process.wait()}; see its stderr")
        return json.loads(line)


# The program.


@dataclass
class Stream:
    """One direction of a connection."""

    source: socket.socket
    sink: socket.socket
    impairment: Impairment
    dice: random.Random
    breaks_after: int | None
    on_break: asyncio.Event
    waiting: collections.deque[tuple[float, bytes]] = field(default_factory=collections.deque)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    held: int = 0
    carried: int = 0
    ended: bool = False
    failed: bool = False
    opposite: Stream | None = None

    async def read(self) -> None:
        """Take in what comes; not more than may be held back."""
        loop = asyncio.get_running_loop()
        while not self.ended:
            async with self.changed:
                await self.changed.wait_for(lambda: self.held < HELD or self.ended)
            try:
                data = await loop.sock_recv(self.source, PIECE)
            except OSError:
                await self.end(failed=True)
                return
            if not data:
                await self.end()
            elif not self.ended:
                await self._hold(data, loop.time())

    async def _hold(self, data: bytes, now: float) -> None:
        bad = self.impairment
        late = bad.delay + self.dice.random() * bad.jitter
        async with self.changed:
            # In order: what is due earlier than what came before it waits for that.
            self.waiting.append((now + late, data))
            self.held += len(data)
            self.changed.notify_all()

    async def end(self, *, failed: bool = False) -> None:
        """Take in nothing more; whether it failed is told to the sink after all that is held back."""
        async with self.changed:
            self.ended = True
            self.failed = self.failed or failed
            self.changed.notify_all()

    async def write(self, direction: Direction, count: collections.Counter[str]) -> None:
        """Hand on what is due."""
        loop = asyncio.get_running_loop()
        free = loop.time()
        while True:
            async with self.changed:
                await self.changed.wait_for(
                    lambda: not self.impairment.frozen and (self.waiting or self.ended)
                )
                if not self.waiting:
                    break
                due, data = self.waiting[0]
            if (left := max(due, free) - loop.time()) > 0:
                await asyncio.sleep(left)
                # It may have been frozen meanwhile.
                continue
            if self.breaks_after is not None:
                data = data[: self.breaks_after - self.carried]
            rate = self.impairment.rate
            if rate is not None:
                # Small pieces, so that a slow link is slow and not silent for long and then quick.
                data = data[: max(1, min(PIECE, round(rate / 50)))]
                free = max(free, loop.time() - 0.02) + len(data) / rate
            try:
                await loop.sock_sendall(self.sink, data)
            except OSError:
                # That the sink is gone goes the other way, as late as all that goes there.
                assert self.opposite is not None
                await self.opposite.end(failed=True)
            self.carried += len(data)
            count[direction] += len(data)
            await self._release(data)
            if self.carried == self.breaks_after:
                self.on_break.set()
                return
        if self.failed:
            self.on_break.set()
            return
        with contextlib.suppress(OSError):
            self.sink.shutdown(socket.SHUT_WR)

    async def _release(self, data: bytes) -> None:
        async with self.changed:
            due, piece = self.waiting.popleft()
            if len(data) < len(piece):
                self.waiting.appendleft((due, piece[len(data) :]))
            self.held -= len(data)
            self.changed.notify_all()

    async def recheck(self) -> None:
        """Look at the impairment again."""
        async with self.changed:
            self.changed.notify_all()


@dataclass(eq=False)
class Connection:
    """Two sockets and what goes between them."""

    client: socket.socket
    server: socket.socket | None = None
    streams: dict[Direction, Stream] = field(default_factory=dict)
    broken: asyncio.Event = field(default_factory=asyncio.Event)
    closed: asyncio.Event = field(default_factory=asyncio.Event)

    def close(self, *, reset: bool) -> None:
        """Close both sockets, with RST if asked for."""
        for each in (self.client, self.server):
            if each is not None:
                if reset:
                    each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                each.close()


class Service:
    """What runs in the relay's process."""

    def __init__(self, listen: tuple[str, int], target: tuple[str, int], seed: int) -> None:
        self._address = listen
        self._target = target
        self._seed = seed
        self._new: New = "forward"
        self._impairments: dict[Direction, Impairment] = {"up": Impairment(), "down": Impairment()}
        self._connections: set[Connection] = set()
        self._count: collections.Counter[str] = collections.Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Relay until stdin ends."""
        await self._listen()
        loop = asyncio.get_running_loop()
        orders = asyncio.StreamReader(limit=1 << 20)
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
        say(self._address)
        while line := await orders.readline():
            what, words, options = json.loads(line)
            say(await getattr(self, f"do_{what}")(*words, **options))

    async def do_impair(self, direction: Direction | None, **values: Any) -> None:
        for each in self._directions(direction):
            # One object for all connections, so that it changes for those that are there.
            for name, value in values.items():
                setattr(self._impairments[each], name, value)
        await self._recheck()

    async def do_freeze(self, direction: Direction | None, *, frozen: bool) -> None:
        for each in self._directions(direction):
            self._impairments[each].frozen = frozen
        await self._recheck()

    async def do_reset(self) -> int:
        broken = [each for each in self._connections if not each.broken.is_set()]
        for each in broken:
            each.broken.set()
        for each in broken:
            await each.closed.wait()
        return len(broken)

    async def do_half_close(self, direction: Direction) -> int:
        streams = [each.streams[direction] for each in self._connections if direction in each.streams]
        for each in streams:
            await each.end()
        return len(streams)

    async def do_new(self, become: New) -> None:
        self._new = become
        if become == "refuse":
            await self._stop_listening()
        elif self._listener is None:
            await self._listen()

    async def do_heal(self) -> None:
        for bad in self._impairments.values():
            for name, value in asdict(Impairment()).items():
                setattr(bad, name, value)
        await self.do_new("forward")
        await self._recheck()

    async def do_stats(self) -> dict[str, int]:
        counted = {name: self._count[name] for name in ("accepted", "reset", "up", "down")}
        return {"open": len(self._connections), **counted}

    def _directions(self, direction: Direction | None) -> list[Direction]:
        return ["up", "down"] if direction is None else [direction]

    async def _recheck(self) -> None:
        for connection in list(self._connections):
            for stream in connection.streams.values():
                await stream.recheck()

    async def _listen(self) -> None:
        self._listener = socket.create_server(self._address, backlog=1024)
        self._listener.setblocking(False)
        self._address = self._listener.getsockname()[:2]
        self._accepting = asyncio.create_task(self._accept(self._listener))

    async def _stop_listening(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None and self._accepting is not None:
            self._accepting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._accepting
            listener.close()

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            client, _ = await loop.sock_accept(listener)
            client.setblocking(False)
            number = self._count["accepted"]
            self._count["accepted"] += 1
            connection = Connection(client)
            if self._new == "reset":
                self._count["reset"] += 1
                connection.close(reset=True)
                continue
            self._connections.add(connection)
            task = asyncio.create_task(self._carry(connection, number, forward=self._new == "forward"))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _carry(self, connection: Connection, number: int, *, forward: bool) -> None:
        broken = asyncio.create_task(connection.broken.wait())
        try:
            work = asyncio.create_task(self._pump(connection, number) if forward else broken_only())
            await asyncio.wait([work, broken], return_when=asyncio.FIRST_COMPLETED)
            # What ends one side (it was reset, it cannot be reached) goes on to the other as RST.
            failed = connection.broken.is_set() or (work.done() and work.exception() is not None)
            work.cancel()
            await asyncio.wait([work])
            if failed:
                self._count["reset"] += 1
            connection.close(reset=failed)
        finally:
            broken.cancel()
            self._connections.discard(connection)
            connection.closed.set()

    async def _pump(self, connection: Connection, number: int) -> None:
        loop = asyncio.get_running_loop()
        connection.server = server = socket.socket(
            socket.AF_INET6 if ":" in self._target[0] else socket.AF_INET, socket.SOCK_STREAM
        )
        server.setblocking(False)
        await loop.sock_connect(server, self._target)
        for each in (connection.client, server):
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        ends: dict[Direction, tuple[socket.socket, socket.socket]] = {
            "up": (connection.client, server),
            "down": (server, connection.client),
        }
        for direction, (source, sink) in ends.items():
            bad = self._impairments[direction]
            dice = random.Random(f"{self._seed}/{number}/{direction}")
            connection.streams[direction] = Stream(
                source, sink, bad, dice, bad.reset_after, connection.broken
            )
        up, down = connection.streams.values()
        up.opposite, down.opposite = down, up
        async with asyncio.TaskGroup() as group:
            writers = []
            for direction, stream in connection.streams.items():
                reader = group.create_task(stream.read())
                writers.append(group.create_task(self._write(direction, stream, reader)))
            await asyncio.wait(writers)
            if connection.broken.is_set():
                await broken_only()

    async def _write(self, direction: Direction, stream: Stream, reader: asyncio.Task[None]) -> None:
        await stream.write(direction, self._count)
        # A direction that was half closed is read no more.
        reader.cancel()


async def broken_only() -> None:
    """Wait for the connection to be broken, which cancels this."""
    await asyncio.get_running_loop().create_future()


def say(answer: Any) -> None:
    """Answer the remote control."""
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Relay until stdin ends."""
    listen, target, seed = json.loads(sys.argv[1])
    asyncio.run(Service(tuple(listen), tuple(target), seed).run())


if __name__ == "__main__":
    main()
