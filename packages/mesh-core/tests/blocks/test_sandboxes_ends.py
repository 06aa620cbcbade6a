"""Sandboxes that end, and leave nothing behind (BOX-3)."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import core_sandboxes as inside
import pytest
from core_processes import Script, Watch, family
from core_sandboxes import SOON, tidily
from core_trees import TREES, pipe

from mesh_core import Isolation, SandboxDied, SandboxError, Sandboxes


@pytest.fixture(scope="module", params=["isolated", "plain"])
def boxes(request: pytest.FixtureRequest) -> Iterator[Sandboxes]:
    with tidily(request.param, ready=2, name=request.param) as made:
        yield made


@pytest.fixture(autouse=True)
def tidy() -> None:
    """The stock of boxes changes all the time, so leaks are checked at the end of the module."""


@pytest.mark.parametrize(("how", "exitcode"), [("exit", 3), ("segv", -11), ("abort", -6), ("kill", -9)])
def test_a_crash_is_an_error(boxes: Sandboxes, how: str, exitcode: int) -> None:
    with boxes.take(SOON) as box:
        with pytest.raises(SandboxDied, match=r"while crash\(\) ran; take another one") as caught:
            box.call(inside.crash, how)
        assert (caught.value.exitcode, caught.value.limit) == (exitcode, None)
        assert "last words" in caught.value.output
        assert "last words" in str(caught.value)
        with pytest.raises(SandboxDied):
            box.call(len, "x")
    with boxes.take(SOON) as box:
        assert box.call(len, "four") == 4


@pytest.mark.parametrize("how", ["close", "noise", "huge", "lies", "two", "alike", "kind", "pickle"])
def test_misuse_of_the_connection_is_an_error(boxes: Sandboxes, how: str) -> None:
    """BOX-1: what a box sends is not unpickled, either."""
    with boxes.take(SOON) as box:
        with pytest.raises(SandboxDied, match=r"closed its connection|ended with exit status|not an answer"):
            box.call(inside.misuse, how, timeout=SOON)
        folder = box.folder
    inside.wait_until(lambda: not folder.exists())


def test_output_is_not_an_answer(boxes: Sandboxes) -> None:
    with boxes.take(SOON) as box:
        assert box.call(exec, "print('x' * 1_000_000)") is None
        assert box.run(["sh", "-c", "head -c 3000000 /dev/zero"], max_output=10).stdout == bytes(10)
        with pytest.raises(SandboxDied) as caught:
            box.call(os._exit, 1)
        assert len(caught.value.output) == 16 << 10


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["daemon", "deaf", "stopped", "workers", "headless"])
def test_trees_end_with_their_box(boxes: Sandboxes, kind: str) -> None:
    with boxes.take(SOON) as box, pipe(box.folder / "fifo") as tree:
        box.call(inside.plant, kind, tree.path)
        tree.wait_for(TREES[kind][0])
        folder = box.folder
        box.give_back()
        assert tree.ended()
    inside.wait_until(lambda: not folder.exists())


def test_a_tree_ends_when_its_worker_dies(boxes: Sandboxes) -> None:
    with boxes.take(SOON) as box, pipe(box.folder / "fifo") as tree:
        box.call(inside.plant, "daemon", tree.path)
        tree.wait_for(1)
        with pytest.raises(SandboxDied):
            box.call(os._exit, 0)
        assert tree.ended()


@pytest.mark.parametrize("what", [b"\0", b"\xff", b"\x1b", "\U0001f600".encode()])
def test_no_output_hides_how_a_box_has_ended(boxes: Sandboxes, what: bytes) -> None:
    """Control characters are told in six times as many."""
    with boxes.take(SOON) as box, pytest.raises(SandboxDied, match="SIGABRT") as died:
        box.call(inside.scream, what)
    assert died.value.exitcode == -signal.SIGABRT
    assert set(died.value.output) == set(what.decode(errors="replace"))
    assert "\0" not in str(died.value)
    assert "\x1b" not in str(died.value)


def test_errors_of_code_in_a_box_do_not_control_a_terminal(boxes: Sandboxes) -> None:
    """As Python shows them where nobody catches them."""
    with boxes.take(SOON) as box, pytest.raises(SandboxError) as raised:
        box.call(exec, "class Odd(Exception):\n    pass\nraise Odd('\\x1b]52;c;\\7')")
    shown = "".join(traceback.format_exception_only(raised.value))
    assert "Odd" in shown
    assert "\x1b" not in shown
    assert "\7" not in shown


def test_folders_that_are_hard_to_remove(boxes: Sandboxes) -> None:
    """Deep, large, and with permissions that forbid everything."""
    with boxes.take(SOON) as box:
        code = (
            "import os\n"
            "for n in range(100): os.makedirs(f'{n}/a/b'); open(f'{n}/a/c', 'w').close()\n"
            "for n in range(50): os.chmod(f'{n}/a', 0)\n"
            "os.symlink('/', 'root'); os.mkfifo('fifo'); os.chmod('.', 0)\n"
        )
        box.call(exec, code)
        folder = box.folder
    inside.wait_until(lambda: not folder.exists())
    assert Path("/usr").exists()


@pytest.mark.parametrize("beside", [0, 100])
def test_a_folder_that_is_too_deep_to_remove_step_by_step(boxes: Sandboxes, beside: int) -> None:
    """It would end the template, and so the boxes of all others."""
    with boxes.take(SOON) as other:
        with boxes.take(SOON) as box:
            code = f"import os\nfor n in range({beside}): os.mkdir(str(n))\nfor n in range(1200): os.mkdir('deep'); os.chdir('deep')"
            box.call(exec, code)
            folder = box.folder
        inside.wait_until(lambda: not folder.exists())
        assert other.call(len, "four") == 4


def test_the_template_does_not_grow(boxes: Sandboxes) -> None:
    """No descriptor, folder, process or mark of an ended box remains."""
    with boxes.take(SOON) as box:
        template = next(
            pid for pid, line in family().items() if "template" in line and f"{boxes.name!r}" in line
        )
        scratch = box.folder.parent

    def state() -> tuple[int, int]:
        return len(list(Path(f"/proc/{template}/fd").iterdir())), len(family(template))

    def settled() -> bool:
        return boxes.ready == 2 and boxes.taken == 0 and len(list(scratch.iterdir())) == 3

    inside.wait_until(settled)
    before = state()
    for _ in range(20):
        with boxes.take(SOON) as box:
            box.call(len, "x")
    inside.wait_until(settled)
    assert state() == before


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["guard", "template"])
def test_a_template_that_ended_is_replaced(boxes: Sandboxes, victim: str) -> None:
    box = boxes.take(SOON)
    with pipe(box.folder / "fifo") as tree:
        box.call(inside.plant, "daemon", tree.path)
        tree.wait_for(1)
        pid = next(pid for pid, line in family().items() if victim in line and f"{boxes.name!r}" in line)
        watch = Watch(family(pid))
        os.kill(pid, signal.SIGKILL)
        assert tree.ended()
        assert not watch.wait()
        with pytest.raises(SandboxError):
            box.call(len, "x", timeout=SOON)
    scratch = box.folder.parent
    box.give_back()
    with boxes.take(SOON) as box:
        assert box.call(len, "four") == 4
    assert not scratch.exists()


OWNER = """
import os, sys, time
import core_sandboxes as inside
from mesh_core import Sandboxes

