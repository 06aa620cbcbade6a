"""A call that is cancelled as soon as it is made never occupies its actor, at whatever point the cancellation arrives."""

import asyncio
from typing import Any

import pytest

from mesh_core import Actor, endpoint, this_host

pytestmark = pytest.mark.python


def mixed_class() -> type[Any]:
    class Mixed(Actor):
        """Its sync endpoint gives it a thread that passes coroutines on to the loop, so a cancellation may arrive in between."""

        @endpoint
        async def hang(self) -> None:
            await asyncio.sleep(3600)

        @endpoint
        def ping(self) -> str:
            return "pong"

    return Mixed


def test_immediate_cancellation_never_occupies_the_actor(runtime: None) -> None:
    with this_host().spawn_procs({"gpus": 2}) as procs:
        mixed: Any = procs.spawn("mixed", mixed_class())
        mixed.ping.call().get(timeout=30)
        for _ in range(300):
            assert mixed.hang.call().cancel()
            assert mixed.ping.call().get(timeout=10).values() == ["pong", "pong"]
