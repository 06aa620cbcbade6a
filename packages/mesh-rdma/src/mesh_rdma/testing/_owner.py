"""The other process of the suite: offers memory as it is told on stdin, in pickled lines, and answers on stdout."""

from __future__ import annotations

import gc
import pickle
import struct
import sys
from typing import IO, Any

from mesh_rdma import RDMABuffer

HEAD = struct.Struct("=Q")


def send(stream: IO[bytes], value: Any) -> None:
    """Write one value."""
    data = pickle.dumps(value)
    stream.write(HEAD.pack(len(data)) + data)
    stream.flush()


def receive(stream: IO[bytes]) -> Any:
    """Read one value."""
    head = stream.read(HEAD.size)
    if len(head) < HEAD.size:
        raise EOFError("the other process has ended")
    return pickle.loads(stream.read(HEAD.unpack(head)[0]))


class Owner:
    """What can be asked for."""

    def __init__(self) -> None:
        self.memory: dict[str, Any] = {}
        self.buffers: dict[str, RDMABuffer] = {}

    def offer(self, name: str, data: bytes, step: int = 1, readonly: bool = False) -> RDMABuffer:
        """Offer every ``step``-th byte of a copy of ``data``."""
        memory = memoryview(bytearray(data))
        self.memory[name] = memory
        self.buffers[name] = RDMABuffer((memory.toreadonly() if readonly else memory)[::step])
        return self.buffers[name]

    def look(self, name: str) -> bytes:
        """Return the memory as it is."""
        return bytes(self.memory[name])

    def drop(self, name: str) -> None:
        """Offer it no longer, and overwrite it: who reads it now reads what is another's."""
        self.buffers[name].drop()
        self.memory[name][:] = b"!" * len(self.memory[name])

    def forget(self, name: str) -> None:
        """Let it become garbage."""
        del self.buffers[name], self.memory[name]
        gc.collect()


def main() -> None:
    """Serve until stdin ends."""
    owner, output = Owner(), sys.stdout.buffer
    while True:
        try:
            name, arguments, options = receive(sys.stdin.buffer)
        except EOFError:
            return
        try:
            send(output, (None, getattr(owner, name)(*arguments, **options)))
        except Exception as error:  # noqa: BLE001 - raised again at the other end
            send(output, (f"{type(error).__name__}: {error}", None))


if __name__ == "__main__":
    main()
