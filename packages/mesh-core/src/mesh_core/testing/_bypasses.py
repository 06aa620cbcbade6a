"""The conformance suite for bypasses: two processes exchange memory, without a mesh."""

from __future__ import annotations

import ctypes
import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mesh_core._system.interpreter import python_command
from mesh_core.plugins import BYPASSES, BypassPlugin, PluginManager
from mesh_core.testing._asserts import expect_bytes
from mesh_core.testing._plugins import PluginConformance

_NAME = b"mesh_core.bypass"
_VERSION = 1
_ROOM = 4096
_LIMIT_S = 60.0
_PAUSE_S = 0.01
_LENGTHS = (1, 4096, 1_000_003, 9_000_000)

_FREED = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_DONE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int32)


class _Struct(ctypes.Structure):
    """``struct mesh_bypass`` of ``mesh_core/bypass.h``."""

    _fields_ = (
        ("version", ctypes.c_uint32),
        (
            "offer",
            ctypes.CFUNCTYPE(
                ctypes.c_uint32,
                ctypes.c_void_p,
                ctypes.c_void_p,
                ctypes.c_uint64,
                ctypes.c_void_p,
                ctypes.c_uint32,
                ctypes.POINTER(ctypes.c_uint64),
                _FREED,
                ctypes.c_void_p,
            ),
        ),
        ("withdraw", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_uint64)),
        (
            "fetch",
            ctypes.CFUNCTYPE(
                None,
                ctypes.c_void_p,
                ctypes.c_char_p,
                ctypes.c_uint32,
                ctypes.c_void_p,
                ctypes.c_uint64,
                _DONE,
                ctypes.c_void_p,
            ),
        ),
    )


class _Calls:
    """Records calls of one of our callbacks, which may come on any thread."""

    def __init__(self) -> None:
        self.statuses: list[int] = []
        self.came = threading.Event()
        self.freed = _FREED(lambda _: self._call(0))
        self.done = _DONE(lambda _, status: self._call(status))

    def _call(self, status: int) -> None:
        self.statuses.append(status)
        self.came.set()

    @property
    def count(self) -> int:
        return len(self.statuses)


class _Offer:
    """Offered memory."""

    def __init__(self, memory: Any, ticket: bytes, number: int, calls: _Calls) -> None:
        self.memory = memory
        self.ticket = ticket
        self.number = number
        self.calls = calls


class _Bypass:
    """Calls a bypass as mesh-core does."""

    def __init__(self, capsule: object) -> None:
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.argtypes, pointer.restype = (ctypes.py_object, ctypes.c_char_p), ctypes.c_void_p
        self._capsule = capsule
        self._at: int = pointer(capsule, _NAME)
        self._struct = _Struct.from_address(self._at)
        self.version: int = self._struct.version
        # Memory that may still be read or written after a test ends.
        self._kept: list[Any] = []

    def offer(self, data: bytes) -> _Offer | None:
        """Offer bytes."""
        memory = ctypes.create_string_buffer(data, len(data))
        ticket, number, calls = ctypes.create_string_buffer(_ROOM), ctypes.c_uint64(), _Calls()
        self._kept.append((memory, calls))
        size = self._struct.offer(
            self._at, memory, len(data), ticket, _ROOM, ctypes.byref(number), calls.freed, None
        )
        return _Offer(memory, ticket.raw[:size], number.value, calls) if size else None

    def withdraw(self, number: int) -> None:
        """Withdraw an offer."""
        self._struct.withdraw(self._at, number)

    def fetch(self, ticket: bytes, length: int) -> tuple[Any, _Calls]:
        """Start a fetch."""
        memory, calls = ctypes.create_string_buffer(length), _Calls()
        self._kept.append((memory, calls))
        self._struct.fetch(self._at, ticket, len(ticket), memory, length, calls.done, None)
        return memory, calls

    def fetched(self, ticket: bytes, length: int) -> bytes | None:
        """Fetch a part; ``None`` if the bypass does not deliver it."""
        memory, calls = self.fetch(ticket, length)
        assert calls.came.wait(_LIMIT_S), f"fetch() did not call done() within {_LIMIT_S} s"
        return memory.raw if calls.statuses[0] == 0 else None

    def reached(self, ticket: bytes, length: int) -> bytes:
        """Fetch a part, trying again until it arrives: a bypass may need to connect first."""
        end = time.monotonic() + _LIMIT_S
        while (found := self.fetched(ticket, length)) is None:
            assert time.monotonic() < end, f"no fetch() of an offered part succeeded within {_LIMIT_S} s"
            time.sleep(_PAUSE_S)
        return found


