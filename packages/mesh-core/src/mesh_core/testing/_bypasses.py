"""The conformance suite of what moves large parts of messages: two processes that give each other memory, without a mesh."""

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

from mesh_core.plugins import BYPASSES, BypassPlugin, PluginManager
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
    """Counts calls of one of our functions, which come on any thread."""

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
    """Memory that is offered."""

    def __init__(self, memory: Any, ticket: bytes, number: int, calls: _Calls) -> None:
        self.memory = memory
        self.ticket = ticket
        self.number = number
        self.calls = calls


class _Bypass:
    """A bypass, as mesh-core calls it."""

    def __init__(self, capsule: object) -> None:
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.argtypes, pointer.restype = (ctypes.py_object, ctypes.c_char_p), ctypes.c_void_p
        self._capsule = capsule
        self._at: int = pointer(capsule, _NAME)
        self._struct = _Struct.from_address(self._at)
        self.version: int = self._struct.version
        # What is still being written to, or read, however a test ends.
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
        """Offer them no longer."""
        self._struct.withdraw(self._at, number)

    def fetch(self, ticket: bytes, length: int) -> tuple[Any, _Calls]:
        """Begin to fetch."""
        memory, calls = ctypes.create_string_buffer(length), _Calls()
        self._kept.append((memory, calls))
        self._struct.fetch(self._at, ticket, len(ticket), memory, length, calls.done, None)
        return memory, calls

    def fetched(self, ticket: bytes, length: int) -> bytes | None:
        """Return what is fetched, or none if it does not come this way."""
        memory, calls = self.fetch(ticket, length)
        assert calls.came.wait(_LIMIT_S), f"fetch() has not called done() within {_LIMIT_S} s"
        return memory.raw if calls.statuses[0] == 0 else None

    def reached(self, ticket: bytes, length: int) -> bytes:
        """Return what is fetched in the end: a way may have to be tried first."""
        end = time.monotonic() + _LIMIT_S
        while (found := self.fetched(ticket, length)) is None:
            assert time.monotonic() < end, (
                f"no fetch() of a part that is offered succeeded within {_LIMIT_S} s"
            )
            time.sleep(_PAUSE_S)
        return found


class _Peer:
    """Another process with the bypass."""

    def __init__(self, name: str) -> None:
        program = "import sys; from mesh_core.testing._bypasses import serve; serve(sys.argv[1])"
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, **question: Any) -> Any:
        """Have it do something, and return what it says."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, f"the other process has ended with status {self.process.wait()}"
        return json.loads(line)

    def offer(self, seed: int, length: int) -> tuple[bytes, int]:
        """Have it offer bytes; returns the ticket and its number."""
        told = self.ask(offer=seed, length=length)
        return bytes.fromhex(told["ticket"]), told["number"]

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.communicate()


class BypassPluginConformance(PluginConformance):
    """What holds for a :class:`~mesh_core.plugins.BypassPlugin`: what is offered arrives whole, once, or not at all."""

    kind = BYPASSES

    def _bypass(self) -> _Bypass:
        assert isinstance(self.plugin, BypassPlugin), f"a BypassPlugin, not {type(self.plugin).__name__}"
        return _Bypass(self.plugin.create())

    @contextmanager
    def _two(self) -> Iterator[tuple[_Bypass, _Peer]]:
        peer = _Peer(self.plugin.name)
        try:
            yield self._bypass(), peer
        finally:
            peer.close()

    def test_creates_a_capsule_of_the_version(self) -> None:
        """``create()`` gives a capsule named ``mesh_core.bypass``, whose struct has the version that the header has."""
        assert self._bypass().version == _VERSION, f"version must be {_VERSION}"

    def test_what_is_offered_is_read_by_another_process(self) -> None:
        """Parts of any length, several at once, in any order."""
        with self._two() as (bypass, peer):
            tickets = [(*peer.offer(at, length), at, length) for at, length in enumerate(_LENGTHS)]
            for ticket, _, seed, length in reversed(tickets):
                assert bypass.reached(ticket, length) == _bytes(seed, length), f"{length} bytes came wrong"

    def test_many_threads_fetch_at_once(self) -> None:
        """All functions are called on any thread."""
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
            assert not wrong, f"the parts of seeds {wrong} came wrong"

    def test_memory_is_freed_once_and_not_before_it_is_withdrawn(self) -> None:
        """``freed()`` gives it back to mesh-core, which uses it for something else."""
        bypass = self._bypass()
        offers = [bypass.offer(_bytes(seed, 10_000)) for seed in range(20)]
        made = [each for each in offers if each is not None]
        assert made, "no memory was offered at all"
        assert not any(each.calls.count for each in made), "freed() was called for memory that is offered"
        for each in made:
            bypass.withdraw(each.number)
        for each in made:
            assert each.calls.came.wait(_LIMIT_S), f"freed() was not called within {_LIMIT_S} s of withdraw()"
        assert [each.calls.count for each in made] == [1] * len(made), "freed() was called more than once"

    def test_what_is_withdrawn_is_not_read(self) -> None:
        """Nor is it what has taken its place."""
        with self._two() as (bypass, peer):
            ticket, number = peer.offer(1, 50_000)
            bypass.reached(ticket, 50_000)
            assert peer.ask(withdraw=number) == {"freed": 1}
            peer.offer(2, 50_000)
            assert bypass.fetched(ticket, 50_000) is None, "memory was read that had been withdrawn"
            # The owner is there, and what it offers comes at once.
            ticket, _ = peer.offer(3, 50_000)
            assert bypass.fetched(ticket, 50_000) == _bytes(3, 50_000), (
                "after a part that was withdrawn the next one of the same process did not come"
            )

    def test_other_lengths_and_foreign_tickets_are_refused(self) -> None:
        """Tickets come over the network."""
        with self._two() as (bypass, peer):
            ticket, _ = peer.offer(1, 5000)
            bypass.reached(ticket, 5000)
            for length in (4999, 5001):
                assert bypass.fetched(ticket, length) is None, f"{length} bytes were had of a part of 5000"
            chance = random.Random(0)
            for wrong in (b"", b"x", bytes(_ROOM), ticket[:-1], chance.randbytes(len(ticket))):
                assert bypass.fetched(wrong, 5000) is None, f"a part was had for the ticket {wrong!r}"
            assert bypass.reached(ticket, 5000) == _bytes(1, 5000)

    def test_the_death_of_the_owner_is_reported(self) -> None:
        """``done()`` is called once for all that is under way, and for what comes later."""
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
                assert calls.statuses[0] != 0 or memory.raw == _bytes(1, length), "a part came wrong"
            assert begun[-1][1].statuses[0] != 0, "a part was had of a process that has ended"
            assert [calls.count for _, calls in begun] == [1] * len(begun), "done() was called more than once"


def serve(name: str) -> None:
    """Be the other process: do what is said on stdin."""
    plugin = PluginManager().get(BYPASSES, name)
    assert isinstance(plugin, BypassPlugin)
    bypass, offers = _Bypass(plugin.create()), dict[int, _Offer]()

    def offer(seed: int, length: int) -> dict[str, Any]:
        made = bypass.offer(_bytes(seed, length))
        assert made is not None, "offer() has returned 0"
        offers[made.number] = made
        return {"ticket": made.ticket.hex(), "number": made.number}

    def withdraw(number: int) -> dict[str, Any]:
        made = offers.pop(number)
        bypass.withdraw(number)
        made.calls.came.wait(_LIMIT_S)
        # As what takes its place.
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
