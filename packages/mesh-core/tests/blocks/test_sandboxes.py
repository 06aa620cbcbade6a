"""Sandboxes: what runs in them, what comes back, and what they are isolated from."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import gc
import os
import pickle
import platform
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import core_sandboxes as inside
import pytest
from core_sandboxes import SOON, Odd, tidily

from mesh_core import (
    Isolation,
    Sandbox,
    SandboxDied,
    SandboxError,
    Sandboxes,
    SandboxTimeout,
    SerializationError,
    ToolLimit,
)
from mesh_core._blocks.sandboxes.box import Keeper, Limits
from mesh_core._blocks.sandboxes.memory import Memory
from mesh_core._common.peers import require_same_namespaces


@pytest.fixture(scope="module", params=["isolated", "plain"])
def boxes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandboxes]:
    folder = tmp_path_factory.mktemp("tools")
    (folder / "data").mkdir()
    (folder / "data" / "numbers.txt").write_text("1 2 3")
    with tidily(
        request.param,
        preload=["fractions", "core_sandboxes"],
        folder=folder,
        memory=128 << 20,
        pids=8,
        file_size=1 << 20,
        most=4,
        ready=2,
        name=request.param,
    ) as made:
        assert isinstance(made.isolation, Isolation)  # waits for the template
        # The template has its copy of the folder by now: sandboxes must not see this.
        (folder / "data" / "numbers.txt").write_text("changed")
        yield made


@pytest.fixture
def box(boxes: Sandboxes) -> Iterator[Sandbox]:
    with boxes.take(timeout=SOON) as taken:
        yield taken


@pytest.fixture(autouse=True)
def tidy() -> None:
    """The stock of boxes changes all the time, so leaks are checked at the end of the module."""


def needs(box: Sandbox | Sandboxes, kind: Isolation) -> None:
    if kind not in box.isolation:
        pytest.skip(f"{kind.name} is not available here, or was not requested")


def test_results_and_exceptions(box: Sandbox) -> None:
    value = {"a": [1, -(2**70), 2.5, None, True], b"b": ("\ud800", {3}, frozenset("x"), 1j, bytearray(b"z"))}
    assert box.call(lambda given: given, value) == value
    assert box.call("{} {x}".format, 1, x=2) == "1 2"
    with pytest.raises(ValueError, match="invalid literal") as caught:
        box.call(int, "one")
    assert "raised in a sandbox of" in caught.value.__notes__[0]
    with pytest.raises(Odd) as odd:
        box.call(inside.raise_odd, 7)
    assert (odd.value.number, odd.value.args) == (7, (7,))
    with pytest.raises(UnicodeDecodeError):
        box.call(b"\xff".decode)
    # Not raised as such: these would end or confuse their caller.
    for function in (sys.exit, lambda: next(iter(()))):
        with pytest.raises(SandboxError, match=r"raised (SystemExit|StopIteration)"):
            box.call(function)


def test_only_plain_data_comes_back(box: Sandbox) -> None:
    """BOX-1."""
    for function in (object, lambda: [{"x": Path()}], lambda: sys):
        with pytest.raises(SerializationError, match="plain data"):
            box.call(function)
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(SerializationError, match="nested"):
        box.call(lambda: endless)
    assert box.call(len, "abc") == 3


def test_calls_share_a_process_and_boxes_do_not(boxes: Sandboxes) -> None:
    with boxes.take(SOON) as one, boxes.take(SOON) as other:
        assert one.call(inside.keep, 1) == [1]
        assert one.call(inside.keep, 2) == [1, 2]
        assert other.call(inside.keep, 3) == [3]
        assert one.call(eval, "__import__('random').random()") != other.call(
            eval, "__import__('random').random()"
        )
        one.call(inside.write, "data/numbers.txt", "mine")
        assert other.call(inside.read, "data/numbers.txt") == "1 2 3"
        assert (one.folder / "data" / "numbers.txt").read_text() == "mine"
        gone = one.folder
    inside.wait_until(lambda: not gone.exists())


def test_preloaded_modules_are_there(box: Sandbox) -> None:
    assert box.call(lambda: "fractions" in sys.modules)


def test_a_box_is_taken_once(boxes: Sandboxes) -> None:
    """BOX-2: nothing of one box is in the next."""
    seen = set()
    for _ in range(10):
        with boxes.take(SOON) as box:
            assert box.call(inside.keep, 1) == [1]
            seen.add(box.folder)
    assert len(seen) == 10


def test_tools(box: Sandbox) -> None:
    result = box.run(["sh", "-c", "cat; pwd; echo no >&2; exit 3"], input="in ", timeout=SOON)
    assert (result.text, result.stderr, result.returncode) == (f"in {box.folder}\n", b"no\n", 3)
    assert box.run(["sh", "-c", "echo $X"], env={"X": "1"}).text == "1\n"
    assert box.run(["sh", "-c", "sleep 60 & sleep 60"], timeout=0.1).limit is ToolLimit.TIMEOUT
    assert box.run([sys.executable, "-S", "-c", "x = bytearray(1 << 30)"]).returncode == 1
    with pytest.raises(FileNotFoundError):
        box.run(["no-such-program"])
    with pytest.raises(TypeError, match="argv must be a list"):
        box.run("echo")
    assert box.call(len, "abc") == 3


def test_environment_holds_no_secrets(boxes: Sandboxes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_KEY", "secret")
    with (
        Sandboxes(network=None, env={"GIVEN": "yes", "LANG": None}, ready=1) as others,
        others.take(SOON) as box,
    ):
        env = box.call(lambda: dict(os.environ))
        assert "API_KEY" not in env
        assert "LANG" not in env
        assert (env["GIVEN"], env["HOME"], env["PATH"]) == ("yes", str(box.folder), os.environ["PATH"])


@pytest.mark.sampled(3, full=True)
@pytest.mark.slow
def test_limits(boxes: Sandboxes) -> None:
    with boxes.take(SOON) as box:
        with pytest.raises(MemoryError):
            box.call(bytearray, 1 << 30)
        with pytest.raises(OSError, match="File too large") as caught:
            box.call(inside.write, "big", "x" * (2 << 20))
        assert caught.value.errno == errno.EFBIG
        with pytest.raises(SandboxDied, match="exceeded its limit pids=") as died:
            box.call(inside.fork, 10)
        assert died.value.limit == "pids"
    with boxes.take(SOON) as box:
        # They run, although their first threads have ended.
        with pytest.raises(SandboxDied, match="exceeded its limit pids=") as died:
            box.call(inside.fork_without_first_threads, 10, timeout=SOON)
        assert died.value.limit == "pids"
    with boxes.take(SOON) as box:
        # Each has less than the limit, all together have more.
        together = "import os, time; os.fork(); os.fork(); x = bytearray(b'1') * (60 << 20); time.sleep(60)"
        with pytest.raises(SandboxDied, match="exceeded its limit memory="):
            box.call(exec, together)
    with Sandboxes(network=None, cpu=1.0, ready=1) as others, others.take(SOON) as box:
        with pytest.raises(SandboxDied, match="exceeded its limit cpu=") as died:
            box.call(inside.spin)
        assert died.value.limit == "cpu"


@pytest.mark.parametrize(
    "kind", ["anonymous", "mapped", "unmapped", "hidden", "secret", "descriptors", "table", "threads"]
)
def test_memory_that_can_be_shared_is_limited(boxes: Sandboxes, kind: str) -> None:
    """BXM-1: `memory=` is 128 MiB."""
    if kind == "secret" and not has_secret_memory():
        pytest.skip("the kernel has no secret memory")
    if kind == "descriptors" and resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 13_000:
        pytest.skip("too few descriptors are allowed here to keep a look busy")
    much = {"hidden": 1, "descriptors": 12_000, "threads": 50}.get(kind, 130)
    with boxes.take(SOON) as box, pytest.raises(SandboxDied, match="exceeded its limit memory=") as caught:
        box.call(inside.fill, kind, much, timeout=SOON)
    assert caught.value.limit == "memory"


def has_secret_memory() -> bool:
    try:
        file, mapped = inside.keep_secret(1)
    except OSError:
        return False
    mapped.close()
    os.close(file)
    return True


@pytest.mark.parametrize("kind", ["segments", "messages", "semaphores", "tables"])
def test_memory_that_no_process_has_is_limited(boxes: Sandboxes, kind: str) -> None:
    """BXM-1: `memory=` is 128 MiB."""
    needs(boxes, Isolation.IPC)
    with boxes.take(SOON) as box, pytest.raises(SandboxDied, match="exceeded its limit memory=") as caught:
        box.call(inside.fill_kernel, kind, 150, timeout=SOON)
    assert caught.value.limit == "memory"


def test_files_without_content_are_limited(boxes: Sandboxes) -> None:
    """They need memory as well."""
    needs(boxes, Isolation.FILES)
    with boxes.take(SOON) as box:
        for folder in ("/tmp", "/dev/shm"):
            assert box.call(eval, f"__import__('os').statvfs({folder!r}).f_files") == (128 << 20) // 4096


def test_memory_that_is_shared_counts_once() -> None:
    """BXM-1: mapped by several processes, open in several, and both."""
    source = (
        "import mmap, os\n"
        "files = os.memfd_create('a'), os.memfd_create('b')\n"
        "for each in files: os.write(each, bytes(8 << 20))\n"
        "kept = mmap.mmap(-1, 8 << 20), mmap.mmap(files[1], 8 << 20)\n"
        "for _ in range(3):\n"
        "    if os.fork() == 0: break\n"
        "for each in kept: each.write(bytes(8 << 20))\n"
        "os.write(1, b'%d\\n' % os.getpid())\n"
        "os.read(0, 1)\n"
    )
    memory = Memory(system_v=False)
    with subprocess.Popen(
        [sys.executable, "-c", source], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdout is not None
        pids = [int(program.stdout.readline()) for _ in range(4)]
        private = sum(memory.private(each) for each in pids)
        assert memory.exceeds(pids, private + (23 << 20))
        assert not memory.exceeds(pids, private + (25 << 20))
        program.communicate()


def counted(source: str, *, least: int, most: int) -> None:
    """Have a program say when it is ready; it has so much memory beyond what is its own."""
    memory = Memory(system_v=False)
    with subprocess.Popen(
        [sys.executable, "-c", f"{source}\nprint(flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as program:
        assert program.stdout is not None
        program.stdout.readline()
        private = memory.private(program.pid)
        assert memory.exceeds([program.pid], private + least)
        assert not memory.exceeds([program.pid], private + most)
        program.communicate("\n")


@pytest.mark.parametrize("end", ["", "os.closerange(3, 100)", "kept[1].close()"])
def test_secret_memory_counts_whether_it_is_mapped_or_open(end: str) -> None:
    """BXM-1."""
    if not has_secret_memory():
        pytest.skip("the kernel has no secret memory")
    source = f"import os, core_sandboxes\nkept = core_sandboxes.keep_secret(4)\n{end}"
    counted(source, least=3 << 20, most=5 << 20)


def test_locked_memory_counts_once() -> None:
    """BXM-1."""
    source = (
        "import ctypes\n"
        "kept = ctypes.create_string_buffer(4 << 20)\n"
        "ctypes.memset(kept, 1, 4 << 20)\n"
        "if ctypes.CDLL(None).mlock(kept, 4 << 20): raise OSError\n"
    )
    counted(source, least=-1, most=1)


def test_mappings_that_take_long_to_look_at_count_as_too_much_memory() -> None:
    """BXM-1: only a list of all of them shows that this file was counted twice."""
    source = (
        "import ctypes, mmap, os\n"
        "file = os.memfd_create('a')\n"
        "os.write(file, bytes(8 << 20))\n"
        "kept = mmap.mmap(file, 8 << 20)\n"
        "kept.read()\n"
        "call = ctypes.CDLL(None)\n"
        "for n in range(40_000): call.mmap(None, ctypes.c_size_t(4096), 1 + n % 2 * 2, 0x22, -1, 0)\n"
    )
    counted(source, least=12 << 20, most=17 << 20)


def test_a_process_that_ends_hides_nothing() -> None:
    """Only root may look at one that has no memory any more and was not waited for."""

    def exceeds() -> bool:
        if os.geteuid() == 0:
            os.setuid(54321)
        ending = os.fork()
        if ending == 0:
            os._exit(0)
        os.waitid(os.P_PID, ending, os.WEXITED | os.WNOWAIT)
        with pytest.raises(PermissionError):
            list(Path(f"/proc/{ending}/fd").iterdir())
        return Memory(system_v=False).exceeds([ending], 1 << 40)

    child = os.fork()
    if child == 0:
        status = 2
        try:
            status = int(exceeds())
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_timeout_ends_the_box(box: Sandbox) -> None:
    with pytest.raises(SandboxTimeout, match=r"sleep\(\) did not return within 0.1 s") as caught:
        box.call(time.sleep, 60, timeout=0.1)
    assert caught.value.timeout == 0.1
    with pytest.raises(SandboxTimeout):
        box.call(len, "later")


def test_nothing_outside_can_be_written(boxes: Sandboxes, tmp_path: Path) -> None:
    needs(boxes, Isolation.FILES)
    with boxes.take(SOON) as box:
        for path in ("/usr/mesh-was-here", str(Path.home() / "mesh-was-here"), "/dev/mesh-was-here"):
            with pytest.raises(OSError, match=r"Read-only|Permission|No such"):
                box.call(inside.write, path, "x")
        # The box's own /tmp.
        box.call(inside.write, "/tmp/mesh-was-here", "x")
        assert not Path("/tmp/mesh-was-here").exists()
        assert box.run(["sh", "-c", "mount -o remount,rw / || umount /dev"]).returncode != 0
        assert box.call(os.listdir, "/dev/shm") == []
        with pytest.raises(OSError, match=r"Read-only|Permission"):
            box.call(inside.write, "/proc/sys/kernel/core_pattern", "x")


def test_other_processes_are_out_of_reach(boxes: Sandboxes) -> None:
    needs(boxes, Isolation.PROCESSES)
    with boxes.take(SOON) as box:
        assert not box.call(inside.can_signal, os.getpid())
        assert len([name for name in box.call(os.listdir, "/proc") if name.isdigit()]) == 2


def test_sockets_and_keys_of_other_processes_are_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the code comes from the folder that they are in, and where they are made later."""
    # Jobs of scripts that have other variables.
    others = ("state/mesh/jobs", "home/.local/state/mesh/jobs")
    for name in ("run", *others):
        (tmp_path / name).mkdir(parents=True)
    for name in ("code.py", "run/bus", *(f"{each}/train" for each in others)):
        (tmp_path / name).touch()
    monkeypatch.syspath_prepend(str(tmp_path))  # type: ignore[no-untyped-call]
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("MESH_JOBS", str(tmp_path / "jobs"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    with Sandboxes(network=None) as boxes, boxes.take(timeout=SOON) as box:
        needs(boxes, Isolation.FILES)
        (tmp_path / "jobs" / "train").mkdir()
        assert "code.py" in box.call(os.listdir, str(tmp_path))
        for name in ("jobs", "run", *others):
            assert box.call(os.listdir, str(tmp_path / name)) == []
            with pytest.raises(OSError, match="Read-only"):
                box.call(os.mkdir, str(tmp_path / name / "mine"))


KEYCTL = ctypes.CDLL(None, use_errno=True).syscall
ADD_KEY, KEYCTL_NUMBER = {"x86_64": (248, 250), "aarch64": (217, 219)}.get(platform.machine(), (0, 0))
SESSION = -3


def read_key(name: bytes) -> tuple[bytes, bool]:
    """What a key of the session holds, and whether one can be added there."""
    import ctypes

    syscall = ctypes.CDLL(None, use_errno=True).syscall
    key, data = syscall(KEYCTL_NUMBER, 10, SESSION, b"user", name, 0), ctypes.create_string_buffer(64)
    if key > 0:
        syscall(KEYCTL_NUMBER, 11, key, data, 64)
    return data.value, syscall(ADD_KEY, b"user", b"mesh-test-other", b"x", 1, SESSION) > 0


@pytest.mark.skipif(not ADD_KEY, reason="the numbers of these system calls are not known here")
def test_keys_of_the_session_stay_outside() -> None:
    """Those of the kernel, such as tickets: a namespace does not keep them apart."""

    def inside(answer: int) -> None:
        # In a session of its own: the keys of whoever runs the tests are left alone.
        KEYCTL(KEYCTL_NUMBER, 1, None)
        if KEYCTL(ADD_KEY, b"user", b"mesh-test", b"secret", 6, SESSION) < 0:
            os.write(answer, repr("no keys here").encode())
            return
        with Sandboxes(isolate=True, network=False) as boxes, boxes.take() as box, boxes.take() as other:
            found = [
                read_key(b"mesh-test"),
                box.call(read_key, b"mesh-test"),
                other.call(read_key, b"mesh-test"),
            ]
        os.write(answer, repr(found).encode())

    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            inside(theirs)
        finally:
            os._exit(0)
    os.close(theirs)
    with os.fdopen(ours) as answer:
        said = answer.read()
    os.waitpid(child, 0)
    if said == repr("no keys here"):
        pytest.skip("this system forbids keys")
    assert said == repr([(b"secret", True), (b"", False), (b"", False)])


def keys_of_the_user(name: str) -> list[str]:
    """What keys of this name hold, if those of the user can be had by the number that /proc shows."""
    import ctypes

    syscall, found = ctypes.CDLL(None, use_errno=True).syscall, []
    rows = [line.split() for line in Path("/proc/keys").read_text().splitlines()]
    for row in rows:
        if row[7] == "keyring" and row[8].startswith("_uid"):
            syscall(KEYCTL_NUMBER, 8, int(row[0], 16), -1)  # into the thread's own
    for row in rows:
        data = ctypes.create_string_buffer(64)
        if row[8] == f"{name}:" and syscall(KEYCTL_NUMBER, 11, int(row[0], 16), data, 64) > 0:
            found.append(data.value.decode())
    return found


@pytest.mark.skipif(not ADD_KEY, reason="the numbers of these system calls are not known here")
def test_keys_of_the_user_stay_outside() -> None:
    """Whoever knows the number of a key may do with it what its user may, in every namespace."""
    name = f"mesh-test-{os.getpid()}"
    key = KEYCTL(ADD_KEY, b"user", name.encode(), b"secret", 6, -4)
    if key < 0:
        pytest.skip("this system forbids keys")
    try:
        with ThreadPoolExecutor(1) as aside:  # its thread has keys of its own
            assert aside.submit(keys_of_the_user, name).result(SOON) == ["secret"]
        with Sandboxes(isolate=True, network=False) as boxes, boxes.take(SOON) as box:
            assert box.call(keys_of_the_user, name) == []
    finally:
        KEYCTL(KEYCTL_NUMBER, 9, key, -4)


def test_paths_may_be_any_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working directory, from which code is imported, and the folder that boxes get a copy of."""
    folder = os.fsencode(tmp_path) + b"/o\xff"
    os.mkdir(folder)  # noqa: PTH102 - of bytes
    monkeypatch.chdir(os.fsdecode(folder))
    monkeypatch.syspath_prepend("")  # type: ignore[no-untyped-call]
    Path("some_module.py").write_text("value = 3")
    with Sandboxes(network=None, folder=os.fsdecode(folder)) as boxes, boxes.take(SOON) as box:
        assert box.call(eval, "__import__('some_module').value") == 3
        assert box.call(os.listdir, ".") == ["some_module.py"]


def test_a_box_is_known_by_its_namespaces(boxes: Sandboxes) -> None:
    """PER-1: although it has the same user as this process."""
    needs(boxes, Isolation.PROCESSES)
    with boxes.take(timeout=SOON) as box, socket.socket(socket.AF_UNIX) as door:
        place = str(box.folder / "door")
        door.bind(place)
        door.listen()
        with ThreadPoolExecutor(1) as visitor:
            for call in (inside.knock, partial(box.call, inside.knock)):
                heard = visitor.submit(call, place)
                with door.accept()[0] as peer:
                    if call is inside.knock:
                        require_same_namespaces(peer)
                    else:
                        with pytest.raises(
                            PermissionError,
                            match=r"pid \d+, is in another .*pid namespace, such as a sandbox's",
                        ):
                            require_same_namespaces(peer)
                    peer.sendall(b"go")
                assert heard.result(SOON) == b"go"


def test_what_enforces_the_limits_cannot_be_weakened(boxes: Sandboxes) -> None:
    """It has the same user as what it watches."""
    needs(boxes, Isolation.PROCESSES)
    with boxes.take(SOON) as box:
        assert box.call(inside.weakening_the_first) == [errno.EPERM] * 5 + [0] * 5
        assert box.call(inside.weakening_all_of_the_user) == [errno.EPERM] * 2


def test_what_enforces_the_limits_is_hidden_before_anything_runs_beside_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        dumpable = ctypes.CDLL(None).prctl

        def fork() -> int:
            os.write(theirs, b"hidden" if dumpable(3) == 0 else b"open")
            os._exit(0)

        try:
            monkeypatch.setattr(os, "fork", fork)
            limits = Limits(memory=None, pids=None, cpu=None, file_size=None)
            end, other = socket.socketpair()
            Keeper(end, limits, Isolation.PROCESSES).run(other, ".")
        finally:
            os._exit(1)
    os.close(theirs)
    with os.fdopen(ours) as said:
        assert said.read() == "hidden"
    os.waitpid(child, 0)


@pytest.mark.parametrize("how", ["unshare", "clone", "clone3", "setns"])
def test_a_box_gets_no_privileges_by_a_user_namespace(boxes: Sandboxes, how: str) -> None:
    """It could make further namespaces with these, in which its memory would not be counted."""
    with boxes.take(SOON) as box:
        if not box.isolation:
            pytest.skip("nothing was requested")
        assert box.call(inside.new_user_namespace, how) == (errno.ENOSYS if how == "clone3" else errno.EPERM)


def test_no_network(boxes: Sandboxes) -> None:
    needs(boxes, Isolation.NETWORK)
    with socket.create_server(("127.0.0.1", 0)) as server, boxes.take(SOON) as box:
        assert not box.call(inside.connects, server.getsockname()[1])
        assert box.call(inside.own_loopback)
        with Sandboxes(network=True, ready=1) as others, others.take(SOON) as open_box:
            assert open_box.call(inside.connects, server.getsockname()[1])
            outside = open_box.call(inside.families)
        # No namespace keeps others apart, such as those to the host of a virtual machine.
        assert outside == inside.families()
        assert box.call(inside.families) == {
            name: errno.EAFNOSUPPORT if name == "AF_VSOCK" else why for name, why in outside.items()
        }
        assert box.call(inside.pairs) == {"AF_UNIX": 0, "AF_INET": errno.EAFNOSUPPORT}


def test_privileges_are_gone(box: Sandbox) -> None:
    status = dict(
        line.split(":\t") for line in box.call(inside.read, "/proc/self/status").splitlines() if ":\t" in line
    )
    assert int(status["CapEff"], 16) == int(status["CapPrm"], 16) == 0
    assert status["NoNewPrivs"] == "1"


def test_take_waits_for_its_turn(boxes: Sandboxes) -> None:
    taken = [boxes.take(SOON) for _ in range(4)]
    with pytest.raises(SandboxTimeout, match="all 4 are taken"):
        boxes.take(timeout=0.05)
    got: list[Sandbox] = []
    thread = threading.Thread(target=lambda: got.append(boxes.take(SOON)))
    thread.start()
    for box in taken:
        box.give_back()
    thread.join(SOON)
    assert got[0].call(len, "four") == 4
    got[0].give_back()


def test_many_at_once(boxes: Sandboxes) -> None:
    """More takers than boxes; each gets its own box."""

    async def one(n: int) -> tuple[int, str]:
        async with boxes.take_async(SOON) as box:
            kept = await box.call_async(inside.keep, n, timeout=SOON)
            return kept[0], str(box.folder)

    async def main() -> list[tuple[int, str]]:
        return await asyncio.gather(*map(one, range(12)))

    found = asyncio.run(main())
    assert [n for n, _ in found] == list(range(12))
    assert len({folder for _, folder in found}) == 12


def test_a_cancelled_call_ends_its_box(boxes: Sandboxes) -> None:
    async def main() -> None:
        box = await boxes.take_async(SOON)
        assert (await box.run_async(["echo", "x"])).text == "x\n"
        os.mkfifo(box.folder / "began")
        began = os.open(box.folder / "began", os.O_RDONLY | os.O_NONBLOCK)
        task = asyncio.create_task(box.call_async(exec, "open('began', 'w').write('x')\nwhile True: pass"))
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()
        loop.add_reader(began, ready.set)
        await ready.wait()
        loop.remove_reader(began)
        os.close(began)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(SandboxError, match="cancelled"):
            await box.call_async(len, "x")
        box.give_back()
        # Nor does a taker that no longer waits keep one.
        held = [await boxes.take_async(SOON) for _ in range(4)]
        waiting = asyncio.create_task(boxes._take_async(None))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        for each in held:
            each.give_back()
        async with boxes.take_async(SOON) as last:
            assert await last.call_async(len, "four") == 4

    asyncio.run(main())


def test_giving_back(boxes: Sandboxes) -> None:
    box = boxes.take(SOON)
    box.give_back()
    box.give_back()
    with pytest.raises(SandboxError, match="was given back"):
        box.call(len, "x")
    # While a call is in progress, by another thread.
    box = boxes.take(SOON)
    os.mkfifo(box.folder / "began")
    failed: list[BaseException] = []

    def wait() -> None:
        try:
            box.call(exec, "open('began', 'w').write('x')\nwhile True: pass")
        except SandboxError as error:
            failed.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    assert (box.folder / "began").read_text() == "x"
    box.give_back()
    thread.join(SOON)
    assert "given back" in str(failed[0])
    # Or dropped.
    dropped = boxes.take(SOON)
    folder = dropped.folder
    del dropped
    gc.collect()
    inside.wait_until(lambda: not folder.exists())


def test_misuse_is_refused(tmp_path: Path) -> None:
    for options, match in [
        ({"memory": 0}, "memory must be positive"),
        ({"most": 0}, "most must be positive"),
        ({"pids": 0}, "pids must be positive"),
        ({"cpu": 0.0}, "cpu must be positive"),
        ({"file_size": 0}, "file_size must be positive"),
        ({"ready": -1}, "ready must not be negative"),
        ({"isolate": False}, "network=False needs isolation"),
    ]:
        with pytest.raises(ValueError, match=match):
            Sandboxes(**options)  # type: ignore[arg-type]
    with pytest.raises(NotADirectoryError, match="is not a folder"):
        Sandboxes(folder=tmp_path / "nowhere")
    with pytest.raises(TypeError, match="preload must be a list"):
        Sandboxes("json")


@pytest.mark.slow
def test_a_template_that_cannot_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "made_up_broken.py").write_text("print('so far')\nraise ValueError('this cannot be')")
    (tmp_path / "made_up_threads.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, match in [
        ("made_up_broken", "(?s)cannot be imported: ValueError: this cannot be.*so far"),
        ("made_up_threads", "started 1 thread"),
    ]:
        with Sandboxes(network=None, preload=[name]) as boxes:
            with pytest.raises(SandboxError, match=match):
                boxes.take(SOON)
            with pytest.raises(SandboxError, match=match):
                _ = boxes.isolation


def test_closed_sandboxes() -> None:
    with Sandboxes(network=None, ready=1) as boxes:
        box = boxes.take(SOON)
        with pytest.raises(SerializationError, match="cannot be sent"):
            pickle.dumps(boxes)
        boxes.close()
        with pytest.raises(SandboxError, match="are closed"):
            boxes.take()
        with pytest.raises(SandboxError):
            box.call(len, "x")
        box.give_back()
