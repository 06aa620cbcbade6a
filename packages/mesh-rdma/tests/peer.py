"""The other process of a test: does what it is told on stdin, one pickled line after the other, and answers on stdout.

Run as a program, so that it is as plain as a user's: no actors, no mesh.
"""

import gc
import os
import pickle
import struct
import sys
from typing import Any

from mesh_rdma import RDMAAction, RDMABuffer, empty


class Peer:
    """What the test can ask for. Each method's result, or exception, is the answer."""

    def __init__(self) -> None:
        self.memory: dict[str, Any] = {}
        self.buffers: dict[str, RDMABuffer] = {}

    def offer(self, name: str, data: bytes, *, readonly: bool = False) -> RDMABuffer:
        self.memory[name] = data if readonly else bytearray(data)
        self.buffers[name] = RDMABuffer(self.memory[name])
        return self.buffers[name]

    def offer_empty(self, name: str, data: bytes, *, readonly: bool = False) -> RDMABuffer:
        """As `offer`, in memory that others can map."""
        memory = empty(len(data))
        memory[:] = data
        self.memory[name] = memory.toreadonly() if readonly else memory
        self.buffers[name] = RDMABuffer(self.memory[name])
        return self.buffers[name]

    def offer_many(self, count: int, size: int) -> list[RDMABuffer]:
        for n in range(count):
            self.offer(f"many-{n}", n.to_bytes(4, "little") * (size // 4))
        return [self.buffers[f"many-{n}"] for n in range(count)]

    def look(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        return bytes(self.memory[name][start:stop])

    def look_up(self) -> str:
        return "here"

    def drop(self, name: str) -> None:
        self.buffers[name].drop()

    def forget(self, name: str) -> None:
        del self.buffers[name], self.memory[name]
        gc.collect()

    def read(self, buffer: RDMABuffer, **options: Any) -> bytes:
        copy = bytearray(buffer.size())
        buffer.read_into(copy, **options).get(timeout=30)
        return bytes(copy)

    def add(self, buffer: RDMABuffer, times: int) -> None:
        for _ in range(times):
            buffer.fetch_add(1).get(timeout=30)

    def rewrite(self, buffer: RDMABuffer, times: int) -> None:
        for n in range(times):
            action = RDMAAction()
            action.write_remote(buffer, bytes([n % 256]) * buffer.size())
            action.submit().get(timeout=30)

    def replace(self) -> None:
        """Become another program: the same process, with the same number and start time."""
        answer(None)
        os.execv(sys.executable, [sys.executable, __file__])

    def fork(self) -> tuple[int, str]:
        """Fork a child that tries to use the buffers, and then ends as a program does."""
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                self.buffers["data"].read_into(bytearray(1)).get(timeout=30)
                said = "it worked"
            except Exception as error:
                said = f"{type(error).__name__}: {error}"
            self.buffers.clear()
            gc.collect()
            os.write(write, said.encode())
            os._exit(0)
        os.close(write)
        with os.fdopen(read) as lines:
            said = lines.read()
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), said

    def fork_with_lasting(self) -> tuple[int, str]:
        """Fork a child in which memory ends whose buffers were sent, while this process is reading it."""
        import numpy

        arrays = [numpy.zeros(64 << 20, numpy.uint8), bytearray(100)]
        sent = [pickle.loads(pickle.dumps(RDMABuffer(each))) for each in arrays]
        reading = sent[0].read_into(bytearray(64 << 20))
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            arrays.clear()
            gc.collect()
            os.write(write, b"ended")
            os._exit(0)
        os.close(write)
        with os.fdopen(read) as lines:
            said = lines.read()
        reading.get(timeout=30)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), said

    def leave_a_fork(self) -> int:
        """Fork a child that lives until the test closes the pipe of the orders."""
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.write(write, b"!")
            while os.read(0, 1):
                pass
            os._exit(0)
        os.read(read, 1)
        os.close(read)
        os.close(write)
        return pid


def answer(value: Any) -> None:
    data = pickle.dumps(value)
    sys.stdout.buffer.write(struct.pack("=Q", len(data)) + data)
    sys.stdout.buffer.flush()


def main() -> None:
    peer = Peer()
    while head := sys.stdin.buffer.read(8):
        name, arguments, options = pickle.loads(sys.stdin.buffer.read(struct.unpack("=Q", head)[0]))
        try:
            result = getattr(peer, name)(*arguments, **options)
        except Exception as error:
            result = error
        answer(result)


if __name__ == "__main__":
    main()