boxes = Sandboxes(network=None, isolate=inside.MODES[sys.argv[1]], ready=1)
box = boxes.take(30)
os.mkfifo(box.folder / "fifo")
fifo = os.open(box.folder / "fifo", os.O_RDONLY | os.O_NONBLOCK)
box.call(inside.plant, "daemon", str(box.folder / "fifo"))
print(box.folder.parent, flush=True)
if sys.argv[2] == "fork" and os.fork() == 0:
    # Whatever a fork of the owner does: the boxes are not its own.
    try:
        boxes.take()
    except Exception as error:
        print(type(error).__name__, error, flush=True)
    del box, boxes
    os._exit(0)
if sys.argv[2] == "busy":
    sys.stdin.readline()
    box.call(inside.spin)
sys.stdin.readline()
"""


@pytest.mark.sampled(3, full=True)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "end"),
    [("isolated", "exit"), ("isolated", "kill"), ("isolated", "fork"), ("plain", "kill"), ("plain", "term")],
)
def test_nothing_outlives_the_owner(script: Callable[..., Script], mode: str, end: str) -> None:
    owner = script(OWNER, mode, end)
    scratch = Path(owner.line())
    if end == "fork":
        assert "before this process was forked" in owner.line()
    watch = owner.watch()
    assert len(watch.pids) >= 6
    if end == "kill":
        owner.process.kill()
    elif end == "term":
        owner.process.terminate()
    else:
        owner.say("")
        out, errors = owner.finish()
        assert (out, errors) == ("", "")
    assert not watch.wait()
    inside.wait_until(lambda: not scratch.exists())


FORBIDDEN = """
import os, sys
from pathlib import Path
from mesh_core import Isolation, Sandboxes, SandboxError, _native

# First as a user without privileges, who may make namespaces; then where nobody may, as in many containers.
user, group = os.getuid(), os.getgid()
try:
    _native.unshare(0x10000000)
    Path("/proc/self/uid_map").write_text(f"1000 {user} 1")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/gid_map").write_text(f"1000 {group} 1")
    if sys.argv[1] == "forbidden":
        Path("/proc/sys/user/max_user_namespaces").write_text("0")
except OSError:
    pass
_native.give_up_privileges()
if sys.argv[1] == "forbidden":
    for options in ({"network": False}, {"network": None, "isolate": True}):
        with Sandboxes(**options) as boxes:
            try:
                boxes.take(30)
            except SandboxError as error:
                print(error)
with Sandboxes(network=None) as boxes, boxes.take(30) as box:
    print(boxes.isolation, box.call(len, "four"), box.run(["echo", "hello"]).text.strip())
"""


@pytest.mark.slow
def test_without_privileges(script: Callable[..., Script], boxes: Sandboxes) -> None:
    out, errors = script(FORBIDDEN, "allowed").finish()
    assert errors == ""
    assert out.endswith("4 hello\n")
    if boxes.isolation:
        assert out.startswith(f"{boxes.isolation} ")


@pytest.mark.slow
def test_sandboxes_without_namespaces(script: Callable[..., Script]) -> None:
    """ISO-1: whether they can be made shows only when somebody tries."""
    out, errors = script(FORBIDDEN, "forbidden").finish()
    assert errors == ""
    first, second, third = out.splitlines()
    assert "cannot be made: network=False, but this system cannot isolate programs from the network" in first
    assert "use network=None" in first
    assert "isolate=True, but this system" in second
    assert third == f"{Isolation.NONE} 4 hello"
