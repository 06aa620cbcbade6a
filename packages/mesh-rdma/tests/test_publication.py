"""Versions of weights: published by one process, read by others, whole and under their own numbers."""

import os
import pickle
import random
import signal
import socket
import threading
import time
from pathlib import Path

import pytest

from mesh_core import Isolation, Sandboxes, configured
from mesh_rdma import (
    InvalidTransfer,
    Publication,
    PublicationGone,
    RDMAError,
    RDMATimeout,
    VersionUnavailable,
)
from mesh_rdma._publication._wire import address_of, open_socket

from .conftest import Other

np = pytest.importorskip("numpy")
pytestmark = pytest.mark.slow

PEER = Path(__file__).parent / "publication_peer.py"


@pytest.fixture(scope="module")
def shared():
    """A process that none of the tests ends."""
    other = Other(program=PEER)
    yield other
    other.end()


@pytest.fixture
def other():
    made = Other(program=PEER)
    yield made
    made.end()


@pytest.fixture
def third():
    made = Other(program=PEER)
    yield made
    made.end()


@pytest.fixture
def publication():
    """One of this process, whose version n has the value n everywhere, and a function that publishes it."""
    state = {"tensor-0": np.zeros(1000, np.int64), "tensor-1": np.zeros((3, 4), np.int64)}
    with Publication(state, start=1) as made:

        def publish(**options):
            for array in state.values():
                array[...] = (made.version or 0) + 1
            return made.publish(**options)

        made.next, made.state = publish, state
        yield made
    assert made.join(30)


def without_leases(publication):
    """Wait until nobody has one, by publishing as often as there are places."""
    for _ in range(2):
        publication.next(timeout=30)


# What a version is.


def test_a_version_stays_as_it_was_published(shared, publication):
    reader = publication.reader()
    assert publication.next() == 1
    assert shared.use(reader, "first") == 1
    assert publication.next() == 2
    assert shared.look("first") == {1}
    assert shared.read(reader) == (2, {2})
    shared.release("first")


def test_arrays_are_where_the_version_lies_and_cannot_be_written_to(publication):
    publication.next()
    with publication.reader().use() as weights:
        assert set(weights) == {"tensor-0", "tensor-1"} and len(weights) == 2
        array = weights["tensor-1"]
        assert array.shape == (3, 4) and array.dtype == np.int64
        with pytest.raises(ValueError, match="read-only"):
            array[0, 0] = 7
        assert np.shares_memory(array, weights["tensor-1"])
        del array
    with pytest.raises(InvalidTransfer, match="inside of their with block"):
        weights["tensor-0"]


def test_all_kinds_of_values():
    state = {
        "float": np.arange(7, dtype=np.float32),
        "big-endian": np.arange(5, dtype=">i4"),
        "strided": np.arange(24).reshape(4, 6)[:, ::2],
        "scalar": np.array(2.5),
        "none": np.zeros((3, 0)),
        "bytes": bytearray(b"some bytes"),
        "half": np.ones(3, np.float16),
    }
    with Publication(state) as publication:
        publication.publish()
        with publication.reader().use() as weights:
            for name, value in state.items():
                if name == "bytes":
                    assert bytes(weights[name]) == value
                else:
                    assert weights[name].dtype == value.dtype and np.array_equal(weights[name], value)
        target = {
            name: np.ones_like(value) if name != "bytes" else bytearray(10) for name, value in state.items()
        }
        publication.reader().load_into(target)
        for name, value in state.items():
            assert np.array_equal(target[name], value)


def test_tensors_may_be_replaced_by_others_of_their_kind(publication):
    reader = publication.reader()
    publication.next()
    publication.state["tensor-0"] = np.full(1000, 2)
    publication.state["tensor-1"] = np.full((3, 4), 2)
    publication.publish()
    with reader.use() as weights:
        assert {int(value) for value in weights["tensor-0"]} == {2}
    publication.state["tensor-0"] = np.zeros(10)
    with pytest.raises(InvalidTransfer, match="'tensor-0' was numpy int64"):
        publication.publish()


def test_what_cannot_be_published_is_named():
    for value, words in ((object(), "got object"), (np.array([None]), "dtype object"), (7, "got int")):
        with pytest.raises(InvalidTransfer, match=f"'name'.*{words}"):
            Publication({"name": value})
    with pytest.raises(InvalidTransfer, match="2 or more"):
        Publication({}, versions=1)


