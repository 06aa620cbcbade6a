"""What the virtual machine boots: Debian's full kernel, which has rdma_rxe, and a first file system that mounts this machine's.

Nothing is installed: the kernel's package is downloaded and unpacked once, and kept under `.nox/` of the checkout.
"""

import fcntl
import hashlib
import lzma
import os
import platform
import re
import shutil
import struct
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

CACHE = Path(__file__).resolve().parents[2] / ".nox" / "soft-roce"
METAPACKAGE = "linux-image-amd64"
# rxe's checksums are looked up by name when a device is made: no module says that it needs crc32_generic.
MODULES = (
    "crc32_generic", "crc32c_generic", "virtio_pci", "9pnet_virtio", "9p", "overlay",
    "rdma_rxe", "ib_uverbs", "dummy",
)  # fmt: skip
# Where those and what they need are; the package has about 4,000 modules.
_MODULE = re.compile(
    r"\./(?:usr/)?lib/modules/[^/]+/kernel/"
    r"(?:(?:arch|crypto|lib|net|drivers/infiniband|drivers/virtio|fs)/(?:.*/)?|drivers/net/)[^/]+\.ko(?:\.xz)?"
)
_DEPENDS = re.compile(rb"\0depends=([^\0]*)\0")
_SIGNED = b"~Module signature appended~\n"
_STARTS_UNPACKED = b"\x12\0\0\0Xen\0"
"""Of an ELF note: its type, which is XEN_ELFNOTE_PHYS32_ENTRY, and whose it is."""
KERNEL, INITRAMFS = "vmlinux", "initramfs"
TOOLS = {
    "qemu-system-x86_64": "qemu-system-x86",
    "busybox": "busybox-static",
    "ip": "iproute2",
    "rdma": "iproute2",
    "apt-get": "apt",
    "dpkg-deb": "dpkg",
    "setpriv": "util-linux",
}
"""What this needs, and the packages of Debian that have it."""

INIT = """#!/bin/busybox sh
busybox=/bin/busybox
for each in proc sys dev lower upper guest; do $busybox mkdir -p /$each; done
$busybox mount -t proc proc /proc
$busybox mount -t sysfs sysfs /sys
$busybox mount -t devtmpfs devtmpfs /dev
while read -r module; do
    $busybox insmod "/modules/$module" || echo "soft_roce: cannot load $module"
done </modules/order
$busybox mount -t 9p -o trans=virtio,version=9p2000.L,ro,msize=262144,cache=loose root /lower
$busybox mount -t tmpfs -o size=75% tmpfs /upper
$busybox mkdir /upper/files /upper/work
$busybox mount -t overlay -o lowerdir=/lower,upperdir=/upper/files,workdir=/upper/work overlay /guest
for each in proc sys dev; do $busybox mount -o move /$each /guest/$each; done
$busybox mount -t tmpfs tmpfs /guest/run
$busybox mkdir -p /guest/run/soft-roce /guest/dev/shm /guest/dev/pts
$busybox mount -t tmpfs tmpfs /guest/dev/shm
$busybox mount -t devpts devpts /guest/dev/pts
$busybox mount -t 9p -o trans=virtio,version=9p2000.L,msize=262144 share /guest/run/soft-roce
exec $busybox switch_root /guest /bin/sh /run/soft-roce/start
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
    recipe = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]
    folder = CACHE / recipe
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            with scratch() as made:
                _make(made)
                made.rename(folder)
    return Image(folder / KERNEL, folder / INITRAMFS)


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder for as long as this lasts. What a process that was killed has left is deleted by the next one."""
    runs = CACHE / "runs"
    runs.mkdir(parents=True, exist_ok=True)
    with (CACHE / "runs.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for each in runs.iterdir():
            if (held := _held(each)) is not None:
                shutil.rmtree(each, ignore_errors=True)
                os.close(held)
        made = Path(tempfile.mkdtemp(dir=runs))
        held = _held(made)
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)
        if held is not None:
            os.close(held)


