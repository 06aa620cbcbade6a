"""A machine of files: two nodes, one GPU with its driver, one without, and a server's plain VGA adapter."""

from pathlib import Path

import pytest


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _device(root: Path, address: str, *, vendor: str, pci_class: str, driver: str | None, node: str) -> None:
    device = root / "sys/bus/pci/devices" / address
    for name, text in {"vendor": vendor, "class": pci_class, "device": "0x2335", "numa_node": node}.items():
        _write(device / name, text + "\n")
    if driver is not None:
        place = root / "sys/bus/pci/drivers" / driver
        place.mkdir(parents=True, exist_ok=True)
        (device / "driver").symlink_to(place)


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    _write(tmp_path / "proc/cpuinfo", "processor\t: 0\nmodel name\t: x\n\nprocessor\t: 1\n")
    _write(tmp_path / "proc/meminfo", "MemTotal:       4194304 kB\nMemFree: 1 kB\n")
    for number in (0, 1):
        node = tmp_path / f"sys/devices/system/node/node{number}"
        _write(node / "cpulist", f"{number}\n")
        _write(node / "meminfo", f"Node {number} MemTotal:  2097152 kB\n")
    _device(tmp_path, "0000:01:00.0", vendor="0x10de", pci_class="0x030200", driver="nvidia", node="1")
    _device(tmp_path, "0000:02:00.0", vendor="0x1002", pci_class="0x038000", driver=None, node="-1")
    _device(tmp_path, "0000:03:00.0", vendor="0x8086", pci_class="0x030000", driver=None, node="0")
    return tmp_path
