"""Which collective of torch.distributed each process is in, shown to those who look into the job.

Each member of a watched group counts the collectives that it begins; a member of the same group has the same number for the
same collective. One that lasts for a while is shown as a promise with a name, which the runtime reports without Python, so
it is seen while the process waits in C++ code. Nothing is sent between members.

CLV-1: a collective is shown only while it has lasted for more than :data:`LATE_S` and has not ended.
CLV-2: while a process is in a collective, the clock of its actors stands still: that time counts as waiting, whichever rank is late.
"""

from __future__ import annotations

import re
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mesh_core import MeshError, Promise
from mesh_core.extensions import ClockStop, Extension, current_proc, find, install

PASSED = "passed"
"""Stands for the operation where a member is in none: its number is that of the last one that it has left."""
LATE_S = 0.2
"""How long a collective lasts before it is shown, and how often that is looked at."""
_END_S = 1.0
_HOOK = 0x6D657368
"""The name under which PyTorch knows our hooks of a group."""
_RUN = re.compile(r"^(?P<mesh>.*)\[(?P<first>\d+)(?:\.\.(?P<last>\d+))?\]$", re.DOTALL)
_TEXT = re.compile(
    r"^(?:collective (?P<number>\d+)|(?P<pairwise>message)) of group (?P<group>\S+) <(?P<members>.*)> as rank (?P<rank>\d+): "
    r"(?P<op>\w+)(?: with rank (?P<root>\d+))?(?:, (?P<what>.+))?$",
    re.DOTALL,
)


@dataclass(frozen=True)
class At:
    """The collective that a member of a group is in."""

    number: int
    """The number of the collective in the group, from 1; 0 for a message from one member to another."""
    op: str
    """The operation, as ``allreduce``, ``broadcast``, ``recv``."""
    root: int | None
    """The rank that a collective is about, or that a message comes from or goes to."""
    what: str
    """Type and shape of the tensors, as ``float32[4, 2]``."""
    rank: int
    """The rank of this member."""
    group: str
    """PyTorch's name of the group."""
    members: str
    """The processes of the group in the order of their ranks, as :func:`shortened`."""

    def __str__(self) -> str:
        which = f"collective {self.number}" if self.number else "message"
        return f"{which} of group {self.group} <{self.members}> as rank {self.rank}: {self.said}"

    @property
    def said(self) -> str:
        """The operation, in words."""
        root = "" if self.root is None else f" with rank {self.root}"
        return f"{self.op}{root}{self.what and f', {self.what}'}"

    @classmethod
    def read(cls, text: str) -> At | None:
        """Read what :meth:`__str__` has written; ``None`` if it is something else.

        >>> at = At(17, "broadcast", 0, "float32[4]", 2, "0", "workers[0..3]")
        >>> str(at)
        'collective 17 of group 0 <workers[0..3]> as rank 2: broadcast with rank 0, float32[4]'
        >>> At.read(str(at)) == at
        True
        """
        found = _TEXT.match(text)
        if found is None:
            return None
        root = found["root"]
        return cls(
            int(found["number"] or 0),
            found["op"],
            None if root is None else int(root),
            found["what"] or "",
            int(found["rank"]),
            found["group"],
            found["members"],
        )


def shortened(procs: Sequence[str]) -> str:
    """Names of processes, with ranks that follow each other put together.

    >>> shortened(["controller", "workers[0]", "workers[1]", "workers[2]", "others[5]"])
    'controller; workers[0..2]; others[5]'
    """
    runs: list[tuple[str, int | None, int]] = []
    for name in procs:
        found = _RUN.match(name)
        mesh, rank = (name, None) if found is None else (found["mesh"], int(found["first"]))
        if (
            runs
            and rank is not None
            and (runs[-1][0], runs[-1][2] + 1) == (mesh, rank)
            and runs[-1][1] is not None
        ):
            runs[-1] = (mesh, runs[-1][1], rank)
        else:
            runs.append((mesh, rank, rank or 0))
    return "; ".join(
        mesh if first is None else f"{mesh}[{first}]" if first == last else f"{mesh}[{first}..{last}]"
        for mesh, first, last in runs
    )


