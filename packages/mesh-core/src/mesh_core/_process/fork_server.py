"""The process that forks workers: single-threaded, with everything imported that workers need.

It reads orders from its agent and reports what happens to its children; see ``fork_server.rs`` for the packets. If its
agent is gone it ends, and its children with it: each has asked the kernel to be killed with its parent.

It also ends what its workers leave behind (``_system/descendants.py``): the kernel gives it their orphans.

NUR-1: it never starts a thread or a runtime, so that a fork is a sound copy.
NUR-2: a preloaded module that starts threads is refused unless it is known to survive a fork; workers then get
fresh interpreters.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn

from mesh_core._common.import_hooks import SURVIVE_FORKS
from mesh_core._native import die_with_parent, name_process
from mesh_core._process import worker as _worker
from mesh_core._process.lessons import Lessons, silenced, threads
from mesh_core._system import config, environment, leaving, streams
from mesh_core._system.descendants import Brood
from mesh_core._system.descriptors import receive_descriptors
from mesh_core._system.interpreter import code_words, searching, show_flags_of_users

_ORDER = struct.Struct("<BQIII")
_REPORT = struct.Struct("<BQIIi")
_FORK, _KILL, _EXEC = 1, 2, 3
_FORKED, _EXITED, _FAILED, _REFUSED, _IMPORTING, _IMPORTED = 11, 12, 13, 14, 15, 16
_PACKET = 256

# What workers import sooner or later, for Mesh or because most programs do: imported once, here,
# instead of in each worker.
_SHARED = (
    "asyncio",
    "cloudpickle",
    "concurrent.futures.thread",
    "dataclasses",
    "faulthandler",
    "inspect",
    "logging",
    "mesh_core._actors.actor",
    "mesh_core._bundle.callables",
    "mesh_core._bundle.worker",
    "mesh_core._system.stack_dumps",
    "mesh_core._serialize.exceptions",
    "mesh_core._extensions.running",
    "mesh_core._failures.failure",
    "mesh_core._failures.repairs",
    "mesh_core._meshes.actors",
    "mesh_core._meshes.hosts",
    "mesh_core._meshes.procs",
    "mesh_core._meshes.repair",
    "mesh_core._common.hooks",
    "mesh_core._process.multiprocess",
    "mesh_core._common.slots",
    "mesh_core._hosting.actor_host",
    "pathlib",
    "random",
    "tempfile",
)

_EXEC_CODE = """
import json
with open(int(sys.argv[1]), "rb") as file: told = json.load(file)
search(told["path"], afar=told["afar"])
from mesh_core._process.worker import main_exec
main_exec(told)
"""


SCRATCH = "MESH_HOST_SCRATCH"
"""The variable by which a host's agent tells its fork servers the job's directory on the host."""

_Addr = tuple[int, int]


class _Order(NamedTuple):
    """An order for one worker."""

    addr: _Addr
    host: int
    seat: int
    link: int
    out: int
    err: int
    told: int
    fresh: bool


class ForkServer:
    """The loop that turns orders into processes."""

    def __init__(self, control: int, board: int, brood: Brood) -> None:
        self._control = socket.socket(fileno=control)
        self._control.setblocking(False)
        self._board = board
        self._brood = brood
        self._workers: dict[int, tuple[int, _Addr]] = {}  # by pid: the pidfd and the address
        self._pids: dict[_Addr, int] = {}
        self._epoll = select.epoll()
        self._epoll.register(control, select.EPOLLIN)
        self._unsent: list[bytes] = []
        # Set by the agents of other machines than the controller's.
        self._host_name = os.environ.pop("_MESH_HOST", "")
        self.only_exec = False
        self._imported: list[str] = []
        self._lessons: Lessons | None = None

    def report(self, op: int, addr: _Addr, *, pid: int = 0, status: int = 0, text: str = "") -> None:
        """Send a report to the agent."""
        self._unsent.append(_REPORT.pack(op, *addr, pid, status) + text.encode()[:8000])
        self._send()

    def _send(self) -> None:
        try:
            while self._unsent:
                self._control.send(self._unsent[0])
                del self._unsent[0]
        except BlockingIOError:
            pass
        except OSError:
            self._leave()
        self._epoll.modify(self._control, select.EPOLLIN | (select.EPOLLOUT if self._unsent else 0))

    def begin_import(self, name: str) -> None:
        """Report that orders will wait for this import."""
        self.report(_IMPORTING, (0, 0), text=name)

    def end_imports(self, *names: str) -> None:
        """Report that orders are followed again, and what was imported for workers so far."""
        self._imported += names
        self.report(_IMPORTED, (0, 0), text=",".join(self._imported))

    def learn(self) -> None:
        """From now on, import what workers have imported, where that makes no difference to later ones."""
        self._lessons = Lessons(self._remember)
        self._epoll.register(self._lessons, select.EPOLLIN)

    def start_minder(self) -> None:
        """Start the process that ends what workers leave behind, even if this process is killed."""
        self._brood.start_minder()

    def serve(self) -> NoReturn:
        """Take orders until the agent is gone."""
        self._epoll.register(self._brood.listen(), select.EPOLLIN)
        pause: float | None = None
        while True:
            ended = pause is not None
            for fd, events in self._epoll.poll(pause):
                if fd != self._control.fileno():
                    if self._lessons is not None and fd == self._lessons.fileno():
                        self._lessons.hear()
                        self._try()
                    else:
                        ended = True
                    continue
                if events & select.EPOLLOUT:
                    self._send()
                if events & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR):
                    self._receive()
            if ended:
                self._reap()
                pause = self._brood.hunt(self._children())

    def _receive(self) -> None:
        try:
            packet, fds = receive_descriptors(self._control, _PACKET, 4)
        except BlockingIOError:
            return
        except OSError:
            packet, fds = b"", []
        if not packet:
            # The agent is gone.
            self._leave()
        op, mesh, rank, host, seat = _ORDER.unpack_from(packet)
        if op == _KILL:
            pid = self._pids.get((mesh, rank))
            if pid is not None:
                # It is in the table, so it has not been reaped: the pid is still its own.
                os.kill(pid, signal.SIGKILL)
            return
        addr = (mesh, rank)
        link, out, err, told = fds
        if self._lessons is not None and (file := self._lessons.changed()):
            self._stop_forking(f"{file} was changed after it was imported for new processes")
        number = self._brood.take_number()
        try:
            pid = os.fork()
        except OSError as error:
            self._brood.give_number(number)
            for fd in fds:
                os.close(fd)
            self.report(
                _FAILED, addr, text=f"fork failed: {error.strerror}; see 'mesh doctor' for the limits"
            )
            return
        if pid == 0:
            self._become(
                number, _Order(addr, host, seat, link, out, err, told, op == _EXEC or self.only_exec)
            )
        for fd in fds:
            os.close(fd)
        watch = os.pidfd_open(pid)
        self._workers[pid] = (watch, addr)
        self._brood.add(pid, number)
        self._pids[addr] = pid
        self._epoll.register(watch, select.EPOLLIN)
        self.report(_FORKED, addr, pid=pid)

    def _reap(self) -> None:
        """Reap all children that have ended; only some of them were workers."""
        for pid, status in self._brood.ended():
            if self._lessons is not None and pid == self._lessons.pid:
                if why := self._lessons.tried(status):
                    self._stop_forking(why)
                self._try()
                continue
            worker = self._workers.pop(pid, None)
            if worker is None:
                continue
            watch, addr = worker
            self._epoll.unregister(watch)
            os.close(watch)
            del self._pids[addr]
            # Negative for a signal, as in subprocess.
            self.report(_EXITED, addr, pid=pid, status=os.waitstatus_to_exitcode(status))

    def _leave(self) -> NoReturn:
        """End, and end all workers and what they have started."""
        children = self._children()
        for pid in children:
            os.kill(pid, signal.SIGKILL)
        self._brood.leave(children)

    def _children(self) -> set[int]:
        """Return the workers, and the copy that tries a module."""
        trying = 0 if self._lessons is None else self._lessons.pid
        return {*self._workers, trying} - {0}

    def _stop_forking(self, why: str) -> None:
        """Have workers start with fresh interpreters from now on."""
        _warn(f"{why}; these processes start by exec instead, which takes longer and shares no memory")
        self.only_exec, lessons, self._lessons = True, self._lessons, None
        if lessons is not None:
            self._epoll.unregister(lessons)

    def _try(self) -> None:
        """Have a copy of this process try the next module that workers have imported."""
        lessons = self._lessons
        trial = None if lessons is None else lessons.next_trial()
        if lessons is None or trial is None:
            return
        number, parent = self._brood.take_number(), os.getpid()
        try:
            pid = os.fork()
        except OSError:
            self._brood.give_number(number)
            lessons.trying(0)
            return
        if pid == 0:
            try:
                die_with_parent(parent)
                self._brood.fledge(number)
                self._control.close()
                self._epoll.close()
                signal.signal(signal.SIGINT, signal.default_int_handler)
            except BaseException:  # noqa: BLE001 - none of the fork server's code may run here
                os._exit(1)
            trial()
        self._brood.add(pid, number)
        lessons.trying(pid)

    def _remember(self, name: str) -> str:
        """Import a module that workers have imported; return why they must not be forked any longer, if so."""
        self.begin_import(name)
        why = ""
        gc.enable()
        try:
            with nothing_at_exit(), silenced():
                found = preload([name])
        except BaseException as error:  # noqa: BLE001 - a copy could import it
            why = f"{name} could be imported in a copy of this process, but not in it: {_said(error)}"
            self.end_imports()
        else:
            why = "" if found is None else f"{found[0]}, and threads do not survive a fork"
            self.end_imports(name)
        _freeze()
        return why

    def _become(self, number: int, order: _Order) -> NoReturn:
        """Turn this copy of the fork server into a worker."""
        parent = os.getppid()
        status = 1
        try:
            die_with_parent(parent)
            self._brood.fledge(number)
            self._epoll.close()
            for watch, _ in self._workers.values():
                os.close(watch)
            self._workers.clear()
            told = {**config.read(order.told, order.addr[1]), "scratch": os.environ.get(SCRATCH, "")}
            here = os.getcwd() if self._lessons is not None else ""  # noqa: PTH109
            # The rank in its mesh, which may have had other processes before.
            rank = told["ranks"][order.addr[1]] if told["ranks"] else order.addr[1]
            os.close(order.told)
            if self._host_name:
                told["host"] = self._host_name
            for pipe, fd in ((order.out, 1), (order.err, 2)):
                os.dup2(pipe, fd)
                os.close(pipe)
            streams.introduce(told, rank)
            try:
                told["env"] = environment.environment(told, rank, os.environ)
                environment.settle(told, rank)
                if order.fresh:
                    self._exec(told, order, parent)
            except environment.Refusal as error:
                self._decline(order.addr, str(error))
            if self._lessons is not None:
                alike = told["env"] == dict(os.environ) and os.getcwd() == here  # noqa: PTH109
                told["teacher"] = self._lessons.become_worker(alike=alike)
            self._control.close()
            gc.enable()
            signal.signal(signal.SIGINT, signal.default_int_handler)
            addr = (*order.addr, order.host)
            status = _worker.run(
                told, addr=addr, seat=order.seat, link=order.link, board=self._board, forked=True
            )
        except BaseException:  # noqa: BLE001 - the last line of defence of a process
            traceback.print_exc()
        finally:
            leaving.leave(status)
        raise AssertionError("unreachable")

    def _decline(self, addr: _Addr, why: str) -> NoReturn:
        """Report, from a copy of the fork server, why it does not become a worker."""
        packet = _REPORT.pack(_FAILED, *addr, 0, 0) + why.encode()[:8000]
        # Not through `report`: the unsent packets and the epoll set belong to the fork server.
        ready = select.poll()
        ready.register(self._control, select.POLLOUT)
        while True:
            try:
                self._control.send(packet)
                break
            except BlockingIOError:
                ready.poll()
        leaving.leave(1)
        raise AssertionError("unreachable")

    def _exec(self, told: dict[str, Any], order: _Order, parent: int) -> NoReturn:
        interpreter = told["python"] or [sys.executable]
        told["numbers"] = [*order.addr, order.host, order.seat, order.link, self._board, parent]
        # Not in the arguments, which every user of the host can read.
        env, told["env"] = config.executable(told["env"])
        file = os.memfd_create("mesh-told", 0)
        with open(file, "wb", closefd=False) as out:
            out.write(json.dumps(told).encode())
        os.lseek(file, 0, os.SEEK_SET)
        os.set_inheritable(order.link, True)
        os.set_inheritable(self._board, True)
        argv = [*interpreter, *code_words(searching(_EXEC_CODE), str(file))]
        try:
            os.execvpe(argv[0], argv, env)
        except OSError as error:
            raise environment.Refusal(
                f"python={argv[0]!r} is not a program that can be run on this host: {error.strerror}; give the path "
                "of an interpreter there"
            ) from None


@contextlib.contextmanager
def nothing_at_exit() -> Iterator[None]:
    """Make ``atexit.register`` do nothing.

    Handlers that modules register on import here would end, in each worker, things that all of them share, such as a temporary
    directory. Handlers registered when the interpreter started stay: tools that measure it write their results in them.
    """
    register, atexit.register = atexit.register, lambda function, *_args, **_kwargs: function  # type: ignore[assignment]
    try:
        yield
    finally:
        atexit.register = register


def _warn(text: str) -> None:
    # There is none where the script was started without one.
    if sys.stderr is not None:
        sys.stderr.write(f"mesh: {text}\n")
        sys.stderr.flush()


def _said(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(error)).strip()


def _freeze() -> None:
    """Keep the collector from what exists now: it lives as long as the workers, and pages that are not touched stay shared."""
    gc.collect()
    gc.freeze()
    gc.disable()


def _preload(names: list[str], begin: Callable[[str], object]) -> str:
    """Import what workers preload. Return why forking is unsound after that, or an empty string."""
    found = preload(names, begin)
    if found is None:
        return ""
    what, it = found
    return (
        f"{what}, and threads do not survive a fork; these processes start by exec instead, which takes longer and "
        f"shares no memory. To fork them, leave {it} out of what is preloaded: import it in the actors, or in "
        "functions where it is used"
    )


def _preload_chosen(names: list[str], begin: Callable[[str], object]) -> tuple[list[str], str]:
    """Import what Mesh has chosen for workers, as far as it is here. Return that, and why forking is unsound after it, if so.

    Workers import the rest themselves, and say what is wrong with it.
    """
    here: list[str] = []
    for name in names:
        try:
            why = _preload([name], begin)
        except ModuleNotFoundError as error:
            if error.name != name:
                return here, _unimported(name, error)
        except Exception as error:  # noqa: BLE001 - foreign code may raise anything
            return here, _unimported(name, error)
        else:
            here.append(name)
            if why:
                return here, why
    return here, ""


def _unimported(name: str, error: Exception) -> str:
    return (
        f"{name} cannot be imported before processes are forked: {_said(error)}; these processes start by exec instead. "
        "With preload=[] they are forked without it"
    )


def _begin_nothing(_name: str) -> None:
    return None


def preload(names: list[str], begin: Callable[[str], object] = _begin_nothing) -> tuple[str, str] | None:
    """Import modules before forks. If one starts threads, return what happened, and which module to leave out."""
    if not names:
        return None
    from mesh_core._common.import_hooks import ThreadCount

    hook = ThreadCount(threads, SURVIVE_FORKS)
    hook.install()
    try:
        for name in names:
            begin(name)
            importlib.import_module(name)
            if hook.started:
                return _unsound(name, hook.started)
    finally:
        hook.remove()
    return None


def _unsound(name: str, started: dict[str, int]) -> tuple[str, str]:
    module, count = next(iter(started.items()))
    threads = f"{count} thread{'s' if count > 1 else ''}"
    if module == name:
        return f"preload={name!r} started {threads} when it was imported", "it"
    return f"preload={name!r} imports {module!r}, which started {threads} when it was imported", repr(module)


def _unfit() -> str:
    """Return why children cannot be watched on this system; empty if they can."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        return (
            f"pidfd_open: {error.strerror}. Mesh needs it to notice that a process has ended: use Linux 5.3 or later, with "
            "pidfd_open allowed in the container's seccomp profile; `mesh doctor` checks what else is needed"
        )
    return ""


