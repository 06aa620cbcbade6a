"""Stacks of the Python threads of processes."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mesh_core._common.codes import Question
from mesh_core._common.display import counted
from mesh_core._common.errors import MeshError
from mesh_core._geometry.values import ValueMesh
from mesh_core._native import Message, locate
from mesh_core._system.process_state import is_stopped
from mesh_core._system.stack_dumps import Stack
from mesh_core._system.stack_dumps import stacks as own_stacks
from mesh_core.inspect._ask import ROOT, Addr, addr_of, ask, proc_name
from mesh_core.inspect._hosts import look, stopped
from mesh_core.inspect._hosts import pids as pids_afar
from mesh_core.inspect._table import span

if TYPE_CHECKING:
    from mesh_core._meshes.actors import ActorMesh
    from mesh_core._meshes.procs import ProcMesh
    from mesh_core._process.process import Process

_THREAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+)(?: \[(.*)\])? \(most recent call first\):")
# The code that waits for messages and passes them to actors, or asks policies and handlers.
_PLUMBING = tuple(
    f"mesh_core/{name}.py"
    for name in (
        "_failures/policy_run",
        "_failures/supervision",
        "_futures/loop",
        "_hosting/actor_cell",
        "_hosting/actor_host",
        "_hosting/constructors",
        "_hosting/ending",
        "_hosting/loop_executor",
        "_hosting/thread_executor",
        "_process/notices",
    )
)
_LOOP_S = 0.1
"""How many seconds a process's event loop may take to answer."""
_NAMED = 3
"""How many actors of a thread are named where it is shown."""

_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')


@dataclass(frozen=True)
class StackFrame:
    """One call of a stack."""

    file: str
    line: int
    """0 if unknown."""
    function: str

    def __str__(self) -> str:
        return f'File "{self.file}", line {self.line}, in {self.function}'


@dataclass(frozen=True)
class ThreadStack:
    """One thread's stack."""

    ident: int
    """Its :func:`threading.get_ident`."""
    name: str
    """``loop`` for the process's own event loop, the names of the actors that run there for their threads; empty if unknown."""
    running: tuple[str, ...]
    """The endpoints that it runs, such as ``trainers.step for 3.2 s``."""
    frames: tuple[StackFrame, ...]
    """The most recent call first."""
    actors: tuple[str, ...] = ()
    """The names of the actors that run on it: one for an actor's own thread, one or more for an event loop of coroutines."""

    @property
    def own(self) -> tuple[StackFrame, ...]:
        """The frames above Mesh's own: the endpoint and what it called. All frames if none are Mesh's."""
        for index, frame in enumerate(self.frames):
            if frame.file.endswith(_PLUMBING):
                return self.frames[:index]
        return self.frames

    def __str__(self) -> str:
        head = f"thread {self.name or f'0x{self.ident:x}'}"
        if self.running:
            head += f", {', '.join(self.running)}"
        frames = self.own
        if not frames:
            return f"{head}: waits for messages"
        # The most recent call last, as in a traceback.
        return "\n".join([f"{head}:", *(f"  {frame}" for frame in reversed(frames))])


@dataclass(frozen=True)
class ProcStacks:
    """The stacks of one process."""

    proc: str
    pid: int | None
    threads: tuple[ThreadStack, ...]
    error: str = ""
    """Why there are no stacks."""

    def of(self, name: str) -> ThreadStack:
        """Return the thread on which the actor with this name runs, or that of the process's own event ``loop``.

        Actors whose endpoints are all coroutines may share a thread.
        """
        for thread in self.threads:
            if name == thread.name or name in thread.actors:
                return thread
        known = ", ".join(repr(thread.name) for thread in self.threads if thread.name) or "none with a name"
        raise KeyError(
            f"{self.proc} has no thread {name!r}; it has {known}{self.error and f' ({self.error})'}"
        )

    def __str__(self) -> str:
        head = f"{self.proc}, pid {self.pid}"
        if self.error:
            return f"{head}: {self.error}"
        return "\n".join([f"{head}:", *(_indent(str(thread)) for thread in self.threads)])

    def __repr__(self) -> str:
        what = self.error or counted(len(self.threads), "thread")
        return f"<ProcStacks of {self.proc}, pid {self.pid}: {what}>"


def stacks(mesh: ProcMesh | ActorMesh[Any] | Any, timeout: float = 2.0) -> ValueMesh[ProcStacks]:
    """Return the Python threads of every process of a mesh of processes or actors.

    Works without the interpreter, so also if an endpoint is stuck, the event loop is blocked, or C code holds the
    interpreter's lock. For a process that has ended or was stopped by a signal, :attr:`ProcStacks.error` says so.

    >>> import threading
    >>> from mesh_core import Actor, endpoint, inspect, this_host
    >>> class Stuck(Actor):
    ...     @endpoint
    ...     def wait(self) -> None:
    ...         threading.Event().wait()
    >>> procs = this_host().spawn_procs()
    >>> stuck = procs.spawn("stuck", Stuck)
    >>> stuck.initialized.get()
    >>> sent = stuck.wait.broadcast()
    >>> while not inspect.snapshot().actors[0].running:
    ...     pass
    >>> [frame.function for frame in inspect.stacks(procs).item().of("stuck").frames[:3]]
    ['wait', 'wait', 'wait']
    >>> from mesh_core import shutdown
    >>> _ = shutdown()
    """
    if not hasattr(mesh, "_procs_id"):
        raise TypeError(f"mesh must be a mesh of processes or actors, got {mesh!r}")
    process: Process = mesh._process
    view, procs_id = mesh._view, mesh._procs_id
    addrs: list[Addr] = [locate(process.runtime, *mesh._location.addr(procs_id, rank)) for rank in view]
    names = dict.fromkeys((addr[0] for addr in addrs), _mesh_name(process, mesh))
    return ValueMesh.of(mesh.extent, _stacks_at(process, addrs, names, timeout))


