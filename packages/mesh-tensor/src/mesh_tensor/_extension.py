"""Each process's extension for tensors: at a controller the streams to meshes, at a worker the tensors.

Imported in every process of a job, and therefore without PyTorch until tensors are used.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
import traceback
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from mesh_core import MeshError
from mesh_core.extensions import Extension, Proc
from mesh_tensor._streams._guard import Guard
from mesh_tensor._streams._handover import Handover

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from mesh_core import Future, ProcMesh, Sending, ValueMesh
    from mesh_tensor._capture._recorder import Recorder
    from mesh_tensor._global._sums import Sums
    from mesh_tensor._groups import Group
    from mesh_tensor._propagate import Issuer
    from mesh_tensor._stream import Flusher, Stream
    from mesh_tensor._timing import Timing

IN_PLACE_SHAPE = 1
LIST = 2
SPECIAL = "mesh_tensor"
"""In place of a namespace of PyTorch: one of our own functions."""
SENT, RECEIVED = "to_mesh: send", "to_mesh: receive"
"""Names of the two instructions that move tensors."""
COLLECTIVES = {"reduce": 2, "reduce_all": 1, "reduce_scatter": 2, "all_gather": 1, "all_to_all": 1}
"""Our own functions that processes do together, and which of their arguments is the group's number."""


class Failed:
    """Takes the place of a tensor whose operator has failed; whatever depends on it fails likewise."""

    __slots__ = ("error", "instruction", "operator", "trace")

    def __init__(self, instruction: int | tuple[Any, ...], operator: str, error: BaseException) -> None:
        self.instruction: int | tuple[Any, ...] = instruction
        """Its number; of a replay, which one, of which program, and where in it; of another stream, which one, and any of these."""
        self.operator = operator
        self.error = f"{type(error).__name__}: {error}"
        self.trace = "".join(traceback.format_exception(error))


class Instead(Exception):
    """An operator has failed here; its results have the form that they should have, for those who continue with them."""

    def __init__(self, error: BaseException, results: Any, mark: Callable[[Failed], None]) -> None:
        super().__init__(str(error))
        self.error = error
        self.results = results
        self.mark = mark


LOST = "lost"
"""Takes the place of a tensor of a process that was restarted since."""


GONE = "the tensor is not there: it was on a process of the mesh that has ended since, or was being computed when one did"


class _Hole:
    """Where in a template a tensor comes in."""

    __slots__ = ()

    def __reduce__(self) -> str:
        return "HOLE"


class _Number:
    """Where in a template a number comes in."""

    __slots__ = ()

    def __reduce__(self) -> str:
        return "NUMBER"


HOLE = _Hole()
NUMBER = _Number()


class Template:
    """An operator with its constant arguments."""

    __slots__ = (
        "args",
        "func",
        "group",
        "kwargs",
        "lenient",
        "mode",
        "name",
        "out",
        "plain",
        "refs",
        "written",
    )

    is_global = False
    """Its tensors are those of a mesh in the global view."""

    def __init__(self, what: tuple[Any, ...], bench: Bench) -> None:
        (name, module), *_ = what
        if name[0] == SPECIAL:
            from mesh_tensor._special import SPECIAL as FUNCTIONS

            func: Callable[..., Any] = partial(FUNCTIONS[name[1]], bench)
        else:
            from mesh_tensor._operators import find

            try:
                func = find(name, module)
            except (AttributeError, ImportError) as error:
                func = partial(_unknown, f"{'.'.join(name)}: {error}")
        self.set(what, func)

    def set(self, what: tuple[Any, ...], func: Callable[..., Any]) -> None:
        """Run a function under this name."""
        (name, _), self.args, self.kwargs, self.refs, self.out, self.mode, self.written = what
        # A user's function has a name of its own.
        self.name = (name[0] == SPECIAL and name[2]) or ".".join(filter(None, name))
        self.func = func
        place = COLLECTIVES.get(name[1]) if name[0] == SPECIAL else None
        self.group: int | None = None if place is None else self.args[place]
        self.lenient = name[0] == SPECIAL and name[1] == "send"
        """Called even if a tensor has failed, or is missing: others wait for an answer about it."""
        # Only tensors, in most cases: avoid building a list of arguments.
        self.plain = not self.kwargs and all(each is HOLE for each in self.args) and not self.mode


