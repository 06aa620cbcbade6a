"""TCP ports of processes that can be reached from elsewhere: :class:`PortForwarder`.

A :class:`_Exit` lives in each process whose port is forwarded, and connects to that port. An :class:`_Entrance` lives where
the forwarded port can be reached, and listens. One streamed call carries one connection: its items are what the service
sends, after a port for what the client sends. So the end of either process, a client that hangs up, and ``mailbox_budget``
work here as in any other call, and what travels between hosts is encrypted like any other message.

FWD-1: however many connect to a forwarded port, they take so many descriptors here and in the process whose port it is, and no more.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

from mesh_core._actors.actor import Actor
from mesh_core._actors.endpoint import endpoint
from mesh_core._common.context import context, current_rank
from mesh_core._common.errors import MeshError, Undeliverable
from mesh_core._geometry.values import ValueMesh
from mesh_core._meshes.hosts import this_proc
from mesh_core._meshes.ports import Channel, Port, PortReceiver
from mesh_core._meshes.procs import ProcMesh

if TYPE_CHECKING:
    from mesh_core._futures.future import Stream
    from mesh_core._native import Point

_LOOPBACK = "127.0.0.1"
_PIECE = 64 * 1024
MOST = 128
"""How many connections to one forwarded port are carried at once."""
_END = b""
"""What ends one direction of a connection, as a read of its socket does."""


class PortForwarder(Actor):
    """Forwards TCP ports of processes, such as that of a debugger or a dashboard in a worker on another host.

    Spawn one where the forwards are to be kept, usually in the script. They end when it is stopped, and with its process. What
    travels between hosts is encrypted like every message, and needs no open port besides that of the hosts.

    >>> from mesh_core import Actor, PortForwarder, endpoint, this_host, this_proc
    >>> class Service(Actor):
    ...     @endpoint
    ...     def listen(self) -> int:
    ...         import socket
    ...         self.server = socket.create_server(("127.0.0.1", 0))
    ...         return self.server.getsockname()[1]
    >>> with this_host().spawn_procs() as procs:
    ...     port = procs.spawn("service", Service).listen.call_one().get(timeout=30)
    ...     ports = this_proc().spawn("ports", PortForwarder)
    ...     address = ports.forward.call_one(procs, port).get(timeout=30).item()
    ...     ports.stop().get(timeout=30)
    >>> address.startswith("127.0.0.1:")
    True
    """

    def __init__(self) -> None:
        self._actors: list[Any] = []

    @endpoint
    async def forward(
        self,
        dst_proc_mesh: ProcMesh,
        dst_port: int | Callable[[Point], int],
        src_proc_mesh: ProcMesh | None = None,
        src_address: str | Callable[[Point], str] = f"{_LOOPBACK}:0",
    ) -> ValueMesh[str]:
        """Make a port of each process of ``dst_proc_mesh`` reachable; return the addresses where, as ``"host:port"``.

        Connections to such an address arrive at ``127.0.0.1:dst_port`` on the host of the process at the same place. Everybody
        who can connect to the address can reach the service: at ``127.0.0.1``, all users of that machine. At most 128 connections
        to a port are carried at once; further ones are closed. When a process has
        died, its connections are reset, as are later ones until its port is forwarded again.

        Args:
            dst_proc_mesh: The processes.
            dst_port: Their port, or a function of a place in the mesh. The function runs in the process there.
            src_proc_mesh: Where to listen: processes in the same shape, each for the one at its own place. By default this
                actor's process listens for all of them.
            src_address: The address to listen on, such as ``"127.0.0.1:6006"``, or a function of a place in the mesh. With
                port 0 the system chooses one.
        """
        for name, mesh in (("dst_proc_mesh", dst_proc_mesh), ("src_proc_mesh", src_proc_mesh)):
            if not isinstance(mesh, ProcMesh) and (mesh is not None or name == "dst_proc_mesh"):
                raise TypeError(
                    f"{name} must be a mesh of processes, got {mesh!r}. The port of an actor is one of its process: "
                    "pass the processes on which the actors were spawned"
                )
        if src_proc_mesh is not None and src_proc_mesh.extent != dst_proc_mesh.extent:
            raise ValueError(
                f"src_proc_mesh must have the shape of dst_proc_mesh, {dst_proc_mesh.extent}, got {src_proc_mesh.extent}"
            )
        if not callable(dst_port):
            _check_port("dst_port", dst_port)
        if not callable(src_address):
            _parse(src_address)
        exits: Any = dst_proc_mesh.spawn("port_exits", _Exit, dst_port)
        entrances: Any = (this_proc() if src_proc_mesh is None else src_proc_mesh).spawn(
            "port_entrances", _Entrance
        )
        try:
            await exits.initialized
            if src_proc_mesh is not None:
                addresses: ValueMesh[str] = await entrances.listen.call(exits, src_address)
            else:
                places = [(point, exits.slice(**point)) for point, _ in dst_proc_mesh]
                addresses = ValueMesh.of(
                    dst_proc_mesh.extent,
                    [
                        await entrances.listen_for.call_one(exit_, point, src_address)
                        for point, exit_ in places
                    ],
                )
        except BaseException:
            # Without await: this coroutine may be ending because it was cancelled.
            entrances.stop()
            exits.stop()
            raise
        self._actors += (entrances, exits)
        return addresses

    def __supervise__(self, failure: object) -> bool:
        # Connections of a process that has died are closed, and those that come later. Its owner learns of its death.
        return True


class _Exit(Actor):
    """In the process whose port it is."""

    def __init__(self, port: int | Callable[[Point], int]) -> None:
        self._port = port(current_rank()) if callable(port) else port
        _check_port("dst_port", self._port)

    @endpoint(concurrent=True)
    async def connect(self) -> AsyncIterator[Port[bytes] | bytes]:
        """Connect to the service; yield a port that leads to it, then what it sends, in pieces."""
        try:
            reader, writer = await asyncio.open_connection(_LOOPBACK, self._port)
        except OSError as error:
            me = context().actor_instance
            raise ConnectionError(
                f"cannot connect to port {self._port} of {me.proc_id}, which is to be forwarded: {error.strerror}; does it listen "
                f"on {_LOOPBACK}?"
            ) from None
        writer.transport.set_write_buffer_limits(0)
        port, receiver = Channel[bytes].open()
        writing = asyncio.create_task(_write_all(receiver, writer))
        try:
            yield port
            while piece := await reader.read(_PIECE):
                yield piece
            yield _END
            await writing
        except BaseException:
            await _cancel(writing)
            _reset(writer)
            raise
        finally:
            receiver.close()
            await _close(writer)


class _Entrance(Actor):
    """Where the forwarded port can be reached."""

    def __init__(self) -> None:
        self._servers: list[asyncio.Server] = []
        self._connections: set[asyncio.Task[None]] = set()
        self._is_over = False

    @endpoint
    async def listen(self, exits: Any, address: str | Callable[[Point], str]) -> str:
        """Listen for the process at the same place as this actor; return the address."""
        place = current_rank()
        return await self._listen(exits.slice(**place), place, address)

    @endpoint
    async def listen_for(self, exit_: Any, place: Point, address: str | Callable[[Point], str]) -> str:
        """Listen for the process at another place; return the address."""
        return await self._listen(exit_, place, address)

    async def _listen(self, exit_: Any, place: Point, address: str | Callable[[Point], str]) -> str:
        carried: set[asyncio.Task[None]] = set()
        is_full = False

        async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal is_full
            task = asyncio.current_task()
            assert task is not None
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)
            was_full, is_full = is_full, len(carried) >= MOST
            if is_full and not was_full:
                logging.getLogger("mesh").warning(
                    "a forwarded port has %d connections, which is the limit: further ones are closed", MOST
                )
            # Or accepted while this actor was stopped.
            if is_full or self._is_over:
                _reset(writer)
                await _close(writer)
                return
            carried.add(task)
            task.add_done_callback(carried.discard)
            # asyncio takes a handler that was cancelled for one that has failed.
            with contextlib.suppress(asyncio.CancelledError):
                await _carry(exit_, reader, writer)

        host, port = _parse(address(place) if callable(address) else address)
        server = await asyncio.start_server(accepted, host, port)
        self._servers.append(server)
        host, port = server.sockets[0].getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    async def __cleanup__(self, _error: BaseException | None) -> None:
        self._is_over = True
        for server in self._servers:
            server.close()
        for task in list(self._connections):
            await _cancel(task)


async def _carry(exit_: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Carry one connection until both ends have closed it, or reset it if the service or the way to it is gone."""
    writer.transport.set_write_buffer_limits(0)
    stream: Stream[Port[bytes] | bytes] = exit_.connect.stream()
    reading: asyncio.Task[None] | None = None
    is_whole = False
    try:
        # Closing it ends the call, whatever happens here.
        pieces: Any = aiter(stream)
        async with contextlib.aclosing(pieces):
            async for future in pieces:
                piece = await future
                if isinstance(piece, Port):
                    reading = asyncio.create_task(_read_all(reader, piece, stream))
                elif piece:
                    writer.write(piece)
                    await writer.drain()
                else:
                    writer.write_eof()
                    is_whole = True
    except (MeshError, OSError) as error:
        if reading is None:
            logging.getLogger("mesh").warning(
                "a connection to a forwarded port is closed: %s", str(error).partition("\n")[0]
            )
    finally:
        # All at once: this may be cancelled while it waits below.
        if reading is not None:
            reading.cancel()
        if is_whole:
            writer.close()
        else:
            _reset(writer)
        if reading is not None:
            await _cancel(reading)
        await _close(writer)