def members_of(text: str) -> list[str]:
    """Undo :func:`shortened`.

    >>> members_of("workers[0..2]; others[5]")
    ['workers[0]', 'workers[1]', 'workers[2]', 'others[5]']
    """
    names = []
    for part in text.split("; "):
        run = _RUN.match(part)
        if run is None:
            names.append(part)
        else:
            first, last = int(run["first"]), int(run["last"] or run["first"])
            names += [f"{run['mesh']}[{number}]" for number in range(first, last + 1)]
    return names


@dataclass(slots=True)
class _Begun:
    """A collective that this process has begun."""

    number: int
    op: str
    root: int
    tensors: int
    shape: tuple[int, ...]
    dtype: Any
    operation: int
    """PyTorch's number of it."""
    since: float
    clock: ClockStop
    """CLV-2. It ends with the work's future, at the latest with this object."""
    work: Any = None
    """Knows whether it has ended; set once it was issued."""


@dataclass(eq=False)
class Watched:
    """A group that this process is a member of. Kept alive only by the hooks of the group."""

    group: str
    rank: int
    members: str
    number: int = 0
    begun: deque[_Begun] = field(default_factory=deque)
    seen: int = 0
    """The number at the last look."""

    def before(self, args: Any) -> None:
        """PyTorch is about to issue an operation. This is on its path, so it does no more than it must."""
        begun = self.begun
        # Ended ones are removed here, so that nothing piles up between two looks; one that was never issued has raised.
        while begun and ((work := begun[0].work) is None or work.is_completed()):
            begun.popleft()
        op = args.name.name
        if op in ("SEND", "RECV"):
            number = 0
        else:
            number = self.number = self.number + 1
        tensors = args.input_tensors or args.output_tensors
        first = tensors[0] if tensors else None
        shape, dtype = (None, None) if first is None else (first.shape, first.dtype)
        begun.append(
            _Begun(
                number,
                op,
                args.root,
                len(tensors),
                shape or (),
                dtype,
                args.op_id,
                time.monotonic(),
                ClockStop(),
            )
        )

    def after(self, args: Any) -> None:
        """The operation was issued."""
        for each in reversed(self.begun):
            if each.operation == args.op_id:
                if args.work is None:
                    self.begun.remove(each)
                    each.clock.end()
                else:
                    each.work = args.work
                    _on_end(args.work, each.clock)
                return

    def late(self, now: float) -> At | None:
        """Return the oldest one that has lasted for too long, if any."""
        for each in list(self.begun):
            if each.work is not None and each.work.is_completed():
                continue
            if now - each.since < LATE_S:
                return None
            what = ""
            if each.dtype is not None:
                what = f"{str(each.dtype).removeprefix('torch.')}{list(each.shape)}"
                if each.tensors > 1:
                    what = f"{each.tensors} tensors, the first {what}"
            op = each.op.lower()
            root = each.root if each.root >= 0 else None
            return At(each.number, op, root, what, self.rank, self.group, self.members)
        return None

    def passed(self) -> At | None:
        """Return how far this member is, if it is in no collective, and was in none at the last look."""
        before, self.seen = self.seen, self.number
        if not self.number or self.number != before:
            return None
        if any(each.work is None or not each.work.is_completed() for each in list(self.begun)):
            return None
        return At(self.number, PASSED, None, "", self.rank, self.group, self.members)

    def close(self) -> None:
        """The group was left. Its works keep its connections open, whatever still refers to this object."""
        self.begun.clear()

    def release(self) -> None:
        """Drop those that have ended: PyTorch's works keep tensors."""
        while self.begun and (work := self.begun[0].work) is not None and work.is_completed():
            try:
                self.begun.popleft()
            except IndexError:  # the thread that begins the next one was faster
                return


