"""Memory reached by UCX: the conformance suite over each of its transports, and what is our own care there.

UCX is switched on by the environment, so that each run is a process of its own.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mesh_rdma import RDMABuffer, explain, transports

SUITE = """
from mesh_rdma._native_transports import UCX
from mesh_rdma.testing import TransportConformance


class TestUcx(TransportConformance):
    plugin = UCX
    distribution = "mesh-rdma"
"""

WHEEL = importlib.util.find_spec("libucx")
SYSTEM = (
    subprocess.run(
        [sys.executable, "-c", "import ctypes; ctypes.CDLL('libucp.so.0')"], capture_output=True, check=False
    ).returncode
    == 0
)
wheel = pytest.mark.skipif(WHEEL is None, reason="needs the package libucx-cu12")
system = pytest.mark.skipif(not SYSTEM, reason="needs the system's libucp.so.0 (Debian: libucx0)")
WITH_WHEEL = {"MESH_RDMA_UCX": "1"}
WITH_SYSTEM = {"MESH_RDMA_UCX": "1", "MESH_RDMA_UCX_LIBRARY": "libucp.so.0"}
ONE_BY_ONE = ["posix,sysv", "posix,cma"]
SHORT = "reads or writes or dropped or answer"
"""What is run of the suite where all of it is run elsewhere."""


def run(folder, environment, *arguments):
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("UCX_", "MESH_RDMA_"))}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=clean | environment,
        capture_output=True,
        text=True,
        timeout=50,
    )


def conforms(folder, environment, *arguments):
    (folder / "test_suite.py").write_text(SUITE)
    done = run(
        folder, environment, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments, "test_suite.py"
    )
    assert done.returncode == 0, done.stdout


@wheel
@pytest.mark.slow
@pytest.mark.sampled(2, full=True)
@pytest.mark.parametrize("tls", ONE_BY_ONE)
def test_passes_the_suite_with_the_wheel(tls, tmp_path):
    """UCX-2: forged handles reach nothing but what the owner shows."""
    conforms(tmp_path, WITH_WHEEL | {"UCX_TLS": tls}, *(("-k", SHORT) if "sysv" in tls else ()))


@system
@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("tls", ONE_BY_ONE)
def test_passes_the_suite_with_the_systems_library(tls, tmp_path):
    conforms(tmp_path, WITH_SYSTEM | {"UCX_TLS": tls}, "-k", SHORT)


def test_is_switched_off_unless_it_is_wanted():
    (found,) = (each for each in transports() if each.name == "ucx")
    assert found.reason is not None
    assert "MESH_RDMA_UCX=1" in found.reason
    assert explain(RDMABuffer(bytearray(1))).passed["ucx"] == "the owner does not offer it"


LOADED = """
import sys
from mesh_rdma import RDMABuffer, transports
RDMABuffer(bytearray(8))
(found,) = (each for each in transports() if each.name == "ucx")
print(found.reason)
print("libucp" in open("/proc/self/maps").read())
"""


@pytest.mark.slow
def test_opens_no_library_unless_it_is_wanted(tmp_path):
    done = run(tmp_path, {}, "-c", LOADED)
    assert done.stdout.splitlines()[1:] == ["False"], done.stderr


@pytest.mark.slow
def test_a_library_that_is_not_there_is_named(tmp_path):
    done = run(
        tmp_path, {"MESH_RDMA_UCX": "1", "MESH_RDMA_UCX_LIBRARY": "/nowhere/libucp.so.0"}, "-c", LOADED
    )
    reason, loaded = done.stdout.splitlines()
    assert "cannot open libucp: /nowhere/libucp.so.0" in reason
    assert loaded == "False"


@pytest.mark.slow
def test_a_library_that_is_another_is_refused(tmp_path):
    libc = next(
        line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libc.so" in line
    )
    done = run(tmp_path, {"MESH_RDMA_UCX": "1", "MESH_RDMA_UCX_LIBRARY": libc}, "-c", LOADED)
    assert "ucp_get_version" in done.stdout, done.stderr


@wheel
@pytest.mark.slow
def test_invalid_settings_of_ucx_are_reported(tmp_path):
    done = run(tmp_path, WITH_WHEEL | {"UCX_TLS": "pigeon"}, "-c", LOADED)
    assert "UCX_" in done.stdout.splitlines()[0], done.stderr


CARE = """
import json, os, threading
from mesh_rdma import explain
from mesh_rdma.testing._ends import Process

said = {}

def outcome(work):
    try:
        work()
    except Exception as error:
        return type(error).__name__
    return "done"