def stacks_of_job(process: Process, mesh: str, timeout: float) -> list[ProcStacks]:
    """Return the threads of all processes of a job, the controller first, or of the mesh with this name."""
    tree, _ = look(process, timeout, pss=False)
    names = {number: name for number, (name, _) in tree.titles.items()}
    addrs = sorted((addr_of(who) for who, *_ in tree.procs), key=lambda addr: (names.get(addr[0], ""), *addr))
    found = [addr for addr in [ROOT, *addrs] if mesh in ("", names.get(addr[0], "controller"))]
    if not found:
        from mesh_core._common.suggestions import did_you_mean

        known = sorted({*names.values(), "controller"})
        raise MeshError(
            f"no mesh of processes is called {mesh!r}{did_you_mean(mesh, known) or '; the names are: ' + ', '.join(known)}"
        )
    return _stacks_at(process, found, names, timeout)


def _stacks_at(
    process: Process, addrs: list[Addr], names: dict[int, str], timeout: float
) -> list[ProcStacks]:
    here: Addr = process.runtime.me
    pids = {addr: process.runtime.pid_of(*addr) for addr in addrs}
    frozen = {addr for addr, pid in pids.items() if is_stopped(pid)}
    asked = {addr: pids[addr] for addr in addrs if addr not in frozen and addr != here}
    deadline = time.monotonic() + timeout
    threads = ask(process, Question.THREADS, asked, min(deadline, time.monotonic() + _LOOP_S))
    # Do not wait for processes on other hosts that a signal has stopped; only their agents know that.
    afar = [addr for addr in asked if addr not in threads and pids[addr] is None]
    pids |= pids_afar(process, afar, _LOOP_S)
    frozen |= stopped(process, {addr: pid for addr in afar if (pid := pids[addr])}, _LOOP_S)
    late = {addr: pid for addr, pid in asked.items() if addr not in threads and addr not in frozen}
    threads |= ask(process, Question.THREADS, late, deadline)
    able = {addr: pids[addr] for addr in threads}
    told = ask(process, Question.STACKS, able, min(deadline, time.monotonic() + _LOOP_S), Message.load)
    # The event loops of the others are blocked; only their runtimes can answer.
    able = {addr: pid for addr, pid in able.items() if addr not in told}
    dumps = ask(process, Question.DUMP, able, deadline)
    found = []
    for addr in addrs:
        name = proc_name(process, addr, names)
        if addr == here:
            found.append(_made(name, {"loop": 0, "actors": (), "pid": process.pid}, own_stacks()))
        elif addr in told:
            found.append(_made(name, threads[addr], told[addr]))
        elif addr in dumps:
            text, error = dumps[addr].get("text", ""), dumps[addr].get("error", "")
            found.append(_made(name, threads[addr], parse(text), error))
        elif addr in frozen or (addr not in afar and is_stopped(pids[addr])):
            found.append(ProcStacks(name, pids[addr], (), "stopped by a signal; SIGCONT resumes it"))
        else:
            found.append(
                ProcStacks(name, pids[addr], (), f"it has ended, or did not answer within {timeout} s")
            )
    return found


def _mesh_name(process: Process, mesh: Any) -> str:
    from mesh_core._meshes.procs import ProcMesh
    from mesh_core.inspect._events import Names

    if isinstance(mesh, ProcMesh):
        return mesh._name.partition("[")[0]
    return Names(process).of((mesh._procs_id, 0, 0)).rpartition("[")[0]


def _made(name: str, told: dict[str, Any], stacks: list[Stack], error: str = "") -> ProcStacks:
    """Combine stacks with what the runtime knows about the threads."""
    loop = told["loop"]
    on: dict[int, list[str]] = {}
    running: dict[int, list[str]] = {}
    for ident, actor, messages in told["actors"]:
        if ident:
            on.setdefault(ident, []).append(actor)
        for endpoint, seconds, _caller in messages:
            running.setdefault(ident or loop, []).append(f"{actor}.{endpoint} for {span(seconds)}")
    threads = (
        ThreadStack(
            ident,
            "loop" if ident == loop else _short(on.get(ident, [title])),
            tuple(running.get(ident, ())),
            tuple(StackFrame(*frame) for frame in frames),
            tuple(on.get(ident, ())),
        )
        for ident, title, frames in stacks
    )
    return ProcStacks(name, told["pid"], tuple(threads), error)


def _short(names: list[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more:,} more" if more > 0 else "")


def parse(text: str) -> list[Stack]:
    r"""Parse threads and frames as written by ``faulthandler``; newer versions include thread names.

    >>> parse('Thread 0x1f (most recent call first):\n  File "a.py", line 3 in f\n')
    [(31, '', [('a.py', 3, 'f')])]
    """
    threads: dict[int, Stack] = {}
    frames: list[tuple[str, int, str]] = []
    for line in text.splitlines():
        if head := _THREAD.match(line):
            frames = []
            threads[int(head[1], 16)] = (int(head[1], 16), head[2] or "", frames)
        elif frame := _FRAME.match(line):
            frames.append((frame[1], int(frame[2]) if frame[2].isdigit() else 0, frame[3]))
    return list(threads.values())


def _indent(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())