def _on_end(work: Any, clock: ClockStop) -> None:
    """Restart the clock when a collective is over. PyTorch calls back before it wakes those who wait for it."""
    try:
        work.get_future().add_done_callback(lambda _: clock.end())
    except RuntimeError:
        # A backend whose works have no future. Too much time is better than the time between two looks.
        clock.end()


class Collectives(Extension):
    """Shows, in each process, collectives that last."""

    name = "supervision.collectives"

    def start(self) -> None:
        """Watch no group yet."""
        self._watched: weakref.WeakSet[Watched] = weakref.WeakSet()
        self._shown: weakref.WeakKeyDictionary[Watched, tuple[At, Promise[None]]] = (
            weakref.WeakKeyDictionary()
        )
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def stop(self) -> None:
        """Show nothing more."""
        self._over.set()
        if self._thread is not None:
            self._thread.join(_END_S)

    def watch(self, group: Any, members: Sequence[str], rank: int) -> Watched:
        """Count the collectives of a PyTorch group from now on; every member must begin at the same one."""
        watched = Watched(str(group.group_name), rank, shortened(members))
        group.register_pre_hook(_HOOK, watched.before)
        group.register_post_hook(_HOOK, watched.after)
        with self._lock:
            self._watched.add(watched)
            if self._thread is None and not self._over.is_set():
                self._thread = threading.Thread(target=self._look, name="mesh-collectives", daemon=True)
                self._thread.start()
        return watched

    def _look(self) -> None:
        while not self._over.wait(LATE_S):
            self._show_all()
        for _, promise in list(self._shown.values()):
            promise.set_result(None)

    def _show_all(self) -> None:
        # A separate function: a group is freed with the last reference to it, and none may stay in a loop's variable.
        with self._lock:
            watched = list(self._watched)
        for each in watched:
            self._show(each)

    def _show(self, watched: Watched) -> None:
        passed = watched.passed()
        at = watched.late(time.monotonic()) or passed
        watched.release()
        shown = self._shown.get(watched)
        if shown is not None and shown[0] != at:
            del self._shown[watched]
            shown[1].set_result(None)
        if at is not None and (shown is None or shown[0] != at):
            promise = Promise[None](str(at))
            # The runtime reports promises that somebody waits for.
            promise.future.add_done_callback(lambda _: None)
            self._shown[watched] = at, promise


def has_hooks(group: Any) -> bool:
    """Return whether this PyTorch reports the collectives of a group."""
    return hasattr(group, "register_pre_hook") and hasattr(group, "register_post_hook")


def watch_collectives(group: Any = None) -> None:
    """Let ``mesh why`` see which collective each member of a process group is in. Every member must call this.

    Groups created by :func:`form_group` are watched already. For others, such as those of ``dist.new_group``, call this right after
    the group was created. It is a collective itself, in which the members exchange their identities.

    Args:
        group: a group of ``torch.distributed``; the default group if none is given.

    >>> import torch.distributed as dist  # doctest: +SKIP
    >>> pairs = dist.new_group([0, 1])  # doctest: +SKIP
    >>> if dist.get_rank() < 2:  # doctest: +SKIP
    ...     watch_collectives(pairs)
    """
    import torch.distributed as dist

    group = dist.group.WORLD if group is None else group
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"watch_collectives() takes a process group that this process is a member of, got {group!r}"
        )
    if not has_hooks(group):
        import torch

        raise MeshError(
            f"PyTorch {torch.__version__} does not tell of the collectives of a group; watch_collectives() needs a later version, "
            "such as 2.15"
        )
    names: list[Any] = [None] * group.size()
    dist.all_gather_object(names, str(current_proc()), group)
    collectives = find(Collectives) or install(Collectives)
    collectives.watch(group, names, group.rank())