def test_a_publication_of_nothing():
    with Publication({}) as publication:
        publication.publish()
        with publication.reader().use() as weights:
            assert dict(weights) == {}


def test_numbers_only_go_up(publication):
    assert publication.publish() == 1
    assert publication.publish(version=7) == 7
    assert publication.publish() == 8
    for version in (8, 3):
        with pytest.raises(InvalidTransfer, match="greater than 8"):
            publication.publish(version=version)


def test_a_handle_is_small_and_can_be_sent_on(shared, publication):
    publication.next()
    data = pickle.dumps(publication.reader())
    assert len(data) < 500
    assert shared.read(pickle.loads(data)) == (1, {1})


# Which version is given.


def test_what_is_not_there_is_refused_at_once(shared, publication):
    reader = publication.reader()
    with pytest.raises(VersionUnavailable, match="nothing has been published"):
        shared.read(reader, wait=False)
    for _ in range(3):
        publication.next()
    assert shared.read(reader, version=2) == (2, {2})
    with pytest.raises(VersionUnavailable, match="no version 1 is there; there are 2, 3"):
        shared.read(reader, version=1)
    with pytest.raises(VersionUnavailable, match="no version from 4 on"):
        shared.read(reader, min_version=4, wait=False)
    assert shared.read(reader, min_version=3, wait=False) == (3, {3})


def test_waiters_get_the_version_when_it_is_published(shared, publication):
    reader = publication.reader()
    shared.tell("read", reader, min_version=2)
    publication.next()
    publication.next()
    assert shared.hear() == (2, {2})
    shared.tell("read", reader, version=3)
    publication.next()
    assert shared.hear() == (3, {3})


def test_a_wait_ends_at_its_deadline(shared, publication):
    publication.next()
    with pytest.raises(RDMATimeout, match=r"within 0\.05 s; there are versions: 1"):
        shared.read(publication.reader(), min_version=2, timeout=0.05)


def test_an_owner_that_does_not_answer(other):
    reader = other.publication("it")
    other.publish("it", 1 << 60)
    other.halt()
    os.waitid(os.P_PID, other.process.pid, os.WSTOPPED)
    with pytest.raises(RDMATimeout, match="did not answer"):
        reader.use(timeout=0.05)
    other.go_on()


# Leases.


def test_a_version_in_use_is_not_overwritten(shared, publication):
    reader = publication.reader()
    publication.next()
    shared.use(reader, "one")
    publication.next()
    shared.use(reader, "two")
    with pytest.raises(RDMATimeout, match=rf"version 1 by pid {shared.process.pid}"):
        publication.next(timeout=0.05)
    assert shared.look("one") == {1} and shared.look("two") == {2}
    published = threading.Thread(target=publication.next)
    published.start()
    shared.release("one")
    published.join(30)
    assert publication.version == 3 and shared.look("two") == {2}
    shared.release("two")


def test_publish_shows_what_it_waits_for(publication, capsys):
    reader = publication.reader()
    publication.next()
    one = reader.use()
    publication.next()
    two = reader.use()

    def publish():
        with configured(progress="ON"):
            publication.next()

    published = threading.Thread(target=publish)
    published.start()
    shown = ""
    until = time.monotonic() + 30
    while "\n" not in shown and time.monotonic() < until:
        shown += capsys.readouterr().err
        time.sleep(0.01)
    one.release()
    published.join(30)
    assert shown == "publish: waits until readers give a version back, 0 MB, 1 s\n"
    assert publication.version == 3
    two.release()


def test_more_versions_at_once(shared):
    reader = shared.publication("many", versions=4, start=1)
    held = []
    for number in range(1, 5):
        shared.publish("many", number)
        held.append(reader.use())
    with pytest.raises(RDMATimeout):
        shared.publish("many", 5, timeout=0)
    for number, weights in enumerate(held, 1):
        assert set(weights["tensor-0"]) == {number}
        weights.release()
    shared.publish("many", 6)
    shared.close("many")


def test_the_lease_of_a_killed_reader_comes_back(other, third, publication):
    reader = publication.reader()
    publication.next()
    other.use(reader, "one")
    publication.next()
    other.use(reader, "two")
    published = threading.Thread(target=publication.next)
    published.start()
    other.kill()
    published.join(30)
    assert publication.version == 3
    # Both ends know: who had what, before its place was used again.
    pid = other.process.pid
    assert sorted((each.pid, each.version) for each in publication.failures) == [(pid, 1), (pid, 2)]
    assert all("has ended, or was killed" in each.reason for each in publication.failures)
    assert third.read(reader) == (3, {3})