def read(buffer, size, **options):
    copy = bytearray(size)
    buffer.read_into(copy, transport="ucx", **options).get(timeout=40)
    return bytes(copy)

owner = Process()
try:
    size = 24 << 20
    big, other = owner.offer("big", b"a" * size), owner.offer("other", b"other")
    said["explained"] = explain(big).candidates
    said["first"] = read(other, 5) == b"other"

    # A write is given up in its middle; another operation that is under way is not hurt by it.
    with owner.halted():
        future = big.write_from(b"b" * size, transport="ucx", timeout=40)
        beside = other.read_into(into := bytearray(5), transport="ucx", timeout=40)
        future.cancel()
        said["late"] = outcome(lambda: read(big, 5, timeout=0.2))
    beside.get(timeout=40)
    said["beside"] = into == b"other"

    # From now on it is dropped, and overwritten by its owner: nothing of what was on its way arrives.
    owner.drop("big")
    said["dropped"] = outcome(lambda: read(big, 5))
    said["other"] = read(other, 5) == b"other"
    said["look"] = set(owner.look("big")) == set(b"!")

    # A forked copy refuses, and hurts nobody.
    end, begin = os.pipe()
    if (child := os.fork()) == 0:
        os.write(begin, outcome(lambda: read(other, 5)).encode())
        os._exit(0)
    os.waitpid(child, 0)
    said["forked"] = os.read(end, 100).decode()
    said["after the fork"] = read(other, 5) == b"other"

    # The owner dies in the middle of a read, which is told at once.
    large = owner.offer("large", bytes(64 << 20))
    ends = []
    def long():
        while not ends or ends[-1] == "done":
            ends.append(outcome(lambda: read(large, 64 << 20)))
    reading = threading.Thread(target=long)
    reading.start()
    while not ends:
        pass
    owner.process.kill()
    reading.join()
    said["killed"] = ends[-1]
finally:
    owner.end()
print(json.dumps(said))
"""


@wheel
@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("tls", ONE_BY_ONE)
def test_what_is_given_up_dropped_forked_or_killed(tls, tmp_path):
    """UCX-3, UCX-4: nothing comes late, and no other operation is hurt."""
    done = run(tmp_path, WITH_WHEEL | {"UCX_TLS": tls}, "-c", CARE)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said.pop("forked").endswith("Error")
    # By cma the owner may be stopped, and is read all the same.
    assert said.pop("late") in ({"RDMATimeout", "done"} if "cma" in tls else {"RDMATimeout"})
    assert said == {
        "explained": ["shm", "ucx", "tcp"],
        "first": True,
        "beside": True,
        "dropped": "BufferGone",
        "other": True,
        "look": True,
        "after the fork": True,
        "killed": "BufferGone",
    }


ENDS = """
import atexit
from pathlib import Path

from mesh_rdma import RDMABuffer
from mesh_rdma.testing._ends import Process

