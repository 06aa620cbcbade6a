"""What a recording is valid for: the state of Python that the step has seen, as far as it is known.

This covers tensors that the step has used, the modules and optimizers that have run in it, what its own code names, and the object that
it is a method of. Everything is compared by a *token*: numbers and texts by their values, tensors and other objects by identity, and tensors of
this process also by how often they were changed.
"""

from __future__ import annotations

import dis
from collections.abc import Callable, Iterator
from operator import itemgetter
from types import CodeType, MethodType
from typing import TYPE_CHECKING, Any
from weakref import ref as weak

import torch

from mesh_tensor._descriptors import Descriptor
from mesh_tensor._errors import line_of

if TYPE_CHECKING:
    from mesh_tensor._stream import Ref, Stream

_SIMPLE = (int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device)
_LONG = 1000
"""The longest lists that are looked into."""
State = dict[str, Any]
"""Tokens, by readable names."""


def token(value: Any) -> Any:
    """Return the token of a value."""
    kind = type(value)
    if kind in _SIMPLE:
        # Minus zero equals zero, and true equals one.
        return (kind, repr(value)) if kind is float or kind is complex else (kind, value)
    if isinstance(value, torch.Tensor):
        if isinstance(getattr(value, "descriptor", None), Descriptor):
            return id(value)
        return id(value), value._version  # noqa: SLF001 - how often it was changed
    if kind in (list, tuple) and len(value) < _LONG:
        return tuple([token(each) for each in value])
    return id(value)


def state_of(optimizer: Any) -> State:
    """Return what an optimizer's step depends on, except for the values of the mesh's tensors."""
    found: State = {}
    for at, group in enumerate(optimizer.param_groups):
        for name, value in group.items():
            found[f"{name} of parameter group {at}"] = token(value)
    for at, state in enumerate(optimizer.state.values()):
        if isinstance(state, dict):
            for name, value in state.items():
                found[f"{name} of parameter {at}"] = token(value)
    return found


def state_of_module(module: Any) -> State:
    """Return the simple attributes of a module, and which tensors and modules it has."""
    have = module.__dict__
    found = {
        name: (type(value), value) for name, value in have.items() if type(value) in (bool, int, float, str)
    }
    for kind in ("_parameters", "_buffers", "_modules"):
        found |= {name: id(value) for name, value in have[kind].items()}
    return found


def _getter(module: Any) -> Callable[[dict[str, Any]], tuple[Any, ...]]:
    """Return what takes the simple attributes of a module, all at once."""
    names = [name for name, value in module.__dict__.items() if type(value) in (bool, int, float, str)]
    return itemgetter("_parameters", "_modules", *names)


def changes(before: State, after: State) -> list[str]:
    """Return the names of everything that differs between before and after."""
    return [name for name, value in before.items() if name in after and after[name] != value]