def _held(folder: Path) -> int | None:
    """A descriptor that holds the folder; None if another process does."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


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


def _make(folder: Path) -> None:
    """Make the files of the image in the folder."""
    wanted = re.search(r"Depends: (linux-image-\S+)", _output("apt-cache", "depends", METAPACKAGE))
    if wanted is None:
        raise CannotBoot(f"apt knows no kernel of {METAPACKAGE}: run apt-get update")
    _output("apt-get", "download", wanted[1], cwd=folder)
    (package,) = folder.glob("*.deb")
    try:
        kernel, known = _unpacked(package)
    except (tarfile.TarError, lzma.LZMAError) as error:
        raise CannotBoot(f"{package.name} cannot be unpacked: {error}") from None
    package.unlink()
    content = {"init": INIT.encode(), "bin/busybox": Path(tool("busybox")).read_bytes(), **_modules(known)}
    with (folder / INITRAMFS).open("wb") as archive:
        for part in _cpio(content):
            archive.write(part)
    (folder / KERNEL).write_bytes(_ready(kernel))


def _unpacked(package: Path) -> tuple[bytes, dict[str, bytes]]:
    """The kernel, and the modules by their names; of one that the kernel has in it, nothing."""
    kernel, built_in, modules = None, list[str](), dict[str, bytes]()
    unpack = [tool("dpkg-deb"), "--fsys-tarfile", str(package)]
    with (
        subprocess.Popen(unpack, stdout=subprocess.PIPE) as unpacking,
        tarfile.open(fileobj=unpacking.stdout, mode="r|") as files,
    ):
        for each in files:
            module = _MODULE.fullmatch(each.name)
            is_kernel = each.name.startswith("./boot/vmlinuz-")
            is_list = each.name.endswith("/modules.builtin")
            if (module is None and not is_kernel and not is_list) or not each.isfile():
                continue
            file = files.extractfile(each)
            data = file.read() if file is not None else b""
            if is_kernel:
                kernel = data
            elif is_list:
                built_in = [_name(line) for line in data.decode().splitlines()]
            else:
                packed = each.name.endswith(".xz")
                modules[_name(each.name)] = lzma.decompress(data) if packed else data
    if kernel is None or unpacking.returncode != 0:
        raise CannotBoot(f"{package.name} cannot be unpacked, or has no kernel")
    return kernel, {**dict.fromkeys(built_in, b""), **modules}


def _name(path: str) -> str:
    """The name by which modules call the one of this file."""
    return path.rpartition("/")[2].partition(".")[0].replace("-", "_")


def _ready(kernel: bytes) -> bytes:
    """The kernel unpacked, as it takes seconds to unpack itself in the virtual machine."""
    sectors = kernel[0x1F1]
    start, length = struct.unpack_from("<II", kernel, 0x248)
    start += (sectors + 1) * 512
    packed = kernel[start : start + length]
    if packed.startswith(b"\xfd7zXZ\0"):
        unpacked = lzma.LZMADecompressor().decompress(packed)
        # qemu starts it only where it says how.
        if unpacked.startswith(b"\x7fELF") and _STARTS_UNPACKED in unpacked:
            return unpacked
    return kernel


def _modules(known: dict[str, bytes]) -> dict[str, bytes]:
    """The modules, each after what it needs, and the file that says so."""
    order: list[str] = []

    def add(name: str) -> None:
        if name in order:
            return
        if name not in known:
            raise CannotBoot(f"the kernel of {METAPACKAGE} has no module {name}")
        needs = _DEPENDS.search(known[name])
        for each in needs[1].decode().split(",") if needs is not None and needs[1] else []:
            add(each.replace("-", "_"))
        if known[name]:
            order.append(name)

    for module in MODULES:
        add(module)
    files = {f"modules/{name}.ko": _plain(known[name]) for name in order}
    return {**files, "modules/order": "".join(f"{name}.ko\n" for name in order).encode()}


def _plain(module: bytes) -> bytes:
    """A module without what takes the kernel long: its signature, and what describes its types, which is not found under another name."""
    if module.endswith(_SIGNED):
        (length,) = struct.unpack_from(">I", module, len(module) - len(_SIGNED) - 4)
        module = module[: -len(_SIGNED) - 12 - length]
    return module.replace(b"\0.BTF\0", b"\0.btf\0")


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
