"""The relay carries what it is given, and impairs it as it is told."""

import hashlib
import os
import random
import select
import socket
import subprocess
import sys
import threading
import time

import pytest
from cluster import HERE, wait_until
from relay import HELD, Relay

# To see that nothing comes takes a while, and so does a delay.
pytestmark = pytest.mark.slow

QUICK = 0.25


class Ends:
    """A relay in front of a listening socket, and connections through it."""

    def __init__(self, **options):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.settimeout(10)
        self.relay = Relay(self.listener.getsockname(), **options)
        self.made = []

    def __enter__(self):
        self.relay.__enter__()
        return self

    def __exit__(self, *_):
        self.relay.close()
        for each in [*self.made, self.listener]:
            each.close()

    def connect(self):
        client = socket.create_connection(self.relay.address, 10)
        self.made.append(client)
        return client

    def pair(self):
        client = self.connect()
        server, _ = self.listener.accept()
        self.made.append(server)
        for end in (client, server):
            end.settimeout(10)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return client, server


def took(one, other, data=b"x"):
    """Seconds from here to there."""
    began = time.monotonic()
    sender = threading.Thread(target=one.sendall, args=(data,))
    sender.start()
    received = receive(other, len(data))
    sender.join()
    assert received == data
    return time.monotonic() - began


def receive(end, size):
    parts = []
    while size:
        part = end.recv(min(size, 1 << 20))
        assert part, "the connection ended early"
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def silent(end, limit=QUICK):
    return not select.select([end], [], [], limit)[0]


def is_reset(end):
    """Whether the connection was broken; not orderly ended."""
    try:
        while end.recv(1 << 20):
            pass
    except ConnectionResetError:
        return True
    return False


def is_broken_at_once(ends):
    """Whether a new connection is; that may be before this side has it."""
    try:
        return is_reset(ends.connect())
    except ConnectionResetError:
        return True


def test_what_goes_in_comes_out():
    rng = random.Random(1)
    with Ends() as ends:
        pairs = [ends.pair() for _ in range(5)]
        data = [rng.randbytes(rng.choice([1, 1000, 3_000_000])) for _ in pairs]
        for (client, server), each in zip(pairs, data, strict=True):
            took(client, server, each)
            took(server, client, each[::-1])
        stats = ends.relay.stats()
        assert stats["open"] == stats["accepted"] == 5
        assert stats["up"] == stats["down"] == sum(map(len, data))
        client, server = pairs[0]
        client.close()
        assert server.recv(1) == b""
        server.close()
        wait_until(lambda: ends.relay.stats()["open"] == 4, "the connection does not end")
        assert ends.relay.stats()["reset"] == 0


def test_a_delay_is_of_one_direction_and_does_not_throttle():
    with Ends() as ends:
        client, server = ends.pair()
        took(client, server)
        ends.relay.impair("up", delay=0.4)
        assert took(client, server) >= 0.4
        client.sendall(b"later")
        took(server, client)
        assert silent(server, 0), "what was sent first is still under way"
        assert receive(server, 5) == b"later"
        # Not 0.4 s for each piece of it: that would take longer than its end waits.
        assert took(client, server, bytes(2_000_000)) >= 0.4
        ends.relay.heal()
        took(client, server)


def test_jitter_keeps_the_order_and_comes_from_the_seed():
    def lateness(seed):
        with Ends(seed=seed) as ends:
            client, server = ends.pair()
            ends.relay.impair(jitter=0.2)
            return [took(client, server, bytes([number])) for number in range(6)]

    first, again, other = lateness(1), lateness(1), lateness(2)
    dice = [random.Random(f"{seed}/0/up") for seed in (1, 2)]
    meant, other_meant = ([each.random() * 0.2 for _ in range(6)] for each in dice)
    for measured, expected in ((first, meant), (again, meant), (other, other_meant)):
        # A busy machine makes it later, never earlier.
        assert all(late >= each for late, each in zip(measured, expected, strict=True))
    assert any(late < each for late, each in zip(first, other_meant, strict=True))


def test_a_rate_throttles_each_connection():
    with Ends() as ends:
        pairs = [ends.pair() for _ in range(2)]
        ends.relay.impair("up", rate=1_000_000)
        took_each = [took(client, server, bytes(500_000)) for client, server in pairs]
        assert all(each > 0.4 for each in took_each)
        took(pairs[0][1], pairs[0][0], bytes(500_000))


def test_what_is_frozen_stays_open_and_goes_on_with_nothing_lost():
    with Ends() as ends:
        client, server = ends.pair()
        ends.relay.freeze("up")
        client.sendall(b"held")
        assert silent(server)
        took(server, client)
        # New connections freeze too.
        other, other_server = ends.pair()
        other.sendall(b"too")
        # Nor is it told that the other side has gone.
        other.close()
        assert silent(other_server)
        # Its sender has to wait at last.
        sent = 4
        while select.select([], [client], [], QUICK)[1]:
            sent += client.send(bytes(1 << 12))
        assert sent > HELD
        ends.relay.thaw("up")
        assert receive(server, sent) == b"held" + bytes(sent - 4)
        assert receive(other_server, 3) == b"too"
        assert other_server.recv(1) == b""


def test_a_freeze_holds_back_resets_too():
    with Ends() as ends:
        client, server = ends.pair()
        ends.relay.freeze()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        client.close()
        assert silent(server)
        ends.relay.thaw()
        assert is_reset(server)
        wait_until(lambda: ends.relay.stats()["open"] == 0, "the connection does not end")


