"""Instructions to the processes of a mesh, in order.

STM-2: when a process ends, its tensors are gone, and everything else is as before: once it was restarted, instructions continue.

STM-1: instructions issued on a stream are carried out in that order, and so are questions. Before a tensor of one stream
is named on another, what waits in the first is sent.

STM-5: a replay is sent at once if nothing was sent for a moment, and otherwise together with those that follow; any other message
takes the waiting replays with it, ahead of itself. The moment is longer the more a message costs: with many
processes, a script that issues replays quickly does not spend its time on messages.

STM-6: before a stream sends an instruction that waits for another mesh's tensors, that mesh's stream sends those that give them. Streams
of meshes that share a process and exchange tensors are one for their order, as in STM-4.

STM-7: what one stream hands over to another is sent together with what the other one takes: whichever is sent first takes the
other with it. It is sent even if a process has ended: those that are left must not wait for it.

STM-4: streams that name the same tensors (`slice_mesh`) are one for their order: instructions never wait in more than one of them.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from array import array
from collections import deque
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakValueDictionary

import torch
from torch.utils._python_dispatch import _disable_current_modes

from mesh_core import DeviceMeshError, MeshError, SupervisionError, Undeliverable
from mesh_core.extensions import ProcEnd, watch
from mesh_tensor._descriptors import Descriptor, Form
from mesh_tensor._errors import RanksDisagree, RemoteException, line_of
from mesh_tensor._groups import Groups
from mesh_tensor._instructions import QUESTION
from mesh_tensor._meeting import Exchange

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from mesh_core import Future, ProcMesh, ValueMesh
    from mesh_tensor._capture._recorder import Program
    from mesh_tensor._extension import Tensors
    from mesh_tensor._propagate import Issuer
    from mesh_tensor._replay._program import Definition
    from mesh_tensor._streams._guard import Storage
    from mesh_tensor._timeline import Timeline

T = TypeVar("T")
BATCH = 512
"""The most instructions that wait to be sent together."""
_HANDED = "exchange"
"""The kind of messages by which something goes from one stream to another, or to others."""
_ROOM = 40
"""Bits of the number of an instruction that count those of one stream."""
PLACES = 1 << 16
"""The number of latest instructions for which it is known which line has issued them."""
INNER = (f"{Path(torch.__file__).parent}{os.sep}", f"{Path(__file__).parent}{os.sep}")
_PAUSE = 0.0005
"""A stream to which nothing was added for so long is sent."""
_PACE = 0.001
"""The least time in seconds between two messages of a script that issues replays faster than that."""
_SHARE = 10
"""The time between two such messages, as a multiple of the processor time of a message, which grows with the mesh."""
_TOLD_S = 5.0
"""How long a call to a process that has ended may take, if it was restarted meanwhile."""
_REPLAYS = 128
"""The most replays that wait to be sent together."""


class Ref:
    """Names a tensor of the workers; when the last reference is gone, it is freed there."""

    __slots__ = ("__weakref__", "at", "number", "storage", "stream")
    storage: Storage
    """The memory that it shares with others, once it does: see `storage_of`."""

    def __init__(self, stream: Stream, number: int) -> None:
        self.stream = stream
        self.number = number
        self.at: int | tuple[Any, int] = stream.issued + stream.waiting
        """Which instruction makes it, or which line has given it to the mesh."""

    def __del__(self) -> None:
        self.stream.freed.append(self.number)

    def let_go(self, again: Callable[[], int]) -> None:
        """Free the tensor now; `again` makes it once more, under another number, if it is used."""
        self.stream.freed.append(self.number)
        self.stream.let_go += 1
        _NUMBER.__set__(self, again)
        self.__class__ = LetGo

    def taken(self) -> int:
        """Return the number, for another reference, and free nothing."""
        number = self.number
        self.__class__ = _Taken
        return number


_NUMBER: Any = vars(Ref)["number"]
"""Where the number is, or what makes another one."""


class LetGo(Ref):
    """Names a tensor that was freed, and can be made again."""

    __slots__ = ()

    @property
    def number(self) -> int:  # type: ignore[override]
        """Make it again."""
        number: int = _NUMBER.__get__(self)()
        self.have(number)
        return number

    def have(self, number: int) -> None:
        """It was made again."""
        self.stream.let_go -= 1
        self.__class__ = Ref  # type: ignore[assignment]  # as it was
        _NUMBER.__set__(self, number)
        if self.stream.tensors.recorders:
            self.stream.tensors.recorded(lambda recorder: recorder.named(self))

    def __del__(self) -> None:
        self.stream.let_go -= 1


class _Taken(Ref):
    """Has given its number to another one."""

    __slots__ = ()

    def __del__(self) -> None:
        pass


class Stream:
    """Messages from this process to the processes of one mesh."""

    def __init__(self, tensors: Tensors, procs: ProcMesh, cls: type) -> None:
        self.procs = procs
        self.lock = tensors.lock
        self._others: list[Stream] = []
        """Streams that name the same tensors."""
        self.freed: list[int] = []
        self.let_go = 0
        """How many tensors were freed and may be used again."""
        self.places: deque[tuple[Any, int]] = deque(maxlen=PLACES)
        # Processes record what they do by number, whatever stream it comes from.
        self.issued = next(tensors.firsts) << _ROOM
        self.waiting = 0
        self._code = array("q")
        """Of each instruction the template, the number of the first result, and those of the tensors; before some, how many tensors are freed, as a negative
        number, and theirs."""
        self._scalars: list[Any] = []
        self._replays: list[tuple[Any, ...]] = []
        """Those that wait (STM-5), and what goes from and to other streams (STM-7), each a message. They come before single instructions."""
        self._partners: dict[Stream, None] = {}
        """Streams that take what waits here, or have what it waits for: they are sent with this one (STM-7)."""
        self.told = 0.0
        """When something was sent last."""
        self.pace = _PACE
        """How long replays wait for company after that."""
        self.tensors = tensors
        self._cls = cls
        self._descriptors: dict[Form, Descriptor] = {}
        self.issuer: Issuer
        self.groups = Groups(self)
        self.exchange = Exchange(self)
        self.sources: dict[Stream, None] = {}
        """Streams that send tensors here which waiting instructions need: they are sent first (STM-6)."""
        self.timeline: Timeline | None = None
        """Records what is sent and waited for, if a timeline is taken."""
        self._born: list[Any] | None = None
        """When each process began to have tensors, once some were restarted."""
        self.lives = 0
        """How often processes were restarted: what they were taught before that is gone."""
        self.devices: dict[str, list[tuple[str, str, bool]]] = {}
        """The kinds of devices that the processes were told to use, and their answers."""
        self.programs: WeakValueDictionary[int, Program] = WeakValueDictionary()
        """The programs that they can replay."""
        self._was_stopped = False
        """The last process that has ended has not failed."""
        self.broken = False
        """A process has ended: call `check()` before looking up anything that the workers may have forgotten."""
        self._watch = watch(procs, self._ended)
        tensors.streams.add(self)

    def _ended(self, end: ProcEnd) -> None:
        self.broken = True
        self._was_stopped = end.failure is None
        self.groups.lost(end)
        self.exchange.lost(end)

    def check(self) -> None:
        """Raise what the mesh has lost, if anything; after its processes were restarted, start over with them (STM-2)."""
        if not self.broken:
            return
        with self.lock, _disable_current_modes():
            if not self.broken:
                return
            if self.procs.failed() or not self.procs.alive():
                self._hand_to_those_left()
                raise self.loss()
            self._watch = watch(self.procs, self._ended)
            self.broken = False
            self.tensors.install_on(self.procs).get()
            born = [answer for _, answer in self.wait(self.tensors.call(self.procs, ("birth",)))]
            if born == self._born:
                # Late news of a known end: callers that asked for these processes since must not lose what waits.
                return
            self._born = born
            self._code, self._scalars = array("q"), []
            self._replays = [each for each in self._replays if each[0] == _HANDED]
            self.waiting = 0
            self._tell("leave", self.groups.clear())
            self.issuer.clear()
            self.devices.clear()
            self.lives += 1

    def loss(self) -> DeviceMeshError:
        """Return the error for the processes that have ended. The script is told of their ends by it, and its waiting calls need not raise them."""
        for point in self.procs.failed():
            with suppress(MeshError, TimeoutError):
                # This is how a failure counts as raised to the script: a call to what is dead raises it at once.
                self.tensors.call(self.procs.slice(**point), ("who",)).get(timeout=_TOLD_S)
        if self._was_stopped and not self.procs.alive():
            return DeviceMeshError(
                f"{self.procs} was stopped, and its tensors are gone: spawn other processes to go on",
                mesh_name=self.procs.name or "",
                coordinates=tuple(dict(point) for point in self.procs.failed()),
            )
        return DeviceMeshError.of(self.procs)

    def _hand_to_those_left(self) -> None:
        """Send what goes from and to other streams even though a process has ended (STM-7)."""
        handed = [each for each in self._replays if each[0] == _HANDED]
        if handed:
            self._replays = [each for each in self._replays if each[0] != _HANDED]
            with suppress(MeshError):
                self.send(handed)

    def link(self, other: Stream) -> None:
        """Make both one for their order, and those that either is one with (STM-4)."""
        with self.lock:
            if other is self or other in self._others:
                return
            together = [self, *self._others, other, *other._others]
            for each in together:
                each.flush()
                each._others = [one for one in together if one is not each]  # noqa: SLF001 - of this class

    def _before(self) -> None:
        """Send what has to come before what comes next here (STM-4)."""
        for each in self._others:
            if each.holds_back():
                each.flush()

    def holds_back(self) -> bool:
        """Return whether anything waits here to be sent."""
        return bool(self.waiting or self._replays)

    def descriptor(self, form: Form) -> Descriptor:
        """Return the one of that form."""
        found = self._descriptors.get(form)
        if found is None:
            found = self._descriptors[form] = Descriptor(self, form, self._cls)
        return found

    def ref(self) -> Ref:
        """Name a tensor that is to be made."""
        made = Ref(self, next(self.tensors.numbers))
        if self.tensors.recorders:
            self.tensors.recorded(lambda recorder: recorder.made(made))
        return made

    def teach(self, *what: Any) -> int:
        """Teach the workers a template, and return its number."""
        with self.lock:
            number: int = next(self.tensors.templates)
            self.flush()
            self._tell("know", number, what)
            return number

    def unlearn(self, templates: list[int]) -> None:
        """Let the workers forget templates that are no longer used."""
        with self.lock:
            for recorder in self.tensors.recorders.values():
                recorder.forgotten = True
            self.flush()
            self._tell("unlearn", templates)

    def append(
        self, template: int, out: int, tensors: list[Any], scalars: list[Any], frame: FrameType
    ) -> None:
        """Add an instruction, issued by that frame. To be called with the lock."""
        if self.let_go:
            self.have(tensors)
        if self._others:
            self._before()
        if self.tensors.recorders:
            self.tensors.recorded(
                lambda recorder: recorder.append(self, template, out, tensors, scalars=scalars, frame=frame)
            )
        if self._replays and self._replays[-1][0] != _HANDED:
            self.flush()
        if self.freed:
            # Here, and not at the end of the batch, so that no process has more memory in use than the script.
            freed, self.freed = self.freed, []
            self._code.append(-len(freed))
            self._code.extend(freed)
        if len(tensors) == 2:
            first, second = tensors
            self._code.extend((template, out, first.ref.number, second.ref.number))
        else:
            self._code.extend([template, out, *[each.ref.number for each in tensors]])
        if scalars:
            self._scalars.extend(scalars)
        self.places.append((frame.f_code, frame.f_lasti))
        self.waiting += 1
        if self.waiting >= BATCH:
            self.flush()
        elif self.waiting == 1:
            if self.timeline is not None:
                self.timeline.issuing(self)
            self.tensors.flusher.wake(self)

    def have(self, tensors: list[Any]) -> None:
        """Have those among tensors made again that were let go: by instructions that come first."""
        for each in tensors:
            each.ref.number  # noqa: B018 - that makes them

    def flush(self) -> None:
        """Send what waits."""
        with self.lock:
            if self.sources:
                self._send_sources()
            if self._partners:
                self._send_partners()
            if self.broken:
                self.check()
            freed, self.freed = self.freed, []
            if not self._code and not freed:
                if self._replays:
                    replays, self._replays = self._replays, []
                    self.send(replays)
                return
            code, scalars, first = self._code, self._scalars, self.issued
            self._code, self._scalars = array("q"), []
            self.issued += self.waiting
            self.waiting = 0
            if self.timeline is not None:
                self.timeline.sent(self, first, self.issued - first)
            self._tell("run", first, code, scalars, freed)

    def _send_sources(self) -> None:
        """Send what the processes are going to wait for (STM-6)."""
        sources, self.sources = self.sources, {}
        for each in sources:
            try:
                each.flush()
            except MeshError as error:
                each.exchange.unsent(self, f"{each.procs} could not send it: {error}")

    def _send_partners(self) -> None:
        """Let those streams send what waits there (STM-7)."""
        partners, self._partners = self._partners, {}
        for each in partners:
            # Its problems are raised to whoever asks it for something.
            with suppress(MeshError):
                each.flush()

    def hand_over(self, other: Stream, frame: FrameType, what: str, *rest: Any) -> None:
        """Let the workers give something to another stream, or take it, once that or this one is sent (STM-7). To be called with the lock."""
        with suppress(MeshError):
            # Problems are raised to the next user of the mesh.
            self._before()
            if self._code:
                self.flush()
        count = self._number(frame)
        self._replays.append((_HANDED, what, count, *rest))
        self._partners[other] = None

    def _number(self, frame: FrameType) -> int:
        """Number an instruction that travels by itself, and note which line issued it."""
        count = self.issued
        self.issued += 1
        self.places.append((frame.f_code, frame.f_lasti))
        if self.timeline is not None:
            self.timeline.issuing(self)
            self.timeline.sent(self, count, 1)
        return count

    def send_soon(self) -> None:
        """Send what waits at once if nothing was sent for a moment, or if it is much; otherwise in a moment. To be called with the lock."""
        if len(self._replays) >= _REPLAYS or time.monotonic() - self.told >= _PACE:
            self.flush()
        else:
            self.tensors.flusher.wake(self)

    def alone(self, frame: FrameType, what: str, *rest: Any) -> None:
        """Let the workers do something that is an instruction by itself, issued by that frame."""
        with self.lock, _disable_current_modes():
            count = self.numbered(frame)
            self._tell("exchange", what, count, *rest)

    def numbered(self, frame: FrameType) -> int:
        """Return the number of an instruction that is sent next, by itself, issued by that frame. To be called with the lock."""
        self.check()
        self._before()
        self.flush()
        return self._number(frame)

    def made_at(self, ref: Ref) -> str:
        """Return which line a tensor comes from."""
        return line_of(self.source(ref.at) if isinstance(ref.at, int) else ref.at)

    def _send_instructions(self) -> None:
        """Have nothing but replays wait, which go together with the message that comes next."""
        if self.waiting or self.broken:
            self.flush()

    def define(self, program: Program, what: Definition) -> None:
        """Teach the workers a program."""
        with self.lock:
            self.flush()
            self._tell("define", program.number, what)
            self.programs[program.number] = program

    def replay(
        self, program: Program, inputs: list[int], made: list[int], *, numbers: list[int], frame: FrameType
    ) -> None:
        """Let the workers carry a program out, soon (STM-5)."""
        with self.lock:
            if self._others:
                self._before()
            if self._code:
                self.flush()
            freed, self.freed = self.freed, []
            count = self._number(frame)
            self._replays.append(("replay", program.number, freed, count, inputs, made, numbers))
            if len(self._replays) >= _REPLAYS or time.monotonic() - self.told >= self.pace:
                self.flush()
            elif len(self._replays) == 1:
                self.tensors.flusher.wake(self)

    def put(self, value: torch.Tensor) -> Ref:
        """Give the workers a tensor, the same to all."""
        with self.lock, _disable_current_modes():
            ref = self.ref()
            if self.tensors.recorders:
                self.tensors.recorded(lambda recorder: recorder.constant(self, ref, value))
            self._send_instructions()
            self._tell("put", ref.number, value.detach())
            return ref

    def ask(self, *question: Any, of: ProcMesh | None = None) -> Future[ValueMesh[Any]]:
        """Ask the processes, or some of them, a question, after everything that was issued."""
        if self.tensors.recorders:
            self.tensors.recorded(lambda recorder: recorder.asked(question))
        with self.lock, _disable_current_modes():
            self._before()
            self.flush()
            return self.tensors.call(self.procs if of is None else of, question)

    def agreed(self, *question: Any) -> Any:
        """Ask all processes, which must agree, and return their answer."""
        with _disable_current_modes():
            answers = [(point, self.value(point, answer)) for point, answer in self.wait(self.ask(*question))]
        (where, first), *rest = answers
        for point, answer in rest:
            if not same(answer, first):
                raise RanksDisagree(
                    f"{where} has {_shown(first)}, {point} has {_shown(answer)}: there can be only one where Python goes "
                    "on with it. Reduce the tensor over the mesh first, or fetch the value of one process with fetch_shard()."
                )
        return first

    def wait(self, future: Future[T], timeout: float | None = None) -> T:
        """Wait for answers; the death of a process that should give one is raised with its coordinates."""
        try:
            with nullcontext() if self.timeline is None else self.timeline.waiting():
                return future.get(timeout=timeout)
        except (SupervisionError, Undeliverable) as error:
            if not self.procs.failed():
                raise
            # Later users of the mesh get the error too, whenever the notice comes.
            self.broken = True
            raise self.loss() from error

    def value(self, point: Any, answer: Any) -> Any:
        """Return a process's answer, or raise what has failed there."""
        kind, *rest = answer
        if kind != "failed":
            return rest[0]
        instruction, operator, error, trace = rest
        raise RemoteException(
            f"{operator} failed at {point} of {self.procs}: {error}\n{self._issued(instruction)}"
            f"The traceback there:\n{trace}",
            operator=operator,
            point=point,
            trace=trace,
        )

    def _issued(self, instruction: Any) -> str:
        """Return where an instruction was issued, as lines of a message."""
        if instruction == QUESTION:
            # By the line that waits, which the traceback shows.
            return ""
        if isinstance(instruction, int):
            return f"  issued at {line_of(self.source(instruction))}\n"
        if len(instruction) == 2:
            lender, instruction = instruction
            return self.tensors.guard.lenders[lender]._issued(instruction)  # noqa: SLF001 - of this class
        replay, number, at = instruction
        program = self.programs.get(number)
        recorded = "a line of a step that is gone" if program is None else line_of(program.places[at])
        return f"  recorded at {recorded}\n  replayed at {line_of(self.source(replay))}\n"

    def source(self, instruction: int) -> tuple[Any, int] | None:
        """Return where an instruction was issued, if it is not too long ago."""
        behind = self.issued + self.waiting - instruction
        return self.places[-behind] if 0 < behind <= len(self.places) else None

    def _tell(self, *message: Any) -> None:
        if self._partners:
            self._send_partners()
        replays, self._replays = self._replays, []
        self.send([*replays, message])

    def send(self, messages: list[tuple[Any, ...]]) -> None:
        """Send these as one."""
        begun = time.thread_time()
        self.tensors.tell(self.procs, messages[0] if len(messages) == 1 else ("several", messages))
        # Processor time: when others use the processor, a message does not become more expensive.
        self.pace = max(_PACE, _SHARE * (time.thread_time() - begun))
        self.told = time.monotonic()


