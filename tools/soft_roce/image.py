"""What the virtual machine boots: Debian's full kernel, which has rdma_rxe, and a first file system that mounts this machine's.

Nothing is installed: the kernel's package is downloaded and unpacked once, and kept under `.nox/` of the checkout.
"""

import fcntl
import gzip
import hashlib
import os
import platform
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CACHE = Path(__file__).resolve().parents[2] / ".nox" / "soft-roce"
METAPACKAGE = "linux-image-amd64"
# rxe's checksums are looked up by name when a device is made: no module says that it needs crc32_generic.
MODULES = (
    "crc32_generic", "crc32c_generic", "virtio_pci", "9pnet_virtio", "9p", "overlay",
    "rdma_rxe", "ib_uverbs", "rdma_ucm", "dummy", "veth",
)  # fmt: skip
# Where those and what they need are; the package has about 4,000 modules.
FOLDERS = ("arch", "crypto", "lib", "net", "drivers/infiniband", "drivers/virtio", "drivers/net", "fs")
TOOLS = {
    "qemu-system-x86_64": "qemu-system-x86",
    "busybox": "busybox-static",
    "modprobe": "kmod",
    "depmod": "kmod",
    "ip": "iproute2",
    "rdma": "iproute2",
    "apt-get": "apt",
    "dpkg-deb": "dpkg",
    "setpriv": "util-linux",
}
"""What this needs, and the packages of Debian that have it."""

INIT = """#!/bin/busybox sh
busybox=/bin/busybox
for each in proc sys dev lower upper root; do $busybox mkdir -p /$each; done
$busybox mount -t proc proc /proc
$busybox mount -t sysfs sysfs /sys
$busybox mount -t devtmpfs devtmpfs /dev
while read -r module; do
    $busybox insmod "/modules/$module" || echo "soft_roce: cannot load $module"
done </modules/order
$busybox mount -t 9p -o trans=virtio,version=9p2000.L,ro,msize=262144,cache=loose root /lower
$busybox mount -t tmpfs -o size=75% tmpfs /upper
$busybox mkdir /upper/files /upper/work
$busybox mount -t overlay -o lowerdir=/lower,upperdir=/upper/files,workdir=/upper/work overlay /root
for each in proc sys dev; do $busybox mount -o move /$each /root/$each; done
$busybox mount -t tmpfs tmpfs /root/run
$busybox mkdir -p /root/run/soft-roce /root/dev/shm /root/dev/pts
$busybox mount -t tmpfs tmpfs /root/dev/shm
$busybox mount -t devpts devpts /root/dev/pts
$busybox mount -t 9p -o trans=virtio,version=9p2000.L,msize=262144 share /root/run/soft-roce
exec $busybox switch_root /root /bin/sh /run/soft-roce/start
"""


class CannotBoot(Exception):
    """The virtual machine cannot be started here; says why, and what to do."""


@dataclass(frozen=True)
class Image:
    """What qemu is given."""

    kernel: Path
    initramfs: Path


def missing() -> str | None:
    """Return why the virtual machine cannot be started here, or None. Fetches nothing."""
    if platform.machine() != "x86_64":
        return f"the virtual machine with Soft-RoCE needs an x86_64 processor, this is {platform.machine()}"
    path = search_path()
    lacking = sorted({package for name, package in TOOLS.items() if shutil.which(name, path=path) is None})
    if not lacking and not _is_static(tool("busybox")):
        lacking = ["busybox-static"]
    if lacking:
        return f"the virtual machine with Soft-RoCE needs {', '.join(lacking)}: apt-get install {' '.join(lacking)}"
    return None


def image() -> Image:
    """Return what to boot; made by the first call on a machine, which takes half a minute."""
    if reason := missing():
        raise CannotBoot(reason)
    recipe = hashlib.sha256(repr((INIT, MODULES, FOLDERS)).encode()).hexdigest()[:16]
    folder = CACHE / recipe
    made = Image(folder / "vmlinuz", folder / "initramfs.gz")
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
                _make(Path(scratch))
                (Path(scratch) / "image").rename(folder)
    return made


def search_path() -> str:
    """Return where programs are looked for."""
    # An ordinary user's PATH may lack them.
    return os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


