"""Memory that the processes of a group share if all of them are on one machine: large collectives go through it.

Through a socket each byte is copied into the kernel and out again, several times for each byte of the result. Here a process writes the part of
its tensor that others need to its own window, reads what it needs from theirs, and all wait for each other in between. They do so with a barrier of the
group, which raises if one of them dies.

WIN-1: a process writes to its window only when no other one still reads its previous content. A window has two halves, used in turn: a process that passes the
barrier of one half has finished with the other one.

A window is anonymous memory, which ends with the processes that map it, however they end.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
from torch._C._distributed_c10d import AllgatherOptions
from torch.distributed import AllreduceOptions, BarrierOptions, ReduceOp

Do = Callable[..., None]
"""Calls PyTorch's group and waits."""

LEAST = 1 << 20
"""Bytes: smaller tensors take longer here, because all processes wait for each other twice."""
HALF = 8 << 20
"""Bytes that go through a window at once."""

_JOINS: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}
_WHOLE = frozenset({torch.int8, torch.uint8, torch.int32, torch.int64})
_REAL = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


def is_for(tensor: torch.Tensor, op: str = "sum") -> bool:
    """Return whether a tensor goes through windows: if it is large, and of a type that gloo accepts; gloo itself refuses the others."""
    kinds = _WHOLE if op.startswith("b") else _WHOLE | _REAL
    return tensor.nbytes >= LEAST and tensor.dtype in kinds


class Window:
    """This process's window, and those of the others in its group.

    It does not refer to the group, whose connections close as soon as nothing does.
    """

    def __init__(self, rank: int, memories: list[torch.Tensor]) -> None:
        self._rank = rank
        self._memories = memories
        """By rank, the bytes of two halves."""
        self._turn = 0

    def reduce(self, do: Do, given: torch.Tensor, result: torch.Tensor, op: str) -> None:
        """Combine `given` of all processes into `result`. Both are contiguous and of the same form; they may be the same tensor."""
        size = len(self._memories)
        given, result = given.view(-1), result.view(-1)
        length = given.numel() // size
        rows, results = given[: size * length].view(size, length), result[: size * length].view(size, length)
        rest = given[size * length :]
        for begin, end in self._pieces(length, given.dtype, size):
            shared = self._reduced(do, rows, results[self._rank], begin, end, op)
            _wait(do)
            for rank, each in enumerate(shared):
                if rank != self._rank:
                    results[rank, begin:end].copy_(each[rank])
        if rest.numel():
            options = AllreduceOptions()
            options.reduceOp = getattr(ReduceOp, "SUM" if op == "avg" else op.upper())
            rest = rest.clone()
            do("allreduce", [rest], options)
            result[size * length :] = rest

    def reduce_scatter(self, do: Do, given: torch.Tensor, result: torch.Tensor, op: str) -> None:
        """Write to `result` this process's part, along the first dimension, of `given` of all processes combined. Both are contiguous."""
        size = len(self._memories)
        rows, result = given.view(size, -1), result.view(-1)
        for begin, end in self._pieces(result.numel(), given.dtype, size):
            self._reduced(do, rows, result, begin, end, op)

    def all_gather(self, do: Do, given: torch.Tensor, result: torch.Tensor) -> None:
        """Write to `result` the tensors of all, stacked. Both are contiguous."""
        size = len(self._memories)
        given, results = given.view(-1), result.view(size, -1)
        results[self._rank].copy_(given)
        for begin, end in self._pieces(given.numel(), given.dtype, 1):
            shared = self._half(1, end - begin, given.dtype)
            shared[self._rank][0].copy_(given[begin:end])
            _wait(do)
            for rank, each in enumerate(shared):
                if rank != self._rank:
                    results[rank, begin:end].copy_(each[0])

    def _reduced(  # noqa: PLR0917 - what both reductions know
        self, do: Do, rows: torch.Tensor, result: torch.Tensor, begin: int, end: int, op: str
    ) -> list[torch.Tensor]:
        """Reduce these columns of this process's row, also into its window; returns the windows, by rank."""
        shared = self._half(len(rows), end - begin, rows.dtype)
        mine = self._rank
        for rank, row in enumerate(rows):
            if rank != mine:
                shared[mine][rank].copy_(row[begin:end])
        _wait(do)
        # In the order of ranks, always.
        first, *others = [
            rows[mine, begin:end] if rank == mine else each[mine] for rank, each in enumerate(shared)
        ]
        total, join = shared[mine][mine], _JOINS[op]
        for each in others:
            first = join(first, each, out=total)
        result[begin:end].copy_(total)
        return shared

    @staticmethod
    def _pieces(length: int, dtype: torch.dtype, parts: int) -> list[tuple[int, int]]:
        """Return beginnings and ends of as many columns as fit into a half, of so many parts."""
        step = max(HALF // (parts * dtype.itemsize), 1)
        return [(begin, min(begin + step, length)) for begin in range(0, length, step)]

    def _half(self, parts: int, length: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """Return the next halves, as parts of so many numbers."""
        begin = HALF * self._turn
        self._turn = 1 - self._turn
        end = begin + parts * length * dtype.itemsize
        return [each[begin:end].view(dtype).view(parts, length) for each in self._memories]


def _wait(do: Do) -> None:
    do("barrier", BarrierOptions())


def opened(do: Do, rank: int, size: int) -> Window | None:
    """Return the windows of a group, in which all call this; ``None`` for all of them if some cannot see each other's memory."""
    fd, told = _made()
    try:
        mine = torch.tensor(told)
        parts = [torch.empty_like(mine) for _ in range(size)]
        do("allgather", [parts], [mine], AllgatherOptions())
        memories: list[torch.Tensor] = []
        with suppress(OSError, RuntimeError):
            memories.extend(_mapped(*each.tolist()) for each in parts)
        see = torch.tensor([int(len(memories) == size)])
        options = AllreduceOptions()
        options.reduceOp = ReduceOp.MIN
        do("allreduce", [see], options)
    finally:
        if fd is not None:
            os.close(fd)
    return Window(rank, memories) if see.item() else None


def _made() -> tuple[int | None, list[int]]:
    """Make a window; returns what the others need to find it."""
    secret = secrets.randbits(62)
    fd = None
    try:
        fd = os.memfd_create(_name(secret), os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, 2 * HALF)
        # Memory that shrinks would kill its readers.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        return fd, [_machine(), os.getpid(), fd, secret]
    except (AttributeError, OSError):
        # Another system, or one that does not allow it.
        if fd is not None:
            os.close(fd)
        return None, [0, 0, 0, 0]


def _mapped(machine: int, pid: int, fd: int, secret: int) -> torch.Tensor:
    """Return the bytes of a process's window."""
    path = f"/proc/{pid}/fd/{fd}"
    # In another namespace that number may belong to another process.
    if not machine or machine != _machine() or _name(secret) not in str(Path(path).readlink()):
        raise OSError(f"{path} is not the window")
    # Unlike Python's `mmap`, it keeps no file open.
    return torch.from_file(path, shared=True, size=2 * HALF, dtype=torch.uint8)


def _name(secret: int) -> str:
    return f"mesh-tensor-{secret:x}"


def _machine() -> int:
    """Return a number of this boot of the machine."""
    return int(Path("/proc/sys/kernel/random/boot_id").read_text().replace("-", ""), 16) >> 66