def test_readers_that_end_in_good_order_are_no_failures(other, third, publication):
    reader = publication.reader()
    publication.next()
    other.use(reader, "one")
    other.end()
    assert third.read(reader) == (1, {1})
    with pytest.raises(RDMATimeout):
        reader.use(min_version=2, timeout=0.01)
    without_leases(publication)
    assert publication.failures == []


def test_a_forked_copy_of_a_reader_keeps_no_lease(other, publication):
    reader = publication.reader()
    publication.next()
    other.use(reader, "one")
    child = other.fork()
    other.kill()
    try:
        without_leases(publication)
    finally:
        os.kill(child, signal.SIGKILL)


def test_arrays_that_outlive_their_block_keep_the_version(shared, publication):
    reader = publication.reader()
    publication.next()
    shared.use(reader, "it")
    shared.keep_array("it")
    shared.release("it")
    publication.next()
    with pytest.raises(RDMATimeout):
        # The other place is in use as the newest version.
        publication.next(timeout=0.05)
    assert shared.look_at_arrays() == [1]
    shared.drop_arrays()
    without_leases(publication)


# Ends.


def test_waiters_are_notified_at_once_of_the_owners_death(other, third):
    reader = other.publication("it", start=1)
    other.publish("it", 1)
    assert third.read(reader) == (1, {1})
    third.tell("read", reader, min_version=2, timeout=None)
    other.kill()
    with pytest.raises(PublicationGone, match=f"pid {other.process.pid}"):
        third.hear()
    with pytest.raises(PublicationGone):
        third.read(reader)


def test_a_fork_of_the_owner_does_not_hide_its_death(other, third):
    reader = other.publication("it", start=1)
    third.tell("read", reader, timeout=None)
    child = other.fork()
    try:
        other.kill()
        with pytest.raises(PublicationGone):
            third.hear()
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("end", [Other.kill, Other.end])
def test_a_version_in_use_outlives_its_owner(end):
    """ARN-1."""
    owner = Other(program=PEER)
    reader = owner.publication("it", sizes=(200_000,), start=1)
    owner.publish("it", 1)
    with reader.use() as weights:
        end(owner)
        assert set(np.unique(weights["tensor-0"])) == {1}
    owner.end()


def test_closing_notifies_waiters_and_keeps_what_is_in_use(shared, other):
    reader = shared.publication("closed", start=1)
    shared.publish("closed", 1)
    weights = reader.use()
    other.tell("read", reader, min_version=2)
    shared.close("closed")
    with pytest.raises((VersionUnavailable, PublicationGone)):
        other.hear()
    with pytest.raises(PublicationGone):
        reader.use()
    with pytest.raises(InvalidTransfer, match="closed"):
        shared.publish("closed", 2)
    assert set(weights["tensor-0"]) == {1}
    shared.tell("joined", "closed")
    weights.release()
    assert shared.hear() is True


def test_a_forgotten_publication_is_closed(shared):
    reader = shared.publication("forgotten", start=1)
    shared.forget("forgotten")
    with pytest.raises(RDMAError):
        reader.use()


# Restarts.


def test_a_restarted_owner_goes_on_with_the_numbers(shared):
    name = f"restarted-{os.getpid()}"
    first = Other(program=PEER)
    reader = first.publication("it", known_as=name)
    before = first.publish("it")
    with reader.use() as weights:
        assert weights.version == before
    first.kill()
    first.end()
    shared.publication("again", known_as=name)
    after = shared.publish("again")
    assert after > before
    with reader.use() as weights:
        assert weights.version == after
    shared.close("again")
    assert shared.joined("again")


def test_a_reader_gets_nothing_older_than_it_has_seen_from_a_later_life(other, shared):
    name = f"older-{os.getpid()}"
    reader = other.publication("it", known_as=name, start=1)
    other.publish("it", 57)
    assert reader.use().version == 57
    other.kill()
    shared.publication("it", known_as=name, start=1)
    for number in (1, 2):
        shared.publish("it", number)
    with pytest.raises(VersionUnavailable, match="no version from 58 on"):
        reader.use(wait=False)
    with pytest.raises(VersionUnavailable):
        reader.use(version=2)
    with pytest.raises(InvalidTransfer, match="greater than 57"):
        shared.publish("it", 3)
    assert shared.publish("it") == 58
    assert reader.use().version == 58
    shared.close("it")


