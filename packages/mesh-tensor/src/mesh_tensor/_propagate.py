"""From a call of an operator to an instruction.

The form of results is worked out once per signature (operator, forms of the tensors, all other arguments) and remembered
with a template that the workers know. SIG-1: two calls of one signature differ in their tensors and numbers only.

VRS-1: each change of a tensor counts in its version, by which autograd knows that what it has kept was changed. PyTorch counts none of what operators on
lists do to tensors of ours, as optimizers use them.
"""

from __future__ import annotations

import logging
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast
from weakref import ref as weak

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.autograd.graph import increment_version
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import _disable_current_modes

from mesh_core import MeshError
from mesh_tensor._descriptors import HERE, Descriptor, form_of, strides_of
from mesh_tensor._errors import RanksDisagree, among, described
from mesh_tensor._instructions import HOLE, IN_PLACE_SHAPE, LIST, NUMBER, SPECIAL
from mesh_tensor._operators import OURS, Operator, describe
from mesh_tensor._stream import Ref, Stream, caller
from mesh_tensor._streams._guard import View, storage_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch._ops import OpOverload

    from mesh_tensor._tensor import MeshTensor

_FORMS_LOG = logging.getLogger("torch._subclasses.fake_tensor")
_COPY = torch.ops.aten.copy_.default
SMALL = 1 << 20
"""The most bytes of a tensor of this process that an operator gives to the mesh by itself."""
CACHED = 1 << 15
"""The most signatures that are remembered."""


class Hit:
    """What is known of a signature."""

    __slots__ = (
        "asks",
        "base",
        "bases",
        "known",
        "lists",
        "mode",
        "new",
        "one",
        "results",
        "shape",
        "template",
        "written",
    )

    def __init__(
        self,
        template: int,
        results: list[Descriptor | int | str | None],
        mode: int,
        lists: bool,
        asks: int = 0,
    ) -> None:
        self.template = template
        self.results = results
        self.mode = mode
        self.lists = lists
        self.new = sum(isinstance(each, Descriptor) for each in results)
        only = results[0] if len(results) == 1 and not lists and not mode else None
        self.one = only if isinstance(only, Descriptor) else None
        """The form of the one new tensor, if there is nothing else."""
        self.asks = asks
        """The number of results whose form only the workers can tell."""
        self.bases: tuple[int | None, ...] | None = None
        """For each new tensor, which of the given ones it shares memory with; ``None`` if none."""
        self.base: int | None = None
        """The same, if there is one tensor."""
        self.written: tuple[int, ...] = ()
        """Which of the given tensors are changed."""
        self.known: Any = None
        """What is no tensor, and follows from the forms alone: nobody is asked."""
        self.shape: Any = None
        """Of a function: its results with a hole for each tensor, and their structure."""


@dataclass(slots=True)
class Asked:
    """A call of an operator."""

    func: OpOverload | None
    operator: Operator
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: list[Any]
    scalars: list[Any]


@dataclass(frozen=True, slots=True)
class Named:
    """Stands for a tensor, without its form."""

    ref: Ref


class Mixed(Exception):
    """A tensor of this process is among the arguments."""