class _Peer:
    """Another process with the bypass."""

    def __init__(self, name: str) -> None:
        program = "import sys; from mesh_core.testing._bypasses import serve; serve(sys.argv[1])"
        self.process = subprocess.Popen(
            python_command(program, name), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, **question: Any) -> Any:
        """Send it a request and return the answer."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, f"the other process ended with status {self.process.wait()}"
        return json.loads(line)

    def offer(self, seed: int, length: int) -> tuple[bytes, int]:
        """Have it offer bytes; return the ticket and its number."""
        told = self.ask(offer=seed, length=length)
        return bytes.fromhex(told["ticket"]), told["number"]

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.communicate()


class BypassPluginConformance(PluginConformance):
    """Tests for a :class:`~mesh_core.plugins.BypassPlugin`: an offered part arrives complete and once, or not at all."""

    kind = BYPASSES

    def _bypass(self) -> _Bypass:
        assert isinstance(self.plugin, BypassPlugin), (
            f"plugin must be a BypassPlugin, got {type(self.plugin).__name__}"
        )
        return _Bypass(self.plugin.create())

    @contextmanager
    def _two(self) -> Iterator[tuple[_Bypass, _Peer]]:
        peer = _Peer(self.plugin.name)
        try:
            yield self._bypass(), peer
        finally:
            peer.close()

    def test_creates_a_capsule_of_the_version(self) -> None:
        """``create()`` returns a capsule named ``mesh_core.bypass``, whose struct has the header's version."""
        version = self._bypass().version
        assert version == _VERSION, f"version must be {_VERSION}, got {version}"

    def test_what_is_offered_is_read_by_another_process(self) -> None:
        """Fetch parts of any length, several at once, in any order."""
        with self._two() as (bypass, peer):
            tickets = [(*peer.offer(at, length), at, length) for at, length in enumerate(_LENGTHS)]
            for ticket, _, seed, length in reversed(tickets):
                expect_bytes(
                    bypass.reached(ticket, length), _bytes(seed, length), f"{length} bytes came wrong"
                )

    def test_many_threads_fetch_at_once(self) -> None:
        """All functions may be called on any thread."""
        with self._two() as (bypass, peer):
            tickets = [peer.offer(seed, 100_000)[0] for seed in range(8)]
            bypass.reached(tickets[0], 100_000)
            wrong: list[int] = []

            def work(seed: int) -> None:
                for _ in range(10):
                    found = bypass.fetched(tickets[seed], 100_000)
                    if found is not None and found != _bytes(seed, 100_000):
                        wrong.append(seed)

            threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
            for each in threads:
                each.start()
            for each in threads:
                each.join()
            assert not wrong, f"the parts of seeds {wrong} arrived damaged"

    def test_memory_is_freed_once_and_not_before_it_is_withdrawn(self) -> None:
        """``freed()`` returns the memory to mesh-core, which reuses it."""
        bypass = self._bypass()
        offers = [bypass.offer(_bytes(seed, 10_000)) for seed in range(20)]
        made = [each for each in offers if each is not None]
        assert made, "offer() accepted no memory at all"
        assert not any(each.calls.count for each in made), (
            "freed() was called for memory that is still offered"
        )
        for each in made:
            bypass.withdraw(each.number)
        for each in made:
            assert each.calls.came.wait(_LIMIT_S), f"freed() was not called within {_LIMIT_S} s of withdraw()"
        assert [each.calls.count for each in made] == [1] * len(made), "freed() was called more than once"

    def test_what_is_withdrawn_is_not_read(self) -> None:
        """Neither is data that replaced it."""
        with self._two() as (bypass, peer):
            ticket, number = peer.offer(1, 50_000)
            bypass.reached(ticket, 50_000)
            assert peer.ask(withdraw=number) == {"freed": 1}
            peer.offer(2, 50_000)
            assert bypass.fetched(ticket, 50_000) is None, "withdrawn memory was read"
            # The owner is still reachable, and its next part arrives at once.
            ticket, _ = peer.offer(3, 50_000)
            found = bypass.fetched(ticket, 50_000)
            assert found is not None, (
                "after a withdrawn part, the next part of the same process did not arrive"
            )
            expect_bytes(found, _bytes(3, 50_000), "a part arrived damaged")

    def test_other_lengths_and_foreign_tickets_are_refused(self) -> None:
        """Tickets arrive over the network and may be wrong."""
        with self._two() as (bypass, peer):
            ticket, _ = peer.offer(1, 5000)
            bypass.reached(ticket, 5000)
            for length in (4999, 5001):
                assert bypass.fetched(ticket, length) is None, (
                    f"{length} bytes of a part of 5000 were fetched"
                )
            chance = random.Random(0)
            for wrong in (b"", b"x", bytes(_ROOM), ticket[:-1], chance.randbytes(len(ticket))):
                assert bypass.fetched(wrong, 5000) is None, (
                    f"a part was fetched with the wrong ticket {wrong!r}"
                )
            expect_bytes(bypass.reached(ticket, 5000), _bytes(1, 5000), "a part arrived damaged")

    def test_the_death_of_the_owner_is_reported(self) -> None:
        """``done()`` is called once for each fetch under way, and for later ones."""
        with self._two() as (bypass, peer):
            length = _LENGTHS[-1]
            ticket, _ = peer.offer(1, length)
            bypass.reached(ticket, length)
            begun = [bypass.fetch(ticket, length) for _ in range(3)]
            peer.process.kill()
            peer.process.wait()
            begun.append(bypass.fetch(ticket, length))
            for memory, calls in begun:
                assert calls.came.wait(_LIMIT_S), (
                    f"done() was not called within {_LIMIT_S} s of the owner's death"
                )
                if calls.statuses[0] == 0:
                    expect_bytes(memory.raw, _bytes(1, length), "a part arrived damaged")
            assert begun[-1][1].statuses[0] != 0, "a part was fetched from a process that has ended"
            assert [calls.count for _, calls in begun] == [1] * len(begun), "done() was called more than once"


def serve(name: str) -> None:
    """Run the other process: carry out the requests on stdin."""
    plugin = PluginManager().get(BYPASSES, name)
    assert isinstance(plugin, BypassPlugin)
    bypass, offers = _Bypass(plugin.create()), dict[int, _Offer]()

    def offer(seed: int, length: int) -> dict[str, Any]:
        made = bypass.offer(_bytes(seed, length))
        assert made is not None, "offer() returned 0"
        offers[made.number] = made
        return {"ticket": made.ticket.hex(), "number": made.number}

    def withdraw(number: int) -> dict[str, Any]:
        made = offers.pop(number)
        bypass.withdraw(number)
        made.calls.came.wait(_LIMIT_S)
        # Overwrite it, as a new user of the memory would.
        made.memory.raw = bytes(len(made.memory))
        return {"freed": made.calls.count}

    for line in sys.stdin:
        question = json.loads(line)
        if "offer" in question:
            told = offer(question["offer"], question["length"])
        else:
            told = withdraw(question["withdraw"])
        sys.stdout.write(json.dumps(told) + "\n")
        sys.stdout.flush()


def _bytes(seed: int, length: int) -> bytes:
    return random.Random(seed).randbytes(length)
