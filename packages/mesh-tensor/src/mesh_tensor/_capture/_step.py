"""`capture`: a step that is recorded, and then replayed."""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable
from types import MethodType
from typing import Any, Generic, ParamSpec, TypeVar, cast, overload
from weakref import WeakSet
from weakref import ref as weak

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from mesh_core import ValueMesh
from mesh_core.extensions import find, install
from mesh_tensor._capture._ending import Before, Ending, Pattern, Recording, name_of
from mesh_tensor._capture._recorder import Program, Recorder
from mesh_tensor._capture._watch import Surroundings, token
from mesh_tensor._descriptors import Descriptor
from mesh_tensor._devices import DEVICES
from mesh_tensor._errors import CaptureError
from mesh_tensor._extension import Tensors
from mesh_tensor._replay._compiled import Compilation, together
from mesh_tensor._tensor import MeshTensor
from mesh_tensor._view import PerRank

P = ParamSpec("P")
R = TypeVar("R")
LIMIT = 16
"""The most recordings of one step, by default."""
_STREAK = 3
"""The most calls in a row that may differ from the next: the first makes state, the second finds it."""
_FLAT = frozenset({int, float, bool, str, type(None), MeshTensor, torch.nn.Parameter})


@overload
def capture(
    function: Callable[P, R], *, limit: int = LIMIT, compile: bool | str = False
) -> Captured[P, R]: ...
@overload
def capture(
    *, limit: int = LIMIT, compile: bool | str = False
) -> Callable[[Callable[P, R]], Captured[P, R]]: ...
def capture(
    function: Any = None,
    *,
    limit: int = LIMIT,
    compile: bool | str = False,  # noqa: A002 - as PyTorch calls it
) -> Any:
    """Record the work of a function on a mesh once, and replay it in later calls.

    The first calls run normally. Once a recording is valid for later calls (for a training step, after the optimizer
    has created its state), a call is a single message to the processes, however much it does. The function is recorded again if the
    shapes of its arguments or anything else that it depends on have changed; `reasons` says why. More than `limit` recordings are an
    error.

    With `compile=True`, each process compiles what it replays with the "inductor" backend of `torch.compile`; a name
    chooses another backend. See :meth:`Captured.compilation`.

    >>> import torch
    >>> from mesh_core import this_host
    >>> from mesh_tensor import capture, fetch, share
    >>> @capture
    ... def step(x):
    ...     return (x * 2).sin().sum()
    >>> with this_host().spawn_procs({"gpus": 2}) as procs:
    ...     for n in range(4):
    ...         y = step(share(torch.full((3,), float(n)), procs))
    ...     print(step.replays, f"{fetch(y).item(gpus=1):.3f}")
    3 -0.838
    """
    if function is None:
        return functools.partial(capture, limit=limit, compile=compile)
    if not callable(function):
        raise TypeError(f"capture() takes a function, got {function!r}")
    if not isinstance(limit, int) or limit < 1:
        raise ValueError(f"limit must be a positive number, got {limit!r}")
    for is_kind in (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction):
        if is_kind(function):
            raise TypeError(
                f"capture() takes an ordinary function, and {name_of(function)} is a coroutine or a generator: it would do its work after "
                "the call. Capture the function that does it."
            )
    return Captured(function, limit, _backend(compile))


def _backend(compile: Any) -> str | None:  # noqa: A002 - as users name it
    """Return the name of the backend that compiles, if any."""
    if isinstance(compile, bool):
        return "inductor" if compile else None
    if not isinstance(compile, str):
        raise TypeError(f"compile must be a bool or the name of a backend of torch.compile, got {compile!r}")
    from torch._dynamo import list_backends

    known = list_backends(exclude_tags=())
    if compile not in known:
        raise ValueError(
            f"compile must be a backend of torch.compile, one of {', '.join(known)}; got {compile!r}"
        )
    return compile


