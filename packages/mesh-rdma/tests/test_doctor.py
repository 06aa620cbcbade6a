"""`mesh doctor` tries the transports, and prints what each can do."""

from pathlib import Path

import pytest

from mesh_core.plugins import ProbeResult
from mesh_core.testing import DoctorCheckConformance, installed_plugins
from mesh_rdma import TransportCapabilities, TransportPlugin, _doctor
from mesh_rdma._doctor import RDMA
from mesh_rdma._transports import TransportStatus
from mesh_rdma.testing import missing_gpu


@pytest.mark.slow
class TestCheck(DoctorCheckConformance):
    plugin = RDMA
    distribution = "mesh-rdma"


def rows():
    found = list(RDMA.create()())
    return {finding.detail.split()[0]: finding for finding in found}


@pytest.mark.slow
def test_each_transport_is_tried_with_another_process():
    found = rows()
    assert found["shm"].status == found["tcp"].status == "ok"
    words = " ".join(found["shm"].detail.split())
    assert words.startswith("shm copies this host owner idle tried: wrote 64 KiB to another process")
    words = " ".join(found["tcp"].detail.split())
    assert words.startswith("tcp copies, atomics")
    assert words.endswith(
        "owner works tried: wrote 64 KiB to another process, and read them back, added to a number there"
    )


@pytest.mark.slow
def test_one_that_does_not_work_says_why_and_what_to_do(monkeypatch):
    missing = TransportPlugin(
        name="quantum",
        api_version=1,
        create=object,
        probe=lambda: ProbeResult.no("there is no such device", remedy="buy one"),
        summary="a device",
    )
    standing = TransportStatus(
        "quantum", TransportCapabilities(True, False, True, True), "there is no such device (buy one)"
    )
    monkeypatch.setattr("mesh_rdma._transports.transports", lambda: [standing])
    with installed_plugins(missing):
        (finding,) = RDMA.create()()
    assert (finding.status, finding.remedy) == ("warn", "buy one")
    assert finding.detail == "quantum  not here: there is no such device (tried: its probe)"


@pytest.mark.slow
def test_one_that_fails_when_it_is_tried_is_no_success(monkeypatch):
    def fail(name, can, buffer):
        raise ConnectionError("the cable is cut")

    monkeypatch.setattr(_doctor, "_try", fail)
    found = rows()
    assert found["shm"].status == "warn"
    assert "tried: the cable is cut" in found["shm"].detail


@pytest.mark.skipif(Path("/sys/class/infiniband").exists(), reason="the kernel has InfiniBand")
def test_a_machine_without_rdma_devices_passes_the_checks():
    (said,) = (each for each in RDMA.create()() if each.detail.startswith("ibverbs"))
    assert said.status == "ok"
    assert "no RDMA device" in said.detail


@pytest.mark.slow
def test_memory_of_gpus_is_tried_on_another_process_or_told_to_be_missing():
    found = rows()["cuda"]
    if missing_gpu() is None:
        assert "to memory of a GPU of another process" in found.detail
    elif not Path("/dev/nvidiactl").exists():
        # Nothing is amiss where there is no driver.
        assert found.status == "ok"
        assert "not used: this machine has no NVIDIA GPU" in found.detail
