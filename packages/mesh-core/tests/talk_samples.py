"""Actors that talk much to each other, for tests of direct links."""

from __future__ import annotations

import contextlib
import os
import random
import time
from pathlib import Path
from typing import Any

from core_owners import write_down

from mesh_core import Actor, ProcMesh, SupervisionError, endpoint

SOON = 60.0
MUCH = 100
"""More messages than it takes to get a direct link."""


class Place(Actor):
    """Keeps a number."""

    def __init__(self) -> None:
        self.number = 0
        self.checked = 0
        self.wrong: list[tuple[int, int]] = []

    @endpoint
    def set(self, number: int, data: Any = None) -> None:
        self.number = number

    @endpoint
    def check(self, number: int) -> None:
        self.checked = number
        if self.number < number:
            self.wrong.append((number, self.number))

    @endpoint
    def report(self) -> tuple[int, list[tuple[int, int]]]:
        return self.checked, self.wrong

    @endpoint
    def get(self) -> int:
        return self.number

    @endpoint
    def echo(self, value: Any) -> Any:
        return value


class Friend(Actor):
    """Talks much to others."""

    @endpoint
    def talk(self, others: list[Any], times: int = MUCH) -> bool:
        """Call them in turn; return whether all answers were right."""
        return all(other.echo.call_one(n).get(timeout=SOON) == n for n in range(times) for other in others)

    @endpoint
    async def chat(self, others: list[Any], times: int = MUCH) -> bool:
        return all([await other.echo.call_one(n) == n for n in range(times) for other in others])

    @endpoint
    def wait_and_talk(self, other: Any, folder: str) -> None:
        for n in range(MUCH):
            other.echo.call_one(n).get(timeout=SOON)
        write_down(f"{folder}/ready", "")
        wait_for(lambda: Path(folder, "go").exists())
        right = all(other.echo.call_one(n).get(timeout=SOON) == n for n in range(MUCH))
        write_down(f"{folder}/done", str(right))

    @endpoint
    def tell(self, other: Any, number: int) -> None:
        for _ in range(3):
            other.set.broadcast(number)

    @endpoint
    def have_told(self, friend: Any, other: Any, number: int) -> None:
        friend.tell.call_one(other, number).get(timeout=SOON)

    @endpoint
    def tell_to_write(self, writer: Any, times: int) -> None:
        for _ in range(times):
            writer.hello.broadcast()

    @endpoint
    def ask(self, other: Any) -> int:
        number: int = other.get.call_one().get(timeout=SOON)
        return number

    @endpoint
    def tell_all(self, others: Any, one: Any, times: int) -> list[int]:
        """Casts and single messages in turn: what one of the receivers has after each."""
        seen = []
        for number in range(times):
            if number % 2:
                others.set.broadcast(number)
            else:
                one.set.broadcast(number)
            seen.append(one.get.call_one().get(timeout=SOON))
        return seen

    @endpoint
    def set_and_have_checked(self, other: Any, friend: Any, path: str) -> int:
        """Set a number there and have a friend check it, until there is a file; return how many there were."""
        number = 0
        while not Path(path).exists():
            number += 1
            other.set.broadcast(number, bytes(50_000))
            friend.have_checked.broadcast(other, number)
        return number

    @endpoint
    def have_checked(self, other: Any, number: int) -> None:
        other.check.broadcast(number)

    @endpoint
    def spawn_at(self, procs: ProcMesh, other: Any, log: str) -> None:
        for n in range(MUCH):
            other.echo.call_one(n).get(timeout=SOON)
        self.mine = procs.spawn("mine", Mortal, log)
        self.mine.hello.call_one().get(timeout=SOON)

    @endpoint
    def talk_until_it_ends(self, other: Any, folder: str) -> str:
        for n in range(MUCH):
            other.echo.call_one(n).get(timeout=SOON)
        write_down(f"{folder}/ready", "")
        try:
            while True:
                other.echo.call_one(0).get(timeout=SOON)
        except SupervisionError as error:
            return str(error)


class Mortal(Actor):
    """Notes that it lives, and that it ends."""

    def __init__(self, log: str) -> None:
        self.log = log

    @endpoint
    def hello(self) -> None:
        write_down(self.log, "lives")

    def __cleanup__(self, error: Exception | None) -> None:
        write_down(self.log, "ended")


def wait_for(what: Any) -> None:
    until = time.monotonic() + SOON
    while not what():
        assert time.monotonic() < until, "it does not come about"
        time.sleep(0.005)


class Counter(Actor):
    """Notes what each sender says, which must be whole numbers in turn."""

    def __init__(self) -> None:
        self.heard: dict[int, int] = {}
        self.wrong: list[str] = []

    @endpoint
    def note(self, sender: int, number: int, data: Any = None) -> int:
        last = self.heard.get(sender)
        if last is not None and number != last + 1:
            self.wrong.append(f"{number} of {sender} after {last}")
        self.heard[sender] = number
        return number

    @endpoint
    def report(self) -> tuple[dict[int, int], list[str]]:
        return self.heard, self.wrong


class Teller(Actor):
    """Says numbers to all counters, by casts, calls and single messages, for a while; some of them may die."""

    @endpoint
    def run(self, counters: Any, each: list[Any], seed: int, limit: float) -> int:
        dice = random.Random(seed)
        sender, number = os.getpid(), 0
        until = time.monotonic() + limit
        while time.monotonic() < until:
            data = bytes(dice.choice((0, 0, 0, 70_000)))
            kind = dice.randrange(3)
            if kind == 0:
                counters.note.broadcast(sender, number, data)
            elif kind == 1:
                for one in each:
                    one.note.broadcast(sender, number, data)
            else:
                self.ask(each, sender, number, data)
            number += 1
        self.ask(each, sender, number, b"")
        return number

    def ask(self, each: list[Any], sender: int, number: int, data: bytes) -> None:
        for call in [one.note.call_one(sender, number, data) for one in each]:
            with contextlib.suppress(SupervisionError):
                assert call.get(timeout=SOON) == number
