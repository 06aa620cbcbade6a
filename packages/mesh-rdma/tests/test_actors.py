"""Between actors: buffers travel in messages, as any value does."""

import pytest

from mesh_core import Actor, ActorError, endpoint, this_host
from mesh_rdma import BufferGone, RDMABuffer


class Server(Actor):
    """Owns weights that others read."""

    def __init__(self, size: int) -> None:
        self.weights = bytearray(size)
        self.buffer = RDMABuffer(self.weights)

    @endpoint
    def offer(self) -> RDMABuffer:
        return self.buffer

    @endpoint
    def look(self, start: int, stop: int) -> bytes:
        return bytes(self.weights[start:stop])

    @endpoint
    def drop(self) -> None:
        self.buffer.drop()


class Reader(Actor):
    """Reads, writes and counts, in coroutines."""

    def __init__(self, buffer: RDMABuffer) -> None:
        self.buffer = buffer

    @endpoint
    async def work(self, rank: int) -> bytes:
        await self.buffer.write_from(bytes([rank + 1]) * 8, offset=8 * (rank + 1))
        await self.buffer.fetch_add(1)
        copy = bytearray(8)
        await self.buffer.read_into(copy, offset=8 * (rank + 1))
        return bytes(copy)

    @endpoint
    async def read_all(self) -> int:
        copy = bytearray(self.buffer.size())
        await self.buffer.read_into(copy)
        return sum(copy)


@pytest.mark.slow
def test_actors_share_memory():
    with this_host().spawn_procs({"gpus": 3}) as procs:
        server = procs.slice(gpus=0).spawn("server", Server, 1 << 20)
        buffer = server.offer.call_one().get(timeout=30)
        readers = procs.slice(gpus=slice(1, 3)).spawn("readers", Reader, buffer)
        for rank in range(2):
            assert readers.slice(gpus=rank).work.call_one(rank).get(timeout=30) == bytes([rank + 1]) * 8
        assert server.look.call_one(0, 8).get(timeout=30) == (2).to_bytes(8, "little")
        assert readers.read_all.call().get(timeout=30).values() == [2 + 8 + 16] * 2
        buffer.write_from(bytes(1 << 20)).get(timeout=30)
        assert readers.read_all.call().get(timeout=30).values() == [0, 0]
        server.drop.call_one().get(timeout=30)
        with pytest.raises(ActorError) as caught:
            readers.slice(gpus=0).read_all.call_one().get(timeout=30)
        assert isinstance(caught.value, BufferGone)


@pytest.mark.slow
def test_a_buffer_of_an_actor_whose_process_ended_is_gone():
    with this_host().spawn_procs() as procs:
        server = procs.spawn("server", Server, 100)
        buffer = server.offer.call_one().get(timeout=30)
        buffer.read_into(bytearray(100)).get(timeout=30)
    for transport in ("shm", "tcp"):
        with pytest.raises(BufferGone):
            buffer.read_into(bytearray(100), transport=transport).get(timeout=30)
