"""The conformance suite: the transports that come with the package pass it, as does one of another package; a broken one fails."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from levels import by_level, drawn
from mesh_core.testing import KindConformance
from mesh_rdma import TRANSPORTS
from mesh_rdma._native_transports import SHM, TCP
from mesh_rdma.testing import TransportConformance, TransportStress

SUITE = """
from mesh_rdma.testing import TransportConformance
from unix_transport import UNIX


class TestUnix(TransportConformance):
    plugin = UNIX
    distribution = "mesh-unix"
"""

CARELESS_SUITE = """
from careless_transports import SUITES

globals().update(SUITES)
"""

FOUND = {
    "believing": ["nothing_outside_of_the_memory_is_reached"],
    "forgetting": ["dropped_memory_is_gone", "a_reader_that_is_killed_under_transfers"],
    "clinging": ["a_reader_that_is_killed_under_transfers"],
    "guessable": ["the_transports_own_part_of_a_handle"],
    "lingering": ["memory_of_a_transfer_that_is_late"],
    "patient": ["memory_of_a_transfer_that_was_cancelled"],
    "deaf": ["an_owner_that_is_killed_under_transfers"],
    "hasty": ["what_is_done_comes_before_what_is_asked_for_then"],
    "mixing": ["many_threads"],
    "rounding": ["random_sizes_offsets_and_alignments"],
    "spilling": ["random_sizes_offsets_and_alignments"],
    "named": ["another_program_of_the_same_number"],
    "brittle": ["an_owner_without_descriptors"],
    "leaking": ["descriptors_do_not_pile_up", "a_reader_without_descriptors"],
}
"""The transports of careless_transports.py, each with the tests of the suite that find it out."""

# A run takes some by its seed; one that is not found out is named.
CARELESS = sorted(drawn(sorted(FOUND), by_level(quick=4, full=1, everything=1)))

READS_HERE = """
import json
from mesh_rdma import RDMABuffer, RDMAError, explain, transports
buffer = RDMABuffer(bytearray(b"hello"))
copy = bytearray(5)
try:
    buffer.read_into(copy, transport="unix", timeout=20).get(timeout=30)
    said = "read"
except RDMAError as error:
    said = f"{type(error).__name__}: {error}"
(found,) = (each for each in transports() if each.name == "unix")
chosen = explain(buffer)
print(json.dumps([said, copy.decode(), found.reason, chosen.candidates, chosen.passed.get("unix")]))
"""


ENDS_UNDER_A_TRANSFER = """
import atexit, signal
from mesh_rdma.testing._ends import Process
owner = Process()
atexit.register(owner.end)  # called after what mesh_rdma does at the end
buffer = owner.offer("a", b"x")
copy = bytearray(1)
buffer.read_into(copy, transport="unix", timeout=20).get(timeout=30)
owner.process.send_signal(signal.SIGSTOP)
read = buffer.read_into(copy, transport="unix", timeout=None)
print("ends now", flush=True)
"""


VANISHES = """
import json, logging
from mesh_rdma import explain
from mesh_rdma.testing._ends import Process, forged
from mesh_rdma.testing._hostile import cut_out

lines = []
class Lines(logging.Handler):
    def emit(self, record):
        lines.append(record.getMessage())
logging.getLogger("mesh_rdma").addHandler(Lines())
logging.getLogger("mesh_rdma").setLevel("INFO")

owner = Process()
try:
    # As of an owner whose memory the kernel does not let others look into.
    buffer = forged(owner.offer("a", b"here" * 5000), lambda handle: cut_out(handle, "shm"))
    before = str(explain(buffer))
    found = []
    for _ in range(4):
        copy = bytearray(20000)
        buffer.read_into(copy, timeout=30).get(timeout=60)
        found.append(copy == b"here" * 5000)
    buffer.write_from(b"gone", timeout=30).get(timeout=60)
    found.append(owner.look("a")[:8] == b"gonehere")
    print(json.dumps([before, found, str(explain(buffer)), [line.replace(buffer.owner, "it") for line in lines]]))
finally:
    owner.end()
