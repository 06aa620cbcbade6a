"""`mesh exec` and `mesh shell` on the hosts of a job, beside the script that has them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from greeter import kill_host
from launched import LIMIT, until
from scripts import Script
from terminals import InTerminal
from test_launcher_commands import mesh

from mesh_core.plugins import COMMANDS, PluginManager
from mesh_core.testing import CommandPluginConformance
from mesh_launchers import jobs

pytestmark = pytest.mark.slow

HELD = """
    import sys
    sys.path.insert(0, TESTS)
    from greeter import Greeter
    from mesh_core import set_fault_handler
    set_fault_handler(lambda failure: True)
    job = launch("local", hosts=2, name="held", OPTIONS).wait(60)
    greeters = job.hosts.spawn_procs(per_host={"gpus": 1}).spawn("greeters", Greeter)
    while True:
        print(*greeters.greet.call("you").get(timeout=60).values(), flush=True)
        if input() == "end":
            break
    job.stop()
"""


def held(folder: Path, options: str = "") -> Script:
    """Return a script that has a job, and has called its actors."""
    script = Script(
        folder, HELD.replace("TESTS", repr(str(Path(__file__).parent))).replace("OPTIONS", options)
    )
    assert script.heard() == "hello you hello you"
    return script


def still_has_its_job(script: Script) -> bool:
    """Whether its actors still answer."""
    script.go()
    return script.heard() == "hello you hello you"


def ended(script: Script) -> tuple[int, str, str]:
    """Have the script end its job."""
    out, error = script.process.communicate("end\n", timeout=60)
    return script.process.returncode, out, error


def quick_to_be_missed() -> dict[str, str]:
    """Variables of a command that is going to be killed: hosts take its silence for its death after two seconds, not ten."""
    return {**os.environ, "MESH_HEARTBEAT_TIMEOUT": "2"}


def runs(command: str) -> bool:
    """Whether a process of this test whose arguments have this text is there."""
    mine = f"XDG_RUNTIME_DIR={os.environ['XDG_RUNTIME_DIR']}".encode()
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and process.name != str(os.getpid()):
            try:
                words = (process / "cmdline").read_bytes()
                is_mine = mine in (process / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if is_mine and command.encode() in words and b"mesh_core.cli" not in words:
                return True
    return False


@pytest.fixture(autouse=True)
def no_script_stays(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """End the scripts of a test that has failed, which would keep their jobs."""
    started: list[Script] = []
    begin = Script.__init__

    def begun(script: Script, folder: Path, text: str) -> None:
        begin(script, folder, text)
        started.append(script)

    monkeypatch.setattr(Script, "__init__", begun)
    yield
    for each in started:
        each.kill()


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Script]:
    """A script that has a job."""
    script = held(tmp_path)
    yield script
    assert ended(script)[:2] == (0, "")


@pytest.mark.full
def test_exec_while_a_script_has_the_job(tmp_path: Path) -> None:
    """VST-1. The hosts need no mesh-launchers."""
    (tmp_path / "site" / "mesh_launchers").mkdir(parents=True)
    (tmp_path / "site" / "mesh_launchers" / "__init__.py").write_text("raise ImportError('not on hosts')")
    script = held(tmp_path, f"env={{'PYTHONPATH': {str(tmp_path / 'site')!r}}}")
    done = mesh("exec", "held", "--", "sh", "-c", "echo out $$; echo err >&2; exit 3")
    assert done.returncode == 3, done.stderr
    lines = sorted(done.stdout.splitlines())
    assert [each.partition("] ")[0] for each in lines] == [
        "[exec hosts=0 on held-0",
        "[exec hosts=1 on held-1",
    ]
    assert "err" in done.stderr
    assert still_has_its_job(script)
    assert mesh("exec", "--on", "hosts=1:2", "held", "--", "sh", "-c", "kill -9 $$").returncode == 137
    assert mesh("exec", "--on", "held-1,held-0", "held", "--", "true").returncode == 0
    # Behind the name it means the same, and never a command on all hosts.
    one = mesh("exec", "held", "--on", "host=1", "--", "echo", "--on", "here")
    assert one.stdout == "[exec hosts=0 on held-1] --on here\n"
    assert "there are 2" in mesh("exec", "held", "--on=7", "--", "true").stderr
    for words in (["--om", "host=1", "--", "true"], ["--on", "host=1", "true"], ["--on"]):
        wrong = mesh("exec", "held", *words)
        assert wrong.returncode == 2 and "usage: mesh exec [options] JOB [options] -- COMMAND" in wrong.stderr
    assert still_has_its_job(script)
    assert ended(script)[:2] == (0, "")


@pytest.mark.full
def test_a_host_that_is_lost_is_left_out(script: Script) -> None:
    running = subprocess.Popen(
        [sys.executable, "-m", "mesh_core.cli", "exec", "held", "--", "sh", "-c", "echo $PPID; sleep 4242"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert running.stdout is not None
    running.stdout.readline()
    running.stdout.readline()
    kill_host("held-1")
    until(lambda: jobs()[0].hosts[1].phase == "failed", "the host's end is told")
    # The other goes on.
    assert runs("sleep 4242") and running.poll() is None
    running.send_signal(signal.SIGINT)
    _, error = running.communicate(timeout=LIMIT)
    assert running.returncode == 130 and "mesh: held-1: " in error
    left_out = mesh("exec", "held", "--", "true")
    assert left_out.returncode == 0
    assert left_out.stderr.startswith("mesh: host held-1 is failed: its agent was ended by signal 9")
    assert left_out.stderr.endswith("; left out\n")
    named = mesh("exec", "--on", "1", "held", "--", "true")
    assert named.returncode != 0 and "host held-1 is failed" in named.stderr
    until(lambda: not runs("sleep 4242"), "the command ends")


@pytest.mark.full
@pytest.mark.parametrize("heeds", [True, False])
def test_ctrl_c_ends_remote_commands(script: Script, heeds: bool) -> None:
    trap = "trap 'echo caught; exit 0' INT" if heeds else "trap '' INT"
    running = subprocess.Popen(
        [
            *(sys.executable, "-m", "mesh_core.cli", "exec", "held", "--"),
            *("sh", "-c", f"{trap}; echo ready; while :; do sleep 0.1; : 4343; done"),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert running.stdout is not None
    assert "ready" in running.stdout.readline()
    # Also before all of them have begun.
    running.send_signal(signal.SIGINT)
    out, _ = running.communicate(timeout=LIMIT)
    assert running.returncode == 130
    assert ("caught" in out) == heeds
    until(lambda: not runs(": 4343"), "the commands end")
    assert still_has_its_job(script)


@pytest.mark.full
def test_exec_that_is_killed_leaves_nothing(script: Script) -> None:
    """VST-1."""
    running = subprocess.Popen(
        [
            *(sys.executable, "-m", "mesh_core.cli", "exec", "held", "--"),
            "sh",
            "-c",
            "echo $PPID; sleep 4444",
        ],
        stdout=subprocess.PIPE,
        env=quick_to_be_missed(),
    )
    assert running.stdout is not None
    running.stdout.readline()
    until(lambda: runs("sleep 4444"), "the command runs")
    running.kill()
    running.communicate()
    until(lambda: not runs("sleep 4444"), "the commands end")
    assert still_has_its_job(script)


@pytest.mark.full
def test_the_end_of_the_job_is_reported(tmp_path: Path) -> None:
    script = held(tmp_path)
    running = subprocess.Popen(
        [
            *(sys.executable, "-m", "mesh_core.cli", "exec", "held", "--"),
            "sh",
            "-c",
            "echo $PPID; sleep 4545",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert running.stdout is not None
    running.stdout.readline()
    ended(script)
    _, error = running.communicate(timeout=LIMIT)
    assert running.returncode not in (0, None)
    assert "mesh: job 'held' has ended, and what ran on its hosts with it" in error, error
    until(lambda: not runs("sleep 4545"), "the commands end")


@pytest.mark.full
def test_a_kept_job_does_not_expire_while_it_is_visited(tmp_path: Path, jobs_folder: Path) -> None:
    script = held(tmp_path, "keep='3s'")
    go = tmp_path / "go"
    running = subprocess.Popen(
        [
            *(sys.executable, "-m", "mesh_core.cli", "exec", "held", "--"),
            *("sh", "-c", f"echo $PPID; until [ -e {go} ]; do sleep 0.05; done"),
        ],
        stdout=subprocess.PIPE,
    )
    assert running.stdout is not None
    running.stdout.readline()
    script.kill()
    until(lambda: jobs()[0].left == 0.0, "the job is late")
    go.touch()
    running.communicate(timeout=LIMIT)
    assert running.returncode == 0
    until(lambda: jobs() == [], "the job ends")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")
def test_others_are_refused(script: Script, jobs_folder: Path) -> None:
    """VST-2: also where the folders are open to them."""
    door = socket.socket(socket.AF_UNIX)
    at = os.open(jobs_folder / "held", os.O_RDONLY)
    (jobs_folder / "held" / "door").chmod(0o777)
    (jobs_folder / "held").chmod(0o755)
    try:
        os.seteuid(65534)
        door.connect(f"/proc/self/fd/{at}/door")
    finally:
        os.seteuid(0)
        os.close(at)
    with door:
        door.settimeout(LIMIT)
        with suppress(ConnectionError):
            door.sendall(b'{"number": 1, "do": "visit"}\n')
            assert door.recv(100) == b""
    (jobs_folder / "held").chmod(0o700)


@pytest.fixture
def terminal() -> Iterator[list[InTerminal]]:
    """Terminals, which go with the test."""
    opened: list[InTerminal] = []
    yield opened
    for each in opened:
        each.close()


@pytest.fixture
def plain_shell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A shell whose prompt is known."""
    monkeypatch.setenv("SHELL", "/bin/sh")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PS1", "> ")


