"""Actors whose state is kept."""

from __future__ import annotations

import os
from typing import Any

from mesh_core import Actor, endpoint
from mesh_supervision import snapshot


class Counter(Actor):
    """Counts; its snapshot is the count and a large block that has to be of one piece."""

    def __init__(self, size: int = 0) -> None:
        self.count = 0
        self.size = size
        self.lives = ["constructed"]
        self.obstacle = ""

    def __snapshot__(self) -> Any:
        if self.obstacle == "snapshot":
            raise RuntimeError("not now")
        block = bytearray(self.count.to_bytes(8, "little") * self.size)
        return self.count, self.size, self.lives, block, self.obstacle

    def __restore__(self, state: Any) -> None:
        self.count, self.size, lives, block, self.obstacle = state
        assert bytes(block) == self.count.to_bytes(8, "little") * self.size, "torn"
        block[:1] = b"x"  # it can be changed
        if self.obstacle == "restore":
            raise RuntimeError("cannot go back")
        self.lives = [*lives, "restored"]

    @endpoint
    def add(self, n: int) -> int:
        self.count += n
        return self.count

    @endpoint
    def add_and_keep(self, n: int) -> tuple[int, int]:
        self.count += n
        return self.count, snapshot().get(timeout=30).number

    @endpoint
    def flood(self) -> None:
        """Count and keep until it is killed."""
        while True:
            self.count += 1
            snapshot().get(timeout=30)

    @endpoint
    def tell(self) -> tuple[int, list[str]]:
        return self.count, self.lives

    @endpoint
    def object_to(self, what: str) -> None:
        self.obstacle = what

    @endpoint
    def leave(self) -> None:
        os._exit(3)


class Later(Actor):
    """The same, in coroutines."""

    def __init__(self) -> None:
        self.count = 0

    def __snapshot__(self) -> int:
        return self.count

    def __restore__(self, state: int) -> None:
        self.count = state

    @endpoint
    async def add(self, n: int) -> int:
        self.count += n
        return self.count


class Half(Actor):
    """Could not be restored."""

    def __snapshot__(self) -> int:
        return 1


class Never(Actor):
    """Its snapshot is a coroutine."""

    async def __snapshot__(self) -> int:
        return 1

    def __restore__(self, state: int) -> None: ...
