"""The processes between an owner and its boxes: the guard, and the template, which is its fork.

The guard waits for the end of the owner or of the template, ends what is left, and removes the folders. The template imports modules
for the boxes, and forks them; it has one thread (NUR-1).
"""

from __future__ import annotations

import gc
import importlib
import itertools
import json
import os
import select
import shutil
import signal
import socket
import sys
import traceback
from contextlib import suppress
from typing import Any, NoReturn

from mesh_core._blocks.sandboxes import wire
from mesh_core._blocks.sandboxes.box import Keeper, Limits
from mesh_core._blocks.sandboxes.isolation import EVERYTHING, Isolation, Seclusion, available
from mesh_core._common.private_folders import remove_tree
from mesh_core._native import adopt_orphans, ask_to_die_with_parent, die_with_parent, name_process
from mesh_core._system import process_marks
from mesh_core._system.descendants import Brood
from mesh_core._system.interpreter import show_flags_of_users
from mesh_core._system.process_marks import Found, Hunt
from mesh_core._system.scratch import Scratch

# Nearly all folders have fewer entries; removing those takes less time than a fork.
_FEW = 32
_SHARED = (
    "mesh_core._blocks.tools",
    "cloudpickle",
    "asyncio",
    "inspect",
    "pathlib",
    "random",
    "tempfile",
    "mesh_core._system.seeds",
    "mesh_core._common.import_hooks",
)


class Unfit(Exception):
    """Boxes cannot be made; the text says why."""


def main(control: int, plan: dict[str, Any]) -> NoReturn:
    """Entry point of a guard, which its owner starts with these arguments."""
    os.set_inheritable(control, False)
    show_flags_of_users()
    end = socket.socket(fileno=control)
    scratch = None
    try:
        owner = os.pidfd_open(plan["owner"])
        if os.getppid() != plan["owner"]:
            os._exit(1)
        name_process(f"mesh: guard of sandboxes {plan['name']!r}", "mesh-guard")
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
            signal.signal(number, signal.SIG_IGN)
        asked, ask = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGTERM, lambda _number, _frame: None)
        signal.set_wakeup_fd(ask)
        scratch = Scratch()
        isolation = _isolation(plan)
        limits = Limits(**plan["limits"])
        seclusion = Seclusion(isolation, plan["keep"], plan["hide"], limits.memory, limits.pids)
        if plan["folder"] is not None:
            shutil.copytree(plan["folder"], f"{scratch.path}/origin", symlinks=True)
        with suppress(OSError):
            adopt_orphans()
        seclusion.settle_guard()
        guard = os.pidfd_open(os.getpid())
        template = os.fork()
        if template == 0:
            signal.set_wakeup_fd(-1)
            os.close(asked)
            os.close(ask)
            os.close(owner)
            scratch.disown()
            Template(end, seclusion, plan, limits, scratch.path).run(guard)
        os.close(guard)
        end.close()
    except BaseException as error:  # noqa: BLE001 - the owner is told
        with suppress(OSError):
            wire.send_packet(end, {"unfit": _why(error)})
        if scratch is not None:
            scratch.close()
        os._exit(1)
    _stand_guard(template, [owner, asked, os.pidfd_open(template)])
    remove_tree(scratch.path)
    scratch.close()
    os._exit(0)


def _isolation(plan: dict[str, Any]) -> Isolation:
    wanted = EVERYTHING if plan["isolate"] is not False else Isolation.NONE
    if plan["network"] is True:
        wanted &= ~Isolation.NETWORK
    had = available(wanted)
    if plan["isolate"] is True and had != wanted:
        raise Unfit(
            f"isolate=True, but this system cannot isolate programs from {_words(wanted & ~had)}: it forbids "
            "namespaces, as many containers do. Allow user namespaces, or use isolate=None for what is available"
        )
    if plan["network"] is False and Isolation.NETWORK not in had:
        raise Unfit(
            "network=False, but this system cannot isolate programs from the network: it forbids namespaces, as "
            "many containers do. Allow user namespaces, or use network=None to continue with the network"
        )
    return had


