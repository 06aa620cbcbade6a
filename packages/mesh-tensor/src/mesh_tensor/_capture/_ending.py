"""From a recording to what can be replayed."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakSet
from weakref import ref as weak

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from mesh_tensor._capture._recorder import Instruction, Program, Recorder, Stepping, coded
from mesh_tensor._capture._watch import (
    Gradients,
    Seen,
    State,
    Surroundings,
    Watch,
    changes,
    leaves,
    state_of,
    state_of_module,
)
from mesh_tensor._descriptors import Descriptor
from mesh_tensor._errors import CaptureError
from mesh_tensor._replay._program import Definition

if TYPE_CHECKING:
    from types import FrameType

    from mesh_tensor._stream import Stream


@dataclass
class Pattern:
    """The shape of a recorded call: two calls in a row that are alike will be followed by more of their kind."""

    key: Any
    shape: tuple[Any, ...]
    users: dict[int, Any]
    seen: Seen
    unsettled: str | None


class Before:
    """What is known about the time before a call."""

    def __init__(self, surroundings: State, last: Pattern | None) -> None:
        self.surroundings = surroundings
        self.last = last
        self.seen = last.seen if last is not None and last.seen.changed() is None else None
        found = leaves(last.users) if last is not None else []
        self.grads = {id(each): each.grad is not None for each in found}


@dataclass
class Result:
    """One of the values that a step returns."""

    value: Any = None
    """What is not a tensor, or a tensor that existed before."""
    input: int | None = None
    made: int | None = None


class Live:
    """An optimizer whose step runs in the script, because its numbers change."""

    def __init__(self, stepping: Stepping) -> None:
        self.optimizer = weak(stepping.optimizer)
        self._grads = [(weak(parameter), grad) for parameter, grad in stepping.grads]

    def run(self) -> None:
        """Take the step."""
        optimizer = self.optimizer()
        assert optimizer is not None, "looked at before"
        others = []
        for ref, grad in self._grads:
            parameter = ref()
            if parameter is not None and parameter.grad is not grad:
                others.append((parameter, parameter.grad))
                parameter.grad = grad
        try:
            optimizer.step()
        finally:
            for parameter, grad in others:
                parameter.grad = grad


@dataclass
class Recording:
    """What is replayed: programs of the workers, and between them what runs here."""

    stream: Stream
    parts: list[Program | Live]
    seeds: list[int]
    """How many numbers each of them draws."""
    watch: Watch
    made: list[Descriptor]
    results: list[Result]
    spec: Any

    def replay(self, inputs: list[Any], frame: FrameType) -> Any:
        """Let the workers do it."""
        stream = self.stream
        if stream.tensors.guard.on:
            stream.tensors.guard.check_replay(stream, self.watch.captured())
        numbers = [each.ref.number for each in inputs]
        last = len(self.parts) - 1
        made: list[Any] = []
        for at, part in enumerate(self.parts):
            if isinstance(part, Live):
                part.run()
                continue
            refs = [stream.ref() for _ in self.made] if at == last else []
            seeds = [_seed() for _ in range(self.seeds[at])]
            stream.replay(part, numbers, [each.number for each in refs], numbers=seeds, frame=frame)
            for ref, descriptor in zip(refs, self.made, strict=False):
                tensor = descriptor.make()
                tensor.descriptor = descriptor
                tensor.ref = ref
                made.append(tensor)
        self.watch.gradients.settle()
        leaves = [
            made[each.made]
            if each.made is not None
            else inputs[each.input]
            if each.input is not None
            else each.value
            for each in self.results
        ]
        return leaves[0] if self.spec is None else pytree.tree_unflatten(leaves, self.spec)


def _seed() -> int:
    """Draw the same random numbers as a random operator of the global view."""
    with _disable_current_modes():
        return int(torch.empty((), dtype=torch.int64).random_())


class Ending:
    """The end of a call that was recorded."""

    def __init__(
        self,
        name: str,
        call: Any,
        recorder: Recorder,
        before: Before,
        *,
        live: WeakSet[Any],
        inputs: list[Any],
        result: list[Any],
        backend: str | None,
    ) -> None:
        self._name = name
        self._backend = backend
        self._call = call
        self._recorder = recorder
        self._before = before
        self._results: list[Result] = []
        self._made: list[tuple[int, Descriptor]] = []
        self._names: dict[int, tuple[int, Any]] = {}
        self._check_inputs(inputs)
        value = result.pop()
        if inspect.isawaitable(value) or inspect.isgenerator(value):
            raise TypeError(
                f"{name} has returned a {type(value).__name__}: what it does after the call cannot be captured"
            )
        if recorder.stream is None:
            raise CaptureError(f"{name} has done nothing on a mesh: there is nothing to replay")
        self._stream: Stream = recorder.stream
        self._spec: Any = None
        found = [value]
        if not isinstance(value, torch.Tensor):
            found, self._spec = pytree.tree_flatten(value)
        self._shown: list[Any] = [self._result(each) for each in found]
        self._live = {id(each): Live(each) for each in recorder.steppings if self._is_live(each, live)}
        self._aliases = [weak(each.ref) for each in inputs]
        inputs.clear()

    def _check_inputs(self, inputs: list[Any]) -> None:
        for number, given, alias in zip(self._recorder.inputs, self._call.tensors, inputs, strict=True):
            if alias.ref.number != number or alias.requires_grad != given.requires_grad:
                raise CaptureError(
                    f"{self._name} changes the shape of its argument {given!r} in place, or whether it requires a gradient: a replay "
                    "would not. Do it outside."
                )
            if alias.grad is not None:
                raise CaptureError(
                    f"{self._name} leaves a gradient in its argument {given!r}: a replay would not. Return it, from torch.autograd.grad()."
                )

    def _result(self, value: Any) -> Any:
        """Find out what a result is; returns what the call returns for it."""
        if not isinstance(value, torch.Tensor):
            self._results.append(Result(value))
            return value
        descriptor = getattr(value, "descriptor", None)
        if not isinstance(descriptor, Descriptor):
            raise CaptureError(
                f"{self._name} returns a tensor of this process, {tuple(value.shape)}, which a replay would not compute anew: compute "
                "it outside"
            )
        number = value.ref.number  # type: ignore[attr-defined]
        if number in self._recorder.inputs:
            at = self._recorder.inputs.index(number)
            self._results.append(Result(input=at))
            return self._call.tensors[at]
        if number not in self._recorder.refs and number not in self._recorder.constants:
            self._results.append(Result(value))
            return value
        if number not in self._names:
            self._names[number] = len(self._made), self._renamed(value)
            self._made.append((number, descriptor))
        at, shown = self._names[number]
        self._results.append(Result(made=at))
        return shown

    @staticmethod
    def _renamed(value: Any) -> Any:
        """Give a result a new name, so that the name under which it was made is gone unless the script has it elsewhere."""
        with _disable_current_modes(), torch.no_grad():
            return value.descriptor.stream.issuer.issue(torch.ops.aten.detach.default, (value,), None)

    def _is_live(self, stepping: Stepping, live: WeakSet[Any]) -> bool:
        """Return whether a step of an optimizer must run in the script: it waits, or has changed what it depends on."""
        assert stepping.after is not None, "it has returned"
        found = (
            stepping.waited or stepping.optimizer in live or bool(changes(stepping.before, stepping.after))
        )
        if found and stepping.given:
            raise CaptureError(
                f"{self._name} calls step() of {type(stepping.optimizer).__name__} with an argument, and its numbers change from call to "
                "call: such a step cannot be replayed"
            )
        return found

    def shown(self) -> Any:
        """Return what the call returns."""
        shown, self._shown = self._shown, []
        self._names.clear()
        return shown[0] if self._spec is None else pytree.tree_unflatten(shown, self._spec)

    def finish(self, surroundings: Surroundings) -> tuple[Pattern, Recording | None]:
        """Return what the call was like, and what can be replayed in its place, if that is already known."""
        recorder = self._recorder
        parts = self._parted()
        kept = [each for part in parts if isinstance(part, list) for each in part]
        made = {number for each in kept for number in each.made} | set(recorder.constants)
        used = dict.fromkeys(number for each in kept for number in each.refs)
        users = {number: recorder.users[number] for number in used if number in recorder.users}
        strange = [number for number in used if number in recorder.refs and number not in made]
        found = leaves(users)
        explained = {each.grad.ref.number for each in found if hasattr(each.grad, "ref")}
        for each in recorder.steppings:
            explained |= {grad.ref.number for _, grad in each.grads if hasattr(grad, "ref")}
            if id(each) not in self._live:
                each.grads.clear()
        escaped = [number for number in recorder.escaped(explained) if number in made]
        aliases = [
            number for number, ref in zip(recorder.inputs, self._aliases, strict=True) if ref() is not None
        ]
        running = [each.optimizer for each in recorder.steppings if id(each) not in self._live]
        shape = self._shape(kept, [*escaped, *aliases])
        unsettled = self._unsettled(surroundings, shape, set(escaped) - explained, found, strange)
        seen = Seen([module for module, _ in recorder.modules.values()], running, recorder.given)
        pattern = Pattern(self._call.key, shape, users, seen, unsettled)
        if unsettled is not None:
            return pattern, None
        refs = [recorder.refs[number] for number in escaped] + [
            ref for ref in self._aliases if ref() is not None
        ]
        refs += [each.optimizer for each in self._live.values()]
        watch = Watch(
            self._stream,
            users,
            refs,
            seen=seen,
            surroundings=surroundings,
            gradients=Gradients([each for each in found if each.requires_grad], self._before.grads, made),
        )
        programs, seeds = self._programs(parts, [*escaped, *aliases])
        made_of = [descriptor for _, descriptor in self._made]
        return pattern, Recording(self._stream, programs, seeds, watch, made_of, self._results, self._spec)

    def _parted(self) -> list[list[Instruction] | Live]:
        """Divide the instructions where something runs in the script."""
        parts: list[list[Instruction] | Live] = []
        at = 0
        instructions = self._recorder.instructions
        for each in self._recorder.steppings:
            live = self._live.get(id(each))
            if live is not None:
                parts += [instructions[at : each.begin], live]
                at = each.end
        last = instructions[at:]
        return [each for each in (*parts, last) if not isinstance(each, list) or each or each is last]

    def _shape(self, kept: list[Instruction], escaped: list[int]) -> tuple[Any, ...]:
        """Return equal values for two calls that do the same with the same tensors."""
        names: dict[int, Any] = {number: (at,) for at, number in enumerate(self._recorder.inputs)}
        shape: list[Any] = []
        for each in kept:
            refs = [
                names.setdefault(number, (-1, len(names)))
                if number in self._recorder.constants
                else names.get(number, number)
                for number in each.refs
            ]
            shape.append((each.template, tuple(refs), () if each.seed else tuple(each.scalars)))
            for number in each.made:
                names[number] = (-1, len(names))
        return tuple(shape), tuple(sorted(names.get(number, (-2,)) for number in escaped))

    def _unsettled(
        self,
        surroundings: Surroundings,
        shape: Any,
        unexplained: set[int],
        found: list[Any],
        strange: list[int],
    ) -> str | None:
        """Return why the next call may be a different one, if so."""
        before = self._before
        told = self._changed(surroundings)
        if told is not None:
            return told
        if self._recorder.forgotten:
            return "the processes have forgotten some of it meanwhile"
        if strange:
            return "it uses what a step of an optimizer makes"
        if before.last is not None and before.last.key == self._call.key and before.last.shape == shape:
            return None
        if any(each.grad is not None and id(each) not in before.grads for each in found):
            return "it has made gradients"
        return "it has made tensors that the script keeps" if unexplained else None

    def _changed(self, surroundings: Surroundings) -> str | None:
        """Return which of its own conditions the call has changed, if any."""
        before = self._before
        told = None
        if changed := changes(before.surroundings, surroundings.state()):
            told = f"it has itself changed {changed[0]!r}"
        for module, state in self._recorder.modules.values():
            if changed := changes(state, state_of_module(module)):
                told = f"it has itself changed {changed[0]} of a {type(module).__name__}"
        running = [each for each in self._recorder.steppings if id(each) not in self._live]
        for each in running:
            kind = type(each.optimizer).__name__
            assert each.after is not None, "it has returned"
            if each.before.keys() != each.after.keys():
                told = f"{kind} has made its state"
            elif changed := changes(each.after, state_of(each.optimizer)):
                told = f"it has itself changed {changed[0]} of {kind}"
            elif before.last is None:
                told = told or f"its first step of {kind}"
        if told is None and before.seen is not None:
            found = before.seen.changed([each.optimizer for each in running])
            told = found and f"it has itself changed something: {found}"
        return told

    def _programs(
        self, parts: list[list[Instruction] | Live], escaped: list[int]
    ) -> tuple[list[Program | Live], list[int]]:
        """Teach the workers what they will replay."""
        results = [number for number, _ in self._made]
        plan = _Plan(
            [each for each in parts if isinstance(each, list)], self._recorder, results, set(escaped)
        )
        programs: list[Program | Live] = []
        seeds: list[int] = []
        at = 0
        for part in parts:
            if isinstance(part, Live):
                programs.append(part)
                seeds.append(0)
                continue
            program = Program(self._stream, [each.place for each in part])
            with _disable_current_modes(), self._stream.lock:
                constants, refs = {}, []
                for number in plan.constants[at]:
                    _, value, how = self._recorder.constants[number]
                    ref = self._stream.place(value, *how) if how else self._stream.put(value)  # type: ignore[attr-defined]
                    refs.append(ref)
                    constants[number] = ref.number
                code, scalars, holes = coded(part)
                definition = Definition(
                    code,
                    scalars,
                    holes,
                    inputs=list(self._recorder.inputs),
                    captured=plan.captured[at],
                    constants=constants,
                    results=results if at == plan.last else [],
                    kept=plan.kept[at],
                    spent=plan.spent if at == plan.last else [],
                    compile=self._backend,
                )
                self._stream.define(program, definition)
            programs.append(program)
            seeds.append(len(holes))
            at += 1
        return programs, seeds


class _Plan:
    """Where in the parts of a step tensors are made, used and dropped."""

    def __init__(
        self, parts: list[list[Instruction]], recorder: Recorder, results: list[int], escaped: set[int]
    ) -> None:
        self.last = len(parts) - 1
        inputs = set(recorder.inputs)
        needed = [list(dict.fromkeys(number for each in part for number in each.refs)) for part in parts]
        needed[-1] = list(dict.fromkeys([*needed[-1], *results]))
        origin = {number: at for at, part in enumerate(parts) for each in part for number in each.made}
        self.constants: list[list[int]] = [[] for _ in parts]
        for at, numbers in enumerate(needed):
            for number in numbers:
                if number in recorder.constants and number not in origin:
                    origin[number] = at
                    self.constants[at].append(number)
        self.captured = [
            [number for number in numbers if number not in inputs and origin.get(number) != at]
            for at, numbers in enumerate(needed)
        ]
        later = [set().union(*self.captured[at + 1 :]) for at in range(len(parts))]
        mine: list[set[int]] = [
            {number for number, where in origin.items() if where == at} for at in range(len(parts))
        ]
        self.kept = [sorted(mine[at] & (later[at] | escaped)) for at in range(len(parts))]
        if self.kept:
            self.kept[0] = sorted({*self.kept[0], *(inputs & escaped)})
        self.spent = [number for numbers in self.kept[:-1] for number in numbers if number not in escaped]


def name_of(function: Any) -> str:
    """Return the name of a function as people know it."""
    name: str = getattr(function, "__qualname__", None) or repr(function)
    return name
