"""Actors that note in which order they hear, and such as send by all adverbs, for tests of order."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from mesh_core import Actor, Channel, MailboxFull, as_endpoint, context, endpoint, send

LARGE = bytes(70_000)
SOON = 60.0


class _Notes:
    """What one listener has heard: whatever a sender says carries a number, which only rises."""

    def __init__(self) -> None:
        self.last: dict[Any, int] = {}
        self.heard = 0
        self.wrong: list[str] = []

    def take(self, sender: Any, number: int) -> int:
        self.heard += 1
        last = self.last.get(sender, -1)
        if number <= last:
            self.wrong.append(f"{number} of {sender} came after {last} at {context().actor_instance.rank}")
        self.last[sender] = number
        return number


class Listener(Actor):
    """Notes what it hears, on its own thread."""

    def __init__(self) -> None:
        self.notes = _Notes()

    @endpoint
    def note(self, sender: Any, number: int, data: Any = None) -> int:
        return self.notes.take(sender, number)

    @endpoint(explicit_response_port=True)
    def note_by_port(self, port: Any, sender: Any, number: int, data: Any = None) -> None:
        port.send(self.notes.take(sender, number))

    def plain(self, sender: Any, number: int, data: Any = None) -> int:
        return self.notes.take(sender, number)

    @endpoint
    def report(self) -> tuple[int, list[str]]:
        return self.notes.heard, self.notes.wrong


class AsyncListener(Actor):
    """The same on the event loop of its process."""

    def __init__(self) -> None:
        self.notes = _Notes()

    @endpoint
    async def note(self, sender: Any, number: int, data: Any = None) -> int:
        taken = self.notes.take(sender, number)
        await asyncio.sleep(0)
        return taken

    @endpoint(explicit_response_port=True)
    async def note_by_port(self, port: Any, sender: Any, number: int, data: Any = None) -> None:
        port.send(self.notes.take(sender, number))

    def plain(self, sender: Any, number: int, data: Any = None) -> int:
        return self.notes.take(sender, number)

    @endpoint
    async def report(self) -> tuple[int, list[str]]:
        return self.notes.heard, self.notes.wrong


def part_of(mesh: Any, dice: random.Random) -> Any:
    """Some of a mesh: all, one, or a slice."""
    picked: dict[str, Any] = {}
    for label, size in mesh.sizes.items():
        kind = dice.randrange(3)
        if kind == 0:
            picked[label] = dice.randrange(size)
        elif kind == 1:
            first = dice.randrange(size)
            picked[label] = slice(first, dice.randrange(first, size) + 1)
    return mesh.slice(**picked) if picked else mesh


class Talk:
    """One sender's messages, at random; knows how many it has sent, and what must come back."""

    def __init__(self, sender: Any, seed: int) -> None:
        self.sender = sender
        self.dice = random.Random(f"{seed} {sender}")
        self.number = 0
        self.sent = 0
        self.due: list[Any] = []
        self.port, self.receiver = Channel.open()

    def say(self, listeners: Any) -> None:
        """Send one message, by any adverb, to some of the listeners."""
        said = (self.sender, self.number, LARGE if self.dice.random() < 0.05 else None)
        by_adverb = [self._to_many, self._to_many, self._to_one, self._by_port]
        try:
            self.sent += self.dice.choice(by_adverb)(part_of(listeners, self.dice), said)
        except MailboxFull:
            return  # a coroutine does not wait for a listener of its own process
        self.number += 1

    def _to_many(self, part: Any, said: tuple[Any, ...]) -> int:
        match self.dice.randrange(6):
            case 0 | 1:
                part.note.broadcast(*said)
            case 2:
                self.due.append(part.note.call(*said))
            case 3:
                self.due.append(part.note.with_options(timeout=SOON).call(*said))
            case 4:
                self.due.extend(part.note.stream(*said))
            case 5:
                self.due.append(part.note.with_options(reduce="sum").call(*said))
        return len(part)

    def _to_one(self, part: Any, said: tuple[Any, ...]) -> int:
        if self.dice.random() < 0.3:
            self.due.append(part.note.choose(*said))
            return 1
        while len(part) > 1:
            part = part_of(part, self.dice)
        if self.dice.random() < 0.5:
            self.due.append(part.note.call_one(*said))
        else:
            as_endpoint(part.plain).broadcast(*said)
        return 1

    def _by_port(self, part: Any, said: tuple[Any, ...]) -> int:
        if self.dice.random() < 0.5:
            send(part.note, said, port=self.port)
        else:
            self.due.append(part.note_by_port.call(*said))
        return len(part)

    def hush(self, listeners: Any) -> None:
        """Say one thing more to all."""
        listeners.note.broadcast(self.sender, self.number)
        self.sent += len(listeners)


class Speaker(Actor):
    """Speaks to listeners, those of its own process among them."""

    @endpoint
    def speak(self, listeners: list[Any], seed: int, rounds: int) -> int:
        talk = Talk(("sync", *context().actor_instance.rank.values()), seed)
        for _ in range(rounds):
            talk.say(talk.dice.choice(listeners))
        for each in listeners:
            talk.hush(each)
        for future in talk.due:
            future.get(timeout=SOON)
        return talk.sent

    @endpoint
    def spawn_and_use(self, procs: Any, cls: Any, rounds: int, mine: dict[str, int]) -> list[Any]:
        """Spawn, speak, and stop, without ever waiting; say what became of it."""
        ends = []
        for number in range(rounds):
            listeners = procs.spawn("late", cls)
            first = listeners.slice(**mine).note.call_one("it", 0)
            listeners.note.broadcast("it", 1)
            second = listeners.slice(**mine).note.call_one("it", 2)
            last = listeners.note.call("it", 3)
            report = listeners.report.call()
            one = number % 2 == 0
            stopped = (listeners.slice(**mine) if one else listeners).stop()
            ends.append((first, second, last, report, stopped))
            if one:
                listeners.stop()
        return [
            (
                first.get(timeout=SOON),
                second.get(timeout=SOON),
                set(last.get(timeout=SOON).values()),
                sorted(set(map(str, report.get(timeout=SOON).values()))),
                stopped.get(timeout=SOON) and None,
            )
            for first, second, last, report, stopped in ends
        ]


class AsyncSpeaker(Actor):
    """The same, from the event loop of its process."""

    @endpoint
    async def speak(self, listeners: list[Any], seed: int, rounds: int) -> int:
        talk = Talk(("async", *context().actor_instance.rank.values()), seed)
        for _ in range(rounds):
            talk.say(talk.dice.choice(listeners))
            if talk.dice.random() < 0.1:
                await asyncio.sleep(0)
        for each in listeners:
            talk.hush(each)
        for future in talk.due:
            await future
        return talk.sent