@pytest.mark.usefixtures("plain_shell")
def test_a_shell_in_a_terminal(tmp_path: Path, terminal: list[InTerminal]) -> None:
    script = held(tmp_path)
    shell = InTerminal("shell", "held", "host=1", size=(31, 97))
    terminal.append(shell)
    shell.sees("[#$>] ")
    shell.type("stty size; echo job=$((40+2))\n")
    shell.sees("\r\n31 97\r\njob=42\r\n")
    shell.type(
        'sh -c \'trap "stty size; echo re""sized" WINCH; echo ar""med; while :; do sleep 0.05; done\'\n'
    )
    shell.sees("armed\r\n")
    shell.resize(12, 60)
    shell.sees("12 60\r\nresized")
    shell.type("\x03")
    shell.sees("[#$>] ")
    # Keys are for the processes there.
    shell.type("sleep 4646\n")
    until(lambda: runs("sleep\x004646"), "the command runs")
    shell.type("\x03")
    shell.sees("[#$>] ")
    shell.type("echo status $?\n")
    shell.sees("status 130")
    # What nobody has read does not keep Ctrl-C away.
    shell.type("yes busy\n")
    shell.sees("busy\r\nbusy\r\n")
    shell.type("\x03")
    shell.type("echo 'quiet'' again'\n")
    shell.sees("quiet again\r\n")
    shell.type("(exit 5)\n")
    shell.type("\x04")
    assert shell.ends() == 5
    assert shell.is_as_before()
    assert still_has_its_job(script)
    assert ended(script)[:2] == (0, "")


