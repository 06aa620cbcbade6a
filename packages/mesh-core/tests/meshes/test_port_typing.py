"""Types of ports, of endpoints that answer through one, and of combined replies, as an editor sees them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from core_typing import mypy

pytest.importorskip("mypy", reason="mypy is not installed")

pytestmark = [pytest.mark.slow]


SOURCE = """
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from mesh_core import Accumulator, Actor, Channel, Port, ProcMesh, as_endpoint, endpoint, send

class Feeder(Actor):
    @endpoint(explicit_response_port=True)
    def feed(self, port: Port[int], count: int) -> None: ...
    @endpoint(explicit_response_port=True)
    async def feed_async(self, port: Port[str], *, name: str = "") -> None: ...
    @endpoint
    def loss(self, x: int) -> float: return 1.0
    @endpoint
    def lines(self, path: str) -> Iterator[bytes]: yield b""
    @endpoint
    async def tokens(self) -> AsyncIterator[str]: yield ""
    @endpoint(concurrent=True)
    async def more(self) -> AsyncGenerator[int, None]: yield 1
    def plain(self, n: int) -> str: return ""
    async def plain_async(self, n: int) -> bytes: return b""

def main(procs: ProcMesh, feeders: Feeder) -> None:
"""


def test_what_an_editor_completes(tmp_path: Path) -> None:
    lines = {
        "feeders.feed.call_one(3).get()": "int",
        "feeders.feed_async.call_one(name='x').get()": "str",
        "[future.get() for future in feeders.feed.stream(2)]": "list[int]",
        "[future.get() for future in feeders.lines.stream('x')]": "list[bytes]",
        "[future.get() for future in feeders.tokens.stream()]": "list[str]",
        "[future.get() for future in feeders.more.stream()]": "list[int]",
        "feeders.loss.with_options(reduce='sum').call(1).get()": "float",
        "feeders.loss.with_options(timeout=1).call(1).get().values()": "list[float]",
        "as_endpoint(feeders.plain).call_one(1).get()": "str",
        "as_endpoint(feeders.plain_async).call(1).get().values()": "list[bytes]",
        "Accumulator(feeders.loss, 0, lambda n, loss: n + 1).accumulate(1).get()": "int",
        "Channel[int].open()": "tuple[Port[int], PortReceiver[int]]",
        "Channel[int].open()[1].recv().get()": "int",
        "Channel[int].open_ranked()[1].recv().get()": "tuple[Point | None, int]",
        "[value for value in Channel[str].open()[1]]": "list[str]",
    }
    wrong = [
        "feeders.feed.call_one()",
        "feeders.feed.call_one('x')",
        "Channel[int].open()[0].send('x')",
        "feeders.loss.with_options(reduce='summ')",
    ]
    path = tmp_path / "program.py"
    body = [f"    reveal_type({line})" for line in lines] + [f"    {line}" for line in wrong]
    path.write_text(SOURCE + "\n".join(body) + "\n")
    out = "\n".join(mypy(path))
    told = re.findall(r'Revealed type is "(.*)"', out)
    told = [re.sub(r"\b(builtins|mesh_core(?:\._?[a-z]\w*)+|_native)\.", "", line) for line in told]
    assert told == list(lines.values())
    codes = re.findall(r"program\.py:\d+: error: .*\[([\w-]+)\]", out)
    assert codes == ["call-arg", "arg-type", "arg-type", "call-overload"], out
