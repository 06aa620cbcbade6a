"""Actors that keep a log of what reached them, in which order, and talk among each other."""

from __future__ import annotations

import random
from typing import Any

from mesh_core import Actor, Channel, Port, context, endpoint

KEPT_WORDS = 300_000
"""Above what travels between hosts in one piece."""


class Witness(Actor):
    """Writes down every message: who sent it, and that sender's number for it."""

    def __init__(self) -> None:
        self.seen: dict[str, list[int]] = {}

    @endpoint
    async def add(self, sender: str, number: int, data: bytes = b"") -> tuple[int, int]:
        """Note a message; its number, and how many bytes came with it."""
        self.seen.setdefault(sender, []).append(number)
        return number, len(data)

    @endpoint
    async def length(self, data: Any) -> int:
        """How many bytes came."""
        return len(data)

    @endpoint
    async def zeros(self, size: int) -> bytes:
        """So many bytes."""
        return b"\0" * size

    @endpoint
    async def stream(self, port: Port[int], first: int, count: int) -> None:
        """Send so many numbers to a port."""
        for number in range(first, first + count):
            port.send(number)

    @endpoint
    async def log(self) -> dict[str, list[int]]:
        """What was seen, sender by sender."""
        return self.seen


class Talker(Actor):
    """Calls, tells and streams among the witnesses of all hosts."""

    def __init__(self, witnesses: Any, seed: int) -> None:
        self.rank = context().actor_instance.rank.rank
        self.name = f"talker{self.rank}"
        self.witnesses = witnesses
        self.dice = random.Random(f"{seed}/{self.rank}")
        self.number = 0

    @endpoint
    async def talk(self, rounds: int, first: int) -> tuple[str, dict[int, list[int]], list[str]]:
        """Send so many messages to the witnesses of hosts from `first` on.

        Returns what each of them should have seen, and what went wrong.
        """
        wrong: list[str] = []
        ranks = range(first, len(self.witnesses))
        sent: dict[int, list[int]] = {rank: [] for rank in ranks}
        for _ in range(rounds):
            self.number += 1
            number = self.number
            to = self.dice.choice(ranks)
            kind = self.dice.choice(["call", "call", "tell", "all", "port"])
            peer = self.witnesses.slice(hosts=to)
            if kind == "call":
                sent[to].append(number)
                data = b"\0" * (KEPT_WORDS if self.dice.random() < 0.05 else 0)
                answer = await peer.add.call_one(self.name, number, data)
                if answer != (number, len(data)):
                    wrong.append(f"{self.name}: {number} to {to} answered {answer}")
            elif kind == "tell":
                sent[to].append(number)
                peer.add.broadcast(self.name, number)
            elif kind == "all":
                for rank in ranks:
                    sent[rank].append(number)
                part = self.witnesses.slice(hosts=slice(first, None))
                answers = list((await part.add.call(self.name, number)).values())
                if answers != [(number, 0)] * len(ranks):
                    wrong.append(f"{self.name}: {number} to all answered {answers}")
            else:
                port, receiver = Channel[int].open()
                peer.stream.broadcast(port, number, 10)
                with receiver:
                    came = [await receiver.recv() for _ in range(10)]
                if came != list(range(number, number + 10)):
                    wrong.append(f"{self.name}: the port gave {came} for {number}")
        return self.name, sent, wrong