def _unknown(what: str, *_: Any, **__: Any) -> None:
    """Take the place of a missing operator."""
    raise MeshError(
        f"the operator is not known in this process ({what}): import the module that defines it there too, with bootstrap= of "
        "spawn_procs for example"
    )


def _fill(what: Any, tensors: Any, numbers: Any) -> Any:
    if what is HOLE:
        return next(tensors)
    if what is NUMBER:
        return next(numbers)
    kind = type(what)
    if kind is list or kind is tuple:
        return [_fill(each, tensors, numbers) for each in what]
    return what


class Bench:
    """The tensors of one controller, and the templates that it has taught. Its public methods are what a controller may call."""

    def __init__(self, address: Any, controller: Any, *, is_side: bool = False) -> None:
        self.address = address
        """This process's own."""
        self.is_side = is_side
        """It belongs to a stream besides the default one."""
        self.controller = controller
        self._birth = (os.getpid(), time.monotonic_ns())
        self.groups: dict[int, Group] = {}
        self._meshes: dict[int, Any] = {}
        self.env: dict[int, Any] = {}
        self.templates: dict[int, Template] = {}
        self.timing: Timing | None = None
        """Records when each instruction runs here, while a timeline is taken."""
        self.programs: dict[int, Any] = {}
        self.now = 0
        """The instruction in progress, if it is not one of the simplest."""
        self.replaying: tuple[int, int] | None = None
        """The replay that the instructions in progress belong to, and its program."""
        self.loose: Failed | None = None
        """The first failure that has no tensor: of an operator without results."""
        self.unfinished: list[Sums] = []
        """Postponed sums, to be waited for at the end of the message."""

    def run(self, first: int, code: Any, scalars: Iterable[Any], freed: list[int]) -> None:
        """Carry out a batch."""
        self.meet()
        env, templates = self.env, self.templates
        numbers = iter(scalars)
        at, end, count = 0, len(code), first
        code = code.tolist()
        while at < end:
            template = templates[code[at]]
            refs = template.refs
            out = code[at + 1]
            first_ref = at + 2
            at = first_ref + refs
            try:
                if template.plain and template.out == 1:
                    if refs == 2:
                        env[out] = template.func(env[code[first_ref]], env[code[first_ref + 1]])
                    else:
                        env[out] = template.func(*[env[ref] for ref in code[first_ref:at]])
                else:
                    self.now = count
                    self._general(template, out, code[first_ref:at], numbers)
            except Exception as error:  # noqa: BLE001 - kept, for whoever asks
                self.fail(template, out, code[first_ref:at], count, error)
            count += 1
        self.finish()
        self.free(freed)

    def meet(self) -> None:
        """Let the groups of all meshes be found."""
        for mesh in self._meshes.values():
            mesh.meet()

    def finish(self) -> None:
        """Wait for postponed sums."""
        for each in self.unfinished[:]:
            each.finish()

    def instruction(self) -> int | tuple[Any, ...]:
        """Return which instruction is in progress, if it is not one of the simplest; -1 if only the whole replay is known."""
        return self.now if self.replaying is None else (*self.replaying, self.now)

    def free(self, numbers: list[int]) -> None:
        """Drop tensors, and programs, whose numbers are negative."""
        env = self.env
        for number in numbers:
            if number < 0:
                self.programs.pop(-number, None)
            else:
                env.pop(number, None)

    def define(self, number: int, what: Any) -> None:
        """Learn a program."""
        from mesh_tensor._capture._program import Replayed

        self.programs[number] = Replayed(self, number, what)

    def compilations(self, numbers: list[int]) -> Any:
        """Return what has been compiled of programs."""
        told = [self.programs[number].compilation() for number in numbers if number in self.programs]
        return "value", [each for each in told if each is not None]

    def replay(self, number: int, freed: list[int], *what: Any) -> None:
        """Carry a program out."""
        self.meet()
        self.programs[number].replay(*what)
        self.finish()
        if freed:
            self.free(freed)

    def know(self, number: int, what: tuple[Any, ...]) -> None:
        """Learn a template."""
        self.templates[number] = Template(what, self)

    def unlearn(self, numbers: list[int]) -> None:
        """Forget templates."""
        for number in numbers:
            self.templates.pop(number, None)

    def leave(self, groups: list[int]) -> None:
        """Leave groups, because some of their processes were restarted."""
        for number in groups:
            self.groups.pop(number, None)

    def enter(self, number: int, *what: Any) -> None:
        """Take a place in a mesh of the global view."""
        from mesh_tensor._global._worker import Worker

        self._meshes[number] = Worker(self, *what)

    def exit(self, number: int) -> None:
        """Leave it, with all tensors of the mesh."""
        mesh = self._meshes.pop(number, None)
        if mesh is not None:
            mesh.close()

    def within(self, number: int, what: str, *rest: Any) -> Any:
        """Do something in a mesh of the global view."""
        self.meet()
        return getattr(self._meshes[number], what)(*rest)

    def put(self, number: int, value: Any) -> None:
        """Store this tensor; its memory is this process's own."""
        self.env[number] = value.clone()

    def get(self, number: int) -> Any:
        """Return a tensor as it travels."""
        return self._loose() or _sent(self.env.get(number, LOST))

    def forms(self, numbers: list[int]) -> Any:
        """Return the forms of tensors, and other values as they are."""
        return self._loose() or _told([self.env.get(number, LOST) for number in numbers])

    def results(self, number: int) -> Any:
        """Return the structure of a function's results, and their forms, or values of those that are not tensors."""
        found = self.env.get(number, LOST)
        if found is LOST or type(found) is Failed:
            return _sent(found)
        kind, told = _told(found.leaves)
        return kind, (found.shape, told)

    def look(self, number: int) -> Any:
        """Return a summary of a tensor."""
        from mesh_tensor._looking import looked

        found = self.env.get(number, LOST)
        return _sent(found) if found is LOST or type(found) is Failed else looked(found)

    def time(self) -> None:
        """Start recording when each instruction runs."""
        from mesh_tensor._timing import Timing

        self.timing = Timing(self)

    def timed(self) -> Any:
        """Return the recording, and end it."""
        timing, self.timing = self.timing, None
        return "value", ([], 0) if timing is None else (timing.spans, timing.left_out)

    def usage(self, by_storage: bool = False) -> Any:
        """Return how many tensors there are, and how much memory they use; views share it."""
        import torch

        tensors = [each for each in self.env.values() if isinstance(each, torch.Tensor)]
        tensors = [getattr(each, "_local_tensor", each) for each in tensors]
        storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
        return "value", (len(tensors), storages if by_storage else sum(storages.values()))

    def device(self, kind: str) -> Any:
        """Use this process's own device of that kind; return a key that distinguishes it from those of others."""
        from mesh_tensor import _devices

        try:
            return "value", _devices.enter(kind, own_queue=self.is_side)
        except Exception as error:  # noqa: BLE001 - told to who asks
            return "value", f"{type(error).__name__}: {error}"

    def who(self) -> Any:
        """Return which process this is."""
        return "value", self.address

    def birth(self) -> Any:
        """Return a number that changes when the process is restarted."""
        return self._birth

    def where(self) -> Any:
        """Return on which host this process is, and how others reach it."""
        from mesh_tensor._network import here

        return "value", tuple(here())

    def group(self, number: int, *what: Any) -> Any:
        """Join others."""
        from mesh_tensor._groups import join

        self.groups[number] = join(self.address, number, *what)
        return "value", None

    def checkpoint(self, what: str, *rest: Any) -> Any:
        """Do something for a checkpoint."""
        from mesh_tensor._checkpoint import _worker

        try:
            return getattr(_worker, what)(self, *rest)
        except Exception as error:  # noqa: BLE001 - said
            return _sent(Failed(-1, "checkpoint", error))

    def exchange(self, what: str, count: int, *rest: Any) -> None:
        """Give tensors to others, or receive theirs: an instruction that is sent by itself."""
        from mesh_tensor import _exchange
        from mesh_tensor._streams import _worker

        getattr(_worker if what in _worker.BETWEEN_STREAMS else _exchange, what)(self, count, *rest)

    def refresh(self, tensor: Any) -> None:
        """Refresh a tensor of the global view that shows another one."""
        for mesh in self._meshes.values():
            if mesh.mesh is tensor.device_mesh:
                mesh.refresh([tensor])

    def _loose(self) -> Any:
        loose, self.loose = self.loose, None
        return None if loose is None else _sent(loose)

    def _general(self, template: Template, out: int, refs: list[int], numbers: Any) -> None:
        env = self.env
        # Numbers are taken even if a tensor has failed.
        tensors = [env.get(ref) for ref in refs]
        supply = iter(tensors)
        args = [_fill(each, supply, numbers) for each in template.args]
        kwargs = {name: _fill(each, supply, numbers) for name, each in template.kwargs.items()}
        if not template.lenient and any(each is None or type(each) is Failed for each in tensors):
            raise MeshError("a tensor is not there")
        if template.mode == IN_PLACE_SHAPE:
            args[0] = args[0].detach()
            env[out] = template.func(*args, **kwargs)
            return
        result: Any = template.func(*args, **kwargs)
        if not template.out:
            return
        self._keep(template, out, result)

    def _keep(self, template: Template, out: int, result: Any) -> None:
        if template.mode == LIST or type(result) is tuple:
            at = out
            for place, each in enumerate(result):
                # As the controller counts: neither tensors that existed before, nor missing ones.
                if each is None or (place < len(template.written) and template.written[place]):
                    continue
                self.env[at] = each
                at += 1
        else:
            self.env[out] = result

    def fail(self, template: Template, out: int, refs: list[int], count: int, error: Exception) -> None:
        """Keep a failure in place of the results."""
        env = self.env
        where = count if self.replaying is None else (*self.replaying, count)
        if isinstance(error, Instead):
            error.mark(Failed(where, template.name, error.error))
            if template.out:
                self._keep(template, out, error.results)
            return
        failed = getattr(error, "failed", None) or next(
            (env[ref] for ref in refs if type(env.get(ref)) is Failed), None
        )
        missing = failed is not None
        if failed is None:
            if any(ref not in env for ref in refs):
                error, missing = MeshError(GONE), True
            failed = Failed(where, template.name, error)
        if missing and template.group is not None:
            # The others wait for this process, which has not begun with it.
            self.groups[template.group].leave(f"{failed.operator} failed there: {failed.error}")
        for each in range(out, out + template.out):
            env[each] = failed
        if any(template.written):
            # The tensor that it was to write has neither its old nor its new values.
            env[refs[0]] = failed
        elif not template.out and self.loose is None:
            self.loose = failed