class Surroundings:
    """What the code of a function names: variables of the functions around it, globals, and attributes of the object it is bound to."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._owner = function.__self__ if isinstance(function, MethodType) else None
        inner: Any = function.__func__ if isinstance(function, MethodType) else function
        code = getattr(inner, "__code__", None)
        self._cells: list[tuple[str, Any]] = []
        self._globals: dict[str, Any] = {}
        self._names: list[str] = []
        if isinstance(code, CodeType):
            self._cells = list(zip(code.co_freevars, inner.__closure__ or (), strict=True))
            self._globals = inner.__globals__
            self._names = sorted({name for name in _globals(code) if name in self._globals})

    def state(self) -> State:
        """Return the present state."""
        found: State = {}
        for name, cell in self._cells:
            try:
                found[name] = token(cell.cell_contents)
            except ValueError:
                found[name] = None
        for name in self._names:
            found[name] = token(self._globals.get(name))
        if self._owner is not None and not isinstance(self._owner, torch.nn.Module):
            found |= {f"self.{name}": token(value) for name, value in vars(self._owner).items()}
        return found

    def objects(self) -> list[Any]:
        """Return what is checked, for a quick comparison by identity."""
        found: list[Any] = []
        for _, cell in self._cells:
            try:
                found.append(cell.cell_contents)
            except ValueError:
                found.append(None)
        found += [self._globals.get(name) for name in self._names]
        if self._owner is not None and not isinstance(self._owner, torch.nn.Module):
            found += vars(self._owner).values()
        for each in [each for each in found if type(each) is list or type(each) is tuple]:
            found += each
        return found


def _globals(code: CodeType) -> Iterator[str]:
    """Yield the names of globals that code reads, that of functions within it included."""
    for each in dis.get_instructions(code):
        if each.opname == "LOAD_GLOBAL":
            yield each.argval
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _globals(const)


class Seen:
    """Modules and optimizers of a call, and tensors of this process that it gave to the mesh."""

    def __init__(
        self, modules: list[Any], optimizers: list[Any], given: list[tuple[torch.Tensor, int]]
    ) -> None:
        self._modules = [(weak(each), state_of_module(each)) for each in modules]
        self._getters = [(weak(each), _getter(each)) for each in modules]
        self._optimizers = [(weak(each), state_of(each)) for each in optimizers]
        self._given = given
        self.moved: Any = None
        """The optimizer that was found to have changed."""

    def objects(self) -> list[Any]:
        """Return what is checked, for a quick comparison by identity."""
        found: list[Any] = []
        for ref, get in self._getters:
            module = ref()
            if module is None:
                return []
            have = module.__dict__
            found += get(have)
            found += have["_parameters"].values()
            if have["_buffers"]:
                found += have["_buffers"].values()
            if have["_modules"]:
                found += have["_modules"].values()
        for ref, _ in self._optimizers:
            optimizer = ref()
            if optimizer is None:
                return []
            for group in optimizer.param_groups:
                found += group.values()
                found += group["params"]
            for state in optimizer.state.values():
                found += state.values() if isinstance(state, dict) else (state,)
        found += [value for value, _ in self._given]
        return found

    def changed(self, optimizers: list[Any] | None = None) -> str | None:
        """Return what is different now, if anything is; of these optimizers only, if given."""
        self.moved = None
        for ref, before in self._modules:
            module = ref()
            if module is None:
                return "a module that has run in it is gone"
            if (after := state_of_module(module)) != before:
                return f"{_first(before, after)} of a {type(module).__name__} {_from_to(before, after)}"
        for ref, before in self._optimizers:
            optimizer = ref()
            if optimizer is None:
                return "an optimizer that has run in it is gone"
            if optimizers is not None and not any(each is optimizer for each in optimizers):
                continue
            if (after := state_of(optimizer)) != before:
                self.moved = optimizer
                return f"{_first(before, after)} of {type(optimizer).__name__} {_from_to(before, after)}"
        for value, version in self._given:
            if value._version != version:  # noqa: SLF001 - how often it was changed
                return f"a tensor of this process that it has given to the mesh, {tuple(value.shape)}, was changed"
        return None


class Gradients:
    """The `.grad` of parameters: what it must be before a replay, and what it is afterwards."""

    def __init__(self, tensors: list[Any], before: dict[int, bool], made: set[int]) -> None:
        self._leaves = [weak(tensor) for tensor in tensors]
        self._ends = [tensor.grad for tensor in tensors]
        self._made = [
            each is None or (hasattr(each, "ref") and each.ref.number in made) for each in self._ends
        ]
        self._there = [before.get(id(tensor), tensor.grad is not None) for tensor in tensors]
        self._ids = [id(each) for each in self._ends]
        self._steady = self._there == [each is not None for each in self._ends]
        self._stale = False
        # Gradients that the step has not made are only known, so that they are freed when the script drops them.
        self._ends = [each if made else None for each, made in zip(self._ends, self._made, strict=True)]

    def fit(self) -> bool:
        """Return whether they are as they were before the recorded call, as far as it matters."""
        tensors = [ref() for ref in self._leaves]
        ids = [id(None if each is None else each.grad) for each in tensors]
        self._stale = not (self._steady and ids == self._ids)
        if not self._stale:
            return True
        nothing = id(None)
        return all(
            (now != nothing) == there if made else now == then
            for now, then, made, there in zip(ids, self._ids, self._made, self._there, strict=True)
        )

    def settle(self) -> None:
        """Set them to what they are after the call."""
        if not self._stale:
            return
        for ref, end, made in zip(self._leaves, self._ends, self._made, strict=True):
            tensor = ref()
            if made and tensor is not None and tensor.grad is not end:
                tensor.grad = end


class Watch:
    """Everything that must be as it was for a recording to be replayed."""

    def __init__(
        self,
        stream: Stream,
        users: dict[int, tuple[weak[Ref], weak[Any], Any]],
        kept: list[weak[Any]],
        *,
        seen: Seen,
        surroundings: Surroundings,
        gradients: Gradients,
    ) -> None:
        self._stream = stream
        self._lives = stream.lives
        self._users = [ref for ref, _, _ in users.values()]
        self._places = [place for *_, place in users.values()]
        self._kept = kept
        self.seen = seen
        self._surroundings = surroundings
        self._state = surroundings.state()
        found = leaves(users)
        self._tensors = [weak(tensor) for tensor in found]
        self._flags = [tensor.requires_grad for tensor in found]
        self.gradients = gradients
        self._ids: list[int] = []
        self._held: list[Any] = []
        """Values that are compared by identity: none of them may be freed and replaced by another one."""
        self._versions: list[tuple[torch.Tensor, int]] = []
        self._remember()

    def missing(self) -> str | None:
        """Return why the recording can never be replayed again, if so. Without PyTorch's functions of subclasses."""
        if self._stream.broken:
            self._stream.check()
        if self._stream.lives != self._lives:
            return "processes of the mesh were made again"
        if None in (alive := [ref() for ref in self._users]):
            return f"a tensor that it uses is gone: the one of {line_of(self._places[alive.index(None)])}"
        if None in [ref() for ref in self._kept]:
            return "something that it makes and the script had kept, or an optimizer, was dropped"
        return None

    def captured(self) -> list[Ref | None]:
        """Return what names the tensors that it uses besides its arguments."""
        return [ref() for ref in self._users]

    def changed(self) -> str | None:
        """Return what is different now, if anything is. Without PyTorch's functions of subclasses."""
        tensors = [ref() for ref in self._tensors]
        if [each is not None and each.requires_grad for each in tensors] != self._flags:
            return "requires_grad of a tensor that it uses was changed"
        if not self.gradients.fit():
            return "the .grad of a parameter is not what it was before the call that was recorded"
        if list(map(id, self._objects())) == self._ids and all(
            value._version == version  # noqa: SLF001 - how often it was changed
            for value, version in self._versions
        ):
            return None
        if (state := self._surroundings.state()) != self._state:
            return f"{_first(self._state, state)!r} {_from_to(self._state, state)}"
        told = self.seen.changed()
        if told is None:
            self._remember()
        return told

    def _objects(self) -> list[Any]:
        return self._surroundings.objects() + self.seen.objects()

    def _remember(self) -> None:
        """Let the quick comparison use the present state."""
        objects = self._objects()
        self._ids = list(map(id, objects))
        self._held = [each for each in objects if _is_simple(each)]
        self._versions = [
            (each, each._version)  # noqa: SLF001 - how often it was changed
            for each in objects
            if isinstance(each, torch.Tensor) and not hasattr(each, "descriptor")
        ]


def _is_simple(value: Any) -> bool:
    if type(value) in (list, tuple):
        return all(map(_is_simple, value))
    return type(value) in _SIMPLE


def leaves(users: dict[int, tuple[weak[Ref], weak[Any], Any]]) -> list[Any]:
    """Return the tensors among these that were not computed from others."""
    found = [tensor() for _, tensor, _ in users.values()]
    return [each for each in found if each is not None and each.is_leaf]


def _first(before: State, after: State) -> str:
    names = [name for name in (before | after) if before.get(name) != after.get(name)]
    return names[0] if names else "something"


def _from_to(before: State, after: State) -> str:
    name = _first(before, after)
    old, new = before.get(name), after.get(name)
    if old is not None and new is not None and _says(old) and _says(new):
        return f"was {old[1]}, is {new[1]}"
    return "is another one" if name in before and name in after else "is new or gone"


def _says(found: Any) -> bool:
    return isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], type)