class Issuer:
    """Issues the operators of one mesh."""

    def __init__(self, stream: Stream, cls: type) -> None:
        self.stream = stream
        stream.issuer = self
        self.cls = cls
        self._operators: dict[int, tuple[Operator, OpOverload]] = {}
        """By the identity of PyTorch's operator, whose own hash costs more than to look it up; kept alive beside it."""
        self._cache: dict[tuple[Any, ...], Hit] = {}
        self._guard = stream.tensors.guard

    def clear(self) -> None:
        """Forget what the workers know, because they have forgotten it."""
        self._cache.clear()

    def issue(  # noqa: C901, PLR0912 - in one piece, as it is called for each operator
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any] | None
    ) -> Any:
        """Let the workers do it, and return mesh tensors for the results."""
        cls = self.cls
        stream = self.stream
        if stream.broken:
            stream.check()
        which = id(func)
        known = self._operators.get(which)
        if known is None:
            known = self._operators[which] = describe(func), func
        operator, _ = known
        numbers = operator.numbers
        tensors: list[Any] = []
        scalars: list[Any] = []
        key: list[Any] = [which]
        try:
            for place, each in enumerate(args):
                kind = type(each)
                if kind is cls:
                    key.append(each.descriptor)
                    tensors.append(each)
                elif (kind is float or kind is int) and place in numbers:
                    key.append(kind)
                    scalars.append(each)
                else:
                    key.append(self._part(each, tensors))
            if kwargs:
                for name, each in kwargs.items():
                    key.append(name)
                    kind = type(each)
                    if (kind is float or kind is int) and name in numbers:
                        key.append(kind)
                        scalars.append(each)
                    else:
                        key.append(self._part(each, tensors))
        except Mixed:
            self._check_changed(func, operator, args, kwargs)
            # What is copied into a tensor, as load_state_dict() does, may be of any size.
            return self.issue(func, *self._given(args, kwargs, SMALL if func is not _COPY else None))
        signature = tuple(key)
        hit = self._cache.get(signature) or self._propagate(
            signature, Asked(func, operator, args, kwargs or {}, tensors, scalars)
        )
        one = hit.one if not self._guard.on else self._guarded(func, tensors, hit)
        if one is None:
            return self._answer(hit, Asked(func, operator, args, kwargs or {}, tensors, scalars))
        # One new tensor, as in nearly all cases.
        if stream.let_go:
            stream.have(tensors)
        result = one.make()
        result.descriptor = one
        with stream.lock:
            ref = result.ref = stream.ref()
            stream.append(hit.template, ref.number, tensors, scalars, caller())
        if hit.base is not None:
            storage = ref.storage = storage_of(tensors[hit.base].ref)
            if storage.views is not None:
                storage.views.append(
                    View(weak(ref), hit.template, [Named(each.ref) for each in tensors], scalars)
                )
        return result

    def _answer(self, hit: Hit, asked: Asked) -> Any:
        if hit.known is not None:
            return hit.known
        return self._ask(hit, asked) if hit.asks else self._send(hit, asked)

    def _guarded(self, func: OpOverload, tensors: list[Any], hit: Hit) -> Descriptor | None:
        """Raise if the tensors may not be used so; return the form of the one new tensor, if there is nothing else."""
        self._guard.check(func, tensors, hit.written)
        return hit.one

    def _part(self, value: Any, tensors: list[Any]) -> Any:
        """Return the key of an argument in a signature."""
        kind = type(value)
        if kind is self.cls:
            tensors.append(value)
            return value.descriptor
        if kind is list or kind is tuple:
            return tuple([self._part(each, tensors) for each in value])
        if isinstance(value, torch.Tensor):
            raise Mixed
        return (kind, value) if kind in (float, bool, complex) else value

    def _check_changed(
        self, func: OpOverload, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any] | None
    ) -> None:
        """Refuse to change a tensor of this process: only its copy on the mesh would change."""
        for where in operator.changed:
            value = (kwargs or {}).get(where) if isinstance(where, str) else args[where : where + 1]
            if (stranger := self._stranger(value)) is not None:
                raise ValueError(
                    f"{func} would change a tensor of this process, {_form(stranger)}, by tensors of {self.stream.procs}: "
                    "give it to the mesh first, or fetch() the others"
                )

    def _given(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None, most: int | None) -> Any:
        """Give the mesh those tensors of this process that are small, such as numbers and indices: PyTorch makes many of them by itself."""

        def give(value: Any) -> Any:
            if isinstance(value, (list, tuple)):
                return type(value)(give(each) for each in value)
            if not isinstance(value, torch.Tensor) or type(value) is self.cls:
                return value
            if (why := self._why_not_given(value, most)) is not None:
                mine = among([args, kwargs or {}])
                # Not a TypeError: Python's operators would turn it into one of their own, which says nothing.
                raise ValueError(f"{why}" + ("" if mine is None else f". The other is {described(mine)}"))
            return self.share(value)

        return give(args), {name: give(each) for name, each in (kwargs or {}).items()}

    def _why_not_given(self, value: torch.Tensor, most: int | None) -> str | None:
        """Return why a tensor of this process must be given to the mesh by the script, if it must."""
        where, how = self._place()
        if value.dim() and value.requires_grad and torch.is_grad_enabled():
            why = "it has a gradient here, which would not come back"
        elif value.dim() and most is not None and value.nbytes > most:
            why = f"it has {value.nbytes:,} bytes, and only up to {most:,} are sent with an operator"
        else:
            return None
        return f"a tensor of this process, {_form(value)}, meets tensors of {where}, and {why}: give it to the mesh first, with {how}"

    def _where(self) -> object:
        """Return what has this issuer's tensors, for messages."""
        return self.stream.procs

    def _how_to_meet(self, _: MeshTensor) -> str:
        """Return what to do about a tensor of another mesh."""
        return "Move them to one first, with to_mesh()."

    def _place(self) -> tuple[object, str]:
        """Return the mesh, and how a tensor is given to it."""
        return self.stream.procs, "share()"

    def _stranger(self, value: Any) -> torch.Tensor | None:
        """Return a tensor of this process that is among these."""
        if isinstance(value, (list, tuple)):
            return next((found for each in value if (found := self._stranger(each)) is not None), None)
        return value if isinstance(value, torch.Tensor) and type(value) is not self.cls else None

    def share(self, value: torch.Tensor) -> Any:
        """Give all processes of the mesh the same tensor."""
        if self.stream.tensors.recorders:
            self.stream.tensors.recorded(lambda recorder: recorder.shares(value))
        value = value.detach()
        if not value.is_contiguous():
            value = value.contiguous()
        shape, strides, _, dtype, device = form_of(value)
        descriptor = self.stream.descriptor((shape, strides, 0, dtype, self.home(device)))
        ref, frame = self.stream.put(value), caller()
        ref.at = frame.f_code, frame.f_lasti
        return self._made(descriptor, ref)

    def home(self, device: torch.device) -> torch.device:
        """Return where the processes have what lies in this process on that device: there, too."""
        return device

    def special(
        self,
        name: str,
        made: tuple[tuple[int, ...], torch.dtype] | None,
        tensors: tuple[Any, ...],
        always: tuple[Any, ...],
        *key: Any,
    ) -> Any:
        """Let the workers call one of our functions: `key` stands for `always`, which the template has."""
        self.stream.check()
        if self._guard.on:
            self._guard.check(name, tensors)
        signature = (name, *[each.descriptor for each in tensors], *key)
        hit = self._cache.get(signature)
        if hit is None:
            results: list[Any] = []
            if made is not None:
                shape, dtype = made
                device = tensors[0].descriptor.form[4] if tensors else torch.device("cpu")
                results = [self.stream.descriptor((shape, strides_of(shape), 0, dtype, device))]
            arguments = [*[HOLE] * len(tensors), *always]
            template = self.stream.teach(
                ((SPECIAL, name, ""), None), arguments, {}, len(tensors), len(results), 0, ()
            )
            hit = self._remember(signature, Hit(template, results, 0, False))
        return self._send(hit, Asked(None, OURS, tensors, {}, list(tensors), []))

    def results(self, whole: Any) -> Any:
        """Wait for the forms of a function's results, and name each."""
        shape, told = self.stream.agreed("results", whole.ref.number)
        values = [
            self.special("result", (tuple(what[0]), what[3]), (whole,), (place,), what, place)
            if kind == "form"
            else what
            for place, (kind, what) in enumerate(told)
        ]
        return shape.filled(values)

    def function(
        self, key: tuple[Any, ...], learn: Callable[[], Hit], tensors: list[Any], *scalars: Any
    ) -> tuple[Hit, list[Any]]:
        """Let the workers do something that `learn` teaches them if its signature is new; return that and the results."""
        self.stream.check()
        if self._guard.on:
            self._guard.check(key[0], tensors)
        hit = self._cache.get(key)
        if hit is None:
            hit = self._remember(key, learn())
        made: list[Any] = self._send(hit, Asked(None, OURS, tuple(tensors), {}, tensors, list(scalars)))
        return hit, made

    def use_device(self, kind: str) -> list[tuple[str, str, bool]]:
        """Let each process use its device of that kind; return the host, its name there, and whether it has a backend for collectives."""
        stream = self.stream
        found = stream.devices.get(kind)
        if found is None:
            with _disable_current_modes():
                told = [(point, answer[1]) for point, answer in stream.wait(stream.ask("device", kind))]
            for point, answer in told:
                if isinstance(answer, str):
                    raise MeshError(f"{point} of {stream.procs} cannot have tensors on {kind!r}: {answer}")
            found = stream.devices[kind] = [answer for _, answer in told]
        return found

    def alias(self, tensor: MeshTensor) -> Any:
        """Name a tensor of another mesh that these processes have too (STM-4)."""
        if self._guard.on:
            self._guard.check("slice_mesh", [tensor])
        self.stream.link(tensor.descriptor.stream)

        def learn() -> Hit:
            template = self.stream.teach(((SPECIAL, "alias", ""), None), [HOLE], {}, 1, 1, LIST, ())
            return Hit(template, [self.stream.descriptor(tensor.descriptor.form)], 0, True)

        _, (made,) = self.function(("alias", tensor.descriptor), learn, [tensor])
        made.ref.storage = storage_of(tensor.ref)
        self.stream.flush()  # before the tensor can be freed
        return made

    def named(self, descriptor: Descriptor, ref: Ref) -> Any:
        """Return the mesh tensor for a tensor that the processes have, or will have."""
        return self._made(descriptor, ref)

    def _made(self, descriptor: Descriptor, ref: Ref) -> Any:
        result = descriptor.make()
        result.descriptor = descriptor
        result.ref = ref
        return result

    def _send(self, hit: Hit, asked: Asked) -> Any:
        stream = self.stream
        with stream.lock:
            made = [stream.ref() for _ in range(hit.new)]
            stream.append(hit.template, made[0].number if made else 0, asked.tensors, asked.scalars, caller())
        if hit.bases is not None:
            _share(hit.bases, made, asked.tensors)
        for where in asked.operator.changed_lists:
            for each in asked.kwargs.get(where, ()) if isinstance(where, str) else asked.args[where]:
                if not each.is_inference():
                    increment_version(each)
        results = hit.results
        if hit.one is not None:
            return self._made(hit.one, made[0])
        if len(results) == 1 and not hit.lists:
            (what,) = results
            if isinstance(what, Descriptor):
                return _reshaped(asked, what, made[0])
            return _argument(what, asked)
        supply = iter(made)
        out = [
            self._made(what, next(supply)) if isinstance(what, Descriptor) else _argument(what, asked)
            for what in results
        ]
        if hit.lists:
            return out
        return tuple(out) if out else None

    def _ask(self, hit: Hit, asked: Asked) -> Any:
        """Wait for results whose form depends on values."""
        stream = self.stream
        with stream.lock:
            made = [stream.ref() for _ in range(hit.asks)]
            stream.append(hit.template, made[0].number, asked.tensors, asked.scalars, caller())
        try:
            told = stream.agreed("forms", [each.number for each in made])
        except RanksDisagree as error:
            given = f" of {described(asked.tensors[0])}" if asked.tensors else ""
            raise RanksDisagree(f"{asked.func}{given}: {error}") from None
        out = [
            self._made(stream.descriptor(what), ref) if kind == "form" else what
            for ref, (kind, what) in zip(made, told, strict=True)
        ]
        return out[0] if len(out) == 1 else tuple(out)

    def _propagate(self, signature: tuple[Any, ...], asked: Asked) -> Hit:
        """Compute the forms of the results, and teach the workers a template."""
        func, operator = asked.func, asked.operator
        assert func is not None
        if self._guard.on:
            self._guard.check(func, asked.tensors)
        streams = {each.descriptor.stream for each in asked.tensors} - {self.stream}
        if streams:
            mine = next(each for each in asked.tensors if each.descriptor.stream is self.stream)
            other = next(each for each in asked.tensors if each.descriptor.stream is not self.stream)
            raise ValueError(
                f"{func}: one of its tensors is on {self._where()}, another on {other.descriptor.stream.issuer._where()}; "  # noqa: SLF001 - of this class
                f"an operator works on one mesh. {self._how_to_meet(other)} They are:\n  {described(mine)}\n  {described(other)}"
            )
        known: dict[int, torch.Tensor] = {}
        with fakes():
            made = [fake(each, known, self.cls) for each in asked.args]
            named = {name: fake(each, known, self.cls) for name, each in asked.kwargs.items()}
            try:
                found = func(*made, **named)
            except (DataDependentOutputException, DynamicOutputShapeException):
                count = len(func._schema.returns)  # noqa: SLF001
                template = self._teach(asked, count, 0)
                return self._remember(signature, Hit(template, [], 0, operator.lists, count))
        if isinstance(found, (bool, int, float)):
            hit = self._remember(signature, Hit(0, [], 0, False))
            hit.known = found
            return hit
        results = list(found) if isinstance(found, (list, tuple)) else [] if found is None else [found]
        said: list[Descriptor | int | str | None] = []
        for place, each in enumerate(results):
            written = (
                operator.written[place] if not operator.lists and place < len(operator.written) else None
            )
            if written is not None and not operator.changes_shape_in_place:
                said.append(written)
            elif isinstance(each, torch.Tensor):
                said.append(self.stream.descriptor(form_of(each)))
            else:
                said.append(None)
        new = sum(isinstance(each, Descriptor) for each in said)
        mode = IN_PLACE_SHAPE if operator.changes_shape_in_place else LIST if operator.lists else 0
        for what in said:
            if isinstance(what, Descriptor) and what.form[4].type not in HERE:
                self.use_device(what.form[4].type)
        template = self._teach(asked, new, mode)
        hit = Hit(template, said, mode, operator.lists)
        made_new = [each for each, what in zip(results, said, strict=True) if isinstance(what, Descriptor)]
        hit.bases = bases([known[id(each)] for each in asked.tensors], made_new)
        hit.base = hit.bases[0] if hit.bases is not None and hit.one is not None else None
        hit.written = _written(asked)
        return self._remember(signature, hit)

    def _remember(self, signature: tuple[Any, ...], hit: Hit) -> Hit:
        if len(self._cache) >= CACHED:
            self.stream.unlearn([each.template for each in self._cache.values()])
            self._cache.clear()
        self._cache[signature] = hit
        return hit

    def _teach(self, asked: Asked, new: int, mode: int) -> int:
        operator = asked.operator
        numbers = operator.numbers
        args, kwargs = _waited_for(asked)
        return self.stream.teach(
            (operator.name, operator.module),
            [_hole(each, place in numbers, self.cls) for place, each in enumerate(args)],
            {name: _hole(each, name in numbers, self.cls) for name, each in kwargs.items()},
            len(asked.tensors),
            new,
            mode,
            tuple(each is not None for each in operator.written) if mode != IN_PLACE_SHAPE else (),
        )


