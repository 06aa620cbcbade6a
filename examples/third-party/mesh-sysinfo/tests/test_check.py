from pathlib import Path

from mesh_sysinfo._check import check_gpus


def test_gpu_without_a_driver_is_a_failure_with_its_address(machine: Path) -> None:
    (finding,) = check_gpus(machine)
    assert finding.status == "fail"
    assert "AMD GPU 0000:02:00.0" in finding.detail
    assert finding.remedy


def test_all_with_drivers_passes(machine: Path) -> None:
    (machine / "sys/bus/pci/devices/0000:02:00.0/driver").symlink_to(machine / "sys/bus/pci/drivers/nvidia")
    (finding,) = check_gpus(machine)
    assert finding.status == "ok"
    assert "2 GPUs" in finding.detail


def test_a_missing_gpu_is_not_an_error(tmp_path: Path) -> None:
    (finding,) = check_gpus(tmp_path)
    assert finding.status == "ok"
    assert "no GPU" in finding.detail
