"""broadcast over several hosts."""

import hashlib
import random

import pytest

from mesh_core import Actor, endpoint
from mesh_core.testing import LocalCluster
from mesh_rdma import RDMABuffer, broadcast, gather


class Rank(Actor):
    """Has memory."""

    def __init__(self, size: int) -> None:
        self.memory = bytearray(size)
        self.buffer = RDMABuffer(self.memory)

    @endpoint
    def offer(self) -> RDMABuffer:
        return self.buffer

    @endpoint
    def look(self) -> str:
        return hashlib.sha256(self.memory).hexdigest()


@pytest.mark.full
@pytest.mark.slow
def test_sixteen_ranks_on_two_hosts_get_and_give_the_bytes():
    data = random.Random(16).randbytes(9_000_001)
    with LocalCluster(hosts=2) as cluster:
        ranks = cluster.attach().spawn_procs({"ranks": 8}).spawn("ranks", Rank, len(data))
        into = ranks.offer.call().get(timeout=60)
        broadcast(data, ranks, into, transport="tcp").get(timeout=60)
        assert set(ranks.look.call().get(timeout=30).values()) == {hashlib.sha256(data).hexdigest()}
        parts = [each[n * 500_000 : (n + 1) * 500_000] for n, each in enumerate(into.values())]
        assert gather(parts, transport="tcp").get(timeout=60) == data[:8_000_000]