class Captured(Generic[P, R]):
    """A function that is recorded and then replayed; created by :func:`capture`."""

    def __init__(self, function: Callable[P, R], limit: int, backend: str | None) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self._limit = limit
        self._backend = backend
        self._lock = threading.RLock()
        self._recordings: dict[Any, list[Recording]] = {}
        self._newest: weak[Recording] | None = None
        self._last: Pattern | None = None
        """What the last recorded call was like."""
        self._live: WeakSet[Any] = WeakSet()
        self._surroundings = Surroundings(function)
        self._attribute = ""
        self._streak = 0
        self.reasons: list[str] = []
        """Why each recording was made."""
        self.replays = 0
        """The number of calls that were replays."""

    def __repr__(self) -> str:
        return f"<captured step {name_of(self._function)}>"

    def __set_name__(self, owner: type, name: str) -> None:
        self._attribute = name

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """As a method: each object has a step of its own."""
        if instance is None:
            return self
        found = Captured(MethodType(self._function, instance), self._limit, self._backend)
        instance.__dict__[self._attribute] = found
        return found

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Replay it, or run it and record what it does."""
        tensors = find(Tensors) or install(Tensors)
        if threading.get_ident() in tensors.recorders:
            # Part of an enclosing step.
            return self._function(*args, **kwargs)
        with self._lock:
            with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - attributes of tensors, at a tenth of the cost
                call = Call(self._function, args, kwargs)
                if tensors.guard.on:
                    tensors.guard.check(self, call.tensors, range(len(call.tensors)))
                found, reason = self._find(call)
            if found is not None:
                self.replays += 1
                result: R = found.replay(call.tensors, sys._getframe(1))  # noqa: SLF001 - the line of the call
                return result
            return cast("R", self._record(tensors, call, reason or self._reason(call)))

    def compilation(self, timeout: float | None = None) -> ValueMesh[Compilation]:
        """Wait for the processes, and return what each has compiled of the latest recording, and why the rest is not compiled.

        A process compiles during its first replay of the step.

        >>> import torch
        >>> from mesh_core import this_host
        >>> from mesh_tensor import capture, share
        >>> @capture(compile="aot_eager")
        ... def step(x):
        ...     return (x * 2).sin().sum()
        >>> with this_host().spawn_procs({"gpus": 2}) as procs:
        ...     for n in range(4):
        ...         y = step(share(torch.ones(3), procs))
        ...     print(step.compilation().item(gpus=0))
        Compilation(backend='aot_eager', regions=1, operators=3, reasons=[])
        """
        name = name_of(self._function)
        if self._backend is None:
            raise CaptureError(f"{name} is not to be compiled: capture it with capture(compile=True)")
        newest = None if self._newest is None else self._newest()
        if newest is None:
            raise CaptureError(
                f"no call of {name} was recorded that can be replayed: there is nothing to compile yet"
            )
        stream = newest.stream
        numbers = [each.number for each in newest.parts if isinstance(each, Program)]
        with _disable_current_modes():
            answers = stream.wait(stream.ask("compilations", numbers), timeout)
            found = [together(self._backend, stream.value(point, answer)) for point, answer in answers]
        return ValueMesh.of(answers.extent, found)

    def _find(self, call: Call) -> tuple[Recording | None, str | None]:
        """Return what can be replayed, or else why the recording cannot."""
        reason = None
        for each in list(self._recordings.get(call.key, ())):
            if (lost := each.watch.missing()) is not None:
                self._recordings[call.key].remove(each)
                reason = lost
            elif (changed := each.watch.changed()) is not None:
                reason = changed
                if each.watch.seen.moved is not None:
                    self._live.add(each.watch.seen.moved)
            else:
                return each, None
        return None, reason

    def _reason(self, call: Call) -> str:
        """Return why nothing can be replayed, if nothing was recorded for such a call."""
        if self._last is None:
            return "the first call" if not self.reasons else "no call like this was recorded"
        if call.key == self._last.key:
            return self._last.unsettled or "nothing was recorded"
        nearest = min([self._last.key, *self._recordings], key=call.distance)
        return call.difference(nearest) or "what was recorded for such a call is gone"

    def _record(self, tensors: Tensors, call: Call, reason: str) -> Any:
        name = name_of(self._function)
        if len(self.reasons) >= self._limit:
            told = "\n  ".join(dict.fromkeys([*self.reasons[-3:], reason]))
            raise CaptureError(
                f"{name} was recorded {len(self.reasons)} times, which is its limit. The last reasons were:\n  {told}\n"
                "Pass what changes as a tensor, or allow more with capture(limit=...)."
            )
        before = Before(self._surroundings.state(), self._last)
        inputs = [_alias(each) for each in call.tensors]
        with Recorder(tensors) as recorder:
            recorder.inputs = tuple(each.ref.number for each in inputs)
            args, kwargs = call.arguments(inputs)
            result: Any = self._function(*args, **kwargs)
        del args, kwargs
        ending = Ending(
            name,
            call,
            recorder,
            before,
            live=self._live,
            inputs=inputs,
            result=[result],
            backend=self._backend,
        )
        del result
        shown = ending.shown()
        last = self._last
        self._last, recording = ending.finish(self._surroundings)
        self.reasons.append(reason)
        again = recording is None and last is not None and last.key == call.key
        self._streak = self._streak + 1 if again else int(recording is None)
        if self._streak > _STREAK:
            raise CaptureError(
                f"{name} cannot be replayed, as {self._streak} calls in a row were each unlike the next: {self._last.unsettled}. Take "
                "that out of it."
            )
        if recording is not None:
            self._recordings.setdefault(call.key, []).append(recording)
            self._newest = weak(recording)
        return shown


class Call:
    """The arguments of a call: tensors, and a key that tells whether another call is like it."""

    __slots__ = ("_leaves", "_spec", "function", "key", "tensors")

    def __init__(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.function = function
        self._spec: Any = None
        if kwargs or not all(type(each) in _FLAT for each in args):
            self._leaves, self._spec = pytree.tree_flatten((args, kwargs))
        else:
            self._leaves = list(args)
        self.tensors: list[Any] = []
        parts = [self._part(at, each) for at, each in enumerate(self._leaves)]
        self.key = (self._spec, tuple(parts), _modes())

    def _part(self, at: int, value: Any) -> Any:
        kind = type(value)
        if kind is MeshTensor or getattr(kind, "is_global", False):
            flag = value.requires_grad
            if flag and not value.is_leaf:
                raise CaptureError(
                    f"{self._name(at)} of {name_of(self.function)} was computed with gradients, which do not flow out of a captured "
                    "step: detach() it, or compute it within the step"
                )
            self.tensors.append(value)
            return value.descriptor, flag
        if isinstance(value, torch.Tensor):
            raise TypeError(
                f"{self._name(at)} of {name_of(self.function)} is a tensor of this process, {tuple(value.shape)} of {value.dtype}: give "
                "it to the mesh first, with share()"
            )
        try:
            hash(value)
        except TypeError:
            raise TypeError(
                f"{self._name(at)} of {name_of(self.function)} is a {kind.__name__}, which cannot be compared by hash: a captured step "
                "takes tensors of a mesh, values that can, and lists, tuples and dicts of them"
            ) from None
        return token(value) if kind in _FLAT else (kind, value)

    def arguments(self, tensors: list[Any]) -> tuple[Any, Any]:
        """Return the arguments with these in place of its tensors."""
        supply = iter(tensors)
        leaves = [next(supply) if isinstance(each, torch.Tensor) else each for each in self._leaves]
        if self._spec is None:
            return leaves, {}
        args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        return args, kwargs

    def distance(self, key: Any) -> int:
        """Return how much a call differs from one with that key."""
        if self._spec != key[0] or len(self.key[1]) != len(key[1]):
            return sys.maxsize
        pairs = [*zip(self.key[1], key[1], strict=True), *zip(self.key[2], key[2], strict=True)]
        return sum(now != then for now, then in pairs)

    def difference(self, key: Any) -> str | None:
        """Return how this call differs from one with that key."""
        if self._spec != key[0] or len(self.key[1]) != len(key[1]):
            return "the arguments are others, or in other lists and dicts"
        for at, (now, then) in enumerate(zip(self.key[1], key[1], strict=True)):
            if now != then:
                return f"{self._name(at)} was {_shown(then)}, is {_shown(now)}"
        for name, now, then in zip(_MODES, self.key[2], key[2], strict=True):
            if now != then:
                return f"{name} was {then}, is {now}"
        return None

    def _name(self, at: int) -> str:
        """Return a readable name of an argument."""
        args, kwargs = (
            (self._leaves, {}) if self._spec is None else pytree.tree_unflatten(self._leaves, self._spec)
        )
        try:
            bound: Any = dict(inspect.signature(self.function).bind(*args, **kwargs).arguments)
        except (TypeError, ValueError):
            bound = args
        paths = [path for path, _ in pytree.tree_flatten_with_path(bound)[0]]
        if len(paths) <= at:
            return f"argument {at}"
        first, *rest = paths[at]
        return f"argument {getattr(first, 'key', at)!r}{pytree.keystr(tuple(rest))}"


_MODES = (
    "grad mode",
    "inference mode",
    "autocast",
    "the type that autocast uses",
    "the default type",
    "activate()",
)


_AUTOCAST = ("cpu", *DEVICES)
"""The kinds of devices for which autocast may be on."""


def _modes() -> tuple[Any, ...]:
    """Return the global state on which PyTorch's behaviour depends."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        tuple([torch.is_autocast_enabled(kind) for kind in _AUTOCAST]),
        tuple([torch.get_autocast_dtype(kind) for kind in _AUTOCAST]),
        torch.get_default_dtype(),
        tuple(
            [
                (each.issuer.stream.procs, each.device) if isinstance(each, PerRank) else type(each)
                for each in _get_current_dispatch_mode_stack()
            ]
        ),
    )


def _shown(part: Any) -> str:
    if isinstance(part, tuple) and len(part) == 2:
        first, second = part
        if isinstance(first, Descriptor):
            return f"{first}{f' on {first.stream.procs}'}, strides {first.form[1]}" + (
                ", with gradient" if second else ""
            )
        return str(second) if isinstance(second, str) and first is not str else repr(second)
    return repr(part)


def _alias(tensor: Any) -> Any:
    """Return another name for an argument, by which the step's own references to it are distinguished."""
    with _disable_current_modes(), torch.no_grad():
        made = tensor.descriptor.stream.issuer.issue(torch.ops.aten.detach.default, (tensor,), None)
    return made.requires_grad_(tensor.requires_grad)
