"""The conformance suite: the transports that come with the package pass it, as does one of another package; a broken one fails."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mesh_core.testing import KindConformance
from mesh_rdma import TRANSPORTS
from mesh_rdma._native_transports import SHM, TCP
from mesh_rdma.testing import TransportConformance

SUITE = """
from mesh_rdma.testing import TransportConformance
from unix_transport import UNIX


class TestUnix(TransportConformance):
    plugin = UNIX
    distribution = "mesh-unix"
"""

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


@pytest.fixture
def site(tmp_path):
    """A folder in which the package mesh-unix is installed."""
    shutil.copy(Path(__file__).with_name("unix_transport.py"), tmp_path)
    info = tmp_path / "mesh_unix-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mesh-unix\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[mesh.transports]\nunix = unix_transport\n")
    (tmp_path / "test_unix.py").write_text(SUITE)
    return tmp_path


def run(site, kind, *arguments):
    environment = {**os.environ, "PYTHONPATH": str(site), "MESH_TEST_UNIX": kind}
    return subprocess.run(
        [sys.executable, *arguments], cwd=site, env=environment, capture_output=True, text=True, timeout=100
    )


def failed(output):
    return set(re.findall(r"^FAILED \S+::(\w+)", output, re.MULTILINE))


@pytest.mark.slow
def test_a_transport_of_another_package_passes(site):
    done = run(site, "good", "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_unix.py")
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_a_careless_one_fails(site):
    done = run(site, "careless", "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_unix.py")
    # What is read-only is in the end kept so by its memory.
    assert failed(done.stdout) == {
        "test_dropped_memory_is_gone",
        "test_nothing_outside_of_the_memory_is_reached",
    }, done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("good", ["read", "hello", None, ["shm", "tcp", "unix"], None]),
        (
            "absent",
            [
                "TransportUnavailable: no transport reaches the buffer's owner",
                "\0" * 5,
                "there is no such device (buy one)",
                ["shm", "tcp"],
                "the owner does not offer it",
            ],
        ),
        (
            "wrong",
            [
                "TransportUnavailable: no transport reaches the buffer's owner",
                "\0" * 5,
                None,
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


@pytest.mark.slow
def test_what_is_installed_is_listed_with_what_it_can_do(site):
    done = run(site, "good", "-m", "mesh_core", "plugins", "--json")
    assert done.returncode == 0, done.stderr
    found = {each["name"]: each for each in json.loads(done.stdout)["plugins"] if each["kind"] == "transport"}
    assert {"shm", "tcp", "ucx", "unix"} <= set(found)
