"""Records what a step has the processes of a mesh do.

REC-1: a recorded call is an ordinary call: its instructions are carried out as they are issued, and also written down. An
exception in it has the same effects as without recording.
"""

from __future__ import annotations

import gc
import sys
import threading
from array import array
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self
from weakref import ref as weak

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from mesh_tensor._capture._watch import State, state_of, state_of_module
from mesh_tensor._errors import CaptureError, line_of
from mesh_tensor._stream import INNER
from mesh_tensor._streams._guard import name_of

if TYPE_CHECKING:
    from types import FrameType, TracebackType

    from mesh_tensor._extension import Tensors
    from mesh_tensor._stream import Ref, Stream

_SETTING_UP = frozenset({"who", "where", "group", "device"})
"""Questions that are asked once for a mesh, before its first collective."""
Place = tuple[Any, int]


class Program:
    """A part of a recorded step, which the workers know by a number. They forget it when this object is freed."""

    def __init__(self, stream: Stream, places: list[Place]) -> None:
        self.number: int = next(stream.tensors.templates)
        self.places = places
        self._stream = stream

    def __del__(self) -> None:
        self._stream.freed.append(-self.number)


@dataclass
class Instruction:
    """What one operator has become."""

    template: int
    out: int
    refs: list[int]
    scalars: list[Any]
    seed: bool
    """Its number is drawn anew each time."""
    place: Place
    made: list[int] = field(default_factory=list)


@dataclass
class Stepping:
    """A step of an optimizer within the recorded one."""

    optimizer: Any
    before: State
    begin: int
    grads: list[tuple[Any, Any]]
    """Parameters, and the gradients that they had."""
    given: bool
    """It was called with arguments."""
    end: int = 0
    waited: bool = False
    after: State | None = None