def _waited_for(asked: Asked) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of an operator that does not end before its result is there.

    Nobody in the processes could wait for what `non_blocking=True` leaves behind; the script does not wait in any case.
    """
    assert asked.func is not None
    names = [each.name for each in asked.func._schema.arguments]  # noqa: SLF001 - as the whole of PyTorch reads it
    if "non_blocking" not in names:
        return asked.args, asked.kwargs
    args = tuple(
        [False if name == "non_blocking" else each for name, each in zip(names, asked.args, strict=False)]
    )
    return args, {name: each for name, each in asked.kwargs.items() if name != "non_blocking"}


def bases(given: list[torch.Tensor], made: list[torch.Tensor]) -> tuple[int | None, ...] | None:
    """Find out, without values, which of the given tensors each of the new ones shares memory with."""
    homes = {_home(each): at for at, each in enumerate(given)}
    homes.pop(None, None)
    found = tuple([homes.get(_home(each)) for each in made])
    return None if all(each is None for each in found) else found


def _home(tensor: torch.Tensor) -> Any:
    # Those of other layouts have no memory of their own, only that of their parts.
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else None  # noqa: SLF001 - its identity


def _written(asked: Asked) -> tuple[int, ...]:
    """Return which of the tensors are changed, in the order in which they are counted."""

    def count(value: Any) -> int:
        if isinstance(value, (list, tuple)):
            return sum(map(count, value))
        return 1 if any(value is each for each in asked.tensors) else 0

    found: list[int] = []
    at = 0
    for where, value in (*enumerate(asked.args), *asked.kwargs.items()):
        behind = at + count(value)
        if where in asked.operator.changed:
            found.extend(range(at, behind))
        at = behind
    return tuple(found)


def _share(bases: tuple[int | None, ...], made: list[Ref], tensors: list[Any]) -> None:
    """Note which of the new tensors share memory with given ones."""
    for ref, at in zip(made, bases, strict=True):
        if at is not None:
            ref.storage = storage_of(tensors[at].ref)


def _form(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} of {tensor.dtype}"


@contextmanager
def fakes() -> Iterator[None]:
    """Compute forms only, whatever modes are active."""
    here = threading.get_ident()

    def is_of_others(record: logging.LogRecord) -> bool:
        return record.thread != here

    # PyTorch logs what it raises, with its own frames.
    _FORMS_LOG.addFilter(is_of_others)
    try:
        with _disable_current_modes(), FakeTensorMode():
            yield
    finally:
        _FORMS_LOG.removeFilter(is_of_others)


def _reshaped(asked: Asked, to: Descriptor, ref: Ref) -> Any:
    """Give the tensor itself another form from now on."""
    tensor = asked.args[0]
    assert asked.func is not None
    with no_dispatch():
        asked.func(*asked.args, **asked.kwargs)
    tensor.descriptor = to
    tensor.ref = ref
    return tensor


def _argument(where: int | str | None, asked: Asked) -> Any:
    """Return the argument that is the result."""
    if where is None:
        return None
    return asked.args[where] if isinstance(where, int) else asked.kwargs[where]


def fake(value: Any, made: dict[int, torch.Tensor], cls: type) -> Any:
    """Return the same with a tensor without memory for each mesh tensor. Within a fake mode."""
    if isinstance(value, cls):
        found = made.get(id(value))
        if found is None:
            shape, strides, offset, dtype, device = cast("MeshTensor", value).descriptor.form
            size = offset + (
                0 if 0 in shape else 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
            )
            base = torch.empty(size, dtype=dtype, device=device)
            found = made[id(value)] = torch.as_strided(base, shape, strides, offset)
        return found
    if isinstance(value, (list, tuple)):
        return type(value)(fake(each, made, cls) for each in value)
    return value


def _hole(value: Any, is_number: bool, cls: type) -> Any:
    if type(value) is cls:
        return HOLE
    if is_number and type(value) in (float, int):
        return NUMBER
    if isinstance(value, (list, tuple)):
        return [_hole(each, False, cls) for each in value]
    return value
