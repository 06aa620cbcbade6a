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


NEWER = (
    "it cannot be loaded: it was written for version 2 of the transport contract; mesh-rdma 0.1.0 speaks version 1 "
    "(upgrade mesh-rdma, or install an older mesh-unix)"
)

RAISES = """
import json, traceback
from mesh_rdma import RDMABuffer
buffer, found = RDMABuffer(bytearray(b"hello")), []
for _ in range(2):
    error = buffer.read_into(bytearray(5), transport="unix", timeout=20).exception(timeout=30)
    cause = error.__cause__
    found.append([str(error), f"{type(cause).__name__}: {cause}", "".join(traceback.format_exception(error))])
print(json.dumps(found))
"""

LASTS = """
import gc, json, pickle
import numpy
from mesh_rdma import RDMABuffer, _here, empty
found = []
try:
    import torch
except ImportError:
    torch = None
for kind in ("array", "view", "dates", "tensor"):
    if kind == "tensor" and torch is not None:
        memory = torch.frombuffer(bytearray(b"here" * 2), dtype=torch.uint8).clone()
    else:
        memory = numpy.frombuffer(b"here" * 2, numpy.uint8).copy()
    part = memory[:] if kind == "view" else memory.view("datetime64[s]") if kind == "dates" else memory
    there = pickle.loads(pickle.dumps(RDMABuffer(part)))
    del part
    gc.collect()
    copy = bytearray(8)
    there.read_into(copy, transport="unix", timeout=20).get(timeout=30)
    before = _here.lasting.counts()
    del memory
    gc.collect()
    gone = there.read_into(copy, timeout=20).exception(timeout=30)
    said = f"{type(gone).__name__}: {gone}"[:len("BufferGone: the owner has let go of the buffer")]
    found.append([before, copy.decode(), _here.lasting.counts(), said])
print(json.dumps(found))
"""

PROBES = """
import json, logging
from mesh_core.plugins import PluginManager
from mesh_rdma import TRANSPORTS, RDMABuffer
lines = []
class Lines(logging.Handler):
    def emit(self, record):
        lines.append(record.getMessage())
logging.getLogger("mesh_core.plugins").addHandler(Lines())
PluginManager().survey([TRANSPORTS])
RDMABuffer(bytearray(1))
PluginManager().survey([TRANSPORTS])
import unix_transport
print(json.dumps([len(unix_transport.PROBED), lines]))
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
        # A failed assert then shows whole values: the suites' own must not take minutes for it.
        "CI": "true",
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
            "newer",
            [
                "TransportUnavailable: the transport 'unix' does not reach the buffer's owner",
                "\0" * 5,
                NEWER,
                ["shm", "tcp"],
                "the owner does not offer it",
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
    if kind in ("absent", "newer"):
        # The one that was asked for alone, with its own reason.
        assert outcome.endswith(f": {said[2]}")


@pytest.mark.slow
def test_what_a_transport_of_another_package_has_raised_is_the_cause(site):
    done = run(site, "raising", "-c", RAISES)
    assert done.returncode == 0, done.stderr
    for said, cause, lines in json.loads(done.stdout):
        assert said.startswith("the transport 'unix' does not reach the buffer's owner")
        assert cause == "AttributeError: 'RaisingPeer' object has no attribute 'missing'" and cause in said
        assert "return self.missing(copies)" in lines


@pytest.mark.slow
def test_memory_is_not_waited_for_where_transports_are_written_in_python(site):
    """BUF-2: it is kept in place instead, until nothing else refers to it."""
    pytest.importorskip("numpy")
    done = run(site, "good", "-c", LASTS)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [
        [[0, 1], "herehere", [0, 0], "BufferGone: the owner has let go of the buffer"] for _ in range(4)
    ]


@pytest.mark.slow
def test_a_probe_runs_once_and_a_slow_one_is_named(site):
    """PLUG-3, PLUG-2."""
    done = run(site, "slow", "-c", PROBES)
    assert done.returncode == 0, done.stderr
    probed, lines = json.loads(done.stdout)
    assert probed == 1
    (line,) = lines
    assert re.match(r"the probe of transport 'unix' of mesh-unix 1.0 has taken [0-9.]+ s", line), line


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("slow", r"the probe takes 2\.\d+ s, more than [01]\.\d+ s: it must be cheap"),
        ("heavy", r"to import the plugin imports .*torch.*: import heavy modules inside create"),
    ],
)
def test_what_a_plugin_costs_a_new_process_is_measured(site, kind, said):
    if kind == "heavy":
        pytest.importorskip("torch")
    done = run(
        site,
        kind,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "test_unix.py",
        "-k",
        "costs_a_new_process",
    )
    assert done.returncode == 1 and re.search(said, done.stdout), done.stdout


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
