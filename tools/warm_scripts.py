"""Scripts that need no interpreter's start: copies of a process that has imported Mesh, and waits.

A test of what a *script* does spends most of its time on starting two interpreters and importing Mesh in both: the script's
and its fork server's. Here a single-threaded process, one for each process of pytest, imports all that once, and PyTorch
too if it is told to: that takes several seconds of a processor for each interpreter. Each script
is a fork of it, with the script's own arguments, variables, directories, streams and ``__main__``; its first fork server is
another. It ends as interpreters do: threads, callbacks at exit and finalization included.

What a test says about the start of an interpreter, or its options, needs a fresh one.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent
_FORKED = struct.Struct("<i")
_ENDED = struct.Struct("<ii")
_SERVER = """
import sys
control, here, *also = sys.argv[1:]
sys.path.insert(0, here)
import warm_scripts
sys.path.remove(here)
warm_scripts.begin(int(control), also)
"""
TORCH = ("torch.distributed.checkpoint", "torch.distributed.tensor")
"""What scripts that compute with PyTorch import of it, themselves or by way of mesh_tensor. Not its compiler, some of whose
modules print complaints about what is left of them at the end of a process that was told to keep what it had imported."""
_READ_AT_START = ("PYTHON", "LD_", "MALLOC_", "GLIBC_", "LC_", "LANG")
"""Variables with these prefixes are read when a program starts."""
_WARM = (
    "mesh_core._process.process",
    "mesh_core._process.notices",
    "mesh_core._bundle.script",
    "contextlib",
    "textwrap",
)


class WarmScripts:
    """The process that scripts are forked from."""

    def __init__(self, env: Mapping[str, str], also: Sequence[str] = ()) -> None:
        """Start it with this environment; beside Mesh it imports modules with these names."""
        self._env = _read_at_start(env)
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            self._server = subprocess.Popen(
                [sys.executable, "-u", "-c", _SERVER, str(theirs.fileno()), str(_HERE), *also],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                # numpy would start threads for its algebra, with which nothing can be forked.
                env={**env, "OPENBLAS_NUM_THREADS": "1"} if also else env,
            )
        self._lock = threading.Lock()
        self._statuses: dict[int, int] = {}
        assert self._control.recv(1), "the process that scripts are forked from has not started"

    @property
    def pid(self) -> int:
        """The pid of that process."""
        return self._server.pid

    def suits(self, env: Mapping[str, str]) -> bool:
        """Whether an interpreter with these variables would start in the same way."""
        return _read_at_start(env) == self._env

    def fork(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        streams: Sequence[int],
        *,
        folder: str | None = None,
        leads: bool = False,
    ) -> int:
        """Start a script, in a working directory, and if it is to lead one, in a session of its own; return its pid."""
        wanted = {"argv": list(argv), "env": dict(env), "cwd": folder or str(Path.cwd()), "leads": leads}
        order = os.memfd_create("order")
        with open(order, "wb", closefd=False) as file:
            file.write(json.dumps(wanted).encode())
        try:
            with self._lock:
                socket.send_fds(self._control, [b"f"], [*streams, order])
                while True:
                    kind, pid, status = self._hear()
                    if kind == b"f":
                        return pid
                    self._statuses[pid] = status
        finally:
            os.close(order)

    def status(self, pid: int, *, wait: bool) -> int | None:
        """The wait status of a script that has ended; ``None`` if it has not."""
        with self._lock:
            while pid not in self._statuses:
                if not wait and not select.select([self._control], [], [], 0)[0]:
                    return None
                _, ended, status = self._hear()
                self._statuses[ended] = status
            return self._statuses[pid]

    def close(self) -> None:
        """End it; scripts that run go on."""
        self._control.close()
        self._server.wait(10)

    def _hear(self) -> tuple[bytes, int, int]:
        kind = self._exactly(1)
        if kind == b"f":
            return kind, *_FORKED.unpack(self._exactly(_FORKED.size)), 0
        return kind, *_ENDED.unpack(self._exactly(_ENDED.size))

    def _exactly(self, size: int) -> bytes:
        data = self._control.recv(size, socket.MSG_WAITALL)
        if len(data) < size:
            raise RuntimeError("the process that scripts are forked from has ended")
        return data


class WarmProcess(subprocess.Popen[str]):
    """A script that was forked, with what :class:`subprocess.Popen` offers."""

    def __init__(
        self,
        scripts: WarmScripts,
        argv: Sequence[str],
        env: Mapping[str, str],
        *,
        stdin: int = subprocess.PIPE,
        stderr: int = subprocess.PIPE,
        cwd: str | None = None,
        leads: bool = False,
    ) -> None:
        self._scripts = scripts
        self._leads = leads
        super().__init__(
            argv, stdin=stdin, stdout=subprocess.PIPE, stderr=stderr, text=True, env=env, cwd=cwd
        )

    def _execute_child(self, args: Any, *rest: Any) -> None:
        cwd, env, (stdin, _, _, stdout, _, stderr) = rest[4], rest[5], rest[9:15]
        try:
            self.pid = self._scripts.fork(args, env, [stdin, stdout, stderr], folder=cwd, leads=self._leads)
            self._child_created = True
        finally:
            self._close_pipe_fds(*rest[9:15])  # type: ignore[attr-defined]

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        status = self._scripts.status(self.pid, wait=not wait_flags & os.WNOHANG)
        return (0, 0) if status is None else (self.pid, status)

    def _internal_poll(self, _deadstate: Any = None, **_: Any) -> int | None:
        if self.returncode is None:
            pid, status = self._try_wait(os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


def _read_at_start(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name.startswith(_READ_AT_START)}


# What follows runs in the process that scripts are forked from, and in the scripts.


def _serve(control: socket.socket) -> tuple[Any, dict[str, Any]]:
    """Fork scripts until nobody wants any; in each script, return its code and the namespace to run it in."""
    poll = select.poll()
    poll.register(control, select.POLLIN)
    running: dict[int, int] = {}
    control.send(b"r")
    while True:
        for fd, _ in poll.poll():
            if fd == control.fileno():
                packet, fds, _, _ = socket.recv_fds(control, 1, 4)
                if not packet:
                    os._exit(0)
                pid = os.fork()
                if pid == 0:
                    for each in (control.detach(), *running):
                        os.close(each)
                    return _become(*fds)
                for each in fds:
                    os.close(each)
                watch = os.pidfd_open(pid)
                running[watch] = pid
                poll.register(watch, select.POLLIN)
                control.sendall(b"f" + _FORKED.pack(pid))
            else:
                poll.unregister(fd)
                os.close(fd)
                control.sendall(b"e" + _ENDED.pack(*os.waitpid(running.pop(fd), 0)))


def _become(stdin: int, stdout: int, stderr: int, order: int) -> tuple[Any, dict[str, Any]]:
    """Take a script's place in the world."""
    from importlib.machinery import SourceFileLoader

    from mesh_core._process import standby

    for number, fd in enumerate((stdin, stdout, stderr)):
        os.dup2(fd, number)
        os.close(fd)
    with open(order, "rb") as file:
        file.seek(0)
        wanted = json.load(file)
    os.environ.clear()
    os.environ.update(wanted["env"])
    if wanted["leads"]:
        os.setsid()
    os.chdir(wanted["cwd"])
    path, *arguments = wanted["argv"]
    sys.argv[:] = [path, *arguments]
    sys.path[0] = str(Path(path).parent)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    namespace = vars(sys.modules["__main__"])
    namespace.clear()
    namespace.update(
        __name__="__main__",
        __doc__=None,
        __package__=None,
        __loader__=SourceFileLoader("__main__", path),
        __spec__=None,
        __builtins__=sys.modules["builtins"],
        __file__=path,
        __cached__=None,
    )
    standby.stand_by_for_script()
    return compile(Path(path).read_bytes(), path, "exec", dont_inherit=True), namespace


def _run(code: Any, namespace: dict[str, Any]) -> None:
    """Run a script; report an error as the interpreter does, without the lines of this file."""
    try:
        exec(code, namespace)
    except SystemExit:
        raise
    except BaseException as error:
        trace = error.__traceback__ and error.__traceback__.tb_next
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        if isinstance(error, KeyboardInterrupt):
            # The interpreter ends by the signal itself.
            sys.excepthook = lambda *_: None
            raise
        sys.exit(1)


def begin(control: int, also: Sequence[str] = ()) -> None:
    """Import what scripts need, then fork them; returns in each script when that is over."""
    import importlib

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    exec("from mesh_core import *", {})
    for name in (*_WARM, *also):
        importlib.import_module(name)
    from mesh_core import preload_host

    preload_host()
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "an import has started a thread"
    _run(*_serve(socket.socket(fileno=control)))