def show_name() -> None:
    """Show in process listings what this process is."""
    name_process("mesh: fork server (mesh_core._process.fork_server)", "mesh-forkserver")


def import_shared() -> None:
    """Import what most workers need."""
    with nothing_at_exit():
        for name in _SHARED:
            importlib.import_module(name)


def refuse(control: int, why: str) -> NoReturn:
    """Tell the agent why there can be no workers, and exit."""
    with socket.socket(fileno=control) as channel:
        channel.send(_REPORT.pack(_REFUSED, 0, 0, 0, 0) + why.encode()[:8000])
    os._exit(1)


def main(control: int, board: int, plan: dict[str, Any]) -> NoReturn:
    """Entry point of a fork server; its agent starts it with these arguments."""
    os.set_inheritable(control, False)
    os.set_inheritable(board, False)
    show_name()
    show_flags_of_users()
    # If the script was started without stdout or stderr, nothing else must get their numbers.
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    fork_server = ForkServer(control, board, Brood())
    if unfit := _unfit():
        fork_server.report(_REFUSED, (0, 0), text=unfit)
        os._exit(1)
    fork_server.start_minder()
    fork_server.begin_import("mesh_core")
    import_shared()
    for folder, why in plan["left out"].items():
        _warn(
            f"on this host, modules of {folder} are not found: {why}. Put the code into a folder that only you can write to, "
            "or send it with hosts.sync_workspace()"
        )
    os.environ.update(plan["env"])
    for name in plan["unset"]:
        os.environ.pop(name, None)
    preload: list[str] = plan["preload"]
    # Scripts and libraries look at it while they are imported.
    sys.argv[:] = plan["argv"]
    try:
        with nothing_at_exit():
            if plan["prepare"]:
                from mesh_core._common.hooks import prepare

                prepare(plan["prepare"], os.environ.get(SCRATCH, ""))
            begin = fork_server.begin_import
            if plan["chosen"]:
                preload, why = _preload_chosen(preload, begin)
            else:
                why = _preload(preload, begin)
    except BaseException as error:  # noqa: BLE001 - reported to the agent
        fork_server.report(
            _REFUSED, (0, 0), text=f"a module of preload={preload!r} cannot be imported: {_said(error)}"
        )
        os._exit(1)
    if why:
        _warn(why)
        fork_server.only_exec = True
    elif plan["chosen"]:
        fork_server.learn()
    _freeze()
    fork_server.end_imports(*preload)
    fork_server.serve()