def tool(name: str) -> str:
    """Return where the program is, which `missing` has found."""
    found = shutil.which(name, path=search_path())
    if found is None:
        raise CannotBoot(f"{name} is not installed")
    return found


def _is_static(path: str) -> bool:
    """Whether a program runs without a loader: none of its program headers names one."""
    with Path(path).open("rb") as file:
        head = file.read(64)
        start, size, count = (
            struct.unpack_from("<Q", head, 32)[0],
            *struct.unpack_from("<HH", head, 54),
        )
        file.seek(start)
        headers = file.read(size * count)
    return all(struct.unpack_from("<I", headers, size * n)[0] != 3 for n in range(count))


def _output(*command: str, cwd: Path | None = None) -> str:
    done = subprocess.run(
        [tool(command[0]), *command[1:]],
        cwd=cwd,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode != 0:
        raise CannotBoot(f"{' '.join(command)} failed ({done.returncode}): {done.stderr.strip()[-500:]}")
    return done.stdout


def _make(scratch: Path) -> None:
    """Make the folder `image` in the folder."""
    wanted = re.search(r"Depends: (linux-image-\S+)", _output("apt-cache", "depends", METAPACKAGE))
    if wanted is None:
        raise CannotBoot(f"apt knows no kernel of {METAPACKAGE}: run apt-get update")
    _output("apt-get", "download", wanted[1], cwd=scratch)
    (package,) = scratch.glob("*.deb")
    (scratch / "kernel").mkdir()
    with subprocess.Popen(
        [tool("dpkg-deb"), "--fsys-tarfile", str(package)], stdout=subprocess.PIPE
    ) as files:
        members = ["./boot/vmlinuz-*", "./lib/modules/*/modules.*"]
        members += [f"./lib/modules/*/kernel/{folder}/*" for folder in FOLDERS]
        subprocess.run(
            ["tar", "-x", "--wildcards", *members], cwd=scratch / "kernel", stdin=files.stdout, check=True
        )
    (kernel,) = (scratch / "kernel" / "boot").glob("vmlinuz-*")
    version = kernel.name.removeprefix("vmlinuz-")
    _output("depmod", "-b", str(scratch / "kernel"), version)
    (scratch / "image").mkdir()
    shutil.move(kernel, scratch / "image" / "vmlinuz")
    content = {
        "init": INIT.encode(),
        "bin/busybox": Path(tool("busybox")).read_bytes(),
        **_modules(scratch, version),
    }
    with gzip.open(scratch / "image" / "initramfs.gz", "wb", 6) as archive:
        for part in _cpio(content):
            archive.write(part)


def _modules(scratch: Path, version: str) -> dict[str, bytes]:
    """The modules, each after what it needs, and the file that says so."""
    paths: dict[str, Path] = {}
    for module in MODULES:
        listed = _output("modprobe", "-d", str(scratch / "kernel"), "-S", version, "--show-depends", module)
        for path in re.findall(r"^insmod (\S+)", listed, re.MULTILINE):
            paths.setdefault(Path(path).name, Path(path))
    files = {f"modules/{name}": path.read_bytes() for name, path in paths.items()}
    return {**files, "modules/order": "".join(f"{name}\n" for name in paths).encode()}


def _cpio(files: dict[str, bytes]) -> Iterator[bytes]:
    """An archive as the kernel unpacks it: the "newc" format of cpio."""
    folders = sorted({str(parent) for name in files for parent in Path(name).parents} - {"."})
    entries = [(folder, 0o040755, b"") for folder in folders]
    entries += [(name, 0o100755, data) for name, data in files.items()]
    # Until /dev is mounted there is nothing to write errors to but this.
    yield _entry("dev", 0o040755, b"")
    yield _entry("dev/console", 0o020600, b"", device=(5, 1))
    for name, mode, data in entries:
        yield _entry(name, mode, data)
    yield _entry("TRAILER!!!", 0, b"")


def _entry(name: str, mode: int, data: bytes, device: tuple[int, int] = (0, 0)) -> bytes:
    numbers = (0, mode, 0, 0, 1, 0, len(data), 0, 0, *device, len(name) + 1, 0)
    head = b"070701" + b"".join(b"%08X" % number for number in numbers) + name.encode() + b"\0"
    return head + bytes(-len(head) % 4) + data + bytes(-len(data) % 4)
