"""Reading a machine from /proc and /sys. Every function takes the root of a file tree, so that a test can build one."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path("/")
VENDORS: Final = {"0x10de": "NVIDIA", "0x1002": "AMD", "0x8086": "Intel"}
# PCI classes: 3D controller, display controller, processing accelerator. A plain VGA adapter counts only with a
# driver that computes: servers have one of those for their console.
COMPUTE_CLASSES: Final = ("0x0302", "0x0380", "0x1200")
VGA_CLASS: Final = "0x0300"
COMPUTE_DRIVERS: Final = ("nvidia", "amdgpu", "xe", "i915")


@dataclass(frozen=True, slots=True)
class NumaNode:
    """One memory node and the CPUs beside it."""

    number: int
    cpus: str
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU, as the PCI bus shows it; `node` is None where the machine has only one."""

    address: str
    vendor: str
    device: str
    driver: str | None
    node: int | None


@dataclass(frozen=True, slots=True)
class Machine:
    """What a machine has."""

    cores: int
    memory_bytes: int
    nodes: tuple[NumaNode, ...]
    gpus: tuple[Gpu, ...]


def read_machine(root: Path = ROOT) -> Machine:
    """Everything at once."""
    return Machine(read_cores(root), read_memory(root / "proc/meminfo"), read_nodes(root), read_gpus(root))


def read_cores(root: Path = ROOT) -> int:
    """The processors that are online."""
    return len(re.findall(r"^processor\s*:", _text(root / "proc/cpuinfo"), re.MULTILINE))


def read_memory(meminfo: Path) -> int:
    """Bytes of memory, from /proc/meminfo or a node's."""
    found = re.search(r"MemTotal:\s*(\d+) kB", _text(meminfo))
    return int(found[1]) * 1024 if found else 0


def read_nodes(root: Path = ROOT) -> tuple[NumaNode, ...]:
    """The memory nodes, in order."""
    folders = (root / "sys/devices/system/node").glob("node[0-9]*")
    nodes = (
        NumaNode(
            int(each.name.removeprefix("node")),
            _text(each / "cpulist").strip(),
            read_memory(each / "meminfo"),
        )
        for each in folders
    )
    return tuple(sorted(nodes, key=lambda node: node.number))


def read_gpus(root: Path = ROOT) -> tuple[Gpu, ...]:
    """The GPUs on the PCI bus, in the order of their addresses; whether they have a driver or not."""
    return tuple(
        gpu for each in sorted((root / "sys/bus/pci/devices").glob("*")) if (gpu := _gpu(each)) is not None
    )


def _gpu(device: Path) -> Gpu | None:
    vendor = _text(device / "vendor").strip()
    pci_class = _text(device / "class").strip()[:6]
    link = device / "driver"
    driver = link.resolve().name if link.exists() else None
    computes = pci_class in COMPUTE_CLASSES or (pci_class == VGA_CLASS and driver in COMPUTE_DRIVERS)
    if vendor not in VENDORS or not computes:
        return None
    number = _text(device / "numa_node").strip()
    identity = f"{vendor[2:]}:{_text(device / 'device').strip()[2:]}"
    return Gpu(device.name, VENDORS[vendor], identity, driver, int(number) if number.isdigit() else None)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
