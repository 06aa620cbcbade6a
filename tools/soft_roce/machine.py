"""One command in a virtual machine of its own."""

import os
import shlex
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from soft_roce.image import Image, image, scratch, tool

SHARE = "/run/soft-roce"
_COMES_UP = 240
"""Seconds after which a machine that is not up is given up: it takes five where nothing else runs."""
_LOOKS = 0.5
_PARAMETERS = (
    "console=ttyS0", "quiet", "loglevel=3", "panic=-1", "rdinit=/init",
    # qemu keeps what it has translated by virtual addresses: where those are random, each process is translated anew.
    "norandmaps", "mitigations=off",
)  # fmt: skip

# The first process: there is no other that could clean up after it.
START = """
: >{share}/up
end() {{
    echo "$1" >{share}/status
    sync
    exec >/dev/null 2>&1
    echo o >/proc/sysrq-trigger
    while :; do sleep 60; done
}}
must() {{
    "$@" && return
    echo "soft_roce: '$*' failed" >&2
    end 125
}}
stty -F /dev/console -onlcr 2>/dev/null
{environment}
PATH=$PATH:/usr/sbin:/sbin
ulimit -l unlimited
echo soft-roce >/proc/sys/kernel/hostname
must ip link set lo up
n=0
while [ $n -lt {devices} ]; do
    must ip link add roce$n type dummy
    must ip address add 10.77.$n.1/24 dev roce$n
    must ip link set roce$n up
    must rdma link add rxe$n type rxe netdev roce$n
    n=$((n + 1))
done
must cd {folder}
{command} </dev/null
end $?
"""


class _NotUp(Exception):
    """The machine has not come so far as to start the command."""


def run(
    command: Sequence[str],
    *,
    devices: int = 1,
    limit: float = 300,
    env: Mapping[str, str] | None = None,
    share: Path | None = None,
    output: int | None = None,
) -> int:
    """Run a command in a virtual machine, in this folder, and return its exit status.

    A machine that does not come up is tried once more.

    Args:
        command: the program and its arguments.
        devices: how many Soft-RoCE devices there are: rxe0 with the address 10.77.0.1, rxe1 with 10.77.1.1, and so on.
        limit: seconds, from power-on to power-off; then TimeoutError is raised.
        env: its environment; this process's, if it is not given.
        share: a folder that the command finds under the variable SOFT_ROCE_SHARE, and can write to.
        output: the descriptor to which goes what the command prints; this process's own output, if it is not given.
    """
    made = image()
    with scratch() as own:
        folder = own if share is None else share
        told = {**(os.environ if env is None else env), "SOFT_ROCE": str(devices), "SOFT_ROCE_SHARE": SHARE}
        script = START.format(
            share=SHARE,
            environment="\n".join(
                f"export {key}={shlex.quote(told[key])}" for key in told if key.isidentifier()
            ),
            devices=devices,
            folder=shlex.quote(str(Path.cwd())),
            command=shlex.join(command),
        )
        (folder / "start").write_text(script)
        try:
            return _boot(made, folder, limit, output)
        except _NotUp:
            pass
        try:
            return _boot(made, folder, limit, output)
        except _NotUp as error:
            raise RuntimeError(f"the virtual machine {error}, twice. What it printed says more.") from None


def _boot(made: Image, folder: Path, limit: float, output: int | None) -> int:
    """Run a machine from power-on to power-off; return the command's exit status."""
    status, up = folder / "status", folder / "up"
    for each in (status, up):
        each.unlink(missing_ok=True)
    with subprocess.Popen(_command(made, folder), stdin=subprocess.DEVNULL, stdout=output) as machine:
        begun = time.monotonic()
        try:
            while machine.poll() is None:
                with suppress(subprocess.TimeoutExpired):
                    machine.wait(_LOOKS)
                    break
                taken = time.monotonic() - begun
                if taken > limit:
                    raise TimeoutError(f"the virtual machine was still running after {limit:g} s")
                if taken > _COMES_UP and not up.exists():
                    raise _NotUp(f"did not come up in {_COMES_UP:g} s")
        finally:
            machine.kill()
    try:
        return int(status.read_text())
    except (FileNotFoundError, ValueError):
        if not up.exists():
            raise _NotUp("ended before it was up") from None
        raise RuntimeError(
            "the virtual machine ended without the exit status of its command: it crashed. What it printed says more."
        ) from None


def _command(made: Image, folder: Path) -> list[str]:
    """How a machine is started."""
    # If this process is killed, so is the machine.
    command = [
        tool("setpriv"),
        "--pdeathsig",
        "KILL",
        tool("qemu-system-x86_64"),
        "-nodefaults",
        "-no-reboot",
    ]
    command += [*_processor(), "-m", "2048", "-display", "none", "-serial", "stdio"]
    command += ["-kernel", str(made.kernel), "-initrd", str(made.initramfs), "-append", " ".join(_PARAMETERS)]
    for tag, path, options in (
        ("root", "/", "readonly=on,multidevs=remap"),
        ("share", folder, "multidevs=remap"),
    ):
        command += ["-fsdev", f"local,id={tag},path={path},security_model=none,{options}"]
        command += ["-device", f"virtio-9p-pci,fsdev={tag},mount_tag={tag}"]
    return command


def _processor() -> list[str]:
    # /dev/kvm may be there and hang every guest, where this is a virtual machine itself.
    flags = set(Path("/proc/cpuinfo").read_text().split())
    if flags & {"svm", "vmx"} and os.access("/dev/kvm", os.R_OK | os.W_OK):
        return ["-accel", "kvm", "-cpu", "host", "-smp", "2"]
    # Without it qemu translates: one processor takes half the time of two, which wake each other all the time, and one
    # that has fewer instructions has fewer that qemu is slow at (`rep stosb`, with which kernels clear memory where it is fast).
    return ["-accel", "tcg", "-cpu", "Nehalem", "-smp", "1"]
