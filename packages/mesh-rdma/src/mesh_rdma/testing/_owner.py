"""The other process of the suite: offers and reads memory as it is told on stdin, in pickled lines, and answers on stdout."""

from __future__ import annotations

import gc
import os
import pickle
import random
import resource
import struct
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from mesh_core import Promise, python_command
from mesh_rdma import RDMABuffer, RDMAError
from mesh_rdma.testing._memory import GPU, HOST, look, make

HEAD = struct.Struct("=Q")
COMMAND = python_command(f"from {__name__} import main; main()")
_BLOCK = 65_537


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


def pattern(seed: int, size: int) -> bytes:
    """Return bytes that both processes can make. They repeat after a prime number, so that no shift by pages fits."""
    block = random.Random(seed).randbytes(min(size, _BLOCK))
    return (block * (size // _BLOCK + 1))[:size]


class Owner:
    """What can be asked for."""

    def __init__(self, kind: str = HOST) -> None:
        self.kind = kind
        self.memory: dict[str, Any] = {}
        self.buffers: dict[str, RDMABuffer] = {}
        self.taken: list[int] = []

    def offer(self, name: str, data: bytes, step: int = 1, readonly: bool = False) -> RDMABuffer:
        """Offer every ``step``-th byte of a copy of ``data``."""
        self.memory[name] = make(self.kind, data)
        return self.offer_part(name, name, slice(None, None, step), readonly)

    def offer_part(self, name: str, of: str, part: slice, readonly: bool = False) -> RDMABuffer:
        """Offer some of the memory that has another name."""
        memory = self.memory[of][part]
        self.buffers[name] = RDMABuffer(memory.toreadonly() if readonly else memory)
        return self.buffers[name]

    def offer_pattern(self, name: str, seed: int, size: int) -> RDMABuffer:
        """Offer memory that has this pattern."""
        return self.offer(name, pattern(seed, size))

    def look(self, name: str) -> bytes:
        """Return the memory as it is."""
        return look(self.memory[name])

    def has(self, name: str, seed: int, size: int) -> bool:
        """Say whether the memory has this pattern."""
        return look(self.memory[name]) == pattern(seed, size)

    def fill(self, name: str, value: int) -> None:
        """Overwrite the memory."""
        self.memory[name][:] = bytes([value]) * len(self.memory[name])

    def drop(self, name: str) -> None:
        """Offer it no longer, and overwrite it: who reads it now reads what is another's."""
        self.close(name)
        self.fill(name, ord("!"))

    def close(self, name: str) -> None:
        """Offer it no longer, and leave the memory as it is."""
        self.buffers[name].drop()

    def forget(self, name: str) -> None:
        """Let it become garbage."""
        del self.buffers[name], self.memory[name]
        gc.collect()

    def read(self, buffer: RDMABuffer, transport: str, timeout: float = 30) -> bytes:
        """Read all of it."""
        copy = bytearray(buffer.size())
        buffer.read_into(copy, timeout=timeout, transport=transport).get(timeout=60)
        return bytes(copy)

    def compare(self, buffer: RDMABuffer, seed: int, turns: int, transport: str) -> str | None:
        """Read windows of a pattern; say what was wrong."""
        data, chance = pattern(seed, buffer.size()), random.Random(os.getpid())
        for _ in range(turns):
            start = chance.randrange(len(data))
            length = chance.randint(0, min(len(data) - start, 1 << 18))
            copy = bytearray(length)
            buffer.read_into(copy, offset=start, timeout=30, transport=transport).get(timeout=60)
            if copy != data[start : start + length]:
                return f"{length} bytes from {start} on are others"
        return None

    def work(self, reads: RDMABuffer, writes: RDMABuffer, transport: str) -> None:
        """Read and write without end, in two threads; return once each has done so."""
        for work in (reads.read_into, writes.write_from):
            begun = threading.Event()
            memory = bytearray(b"\xff" * reads.size())
            arguments = (work, memory, transport, begun)
            threading.Thread(target=self._again_and_again, args=arguments, daemon=True).start()
            if not begun.wait(60):
                raise TimeoutError("the first transfer did not end")

    @staticmethod
    def _again_and_again(
        work: Callable[..., Any], memory: bytearray, transport: str, begun: threading.Event
    ) -> None:
        with suppress(RDMAError):
            while True:
                work(memory, timeout=60, transport=transport).get(timeout=90)
                begun.set()

    def fork(self, mine: str, theirs: RDMABuffer, transport: str) -> tuple[int, list[str]]:
        """Have a forked child use a buffer of this process, one of another, and offer memory; return what it was told."""
        gets, puts = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            said = []
            for work in (
                lambda: self.read(self.buffers[mine], transport),
                lambda: self.read(theirs, transport),
                lambda: RDMABuffer(bytearray(8)),
            ):
                try:
                    work()
                    said.append("it worked")
                except RDMAError as error:
                    said.append(str(error))
                except BaseException as error:  # noqa: BLE001 - told to the parent
                    said.append(f"unexpected {error!r}")
            self.buffers.clear()
            gc.collect()
            os.write(puts, pickle.dumps(said))
            os._exit(0)
        os.close(puts)
        with os.fdopen(gets, "rb") as stream:
            told = stream.read()
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), pickle.loads(told)

    def replace(self) -> None:
        """Become another program, with the same number and start time."""
        send(sys.stdout.buffer, (None, None))
        os.execv(COMMAND[0], [*COMMAND, self.kind])

    def limit(self, what: str, value: int) -> int:
        """Set a soft limit of resources, such as ``"MEMLOCK"``; return what it was."""
        number = getattr(resource, f"RLIMIT_{what}")
        soft, hard = resource.getrlimit(number)
        resource.setrlimit(number, (value, hard))
        return soft

    def descriptors(self) -> int:
        """Return how many are open."""
        return len(list(Path("/proc/self/fd").iterdir()))

    def take_descriptors(self) -> None:
        """Use up all descriptors."""
        # A transfer that takes a while imports this, which needs a descriptor.
        done: Promise[None] = Promise()
        done.set_result(None)
        done.future.add_done_callback(lambda _: None)
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        used = max(int(each.name) for each in Path("/proc/self/fd").iterdir())
        self.soft = soft
        self.limit("NOFILE", used + 2)
        with suppress(OSError):
            while True:
                self.taken.append(os.dup(0))

    def give_descriptors(self) -> None:
        """Have as many as before."""
        for each in self.taken:
            os.close(each)
        self.taken.clear()
        self.limit("NOFILE", self.soft)


def main() -> None:
    """Serve until stdin ends."""
    owner, output = Owner(GPU if GPU in sys.argv[1:2] else HOST), sys.stdout.buffer
    while True:
        try:
            name, arguments, options = receive(sys.stdin.buffer)
        except EOFError:
            return
        try:
            send(output, (None, getattr(owner, name)(*arguments, **options)))
        except Exception as error:  # noqa: BLE001 - raised again at the other end
            send(output, (f"{type(error).__name__}: {error}", None))
