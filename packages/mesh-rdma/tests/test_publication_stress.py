"""Publishes, reads and kills at random: no version torn, none under another's number, none that goes back.

``MESH_PUBLICATION_STRESS=1000000`` does it for so many reads, and a publish for each hundred, and prints how much that was: one to
two thousand reads a second on two cores. A read looks at all bytes of a version, and their checksum; one lease may have ten.
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
READS = int(os.environ.get("MESH_PUBLICATION_STRESS", "0"))
ROUNDS, READERS = 5, 3
PATIENCE = 0.003
"""Seconds of a round for each lease of a reader: the publishes of a long run are spread over them."""


class Run:
    """A publication that is owned by one life after the other, and its readers."""

    def __init__(self, seed):
        self.dice = random.Random(seed)
        self.name = f"stress-{os.getpid()}-{seed}"
        self.versions = self.dice.randint(2, 4)
        self.last = 0
        self.victims = []
        """Who is killed in the next rounds."""
        self.killed = set()
        """The readers that were."""
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

    def round(self, publishes, reads, waits=1, seconds=0.0):
        """Publish and read all at once, and kill somebody when somebody else is done."""
        self.owner.tell("publish", publishes, seconds)
        for each in self.readers:
            each.tell("read", reads, self.dice.randrange(1 << 30), waits)
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
            self.killed.add(self.readers[victim].process.pid)
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


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(60 + READS / 50)
@pytest.mark.parametrize("seed", [7])
def test_random_kills(seed):
    run = Run(seed)
    began = time.monotonic()
    try:
        rounds = 0
        while rounds < ROUNDS or run.counts["reads"] < READS or run.counts["publishes"] < READS // 100:
            if READS:
                leases = run.dice.randint(500, 3000)
                run.round(leases * READERS // 20, leases, 30, leases * PATIENCE)
            else:
                run.round(20, 20)
            rounds += 1
        # Nothing was wrong but that some were killed.
        assert {each.pid for each in run.owner.failures()} <= run.killed
    finally:
        run.end()
    assert run.counts["reads"] > ROUNDS * 20
    assert run.counts["owners killed"] > 0 and run.counts["readers killed"] > 0
    sys.stdout.write(f"in {time.monotonic() - began:.0f} s: {run.counts}, rounds: {rounds}\n")
