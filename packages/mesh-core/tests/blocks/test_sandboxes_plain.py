"""Answers of sandboxes: plain data, whose reading is limited whatever was sent (PLN-1)."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
from core_sandboxes import SOON, tidily

from mesh_core import SandboxError, SandboxTimeout
from mesh_core._blocks.sandboxes import plain

P = sys.hash_info.modulus
"""All multiples of it have the hash 0."""


def sized(code: bytes, size: int, data: bytes = b"") -> bytes:
    return code + size.to_bytes(8, "big") + data


def numbers(count: int, value: bytes = b"") -> bytes:
    """Different numbers that have the same hash, each followed by a value."""
    return b"".join(sized(b"i", 16, (each * P).to_bytes(16, "big")) + value for each in range(count))


@pytest.mark.parametrize(
    "value",
    [
        [None, True, False, 0, -1, 1 << 100, 2.5, 1j, "text", "\udc80", b"bytes", bytearray(b"array")],
        {"a": [1, (2.5, None)], b"b": {True}, (1, 2): frozenset({3})},
        {float(1 << each) for each in range(1000)},
        {each: str(each) for each in range(5000)},
    ],
)
def test_plain_data_is_the_same_afterwards(value: object) -> None:
    again = plain.decode(plain.encode(value))
    assert again == value
    assert type(again) is type(value)


def test_the_number_of_values_is_limited_at_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain, "MOST_VALUES", 100)
    most: list[Any] = [[{1: 2}, None]] * 19 + [None] * 4
    assert plain.decode(plain.encode(most)) == most
    with pytest.raises(plain.NotPlain, match="more than 100 values"):
        plain.encode([*most, None])
    for code in b"lte":
        with pytest.raises(plain.Garbage, match="more than 100 values"):
            plain.decode(sized(bytes([code]), 100, b"n" * 100))
    with pytest.raises(plain.Garbage, match="more than 100 values"):
        plain.decode(sized(b"d", 50, b"n" * 100))


@pytest.mark.parametrize("kind", ["set", "frozenset", "dict"])
def test_members_of_the_same_hash_are_limited_at_both_ends(kind: str) -> None:
    make: Callable[[int], Any] = {
        "set": lambda count: {each * P for each in range(count)},
        "frozenset": lambda count: frozenset(each * P for each in range(count)),
        "dict": lambda count: {each * P: None for each in range(count)},
    }[kind]
    code, value = {"set": (b"e", b""), "frozenset": (b"z", b""), "dict": (b"d", b"n")}[kind]
    most = make(plain.MOST_ALIKE)
    assert plain.decode(plain.encode(most)) == most
    with pytest.raises(plain.NotPlain, match="65 members or keys of the same hash"):
        plain.encode([make(plain.MOST_ALIKE + 1)])
    with pytest.raises(plain.Garbage, match="more than 64 members of the same hash"):
        plain.decode(sized(code, plain.MOST_ALIKE + 1, numbers(plain.MOST_ALIKE + 1, value)))


def test_equal_members_are_limited() -> None:
    with pytest.raises(plain.Garbage, match="of the same hash"):
        plain.decode(sized(b"e", 65, b"n" * 65))


def test_halves_of_surrogate_pairs_count_as_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each costs as much to read."""
    monkeypatch.setattr(plain, "MOST_VALUES", 100)
    assert plain.decode(plain.encode("\udc80" * 99)) == "\udc80" * 99
    with pytest.raises(plain.NotPlain):
        plain.encode("\udc80" * 100)
    with pytest.raises(plain.Garbage):
        plain.decode(sized(b"s", 300, "\udc80".encode("utf-8", "surrogatepass") * 100))
    assert plain.decode(plain.encode("x" * 1000)) == "x" * 1000


@pytest.mark.parametrize("data", [sized(b"l", 5000, b"n" * 5000), plain.encode(set(range(5000)))])
def test_reading_can_be_stopped(data: bytes) -> None:
    looks = []

    def look() -> None:
        looks.append(1)
        if len(looks) == 3:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        plain.decode(data, look)


def test_exceptions_that_are_too_large_come_without_their_arguments() -> None:
    with tidily("plain") as boxes, boxes.take(SOON) as box:
        source = f"raise ValueError([None] * {plain.MOST_VALUES - 10})"
        with pytest.raises(SandboxError, match="raised ValueError"):
            box.call(exec, source, timeout=SOON)
        assert box.call(len, "abc") == 3


def test_reading_an_answer_is_a_part_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its timeout ends it, and so does a cancellation."""
    reading = threading.Event()

    def endless(_data: bytes, look: Callable[[], None]) -> Any:
        reading.set()
        while True:
            look()

    async def cancelled() -> None:
        async with boxes.take_async(SOON) as box:
            call = asyncio.ensure_future(box.call_async(len, "abc"))
            await asyncio.to_thread(reading.wait, SOON)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call

    with tidily("plain") as boxes:
        with boxes.take(SOON) as box:
            assert box.call(len, "abc") == 3
            with monkeypatch.context() as patch:
                patch.setattr(plain, "decode", endless)
                with pytest.raises(SandboxTimeout):
                    box.call(len, "abc", timeout=0.3)
        reading.clear()
        monkeypatch.setattr(plain, "decode", endless)
        asyncio.run(cancelled())