class Tensors(Extension):
    """Keeps the tensors of a process and works on them on a thread of its own; or lets others do so."""

    name = "mesh_tensor"
    is_side = False
    """It is a stream besides the default one."""

    def start(self) -> None:
        """Make room."""
        self._benches: dict[Any, Bench] = {}
        self._streams: dict[ProcMesh, Issuer] = {}
        self._lock = threading.Lock()
        self.lock = threading.RLock()
        """Those of all streams."""
        self._flusher: Flusher | None = None
        self.numbers = itertools.count(1)
        self.templates = itertools.count(1)
        self.groups = itertools.count(1)
        self.firsts = itertools.count()
        self.streams: WeakSet[Stream] = WeakSet()
        """All, of both views."""
        self.refuses = threading.local()
        self.guard = Guard()
        self.backends: dict[tuple[ProcMesh, str], str] = {}
        """By mesh and kind of device, PyTorch's name of the collectives there, if one was chosen."""
        self.handover = Handover()
        self.clear_text: dict[str, str] | None = None
        """Whether collectives may go between hosts, and over which addresses."""
        self.recorders: dict[int, Recorder] = {}
        """By thread, the recording in progress."""

    def recorded(self, tell: Callable[[Recorder], None]) -> None:
        """Notify the recording of this thread, if there is one."""
        recorder = self.recorders.get(threading.get_ident())
        if recorder is not None:
            tell(recorder)

    def tell(self, to: Any, message: Any) -> Sending:
        """Send a message without tensors of a mesh."""
        with self.without_tensors():
            return super().tell(to, message)

    def call(self, to: Any, message: Any, *, timeout: float | None = None) -> Future[ValueMesh[Any]]:
        """Send a message without tensors of a mesh, and return a future of the answer."""
        with self.without_tensors():
            return super().call(to, message, timeout=timeout)

    @contextmanager
    def without_tensors(self) -> Iterator[None]:
        """Refuse tensors of a mesh when this thread pickles them."""
        before, self.refuses.here = getattr(self.refuses, "here", False), True
        try:
            yield
        finally:
            self.refuses.here = before

    def stop(self) -> None:
        """Undo that."""
        self.handover.close()
        if self._flusher is not None:
            self._flusher.close()

    @property
    def flusher(self) -> Flusher:
        """Sends waiting instructions."""
        if self._flusher is None:
            from mesh_tensor._stream import Flusher

            self._flusher = Flusher()
        return self._flusher

    def issuer(self, procs: ProcMesh) -> Issuer:
        """Return the issuer of operators for a mesh; the same one each time."""
        from mesh_tensor._propagate import Issuer
        from mesh_tensor._stream import Stream
        from mesh_tensor._tensor import MeshTensor

        with self._lock:
            found = self._streams.get(procs)
            if found is None:
                from mesh_tensor._actors import carry

                carry(MeshTensor)
                self.install_on(procs).get()
                found = self._streams[procs] = Issuer(Stream(self, procs, MeshTensor), MeshTensor)
                self.have_recorded(found.stream)
            return found

    def have_recorded(self, stream: Stream) -> None:
        """Let timelines of meshes that share processes with a new stream's record it too."""
        for each in {one.timeline for one in list(self.streams) if one.timeline is not None}:
            each.join(stream)

    def receive(self, message: tuple[Any, ...], sender: Proc) -> Any:
        """Do what a controller says."""
        import torch

        kind, *rest = message
        bench = self._benches.get(sender.address)
        if bench is None:
            bench = self._benches[sender.address] = Bench(
                self.proc.address, sender.address, is_side=self.is_side
            )
        with torch.no_grad():
            if kind == "several":
                return self._several(bench, *rest)
            if bench.timing is not None:
                return bench.timing.do(kind, rest)
            return getattr(bench, kind)(*rest)

    def _several(self, bench: Bench, messages: list[tuple[Any, ...]]) -> None:
        """Carry out several messages, each as if it had come alone: an error in one does not affect the next."""
        raised = []
        for kind, *rest in messages:
            try:
                if bench.timing is not None:
                    bench.timing.do(kind, rest)
                else:
                    getattr(bench, kind)(*rest)
            except Exception as error:  # noqa: BLE001 - raised below
                raised.append(error)
        if raised:
            raise raised[0] if len(raised) == 1 else ExceptionGroup("several instructions raised", raised)