def _words(kinds: Isolation) -> str:
    return ", ".join(str(kind.name).lower() for kind in kinds)


def _why(error: BaseException) -> str:
    if isinstance(error, Unfit):
        return str(error)
    return "".join(traceback.format_exception_only(error)).strip()


def _stand_guard(template: int, fds: list[int]) -> None:
    """Wait until the owner or the template ends, or SIGTERM arrives, and end everything that is left."""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    poll.poll()
    with suppress(ProcessLookupError):
        os.kill(template, signal.SIGKILL)
    os.waitpid(template, 0)
    me = os.getpid()

    def left() -> Found:
        everyone = process_marks.look_at_all(process_marks.all_pids())
        found = process_marks.living(process_marks.below([me], everyone), everyone)
        found.pop(me, None)
        return found

    Hunt(left, grace=0.0).run(_reap)
    _reap()


def _reap() -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


class Template:
    """The template process: it makes and ends boxes as its owner orders."""

    def __init__(
        self, control: socket.socket, seclusion: Seclusion, plan: dict[str, Any], limits: Limits, scratch: str
    ) -> None:
        self._control = control
        self._seclusion = seclusion
        self._plan = plan
        self._limits = limits
        self._scratch = scratch
        self._alone = Isolation.PROCESSES in seclusion.kinds
        self._boxes: dict[int, tuple[int, int]] = {}  # by pid: the box, and its number among the marks
        self._pids: dict[int, int] = {}  # by box
        self._clearing: dict[int, int] = {}  # by pid of the process that removes a folder: the box
        self._hunted: dict[int, int] = {}  # by number among the marks: boxes that left processes behind
        self._epoll = select.epoll()

    def run(self, guard: int) -> NoReturn:
        """Prepare, and serve until the owner is gone."""
        try:
            ask_to_die_with_parent()
            ends = select.poll()
            ends.register(guard, select.POLLIN)
            if ends.poll(0):
                os._exit(1)  # the guard had ended before
            os.close(guard)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            name_process(f"mesh: template of sandboxes {self._plan['name']!r}", "mesh-template")
            self._seclusion.settle_template()
            self._brood = Brood()
            self._preload()
            self._epoll.register(self._brood.listen(), select.EPOLLIN)
            self._epoll.register(self._control, select.EPOLLIN)
            self._say(
                {
                    "isolation": self._seclusion.kinds.value,
                    "mark": self._brood.owner,
                    "scratch": self._scratch,
                }
            )
            self._serve()
        except BaseException as error:  # noqa: BLE001 - the owner is told
            with suppress(OSError):
                wire.send_packet(self._control, {"unfit": _why(error)})
            os._exit(1)

    def _preload(self) -> None:
        from mesh_core._process.fork_server import nothing_at_exit, preload

        names = self._plan["preload"]
        with nothing_at_exit():
            for name in _SHARED:
                importlib.import_module(name)
            sys.argv[:] = self._plan["argv"]
            try:
                found = preload(names)
            except BaseException as error:
                raise Unfit(f"a module of preload={names!r} cannot be imported: {_why(error)}") from error
        if found is not None:
            what, it = found
            raise Unfit(
                f"{what}, and threads do not survive a fork. Leave {it} out of preload=: import it in the functions that "
                "run in sandboxes"
            )
        gc.collect()
        gc.freeze()
        gc.disable()

    def _say(self, told: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
        try:
            wire.send_packet(self._control, told, fds)
        except OSError:
            self._leave()

    def _serve(self) -> NoReturn:
        pause: float | None = None
        while True:
            for fd, _ in self._epoll.poll(pause):
                if fd == self._control.fileno():
                    self._obey()
            self._bury()
            pause = None
            if self._hunted:
                pause = self._brood.hunt({*self._boxes, *self._clearing})
                for number, box in list(self._hunted.items()):
                    if self._brood.is_free(number):
                        del self._hunted[number]
                        self._clear(box)

    def _obey(self) -> None:
        order, fds = wire.receive_packet(self._control)
        if order is None or "stop" in order:
            self._leave()
        if "end" in order:
            pid = self._pids.get(order["end"])
            if pid is not None:
                # It has not been reaped yet, so its pid was not reused.
                os.kill(pid, signal.SIGKILL)
            return
        self._make(order["make"], *fds)

    def _make(self, box: int, connection: int, told: int) -> None:
        folder = f"{self._scratch}/{box}"
        number = self._brood.take_number()
        me = os.getpid()
        try:
            os.mkdir(folder, 0o700)  # noqa: PTH102 - as quick as can be
            pid = self._seclusion.fork()
        except OSError as error:
            self._brood.give_number(number)
            with suppress(OSError):
                os.rmdir(folder)  # noqa: PTH106
            self._say({"failed": box, "text": f"a sandbox cannot be made: {error}"})
            pid = -1
        if pid == 0:
            self._become(number, connection, told, folder, me)
        os.close(connection)
        os.close(told)
        if pid > 0:
            self._boxes[pid] = (box, number)
            self._pids[box] = pid
            if not self._alone:
                self._brood.add(pid, number)

    def _become(self, number: int, connection: int, told: int, folder: str, template: int) -> NoReturn:
        """Turn this copy of the template into a box."""
        say = socket.socket(fileno=told)
        try:
            if not self._alone:
                die_with_parent(template)
            self._brood.fledge(number)
            self._epoll.close()
            self._control.close()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.environ["HOME"] = folder
            if self._plan["folder"] is not None:
                shutil.copytree(f"{self._scratch}/origin", folder, symlinks=True, dirs_exist_ok=True)
            self._seclusion.settle_box(folder)
            isolation = self._seclusion.kinds
            Keeper(say, self._limits, isolation).run(socket.socket(fileno=connection), folder)
        except BaseException as error:  # noqa: BLE001 - the owner is told
            with suppress(OSError):
                wire.send_packet(say, {"failed": f"a sandbox cannot be made: {_why(error)}"})
        finally:
            os._exit(1)
        raise AssertionError("unreachable")

    def _bury(self) -> None:
        for pid, _ in self._brood.ended():
            if pid in self._clearing:
                self._cleared(self._clearing.pop(pid))
                continue
            box, number = self._boxes.pop(pid, (0, 0))
            if box == 0:
                continue
            del self._pids[box]
            if self._alone:
                self._brood.give_number(number)
                self._clear(box)
            else:
                self._hunted[number] = box

    def _clear(self, box: int) -> None:
        """Remove the folder of a box that has no processes left."""
        folder = f"{self._scratch}/{box}"
        few = False
        with suppress(OSError), os.scandir(folder) as entries:
            # However many there are, others wait here for so few.
            first = list(itertools.islice(entries, _FEW))
            few = len(first) < _FEW and not any(entry.is_dir(follow_symlinks=False) for entry in first)
        if not few:
            with suppress(OSError):
                pid = os.fork()
                if pid == 0:
                    remove_tree(folder)
                    os._exit(0)
                self._clearing[pid] = box
                return
        remove_tree(folder)
        self._cleared(box)

    def _cleared(self, box: int) -> None:
        self._say({"gone": box})

    def _leave(self) -> NoReturn:
        """End all boxes and this process; the guard does the rest."""
        if not self._alone:
            for pid in self._boxes:
                os.kill(pid, signal.SIGKILL)
        os._exit(0)


def start(control: int, plan: int) -> NoReturn:
    """Read the plan, and become a guard."""
    with os.fdopen(plan, "rb") as file:
        told = json.loads(file.read())
    main(control, told)
