"""From a call of an operator to an instruction.

The form of results is worked out once per signature (operator, forms of the tensors, all other arguments) and remembered
with a template that the workers know. SIG-1: two calls of one signature differ in their tensors and numbers only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.utils._mode_utils import no_dispatch

from mesh_tensor._descriptors import Descriptor, form_of, strides_of
from mesh_tensor._errors import RanksDisagree, among, described
from mesh_tensor._extension import HOLE, IN_PLACE_SHAPE, LIST, NUMBER, SPECIAL
from mesh_tensor._operators import OURS, Operator, describe
from mesh_tensor._stream import Ref, Stream, caller

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch._ops import OpOverload

    from mesh_tensor._tensor import MeshTensor

CACHED = 1 << 15
"""Signatures that are remembered at most."""


class Hit:
    """What is known of a signature."""

    __slots__ = ("asks", "lists", "mode", "new", "one", "results", "shape", "template")

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
        """The form of the one tensor that is made, if that is all there is to it."""
        self.asks = asks
        """So many results have a form that only the workers can tell."""
        self.shape: Any = None
        """Of a function: its results with a hole for each tensor, and how they belong together."""


@dataclass(slots=True)
class Asked:
    """A call of an operator."""

    func: OpOverload | None
    operator: Operator
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: list[Any]
    scalars: list[Any]


class Mixed(Exception):
    """A tensor of this process is among the arguments."""


class Issuer:
    """Issues the operators of one mesh."""

    def __init__(self, stream: Stream, cls: type) -> None:
        self.stream = stream
        stream.issuer = self
        self.cls = cls
        self._operators: dict[Any, Operator] = {}
        self._cache: dict[tuple[Any, ...], Hit] = {}

    def clear(self) -> None:
        """Forget what the workers know: they do not any longer."""
        self._cache.clear()

    def issue(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        """Have the workers do it, and return what stands for the results."""
        cls = self.cls
        stream = self.stream
        if stream.broken:
            stream.check()
        operator = self._operators.get(func)
        if operator is None:
            operator = self._operators[func] = describe(func)
        numbers = operator.numbers
        tensors: list[Any] = []
        scalars: list[Any] = []
        key: list[Any] = [func]
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
            return self.issue(func, *self._given(args, kwargs))
        signature = tuple(key)
        hit = self._cache.get(signature)
        if hit is None:
            hit = self._propagate(signature, Asked(func, operator, args, kwargs or {}, tensors, scalars))
        one = hit.one
        if one is None:
            asked = Asked(func, operator, args, kwargs or {}, tensors, scalars)
            return self._ask(hit, asked) if hit.asks else self._send(hit, asked)
        # One new tensor, as nearly always.
        result = one.make()
        result.descriptor = one
        with stream.lock:
            ref = result.ref = stream.ref()
            stream.append(hit.template, ref.number, tensors, scalars, caller())
        return result

    def _part(self, value: Any, tensors: list[Any]) -> Any:
        """Return what stands for an argument in a signature."""
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
        """Refuse to change a tensor of this process: it would be a copy on the mesh that changes."""
        for where in operator.changed:
            value = (kwargs or {}).get(where) if isinstance(where, str) else args[where : where + 1]
            if (stranger := self._stranger(value)) is not None:
                raise ValueError(
                    f"{func} would change a tensor of this process, {_form(stranger)}, by tensors of {self.stream.procs}: "
                    "give it to the mesh first, or fetch() the others"
                )

    def _given(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        """Give the mesh those tensors of this process that are single numbers, as PyTorch does between devices."""

        def give(value: Any) -> Any:
            if isinstance(value, (list, tuple)):
                return type(value)(give(each) for each in value)
            if not isinstance(value, torch.Tensor) or type(value) is self.cls:
                return value
            if value.dim():
                # No TypeError: of that Python's operators make one of their own, which says nothing.
                mine = among([args, kwargs or {}])
                raise ValueError(
                    f"a tensor of this process, {_form(value)}, meets tensors of {self.stream.procs}: give it to the mesh first, with "
                    f"share()" + ("" if mine is None else f". The other is {described(mine)}")
                )
            return self.share(value)

        return give(args), {name: give(each) for name, each in (kwargs or {}).items()}

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
        descriptor = self.stream.descriptor((shape, strides, 0, dtype, device))
        ref, frame = self.stream.put(value), caller()
        ref.at = frame.f_code, frame.f_lasti
        return self._made(descriptor, ref)

    def special(
        self,
        name: str,
        made: tuple[tuple[int, ...], torch.dtype] | None,
        tensors: tuple[Any, ...],
        always: tuple[Any, ...],
        *key: Any,
    ) -> Any:
        """Have the workers do something of ours: `key` stands for `always`, which the template has."""
        self.stream.check()
        signature = (name, *[each.descriptor for each in tensors], *key)
        hit = self._cache.get(signature)
        if hit is None:
            results: list[Any] = []
            if made is not None:
                shape, dtype = made
                device = tensors[0].device if tensors else torch.device("cpu")
                results = [self.stream.descriptor((shape, strides_of(shape), 0, dtype, device))]
            arguments = [*[HOLE] * len(tensors), *always]
            template = self.stream.teach(
                ((SPECIAL, name, ""), None), arguments, {}, len(tensors), len(results), 0, ()
            )
            hit = self._remember(signature, Hit(template, results, 0, False))
        return self._send(hit, Asked(None, OURS, tensors, {}, list(tensors), []))

    def function(
        self, key: tuple[Any, ...], learn: Callable[[], Hit], tensors: list[Any], *scalars: Any
    ) -> tuple[Hit, list[Any]]:
        """Have the workers do something that `learn` teaches them when its signature is new; returns that and the results."""
        self.stream.check()
        hit = self._cache.get(key)
        if hit is None:
            hit = self._remember(key, learn())
        made: list[Any] = self._send(hit, Asked(None, OURS, tuple(tensors), {}, tensors, list(scalars)))
        return hit, made

    def alias(self, tensor: MeshTensor) -> Any:
        """Name a tensor of another mesh that these processes have, too (STM-4)."""
        self.stream.link(tensor.descriptor.stream)

        def learn() -> Hit:
            template = self.stream.teach(((SPECIAL, "alias", ""), None), [HOLE], {}, 1, 1, LIST, ())
            return Hit(template, [self.stream.descriptor(tensor.descriptor.form)], 0, True)

        _, (made,) = self.function(("alias", tensor.descriptor), learn, [tensor])
        self.stream.flush()  # before the tensor can be let go of
        return made

    def named(self, descriptor: Descriptor, ref: Ref) -> Any:
        """Return what stands for a tensor that the processes have, or will have."""
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
        """Work the forms of the results out, and teach the workers a template."""
        func, operator = asked.func, asked.operator
        assert func is not None
        streams = {each.descriptor.stream for each in asked.tensors} - {self.stream}
        if streams:
            mine = next(each for each in asked.tensors if each.descriptor.stream is self.stream)
            other = next(each for each in asked.tensors if each.descriptor.stream is not self.stream)
            how = "fetch() and distribute()" if getattr(self.cls, "is_global", False) else "to_mesh()"
            raise ValueError(
                f"{func}: one of its tensors is on {self.stream.procs}, another on {other.descriptor.stream.procs}; an operator works "
                f"on one mesh. Move them to one first, with {how}. They are:\n  {described(mine)}\n  {described(other)}"
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
        template = self._teach(asked, new, mode)
        return self._remember(signature, Hit(template, said, mode, operator.lists))

    def _remember(self, signature: tuple[Any, ...], hit: Hit) -> Hit:
        if len(self._cache) >= CACHED:
            self.stream.unlearn([each.template for each in self._cache.values()])
            self._cache.clear()
        self._cache[signature] = hit
        return hit

    def _teach(self, asked: Asked, new: int, mode: int) -> int:
        operator = asked.operator
        numbers = operator.numbers
        return self.stream.teach(
            (operator.name, operator.module),
            [_hole(each, place in numbers, self.cls) for place, each in enumerate(asked.args)],
            {name: _hole(each, name in numbers, self.cls) for name, each in asked.kwargs.items()},
            len(asked.tensors),
            new,
            mode,
            tuple(each is not None for each in operator.written) if mode != IN_PLACE_SHAPE else (),
        )


def _form(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} of {tensor.dtype}"


def fakes() -> Any:
    """Work out forms only, whatever is active."""
    from contextlib import ExitStack

    from torch.utils._python_dispatch import _disable_current_modes

    stack = ExitStack()
    stack.enter_context(_disable_current_modes())
    stack.enter_context(FakeTensorMode())
    return stack


def _reshaped(asked: Asked, to: Descriptor, ref: Ref) -> Any:
    """Have the tensor itself be of another form from now on."""
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
    """Return the same with a tensor without memory for each of a mesh. Within a fake mode."""
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