"""


class TestTransports(KindConformance):
    kind = TRANSPORTS


@pytest.mark.slow
class TestShm(TransportConformance):
    plugin = SHM
    distribution = "mesh-rdma"


@pytest.mark.slow
class TestTcp(TransportConformance):
    plugin = TCP
    distribution = "mesh-rdma"


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.once
@pytest.mark.timeout(180)  # a GiB, on a machine that has other work
class TestShmStress(TransportStress):
    plugin = SHM
    distribution = "mesh-rdma"


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.once
@pytest.mark.timeout(180)  # a GiB, on a machine that has other work
class TestTcpStress(TransportStress):
    plugin = TCP
    distribution = "mesh-rdma"


@pytest.fixture
def site(tmp_path):
    """A folder in which the package mesh-unix is installed."""
    install(tmp_path, "unix = unix_transport")
    (tmp_path / "test_unix.py").write_text(SUITE)
    return tmp_path


def install(folder, *entries):
    for module in ("unix_transport.py", "careless_transports.py"):
        shutil.copy(Path(__file__).with_name(module), folder)
    info = folder / "mesh_unix-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mesh-unix\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("\n".join(["[mesh.transports]", *entries, ""]))


def run(site, kind, *arguments, careless=""):
    environment = {
        **os.environ,
        "PYTHONPATH": str(site),
        "MESH_TEST_UNIX": kind,
        "MESH_TEST_CARELESS": careless,
    }
    return subprocess.run(
        [sys.executable, *arguments], cwd=site, env=environment, capture_output=True, text=True, timeout=100
    )


@pytest.mark.slow
@pytest.mark.full
def test_a_transport_of_another_package_passes(site):
    done = run(site, "good", "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_unix.py")
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("names", [CARELESS[::2], CARELESS[1::2]], ids=["even", "odd"])
def test_each_careless_one_is_caught(tmp_path, names):
    install(tmp_path, *(f"{name} = careless_transports" for name in names))
    (tmp_path / "test_careless.py").write_text(CARELESS_SUITE)
    wanted = {f"test_careless.py::Test{name.title()}::test_{test}" for name in names for test in FOUND[name]}
    done = run(
        tmp_path,
        "good",
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        *sorted(wanted),
        careless=",".join(names),
    )
    assert set(re.findall(r"^FAILED (\S+)", done.stdout, re.MULTILINE)) == wanted, done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("good", ["read", "hello", None, ["shm", "tcp", "unix"], None]),
        (
            "absent",
            [
                "TransportUnavailable: the transport 'unix' does not reach the buffer's owner",
                "\0" * 5,
                "there is no such device (buy one)",
                ["shm", "tcp"],
                "the owner does not offer it",
            ],
        ),
        (
            "wrong",
            [
                "TransportUnavailable: the transport 'unix' does not reach the buffer's owner",
                "\0" * 5,
                None,
                ["shm", "tcp"],
                "the owner does not offer it: TypeError: create() of the transport unix gave object, no Transport",
            ],
        ),
        (
            "hoarding",
            [
                "InvalidTransfer: the transport unix has kept 1 views",
                "hello",
                None,
                ["shm", "tcp", "unix"],
                None,
            ],
        ),
    ],
)
def test_what_the_transport_of_another_package_says(site, kind, said):
    done = run(site, kind, "-c", READS_HERE)
    assert done.returncode == 0, done.stderr
    outcome, *rest = json.loads(done.stdout)
    assert outcome.startswith(said[0])
    assert rest == said[1:]


@pytest.mark.slow
def test_what_is_installed_is_listed_with_what_it_can_do(site):
    done = run(site, "good", "-m", "mesh_core", "plugins", "--json")
    assert done.returncode == 0, done.stderr
    found = {each["name"]: each for each in json.loads(done.stdout)["plugins"] if each["kind"] == "transport"}
    assert set(found) == {"shm", "cuda", "tcp", "ibverbs", "ucx", "unix"}


@pytest.mark.python
@pytest.mark.slow
def test_the_interpreter_may_end_under_a_transfer(site):
    """What is under way in Python is given up, and has ended before the interpreter does."""
    done = run(site, "good", "-c", ENDS_UNDER_A_TRANSFER)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ends now\n", "")


@pytest.mark.slow
def test_another_takes_over_in_the_middle_of_a_transfer_when_a_device_goes_away(site):
    """The user notices nothing but the delay, and the log has a line for each choice."""
    done = run(site, "vanishing", "-c", VANISHES)
    assert done.returncode == 0, done.stderr
    before, found, after, lines = json.loads(done.stdout)
    shm = "; ".join(f"not {name}: the owner does not offer it" for name in ("shm", "cuda", "ucx", "ibverbs"))
    gone = "not unix: OSError: [Errno 19] the device is gone"
    assert (before, found, after) == (f"unix, then tcp; {shm}", [True] * 5, f"tcp; {shm}; {gone}")
    assert lines == [f"memory of it is reached by {said}" for said in (before, after)]
