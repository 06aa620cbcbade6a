"""Checks of kernel features: shared memory, opening it in sibling processes, pidfd, Unix sockets. Each one is tried out."""

import mmap
import os
import select
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from mesh_core._system.interpreter import python_command
from mesh_core.plugins import Finding

SMALL_DEV_SHM: Final = 64 * 1024 * 1024 + 1  # containers get 64 MiB by default
LONGEST_FOLDER: Final = 70  # a socket's path is limited to 107 bytes, including the part below this folder
TRIAL_SECONDS: Final = 20.0


def check_shared_memory(dev_shm: Path = Path("/dev/shm")) -> Iterator[Finding]:
    """Check memfd, in which Mesh keeps large parts of messages, and /dev/shm, which other libraries use."""
    try:
        _try_memfd()
    except OSError as error:
        remedy = "allow memfd_create and mmap in the container's seccomp profile"
        yield Finding(status="fail", detail=f"memfd does not work: {error}", remedy=remedy)
    else:
        yield Finding(status="ok", detail="anonymous shared memory (memfd) works")
    try:
        total = shutil.disk_usage(dev_shm).total
        writable = os.access(dev_shm, os.W_OK)
    except OSError as error:
        yield Finding(
            status="warn",
            detail=f"cannot use {dev_shm}, which other libraries need: {error.strerror}",
            remedy=f"mount a tmpfs on {dev_shm}",
        )
        return
    detail = f"{dev_shm} holds {total / 2**20:,.0f} MiB, {'writable' if writable else 'not writable'}"
    if not writable:
        yield Finding(status="warn", detail=detail, remedy=f"chmod 1777 {dev_shm}")
    elif total < SMALL_DEV_SHM:
        yield Finding(status="warn", detail=detail, remedy="start the container with a larger --shm-size")
    else:
        yield Finding(status="ok", detail=detail)


def _try_memfd() -> None:
    descriptor = os.memfd_create("mesh-doctor", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, mmap.PAGESIZE)
        with mmap.mmap(descriptor, mmap.PAGESIZE) as memory:
            memory[:4] = b"mesh"
        if os.pread(descriptor, 4, 0) != b"mesh":
            raise OSError("data written through a mapping cannot be read back")
    finally:
        os.close(descriptor)


_OWNER: Final = """
import os, sys
descriptor = os.memfd_create("mesh-doctor")
os.write(descriptor, b"mesh")
print(f"/proc/{os.getpid()}/fd/{descriptor}", flush=True)
sys.stdin.read()
"""
_SIBLING: Final = """
import os, sys
print(os.pread(os.open(sys.argv[1], os.O_RDWR), 4, 0).decode())
"""


def check_memory_sharing(
    scope: Path = Path("/proc/sys/kernel/yama/ptrace_scope"), own: str = "/proc/self/fd"
) -> Iterator[Finding]:
    """Check that a process can open the shared memory of its sibling through /proc."""
    try:
        yama = scope.read_text().strip()
    except FileNotFoundError:
        yama = "absent"
    except OSError:
        yama = "unknown"
    owner = subprocess.Popen(
        python_command(_OWNER, isolated=True), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    # Leaving the block closes the owner's stdin, which ends it, and waits for it.
    with owner:
        assert owner.stdout is not None
        path = owner.stdout.readline().strip()
        try:
            sibling = subprocess.run(
                python_command(_SIBLING, path, isolated=True),
                capture_output=True,
                text=True,
                timeout=TRIAL_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            reason = f"no answer within {TRIAL_SECONDS:g} s"
        else:
            reason = (
                ""
                if sibling.stdout.strip() == "mesh"
                else (sibling.stderr.strip().splitlines() or ["no reason given"])[-1]
            )
    if not reason:
        yield Finding(
            status="ok", detail=f"processes can open each other's shared memory (Yama ptrace_scope: {yama})"
        )
        return
    if not os.path.exists(own):  # noqa: PTH110 - false for any error, unlike Path.exists
        yield Finding(
            status="warn",
            detail=f"{own} is masked, so large parts of messages are copied through sockets, which is slower",
            remedy="mount /proc in the container",
        )
        return
    yield Finding(
        status="fail",
        detail=f"a process cannot open its sibling's shared memory (Yama ptrace_scope: {yama}): {reason}",
        remedy="run all workers of a host as one user, mount /proc without hidepid, and set ptrace_scope to at most 1",
    )


def check_pidfd() -> Iterator[Finding]:
    """Check that a pidfd reports the end of a child process."""
    try:
        child = subprocess.Popen(
            python_command("import sys; sys.stdin.read()", isolated=True), stdin=subprocess.PIPE
        )
        with child:
            descriptor = os.pidfd_open(child.pid)
            try:
                before = select.select([descriptor], [], [], 0)[0]
                assert child.stdin is not None
                child.stdin.close()
                after = select.select([descriptor], [], [], TRIAL_SECONDS)[0]
            finally:
                os.close(descriptor)
    except OSError as error:
        remedy = "use Linux 5.3 or later, with pidfd_open allowed in the container's seccomp profile"
        yield Finding(status="fail", detail=f"pidfd_open: {error.strerror or error}", remedy=remedy)
        return
    if before or not after:
        yield Finding(
            status="fail",
            detail="a pidfd does not report the end of its process",
            remedy="use another kernel",
        )
    else:
        yield Finding(status="ok", detail="a pidfd reports the end of its process")


def check_unix_sockets(folder: Path | None = None) -> Iterator[Finding]:
    """Check that Unix sockets work, can be bound in the folder for temporary files, and carry descriptors."""
    place = folder or Path(tempfile.gettempdir())
    try:
        _try_pair()
    except OSError as error:
        yield Finding(
            status="fail",
            detail=f"Unix sockets do not work: {error.strerror or error}",
            remedy="allow socketpair, sendmsg and recvmsg in the container's seccomp profile",
        )
        return
    try:
        with tempfile.TemporaryDirectory(prefix="mesh-doctor-", dir=place) as private:
            _try_socket(f"{private}/socket")
    except OSError as error:
        # Mesh's own sockets have no path or are bound through their folder's descriptor; other libraries bind paths here.
        yield Finding(
            status="warn",
            detail=f"sockets work, but cannot be bound in {place}: {error.strerror or error}",
            remedy="for other libraries, set TMPDIR to a short path on a local, writable file system",
        )
        return
    if len(os.fsencode(place)) > LONGEST_FOLDER:
        detail = f"sockets work in {place}, but its path is long, and a socket's path is limited to 107 bytes"
        yield Finding(status="warn", detail=detail, remedy="set TMPDIR to a shorter path")
    else:
        yield Finding(status="ok", detail=f"sockets work in {place} and carry descriptors")


def _try_pair() -> None:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    with one, other:
        _try_descriptors(one, other)


def _try_socket(path: str) -> None:
    kind = socket.SOCK_STREAM | socket.SOCK_CLOEXEC
    with socket.socket(socket.AF_UNIX, kind) as door, socket.socket(socket.AF_UNIX, kind) as caller:
        door.bind(path)
        door.listen(1)
        caller.connect(path)
        answerer, _ = door.accept()
        with answerer:
            _try_descriptors(caller, answerer)


def _try_descriptors(caller: socket.socket, answerer: socket.socket) -> None:
    socket.send_fds(caller, [b"mesh"], [caller.fileno()])
    message, descriptors, _, _ = socket.recv_fds(answerer, 4, 1)
    for each in descriptors:
        os.close(each)
    if message != b"mesh" or len(descriptors) != 1:
        raise OSError("a descriptor sent through a socket did not arrive")