def threads():
    names = [task.joinpath("comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    print(names.count("mesh-ucx"))

# Registered before the engine, and so called after it has closed.
atexit.register(threads)
other = Process()
buffer = other.offer("it", b"there")
buffer.read_into(copy := bytearray(5), transport="ucx").get(timeout=40)
mine = RDMABuffer(bytearray(b"where"))
assert (bytes(copy), other.read(mine, "ucx")) == (b"there", b"where")
threads()
other.keep = mine
atexit.register(other.end)
"""


@wheel
@pytest.mark.slow
def test_at_exit_the_threads_of_readers_and_owners_are_joined(tmp_path):
    """UCX's own end must not come while a thread of ours is in its code."""
    done = run(tmp_path, WITH_WHEEL | {"UCX_TLS": "posix,sysv"}, "-c", ENDS)
    assert done.returncode == 0, done.stderr
    # The reader's, the owner's that listens, and the owner's for its one reader.
    assert done.stdout.split() == ["3", "0"], done.stderr


KILLS = """
import pickle, subprocess, sys
from mesh_rdma.testing._ends import Process

WRITER = '''
import pickle, sys
buffer = pickle.load(sys.stdin.buffer)
parts = [buffer[at : at + (1 << 20)] for at in range(0, buffer.size(), 1 << 20)]
while True:
    for data in (b"e" * (1 << 20), b"o" * (1 << 20)):
        for future in [part.write_from(data, transport="ucx") for part in parts]:
            future.get(timeout=40)
'''
owner = Process()
try:
    big = owner.offer("big", b"e" * (48 << 20))
    owner.offer("small", b"a")
    first, last = (big[at : at + 1] for at in (0, big.size() - 1))
    one, other = bytearray(1), bytearray(1)
    for turn in range(24):
        with subprocess.Popen([sys.executable, "-c", WRITER], stdin=subprocess.PIPE) as writer:
            writer.stdin.write(pickle.dumps(big))
            writer.stdin.close()
            # The memory is looked at: when its ends differ the writer is in the middle.
            for _ in range(1 + turn % 3):
                while one == other:
                    first.read_into(one, transport="shm").get(timeout=40)
                    last.read_into(other, transport="shm").get(timeout=40)
                one = bytearray(other)
            writer.kill()
        assert owner.look("small") == b"a", turn
finally:
    owner.end()
"""


@wheel
@pytest.mark.slow
def test_a_writer_that_is_killed_does_not_take_the_owner_with_it(tmp_path):
    """UCX-3: its worker ends with it."""
    done = run(tmp_path, WITH_WHEEL | {"UCX_TLS": "posix,sysv"}, "-c", KILLS)
    assert done.returncode == 0, done.stderr


KILLED_READERS = """
import pickle, subprocess, sys
from mesh_rdma import RDMABuffer
from mesh_rdma.testing._ends import Process

READER = '''
import os, pickle, signal, sys
buffer = pickle.load(sys.stdin.buffer)
buffer.read_into(bytearray(1), transport="ucx").get(timeout=40)
into = bytearray(buffer.size())
reads = [buffer.read_into(into, transport="ucx", timeout=40) for _ in range(2)]
print(flush=True)
while True:
    for read in reads:
        read.get(timeout=40)
    reads = [buffer.read_into(into, transport="ucx", timeout=40) for _ in range(2)]
'''
memory = bytearray(16 << 20)
buffer = RDMABuffer(memory)
for _ in range(6):
    command = [sys.executable, "-c", READER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as reader:
        reader.stdin.write(pickle.dumps(buffer))
        reader.stdin.close()
        reader.stdout.readline()
        # The owner has more to answer than has room on the way.
        reader.kill()
owner = Process()
try:
    assert owner.read(buffer[:8], "ucx") == bytes(8)
finally:
    owner.end()
"""


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "library", [pytest.param(WITH_WHEEL, marks=wheel), pytest.param(WITH_SYSTEM, marks=system)]
)
def test_a_reader_that_is_killed_does_not_take_the_owner_with_it(library, tmp_path):
    """UCX-6. What is left in memory by those who used it before is something else than zeros here."""
    environment = library | {"UCX_TLS": "posix,sysv", "MALLOC_PERTURB_": "165"}
    done = run(tmp_path, environment, "-c", KILLED_READERS)
    assert done.returncode == 0, done.stderr


HALTED = """
from mesh_rdma.testing._ends import Process

owner = Process()
try:
    buffer = owner.offer("it", b"there")
    buffer.read_into(copy := bytearray(5), transport="ucx").get(timeout=40)
    with owner.halted():
        buffer.read_into(copy := bytearray(5), transport="ucx", timeout=20).get(timeout=40)
        buffer.write_from(b"where", transport="ucx", timeout=20).get(timeout=40)
    print(copy, owner.look("it"))
finally:
    owner.end()
"""


@wheel
@pytest.mark.slow
def test_by_cma_the_owner_does_nothing(tmp_path):
    """LSE-1: UCX uses it where it is told that keys can be revoked, for which there are leases."""
    done = run(tmp_path, WITH_WHEEL | {"UCX_TLS": "posix,cma"}, "-c", HALTED)
    assert done.stdout.splitlines() == ["bytearray(b'there') b'where'"], done.stderr


REFUSED = """
from mesh_rdma.testing._ends import Process

owner = Process()
try:
    buffer = owner.offer("it", b"there")
    try:
        buffer.read_into(bytearray(5), transport="ucx").get(timeout=40)
    except Exception as error:
        print(error)
    # Another transport goes on, without being asked for.
    buffer.read_into(copy := bytearray(5)).get(timeout=40)
    print(copy)
finally:
    owner.end()
"""


@wheel
@pytest.mark.slow
def test_its_tcp_is_not_used(tmp_path):
    """UCX-5."""
    done = run(tmp_path, WITH_WHEEL | {"UCX_TLS": "tcp"}, "-c", REFUSED)
    assert done.returncode == 0, done.stderr
    refused, read = done.stdout.splitlines()
    assert "leave tcp out of UCX_TLS" in refused
    assert read == "bytearray(b'there')"


@wheel
@pytest.mark.slow
def test_its_tcp_is_left_out_unless_it_is_asked_for(tmp_path):
    done = run(tmp_path, WITH_WHEEL, "-c", REFUSED)
    assert done.stdout.splitlines() == ["bytearray(b'there')"], done.stderr