def test_a_reset_that_is_found_in_writing_is_one_for_the_other_side_too():
    with Ends() as ends:
        client, server = ends.pair()
        ends.relay.freeze("down")
        # So much that the relay reads no more from there, and cannot learn of it in that way.
        while select.select([], [server], [], QUICK)[1]:
            server.send(bytes(1 << 12))
        server.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        server.close()
        client.sendall(b"x")
        wait_until(lambda: ends.relay.stats()["up"] == 1, "nothing is written")
        assert silent(client)
        ends.relay.thaw()
        assert is_reset(client)


def test_a_reset_breaks_both_sides_and_new_connections_are_carried():
    with Ends() as ends:
        pairs = [ends.pair() for _ in range(3)]
        ends.relay.freeze("up")
        pairs[0][0].sendall(b"lost")
        assert ends.relay.reset() == 3
        for client, server in pairs:
            assert is_reset(client) and is_reset(server)
        ends.relay.thaw("up")
        assert ends.relay.stats() == {"open": 0, "accepted": 3, "reset": 3, "up": 0, "down": 0}
        took(*ends.pair())


def test_connections_break_at_a_byte_that_is_given():
    with Ends() as ends:
        ends.relay.impair("down", reset_after=100_001)
        for _ in range(3):
            client, server = ends.pair()
            took(client, server, bytes(200_000))
            server.sendall(bytes(150_000))
            wait_until(lambda: ends.relay.stats()["open"] == 0, "the connection does not break")
            assert is_reset(client) and is_reset(server)
        assert ends.relay.stats()["down"] == 3 * 100_001


def test_half_of_a_connection_ends():
    with Ends() as ends:
        client, server = ends.pair()
        took(client, server)
        assert ends.relay.half_close("up") == 1
        assert server.recv(1) == b""
        took(server, client, bytes(100_000))
        assert ends.relay.stats()["open"] == 1
        server.close()
        assert client.recv(1) == b""
        wait_until(lambda: ends.relay.stats()["open"] == 0, "the connection does not end")


def test_new_connections_are_refused_reset_or_held():
    with Ends() as ends:
        client, server = ends.pair()
        address = ends.relay.address
        ends.relay.new_connections("refuse")
        with pytest.raises(ConnectionRefusedError):
            ends.connect()
        ends.relay.new_connections("reset")
        assert ends.relay.address == address
        assert is_broken_at_once(ends)
        ends.relay.new_connections("hold")
        held = ends.connect()
        held.sendall(b"hello?")
        assert silent(held) and silent(ends.listener)
        # Those that were there are not concerned.
        took(client, server)
        ends.relay.heal()
        took(*ends.pair())
        assert silent(held)


def test_a_target_that_is_not_there_is_as_a_reset():
    with Ends() as ends:
        ends.listener.close()
        assert is_broken_at_once(ends)
        assert ends.relay.stats()["reset"] == 1


def test_a_side_that_breaks_breaks_the_other():
    with Ends() as ends:
        client, server = ends.pair()
        server.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        server.close()
        assert is_reset(client)
        assert ends.relay.stats()["reset"] == 1


def test_random_orders_under_load_lose_nothing_that_is_not_broken():
    rng = random.Random(5)
    with Ends(seed=5) as ends:
        client, server = ends.pair()
        blocks = [rng.randbytes(rng.randint(1, 200_000)) for _ in range(150)]
        sender = threading.Thread(target=lambda: [client.sendall(each) for each in blocks])
        size, wanted = sum(map(len, blocks)), hashlib.sha256(b"".join(blocks)).digest()
        sender.start()
        received = hashlib.sha256()
        orders = 0
        parts = 0
        while size:
            part = server.recv(min(size, rng.randint(1, 1 << 18)))
            received.update(part)
            size -= len(part)
            parts += 1
            if parts % 5 == 0:
                orders += 1
                ends.relay.impair(
                    delay=rng.random() / 50, jitter=rng.random() / 50, rate=rng.choice([None, 2e7])
                )
                ends.relay.freeze("up")
                ends.relay.thaw()
        sender.join()
        assert orders > 3
        assert received.digest() == wanted


def test_a_relay_ends_with_its_context_and_refuses_orders_then():
    with Ends() as ends:
        client, _ = ends.pair()
        ends.relay.close()
        assert client.recv(1) == b""
        with pytest.raises(RuntimeError, match="use it in its `with`"):
            ends.relay.reset()
    with pytest.raises(RuntimeError, match="the relay has ended with 1"):
        Relay(("127.0.0.1", 1), listen=("192.0.2.77", 0)).__enter__()


def test_a_relay_ends_with_its_owner(alive):
    program = (
        "import sys, os; sys.path.insert(0, sys.argv[1])\n"
        "from relay import Relay\n"
        "relay = Relay(('127.0.0.1', 1)).__enter__()\n"
        "print('up', flush=True)\n"
        "os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(HERE)], capture_output=True, text=True)
    assert done.stdout == "up\n"
    wait_until(lambda: not alive(), lambda: f"processes are left: {alive()}", 10)


@pytest.mark.network
def test_a_relay_runs_on_a_machine(network):
    one, other, third = network(3).hosts
    with other.listen() as listener:
        with Relay(listener.getsockname(), host=third) as relay:
            assert relay.address[0] == third.address
            with one.connect(relay.address) as client, listener.accept()[0] as server:
                assert server.getpeername()[0] == third.address
                took(client, server)
        assert third.pids() == []
    assert os.getpid() not in other.pids()