def _told(values: list[Any]) -> Any:
    """Forms of tensors, and other values as they are."""
    import torch

    from mesh_tensor._descriptors import form_of

    for each in values:
        if type(each) is Failed:
            return _sent(each)
    return "value", [
        ("form", form_of(each)) if isinstance(each, torch.Tensor) else ("value", each) for each in values
    ]


def _sent(value: Any) -> Any:
    """A tensor as it is sent, without a copy: a reply's bytes are copied before the next instruction can change the tensor."""
    if value is LOST:
        return ("failed", -1, "keeping it", GONE, "")
    if type(value) is Failed:
        return ("failed", value.instruction, value.operator, value.error, value.trace)
    if not hasattr(value, "detach"):
        return ("value", value)
    import torch

    from mesh_tensor._descriptors import HERE

    value = value.detach()
    if value.device.type not in HERE:
        value = value.to("cpu")
    # Other layouts, and subclasses, pickle in PyTorch's way: with all the memory that they are views of.
    is_plain = type(value) is torch.Tensor and value.layout is torch.strided and not value.is_quantized
    # Zeros that PyTorch keeps without memory have nothing to copy from.
    is_plain = is_plain and not value._is_zerotensor()  # noqa: SLF001 - nothing else tells
    return ("value", value if is_plain else value.clone())
