"""A call that is given up the moment it is made never occupies its actor, wherever the cancellation meets it."""

import asyncio
from typing import Any

import pytest

from mesh_core import Actor, endpoint, this_host

pytestmark = pytest.mark.python


def mixed_class() -> type[Any]:
    class Mixed(Actor):
        """Its sync endpoint gives it a thread, which hands coroutines to the loop: there is a gap to fall into."""

        @endpoint
        async def hang(self) -> None:
            await asyncio.sleep(3600)

        @endpoint
        def ping(self) -> str:
            return "pong"

    return Mixed


def test_cancel_at_once_many_times(runtime: None) -> None:
    with this_host().spawn_procs({"gpus": 2}) as procs:
        mixed: Any = procs.spawn("mixed", mixed_class())
        mixed.ping.call().get(timeout=30)
        for _ in range(300):
            assert mixed.hang.call().cancel()
            assert mixed.ping.call().get(timeout=10).values() == ["pong", "pong"]
