"""Publishes, reads and kills at random: no version torn, none under another's number, none that goes back.

``MESH_PUBLICATION_STRESS=180`` does it for so many seconds, and prints how much that was.
"""

import os
import random
import sys
import time
from pathlib import Path

import pytest

from .conftest import Other

pytest.importorskip("numpy")

PEER = Path(__file__).parent / "publication_stress_peer.py"
SECONDS = float(os.environ.get("MESH_PUBLICATION_STRESS", "0"))
ROUNDS, READERS = 5, 3


class Run:
    """A publication that is owned by one life after the other, and its readers."""

    def __init__(self, seed):
        self.dice = random.Random(seed)
        self.name = f"stress-{os.getpid()}-{seed}"
        self.versions = self.dice.randint(2, 4)
        self.last = 0
        self.victims = []
        """Who is killed in the next rounds."""
        self.counts = {"publishes": 0, "reads": 0, "readers killed": 0, "owners killed": 0}
        self.owner, self.reader, self.readers = None, None, []
        self.new_owner()
        self.readers = [self.new_reader() for _ in range(READERS)]

    def new_owner(self):
        self.owner = Other(program=PEER)
        reader = self.owner.own(self.name, self.versions)
        self.reader = self.reader or reader
        for each in self.readers:
            # It learns what they have seen: below that they take nothing, and would wait.
            each.greet()
        self.publish(1)

    def publish(self, count):
        self.owner.tell("publish", count)
        self.published(count)

    def published(self, count):
        last = self.owner.hear()
        self.counts["publishes"] += count
        self.last = max(self.last, last)

    def new_reader(self):
        made = Other(program=PEER)
        made.follow(self.reader)
        return made

    def round(self, publishes, reads):
        """Publish and read all at once, and kill somebody when somebody else is done."""
        self.owner.tell("publish", publishes)
        for each in self.readers:
            each.tell("read", reads, self.dice.randrange(1 << 30))
        if not self.victims:
            self.victims = [None, "owner", *range(READERS)]
            self.dice.shuffle(self.victims)
        victim = self.victims.pop()
        first = self.dice.choice([at for at in range(READERS) if at != victim])
        self.heard(self.readers[first].hear())
        if victim == "owner":
            self.owner.kill()
            self.counts["owners killed"] += 1
        elif victim is not None:
            self.readers[victim].kill()
            self.counts["readers killed"] += 1
        for at, each in enumerate(self.readers):
            if at not in (first, victim):
                self.heard(each.hear())
        if victim == "owner":
            self.owner.end()
            self.new_owner()
            return
        # Nobody's lease is lost with a reader: all of this is published.
        self.published(publishes)
        if victim is not None:
            self.readers[victim].end()
            self.readers[victim] = self.new_reader()

    def heard(self, said):
        done, wrong = said
        assert not wrong, wrong
        self.counts["reads"] += done

    def end(self):
        for each in (self.owner, *self.readers):
            each.end()


@pytest.mark.slow
@pytest.mark.timeout(60 + 2 * SECONDS)
@pytest.mark.parametrize("seed", [7])
def test_random_kills(seed):
    run = Run(seed)
    began = time.monotonic()
    try:
        rounds = 0
        while rounds < ROUNDS or time.monotonic() - began < SECONDS:
            run.round(
                *((20, 20) if SECONDS == 0 else (run.dice.randint(20, 400), run.dice.randint(50, 2000)))
            )
            rounds += 1
        assert run.owner.failures() == []
    finally:
        run.end()
    assert run.counts["reads"] > ROUNDS * 20
    assert run.counts["owners killed"] > 0 and run.counts["readers killed"] > 0
    sys.stdout.write(f"in {time.monotonic() - began:.0f} s: {run.counts}, rounds: {rounds}\n")