def test_a_name_is_used_once(shared, publication):
    with pytest.raises(InvalidTransfer, match="may publish under this name"):
        shared.publication("taken", known_as=publication.name)
    for wrong in ("", "x" * 65, "é" * 32 + "x", "a\0"):
        with pytest.raises(InvalidTransfer, match="1 to 64 bytes"):
            Publication({}, name=wrong)
    for name in ("x", "é" * 32):
        Publication({}, name=name).close()


def test_one_version_is_too_few():
    with pytest.raises(InvalidTransfer, match=r"versions must be 2 or more, .* got 1"):
        Publication({}, versions=1)


# Strangers.


def test_garbage_ends_the_connection_and_nothing_else(shared, publication):
    publication.next()
    dice = random.Random(3)
    packets = [b"x", b"[]", b"{}", b'{"wait": 1}', b'{"wait": true, "version": "x"}', b"\xff" * 60_000]
    packets += [b'{"wait": true, "version": 1e400}', b'{"wait": false, "version": true}', dice.randbytes(100)]
    packets += [b"[" * 30_000]
    for packet in packets:
        with open_socket() as stranger:
            stranger.settimeout(30)
            stranger.connect(address_of(publication.name))
            stranger.send(packet)
            assert stranger.recv(10) == b"", packet[:40]
    assert shared.read(publication.reader()) == (1, {1})


def test_asking_twice_on_one_connection_gives_one_lease(publication):
    publication.next()
    with open_socket() as stranger:
        stranger.settimeout(30)
        stranger.connect(address_of(publication.name))
        for _ in range(2):
            stranger.send(b'{"wait": true, "version": null, "floor": null}')
        first, descriptors, _, _ = socket.recv_fds(stranger, 10_000, 4)
        for each in descriptors:
            os.close(each)
        assert b'"version": 1' in first and b"asked already" in stranger.recv(10_000)
        assert publication.leases == [(os.getpid(), 1)]
    without_leases(publication)


def test_silent_connections_block_nobody(shared, publication):
    silent = [open_socket() for _ in range(200)]
    for each in silent:
        each.connect(address_of(publication.name))
    publication.next()
    assert shared.read(publication.reader()) == (1, {1})
    for each in silent:
        each.close()


def test_many_threads_of_one_reader(shared, in_threads):
    reader = shared.publication("threads", start=1)
    shared.publish("threads", 1)

    def work(n):
        for number in range(20):
            if n == 0:
                shared.publish("threads", number + 2)
            with reader.use() as weights:
                assert set(np.unique(weights["tensor-0"])) == {weights.version}

    in_threads(work, 8)
    shared.close("threads")


KNOCK = """
import os, socket
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as end:
    end.connect(address)
    try:
        end.send(b'{"wait": false, "version": null, "floor": null}')
        said = end.recv(1000)
    except ConnectionError:
        said = b""
open("said", "wb").write(said)
"""
POSE = """
import socket
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as end:
    end.bind(address)
    end.listen()
    open("listens", "w")
    with end.accept()[0] as reader:
        open("heard", "wb").write(reader.recv(1000))
"""


def test_code_in_a_sandbox_neither_reads_nor_poses_as_a_publication(publication, caplog):
    """PBL-1: whoever has the memory can write to it, although its descriptor is for reading."""
    publication.next()
    with Sandboxes(network=True, ready=1) as boxes, boxes.take(timeout=60) as box:
        if Isolation.PROCESSES not in box.isolation:
            pytest.skip("this system cannot isolate processes")
        box.call(exec, KNOCK, {"address": address_of(publication.name)}, timeout=60)
        assert (box.folder / "said").read_bytes() == b""
        assert caplog.text.count(f"refused a reader of publication {publication.name}") == 1
        without_leases(publication)

        reader = publication.reader()
        publication.close()
        posing = threading.Thread(
            target=box.call,
            args=(exec, POSE, {"address": address_of(publication.name)}),
            kwargs={"timeout": 60},
        )
        posing.start()
        until = time.monotonic() + 60
        while not (box.folder / "listens").exists():
            assert time.monotonic() < until
            time.sleep(0.01)
        with pytest.raises(PublicationGone, match=r"another process has its name: .* such as a sandbox's"):
            reader.use(timeout=60)
        posing.join()
        # That it was connected to is all that it learns.
        assert b"wait" not in (box.folder / "heard").read_bytes()
