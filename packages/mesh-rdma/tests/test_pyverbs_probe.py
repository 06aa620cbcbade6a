"""What the engine on pyverbs says where it cannot work, which ports it would use, and how it is chosen. No device is needed."""

import os
import subprocess
import sys
from ipaddress import IPv6Address

import pytest

from mesh_rdma._pyverbs import IBVERBS
from mesh_rdma._pyverbs._devices import address, ports

DEVICES = "def get_device_list():\n    {}\n"
LIST = "import mesh_rdma; print([(each.name, each.reason) for each in mesh_rdma.transports()])"


@pytest.fixture
def library(tmp_path, monkeypatch):
    """Make a module `pyverbs` that does this."""

    def make(devices="return []", other=""):
        package = tmp_path / "pyverbs"
        package.mkdir()
        (package / "__init__.py").touch()
        for name in ("addr", "cq", "enums", "mr", "pd", "qp", "wr"):
            (package / f"{name}.py").write_text(other)
        (package / "device.py").write_text(DEVICES.format(devices))
        monkeypatch.syspath_prepend(tmp_path)

    for name in [name for name in sys.modules if name.partition(".")[0] == "pyverbs"]:
        monkeypatch.delitem(sys.modules, name)
    yield make
    for name in [name for name in sys.modules if name.partition(".")[0] == "pyverbs"]:
        del sys.modules[name]


def test_without_the_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyverbs", None)
    said = IBVERBS.probe()
    assert said.reason == "pyverbs is not installed for this Python"
    assert "python3-pyverbs" in said.remedy


def test_with_a_library_that_does_not_fit(library):
    library(other="raise ImportError('libibverbs.so.1: version IBVERBS_1.14 not found')")
    said = IBVERBS.probe()
    assert said.reason.endswith("libibverbs.so.1: version IBVERBS_1.14 not found")
    assert "same version" in said.remedy


def test_without_infiniband_in_the_kernel(library):
    library(devices="raise RuntimeError('Failed to get devices list')")
    said = IBVERBS.probe()
    assert said.reason == "this machine's kernel has no InfiniBand (Failed to get devices list)"
    assert "ib_uverbs" in said.remedy


def test_without_a_device(library):
    library()
    said = IBVERBS.probe()
    assert said.reason == "this machine has no RDMA device"
    assert "rdma link add" in said.remedy


class Tables:
    """The library, as far as it is asked for addresses."""

    def __init__(self):
        self.known = {}

    def gids(self, device, port):
        assert port == 1
        return [(index, IPv6Address(gid).packed) for index, gid in self.known.get(device, ())]


@pytest.fixture
def tables():
    return Tables()


@pytest.fixture
def tree(tmp_path, tables):
    """Make a folder as the kernel shows devices."""

    def device(name, gids=(), *, link="Ethernet", state="4: ACTIVE", rate="100 Gb/sec (4X EDR)", lid="0x0"):
        port = tmp_path / name / "ports" / "1"
        (port / "gids").mkdir(parents=True)
        for file, text in (("link_layer", link), ("state", state), ("rate", rate), ("lid", lid)):
            (port / file).write_text(f"{text}\n")
        (port / "gids" / "0").write_text("fe80:0000:0000:0000:0000:0000:0000:0002\n")
        tables.known[name] = gids
        return tmp_path

    return device


IPV4 = [(0, "::ffff:10.0.0.1")]


def test_ports_are_used_by_their_address_that_reaches_farthest(tree, tables):
    gids = [(1, "fe80::1"), (3, "2001:db8::1"), (5, "::ffff:10.0.0.2"), (4, "::ffff:10.0.0.1")]
    root = tree("a")
    for count, (index, gid) in enumerate(gids, start=1):
        tables.known["a"] = gids[:count]
        (port,) = ports(tables, root)
        assert (port.gid_index, IPv6Address(port.gid)) == (index, IPv6Address(gid))


def test_of_the_ports_the_fastest_come_first_and_the_unusable_are_left_out(tree, tables):
    for name, rate in (("slow", "10 Gb/sec"), ("fast", "400 Gb/sec (4X NDR)"), ("also", "10 Gb/sec")):
        tree(name, IPV4, rate=rate)
    tree("down", IPV4, state="1: DOWN")
    tree("bare")
    tree("strange", IPV4, link="Unspecified")
    root = tree("wide", link="InfiniBand", rate="56 Gb/sec (4X FDR)", lid="0x1f")
    assert [(port.device, port.rate) for port in ports(tables, root)] == [
        ("fast", 400_000),
        ("wide", 56_000),
        ("also", 10_000),
        ("slow", 10_000),
    ]
    wide = ports(tables, root)[1]
    assert (wide.lid, IPv6Address(wide.gid)) == (31, IPv6Address("fe80::2"))
    tree("more", IPV4)
    assert len(ports(tables, root)) == 4


def test_others_find_the_owner_by_the_address_of_its_port(tree, tables):
    (port,) = ports(tables, tree("a", IPV4))
    assert address(port) == IPv6Address("::ffff:10.0.0.1")


def test_without_a_device_there_is_no_port(tmp_path, tables):
    assert ports(tables, tmp_path / "infiniband") == []


def listed(**changes):
    environment = {**os.environ, **changes}
    return subprocess.run(
        [sys.executable, "-c", LIST], env=environment, capture_output=True, text=True, timeout=30
    )


@pytest.mark.slow
def test_it_is_there_where_it_was_asked_for():
    assert "pyverbs" not in listed(MESH_RDMA_VERBS="").stdout
    said = listed(MESH_RDMA_VERBS="pyverbs")
    assert said.stdout.count("'ibverbs'") == 1, said.stderr
    wrong = listed(MESH_RDMA_VERBS="pyverb")
    assert "SettingsError: MESH_RDMA_VERBS must be 'native' or 'pyverbs', got 'pyverb'" in wrong.stderr