async def _read_all(reader: asyncio.StreamReader, port: Port[bytes], stream: Stream[Any]) -> None:
    """Send on what a client sends. If it is gone, the service is told by the end of the stream."""
    try:
        while piece := await reader.read(_PIECE):
            await port.send(piece)
        await port.send(_END)
    except Undeliverable:
        # The service has ended the connection. What it sent before that is still on its way.
        pass
    except OSError:
        stream.cancel()


async def _write_all(receiver: PortReceiver[bytes], writer: asyncio.StreamWriter) -> None:
    """Write what arrives for a service. An error ends the reading from it, too."""
    async for piece in receiver:
        if not piece:
            break
        writer.write(piece)
        await writer.drain()
    writer.write_eof()


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])
    if not task.cancelled():
        task.exception()  # so that asyncio does not report it


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    # The loop may end with this actor, and closes nothing by itself.
    with contextlib.suppress(OSError):
        await writer.wait_closed()


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close a connection so that the other end takes what it has got for incomplete."""
    with contextlib.suppress(OSError):
        writer.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
        )
    writer.transport.abort()


def _check_port(name: str, port: object, least: int = 1) -> None:
    if not isinstance(port, int) or isinstance(port, bool) or not least <= port < 2**16:
        raise ValueError(f"{name} must be a port number from {least} to 65535, got {port!r}")


def _parse(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal():
        raise ValueError(f"src_address must be an address such as '127.0.0.1:6006', got {address!r}")
    _check_port("the port of src_address", int(port), 0)
    return host, int(port)