def test_a_python_and_a_command_in_a_terminal(script: Script, terminal: list[InTerminal]) -> None:
    python = InTerminal("shell", "--python", "held", "held-0")
    terminal.append(python)
    python.sees(">>> ")
    python.type("import mesh_core, sys; sys.stdout.isatty(), 6 * 7\n")
    python.sees(r"\(True, 42\)\r\n>>> ")
    python.type("\x04")
    assert python.ends() == 0
    command = InTerminal("shell", "held", "host=0", "--", "sh", "-c", "tty; kill -9 $$")
    terminal.append(command)
    command.sees("/dev/pts/")
    assert command.ends() == 137
    missing = InTerminal("shell", "held", "host=0", "--", "/nowhere/program")
    terminal.append(missing)
    assert missing.ends() == 127
    assert "/nowhere/program: No such file or directory" in missing.shown


@pytest.mark.full
@pytest.mark.usefixtures("plain_shell")
@pytest.mark.parametrize("how", ["is left", "is killed", "loses its host"])
def test_a_shell_that_does_not_end_by_itself(tmp_path: Path, terminal: list[InTerminal], how: str) -> None:
    script = held(tmp_path)
    command = ("sh", "-c", "trap '' INT; echo up; sleep 4747; :")
    shell = InTerminal("shell", "held", "host=1", "--", *command, env=quick_to_be_missed())
    terminal.append(shell)
    shell.sees("up\r\n")
    if how == "is killed":
        shell.process.kill()
        shell.ends()
    elif how == "is left":
        shell.type("\r~.")
        assert shell.ends() == 255
        assert shell.is_as_before()
    else:
        kill_host("held-1")
        assert shell.ends() not in (0, None)
        assert "mesh: " in shell.shown and shell.is_as_before()
    until(lambda: not runs("sleep\x004747"), "what ran there ends")
    if how != "loses its host":
        assert still_has_its_job(script)
    ended(script)


def test_what_a_shell_cannot_be(script: Script, terminal: list[InTerminal]) -> None:
    refused = mesh("shell", "held", "host=0")
    assert "mesh shell needs a terminal; `mesh exec` runs commands without one" in refused.stderr
    for words, says in {
        (): "name one host, such as `mesh shell held host=0`; there are 2: held-0, held-1",
        ("host=2",): "'host=2' names no hosts",
        ("gpus=0",): "'gpus=0' names no hosts",
    }.items():
        asked = InTerminal("shell", "held", *words)
        terminal.append(asked)
        assert asked.ends() == 1
        assert says in asked.shown.replace("\r\n", "\n")


class TestShell(CommandPluginConformance):
    plugin = PluginManager().get(COMMANDS, "shell")
    distribution = "mesh-launchers"
