"""A copy of a host's agent, or of a script, that waits to become its first fork server.

It is forked before the runtime starts, so that what both import is imported once. See ``fork_server.rs`` for the
order that it waits for.

SBY-1: workers find the same as below a fork server with a fresh interpreter: the same modules, variables, descriptors,
signal handlers and ``__main__``. If a copy of the agent cannot give them that, it becomes such an interpreter.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from mesh_core._common.current import holder
from mesh_core._native import die_with_parent
from mesh_core._process import fork_server
from mesh_core._system import (
    descendants,  # noqa: F401 - imported before the fork, for all copies
    search_path,
)
from mesh_core._system.descriptors import receive_descriptors
from mesh_core._system.interpreter import interpreter_words, runs_code

_PACKET = 16
_OWN = frozenset({"_MESH_HOST", fork_server.SCRATCH})
"""Variables that agents add for their fork servers; the interpreter does not read them."""
_HOME: list[ModuleType] = []


def begin() -> tuple[int, int] | None:
    """Fork the standby of this process; return its pid and this end of its socket, or ``None`` if a copy would not be sound."""
    if len(os.listdir("/proc/self/task")) > 1:  # noqa: PTH208 - a list of names is all that is wanted
        return None
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for stream in (sys.stdout, sys.stderr):
        # Otherwise every copy would write what is buffered again.
        stream.flush()
    parent = os.getpid()
    try:
        pid = os.fork()
    except OSError:
        # The fork server that is started instead may fail too; then it says why.
        ours.close()
        theirs.close()
        return None
    if pid:
        theirs.close()
        return pid, ours.detach()
    try:
        die_with_parent(parent)
        ours.close()
        _stand_by(theirs.detach())
    except BaseException:  # noqa: BLE001 - none of the agent's code may run here
        traceback.print_exc()
    finally:
        os._exit(1)


def stand_by_for_script() -> None:
    """Fork the standby of a script. Must be called before the script's first line, in a process that has imported Mesh.

    For programs that fork scripts instead of starting interpreters for them.
    """
    holder().standby = begin()


def _stand_by(control: int) -> NoReturn:
    # In a process group of its own and without standard input, like a fork server that is started by `exec`.
    os.setpgid(0, 0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    fork_server.show_name()
    _forget_signals()
    # Garbage would close its descriptors later, when their numbers belong to other files.
    gc.collect()
    gc.freeze()
    os.closerange(3, control)
    os.closerange(control + 1, os.sysconf("SC_OPEN_MAX"))
    fork_server.import_shared()
    with socket.socket(fileno=control) as channel:
        packet, fds = receive_descriptors(channel, _PACKET, 3)
        if not packet:
            # The agent has ended, or needs no standby.
            os._exit(0)
        channel.detach()
    board, told, words = fds
    with open(told, "rb", closefd=False) as file:
        plan = json.load(file)
    argv, env = _command(words)
    if not _can_stand_for(plan, argv, env):
        os.lseek(told, 0, os.SEEK_SET)
        for fd in (control, board, told):
            os.set_inheritable(fd, True)
        try:
            os.execvpe(argv[0], [*argv, str(control), str(board), str(told)], env)
        except OSError as error:
            fork_server.refuse(control, f"{argv[0]}: {error.strerror}")
    os.close(told)
    for name in _OWN & env.keys():
        os.environ[name] = env[name]
    if plan["afar"] and not sys.flags.safe_path and sys.path[:1] == [""]:
        # The agent's working directory, which Mesh's own interpreters do not have.
        del sys.path[0]
    plan["left out"] = search_path.search(plan["path"], afar=plan["afar"])
    _forget_main()
    fork_server.main(control, board, plan)


def _command(words: int) -> tuple[list[str], dict[str, str]]:
    """Read a program's arguments and environment."""
    with open(words, "rb") as file:
        count = int.from_bytes(file.read(4), "little")
        texts = [os.fsdecode(each) for each in file.read().split(b"\0")[:-1]]
    pairs = [each.partition("=") for each in texts[count:]]
    return texts[:count], {name: value for name, _, value in pairs}


def _forget_signals() -> None:
    """Reset signal handlers to those of a program that was just started."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    # The agent and the script handle Ctrl-C.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def _forget_main() -> None:
    """Replace ``__main__`` by one without what the agent's program put there."""
    # Functions of that program are running, so it must not be freed.
    _HOME.append(sys.modules["__main__"])
    main = ModuleType("__main__")
    vars(main)["__builtins__"] = sys.modules["builtins"]
    sys.modules["__main__"] = main


def _new_directories(path: Iterable[str]) -> list[str]:
    new = (each for each in path if Path(each).is_dir() and each not in sys.path)
    return [each for each in new if not search_path.why_unsafe(each)]


def _can_stand_for(plan: dict[str, Any], argv: list[str], env: dict[str, str]) -> bool:
    """Whether a fresh interpreter would be in the same state by now."""
    if not runs_code() if plan["afar"] else argv[:1] != interpreter_words(None)[:1]:
        return False
    if {name: value for name, value in env.items() if name not in _OWN} != dict(os.environ):
        # The loader, the allocator and the interpreter read some of them when they start.
        return False
    imported = {name.partition(".")[0] for name in sys.modules}
    return not any(imported & _modules(Path(each)) for each in _new_directories(plan["path"]))


def _modules(directory: Path) -> set[str]:
    """Return the names of the modules and packages that an interpreter finds in a directory, and of other files, which is faster."""
    found = set()
    try:
        for each in os.scandir(directory):
            name, dot, _ = each.name.partition(".")
            # A directory without an __init__.py comes after all others of its name.
            if dot or Path(each.path, "__init__.py").exists():
                found.add(name)
    except OSError:
        pass
    return found


def preload_host() -> None:
    """Import what a host's agent, its fork server and its workers import, so that copies of this process share it.

    For programs that fork several agents. It starts no thread. The garbage collector ignores existing objects from then on.

    >>> from mesh_core import preload_host
    >>> preload_host()
    """
    for name in ("mesh_core._meshes.host_traits", "mesh_core._meshes.spawning", "mesh_core._process.agent"):
        importlib.import_module(name)
    fork_server.import_shared()
    # Pages stay shared if the collector does not touch them.
    gc.collect()
    gc.freeze()