class Flusher:
    """Sends what waits once nobody has added to it for a moment: a controller may issue and then do something else."""

    def __init__(self) -> None:
        self._waiting: deque[Stream] = deque()
        self._woken = threading.Event()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def wake(self, stream: Stream) -> None:
        """Something waits there."""
        self._waiting.append(stream)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="mesh-tensor-flush", daemon=True)
            self._thread.start()
        self._woken.set()

    def _run(self) -> None:
        while not self._ended.is_set():
            self._woken.wait()
            self._woken.clear()
            while self._waiting:
                stream = self._waiting.popleft()
                seen = -1
                while stream.holds_back() and seen != (seen := stream.issued + stream.waiting):
                    if self._ended.wait(_PAUSE):
                        return
                # Problems of the mesh are raised to whoever asks it for something.
                with suppress(MeshError):
                    stream.flush()

    def close(self) -> None:
        """End the thread."""
        self._ended.set()
        self._woken.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()


def caller() -> FrameType:
    """Return the frame of the nearest code that is neither PyTorch's nor this package's."""
    frame = sys._getframe(3)  # noqa: SLF001 - the frame of who calls PyTorch, at no cost
    while frame.f_code.co_filename.startswith(INNER) and (back := frame.f_back) is not None:
        frame = back
    return frame


def _shown(what: Any) -> Any:
    """Return a readable name."""
    values = [value for _, value in what] if isinstance(what, list) else [what]
    return values[0] if len(values) == 1 else values


def same(a: Any, b: Any) -> bool:
    """Return whether two answers are the same, even if both are not a number."""
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b or (a != a and b != b))  # noqa: PLR0124 - of all values only NaN differs from itself
