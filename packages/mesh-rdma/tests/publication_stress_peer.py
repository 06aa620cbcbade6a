"""A process of the stress test: publishes versions that can be told by their checksums, or reads them in all ways there are."""

import pickle
import random
import re
import struct
import sys
import time
import zlib
from typing import Any

import numpy as np

from mesh_rdma import (
    InvalidTransfer,
    Publication,
    PublicationGone,
    PublicationReader,
    RDMATimeout,
    VersionUnavailable,
)

SIZES = (5000, 7, 300)
LOOKS = 10
"""How often a version that is held is looked at."""


def fill(state: dict[str, np.ndarray], version: int) -> None:
    """Make the tensors those of a version: numbers drawn from its number, it, and the checksum of all that."""
    dice = np.random.default_rng(version)
    for n in range(len(SIZES)):
        state[f"tensor-{n}"][...] = dice.integers(0, 1 << 62, SIZES[n])
    state["version"][0] = version
    state["sum"][0] = checksum(state)


def checksum(state: Any) -> int:
    """Return the checksum of all but itself."""
    sum_of_it = zlib.crc32(state["version"])
    for n in range(len(SIZES)):
        sum_of_it = zlib.crc32(state[f"tensor-{n}"], sum_of_it)
    return sum_of_it


def blank() -> dict[str, np.ndarray]:
    state = {f"tensor-{n}": np.zeros(size, np.int64) for n, size in enumerate(SIZES)}
    return {**state, "version": np.zeros(1, np.int64), "sum": np.zeros(1, np.int64)}


class Peer:
    """What the test can ask for. Each method's result, or exception, is the answer."""

    def __init__(self) -> None:
        self.state = blank()
        self.target = blank()
        self.last = 0
        self.dice = random.Random(1)
        self.reader: PublicationReader | None = None

    def own(self, known_as: str, versions: int) -> PublicationReader:
        """Be the owner, of the first life or a later one."""
        self.publication = Publication(self.state, name=known_as, versions=versions, start=1)
        return self.publication.reader()

    def publish(self, count: int, seconds: float = 0.0) -> int:
        """Publish so often, spread over about so many seconds; returns the last number."""
        for _ in range(count):
            if seconds:
                time.sleep(self.dice.random() * 2 * seconds / count)
            while True:
                fill(self.state, self.last + 1)
                try:
                    self.last = self.publication.publish(version=self.last + 1)
                    break
                except InvalidTransfer as error:
                    # A reader has seen more of an earlier life, and said so.
                    known = re.search("greater than ([0-9]+), the last one", str(error))
                    if known is None:
                        raise
                    self.last = int(known[1])
        return self.last

    def failures(self) -> list[Any]:
        return self.publication.failures

    def follow(self, reader: PublicationReader) -> None:
        """Be a reader."""
        self.reader = reader

    def greet(self) -> None:
        """Tell the owner what was seen."""
        assert self.reader is not None
        try:
            self.reader.use(wait=False).release()
        except VersionUnavailable:
            pass

    def read(self, count: int, seed: int, waits: int = 1) -> tuple[int, list[str]]:
        """Read so often, unless the owner ends; returns how often all bytes were looked at, and what was wrong.

        Reads that may wait for a version are one in ``waits`` of the others.
        """
        dice, done, wrong = random.Random(seed), 0, []
        for _ in range(count):
            way = dice.choices(("use", "load", "hold", "exact", "next"), (waits, waits, waits, 1, 1))[0]
            try:
                number, found = self.once(way, dice)
            except (VersionUnavailable, RDMATimeout):
                continue
            except PublicationGone:
                # Killed: the test makes another one before it asks again.
                break
            done += LOOKS if way == "hold" else 1
            if found != (number, True):
                wrong.append(f"torn or mislabelled: version {number} is {found}, by {way}")
            if way != "exact" and number < self.last:
                wrong.append(f"went back: from {self.last} to {number}, by {way}")
            self.last = max(self.last, number)
        return done, wrong

    def once(self, way: str, dice: random.Random) -> tuple[int, tuple[int, bool]]:
        """Return a version's number, the one that is in it, and whether its checksum is right."""
        assert self.reader is not None
        if way == "load":
            number = self.reader.load_into(self.target, timeout=60)
            return number, seen(self.target)
        options = {
            "use": {},
            "hold": {},
            "exact": {"version": self.last + dice.randint(-1, 2), "timeout": 0.01},
            "next": {"min_version": self.last + 1, "timeout": 0.05},
        }[way]
        with self.reader.use(**options) as weights:
            found = seen(weights)
            arrays, number = dict(weights), weights.version
        # The arrays keep the version, beyond the block.
        for _ in range(LOOKS - 1 if way == "hold" else 0):
            if seen(arrays) != found:
                return number, (-1, False)
        return number, found


def seen(state: Any) -> tuple[int, bool]:
    return int(state["version"][0]), int(state["sum"][0]) == checksum(state)


def main() -> None:
    peer = Peer()
    while head := sys.stdin.buffer.read(8):
        name, arguments, options = pickle.loads(sys.stdin.buffer.read(struct.unpack("=Q", head)[0]))
        try:
            result = getattr(peer, name)(*arguments, **options)
        except Exception as error:
            result = error
        data = pickle.dumps(result)
        sys.stdout.buffer.write(struct.pack("=Q", len(data)) + data)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