class Recorder:
    """Writes down what this thread issues. Used in a `with` statement."""

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors
        self._thread = threading.get_ident()
        self.stream: Stream | None = None
        self.instructions: list[Instruction] = []
        self.refs: dict[int, weak[Ref]] = {}
        """Tensors that were made in the meantime."""
        self._new: list[int] = []
        self.users: dict[int, tuple[weak[Ref], weak[Any], Place]] = {}
        """For each tensor that existed before: its name, the tensor itself, and where it was used first."""
        self.constants: dict[int, tuple[Stream, torch.Tensor, tuple[Any, ...]]] = {}
        self.given: list[tuple[torch.Tensor, int]] = []
        """Tensors of this process that the mesh was given, and how often they had been changed."""
        self.inputs: tuple[int, ...] = ()
        self.modules: dict[int, tuple[Any, State]] = {}
        """Modules that have run, as they were before."""
        self.steppings: list[Stepping] = []
        self._stepping: Stepping | None = None
        self.error: CaptureError | None = None
        self.forgotten = False
        """The workers have forgotten some of the recording."""
        self._hooks = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.callback(register_module_forward_pre_hook(self._called).remove)
            stack.callback(register_optimizer_step_pre_hook(self._steps).remove)
            stack.callback(register_optimizer_step_post_hook(self._stepped).remove)
            self._tensors.recorders[self._thread] = self
            stack.callback(self._tensors.recorders.pop, self._thread, None)
            self._hooks = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.close()
        if error is None and self.error is not None:
            # The step has continued without what it was refused.
            raise self.error

    # Called by streams.

    def made(self, ref: Ref) -> None:
        """A tensor is to be made."""
        self.refs[ref.number] = weak(ref)
        self._new.append(ref.number)

    def named(self, ref: Ref) -> None:
        """A tensor that was let go is made again, and is what this names from now on."""
        self.refs[ref.number] = weak(ref)

    def append(
        self,
        stream: Stream,
        template: int,
        out: int,
        tensors: list[Any],
        *,
        scalars: list[Any],
        frame: FrameType,
    ) -> None:
        """Something was issued."""
        place = (frame.f_code, frame.f_lasti)
        self._one_mesh(stream, place)
        refs = []
        for each in tensors:
            ref = each.ref
            number = ref.number
            refs.append(number)
            if number not in self.refs and number not in self.inputs and number not in self.users:
                self.users[number] = (weak(ref), weak(each), place)
        made, self._new = self._new, []
        seed = template == getattr(stream.issuer, "seeding", -1)
        self.instructions.append(Instruction(template, out, refs, list(scalars), seed, place, made))

    def constant(self, stream: Stream, ref: Ref, value: torch.Tensor, *how: Any) -> None:
        """The mesh was given a tensor of this process."""
        if ref.number in self.constants:
            return
        self._new.clear()
        self.constants[ref.number] = (stream, value.detach().clone(), how)
        self._one_mesh(stream, _here())

    def shares(self, value: torch.Tensor) -> None:
        """A number that is a tensor of this process is given to the mesh, as the step finds it."""
        if self._stepping is None:
            self.given.append((value, value._version))  # noqa: SLF001 - how often it was changed

    def spreads(self) -> None:
        """A tensor of this process is given to the mesh by the step itself."""
        self._refuse(
            f"a captured step would give the mesh the same tensor in each replay: {line_of(_here())}\n  share() or distribute() it outside, "
            "and pass it as an argument."
        )

    def exchanges(self, what: str) -> None:
        """Something besides operators of the mesh is done at this place of the step."""
        self._refuse(
            f"a captured step cannot {what}, as its replays would not: {line_of(_here())}\n  Do that outside."
        )

    def asked(self, question: tuple[Any, ...]) -> None:
        """Values are waited for."""
        if question[0] in _SETTING_UP:
            return
        if self._stepping is not None:
            self._stepping.waited = True
            return
        self._refuse(
            f"a captured step cannot wait for a value, as its replays do not: {line_of(_here())}\n  Return the tensor and fetch it "
            "outside; in place of control flow on values use torch.where, and in place of operators whose shapes depend on "
            "values, such as x[x > 0], those with a mask."
        )

    def _one_mesh(self, stream: Stream, place: Place) -> None:
        if self.stream is None:
            self.stream = stream
        elif self.stream is not stream and self.stream.procs == stream.procs:
            self._refuse(
                f"a captured step runs on one stream: it has begun on {name_of(self.stream.tensors)}, and goes on on "
                f"{name_of(stream.tensors)} at {line_of(place)}\n  Capture what runs on the other stream by itself."
            )
        elif self.stream is not stream:
            self._refuse(
                f"a captured step works on one mesh: it has begun on {self.stream.procs}, and works on {stream.procs} at "
                f"{line_of(place)}\n  Take what is on the other mesh out of it."
            )

    def _refuse(self, message: str) -> None:
        self.error = CaptureError(message)
        raise self.error

    # Called by PyTorch.

    def _called(self, module: Any, args: Any) -> None:
        if threading.get_ident() == self._thread:
            self.modules.setdefault(id(module), (module, state_of_module(module)))

    def _steps(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if threading.get_ident() != self._thread or self._stepping is not None:
            return
        grads = [
            (each, each.grad)
            for group in optimizer.param_groups
            for each in group["params"]
            if each.grad is not None
        ]
        given = len(args) > 1 or any(each is not None for each in kwargs.values())
        self._stepping = Stepping(optimizer, state_of(optimizer), len(self.instructions), grads, given)

    def _stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        stepping = self._stepping
        if threading.get_ident() != self._thread or stepping is None or stepping.optimizer is not optimizer:
            return
        stepping.end = len(self.instructions)
        stepping.after = state_of(optimizer)
        self.steppings.append(stepping)
        self._stepping = None

    # What exists afterwards.

    def alive(self) -> list[int]:
        """Return those of the new tensors that the script still has."""
        return [number for number, ref in self.refs.items() if ref() is not None]

    def escaped(self, explained: set[int]) -> list[int]:
        """Return the same, without those that only a reference cycle keeps."""
        found = self.alive()
        if set(found) - explained:
            gc.collect()
            found = self.alive()
        return found


def _here() -> Place:
    """Return the line of the nearest code that is neither PyTorch's nor this package's."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - as `caller` does
    inner = frame
    while frame is not None and frame.f_code.co_filename.startswith(INNER):
        frame = frame.f_back
    frame = frame or inner
    assert frame is not None, "there is a caller"
    return frame.f_code, frame.f_lasti


def coded(instructions: list[Instruction]) -> tuple[array[int], list[Any], list[int]]:
    """Return instructions as they are sent, with their numbers, and the places of those that are drawn anew."""
    code: array[int] = array("q")
    scalars: list[Any] = []
    holes: list[int] = []
    for each in instructions:
        code.extend([each.template, each.out, *each.refs])
        if each.seed:
            holes.append(len(scalars))
        scalars.extend(each.scalars)
    return code, scalars, holes
