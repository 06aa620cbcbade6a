"""What operators on tensors of a mesh do with this process's parts: operators on local tensors, and collectives, noted as a program.

Captured steps note runs of operators so, on tensors without values (`_sharded.py`); the flat loop notes single ones, as they are carried out
(`_decisions.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch._ops import OpOverload
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from mesh_tensor._instructions import HOLE, LIST, Failed, Template
from mesh_tensor._replay._compiled import arguments, places_of, roots_of, written_by
from mesh_tensor._torch._keys import resolving

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mesh_tensor._replay._compiled import Step


class Untraceable(Exception):
    """An operator does something that cannot be noted as operators on local tensors."""


class Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes which operators are carried out on tensors that are not DTensors."""

    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps: list[Step] = []
        self.origins: list[int] = []
        """Of each: which operator of the run it belongs to."""
        self.forms: dict[int, tuple[Any, Any, Any, Any]] = {}
        self.refs: dict[int, int] = {}
        self.now = 0
        self._alive: list[torch.Tensor] = []
        for each in inputs:
            self._name(each)

    def _name(self, tensor: torch.Tensor) -> int:
        """Give a number to a tensor that is new."""
        ref = self.refs[id(tensor)] = len(self._alive)
        # Keeps it alive, so that no other tensor gets its identity.
        self._alive.append(tensor)
        self.forms[ref] = tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device
        return ref

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, (DTensor, AsyncCollectiveTensor)) for each in types):
            # They are carried out with this mode still active.
            return NotImplemented
        kwargs = kwargs or {}
        with resolving():
            result = func(*args, **kwargs)
        self._note(func, args, kwargs, result)
        return result

    def _note(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        values = list(result) if isinstance(result, (list, tuple)) else [result]
        tensors = [each for each in values if isinstance(each, torch.Tensor)]
        if not isinstance(func, OpOverload):
            raise Untraceable(f"{func} is no operator")
        if not tensors and not func._schema.is_mutable:  # noqa: SLF001 - as the whole of PyTorch reads it
            # A question about a form.
            return
        refs: list[int] = []
        outline = [self._hole(each, refs) for each in args]
        named = {name: self._hole(each, refs) for name, each in kwargs.items()}
        is_new = [isinstance(each, torch.Tensor) and id(each) not in self.refs for each in values]
        made = [self._name(each) for each, new in zip(values, is_new, strict=True) if new]
        namespace, _, name = func._schema.name.partition("::")  # noqa: SLF001 - likewise
        what = ((namespace, name, func._overloadname), None)  # noqa: SLF001 - likewise
        mode = LIST if isinstance(result, list) else 0
        template = Template(
            (what, outline, named, len(refs), len(made), mode, tuple(not each for each in is_new)), func
        )
        self.steps.append((template, made[0] if made else 0, refs))
        self.origins.append(self.now)

    def _hole(self, value: Any, refs: list[int]) -> Any:
        """Return the place of an argument in a template."""
        if isinstance(value, torch.Tensor):
            ref = self.refs.get(id(value))
            if ref is None:
                raise Untraceable("it uses a tensor that is made anew each time")
            refs.append(ref)
            return HOLE
        if isinstance(value, (list, tuple)):
            return [self._hole(each, refs) for each in value]
        return value


class Program:
    """Steps on this process's parts, and what they give."""

    def __init__(self, tracer: Tracer, count: int) -> None:
        self.count = count
        """Of its inputs, which have the first numbers."""
        self.steps = tracer.steps
        self._origins = tracer.origins
        self._forms = tracer.forms
        self.results: list[tuple[int, Any]] = []
        """Of each result: which local tensor and which layout; or without a layout the input that it is, or, counted from -1 downwards, the
        earlier result."""
        self.ends: list[int] = []
        """The local tensors that are given back."""
        self.roots = roots_of(self.steps)
        written = (self.root(ref) for template, _, refs in self.steps for ref in written_by(template, refs))
        self.written = [ref for ref in dict.fromkeys(written) if ref < self.count]
        """Places of the inputs that it writes to."""

    def gives(self, inputs: Sequence[Any], wholes: Sequence[Any], refs: Sequence[int | None]) -> None:
        """Say what the results are."""
        places = {id(each): at for at, each in enumerate(inputs)}
        for at, (whole, ref) in enumerate(zip(wholes, refs, strict=True)):
            known = places.setdefault(id(whole), -1 - at)
            if known != -1 - at:
                self.results.append((known, None))
                continue
            assert ref is not None, "every tensor that it makes is seen"
            self.results.append((len(self.ends), whole._spec))  # noqa: SLF001 - its layout
            self.ends.append(ref)

    def failures(self, failed: dict[int, Failed]) -> list[Failed | None]:
        """Return why the results have failed, those that have."""
        found: list[Failed | None] = []
        for what, spec in self.results:
            if spec is not None:
                found.append(failed.get(self.ends[what]))
            else:
                found.append(failed.get(what) if what >= 0 else found[-1 - what])
        return found

    def rest(  # noqa: PLR0917 - the state of a program that has begun
        self,
        at: int,
        env: dict[int, Any],
        failed: dict[int, Failed],
        raised: Exception | None,
        why: Callable[[int, Exception], Failed],
        numbers: Sequence[Any] = (),
    ) -> tuple[Sequence[Any], dict[int, Failed]]:
        """Carry out the steps from one on, one by one, with zeros of the same form in place of what has failed (RGN-2); that one has perhaps `raised`."""
        for place in range(at, len(self.steps)):
            self._one(place, env, failed, raised, why, numbers)
            raised = None
        return [env[ref] for ref in self.ends], failed

    def _one(  # noqa: PLR0917 - likewise
        self,
        at: int,
        env: dict[int, Any],
        failed: dict[int, Failed],
        raised: Exception | None,
        say: Callable[[int, Exception], Failed],
        numbers: Sequence[Any],
    ) -> None:
        """Carry one step out; if it has `raised` already, only what follows from that."""
        template, out, refs = self.steps[at]
        made = range(out, out + template.out)
        why = next((failed[ref] for ref in refs if ref in failed), None)
        try:
            if raised is not None:
                raise raised
            args, kwargs = arguments(template, [env[ref] for ref in refs], list(numbers))
            result: Any = template.func(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - kept, for whoever asks
            why = why or say(at, error)
            env.update((ref, self.zeros(ref)) for ref in made)
        else:
            places = places_of(template, result)
            env.update(
                zip(made, [result] if places is None else [result[each] for each in places], strict=True)
            )
        if why is not None:
            written = written_by(template, refs)
            for ref in (*made, *written, *map(self.root, written)):
                failed.setdefault(ref, why)

    def root(self, ref: int) -> int:
        """Return the tensor whose memory one is in."""
        return self.roots.get(ref, ref)

    def zeros(self, ref: int) -> torch.Tensor:
        """Return something of that form."""
        shape, strides, dtype, device = self._forms[ref]
        return torch.empty_strided(shape, strides, dtype=dtype, device=device).zero_()


def local_of(tensor: Any) -> Any:
    """Return this process's part of a tensor that exists here."""
    local = tensor._local_tensor  # noqa: SLF001 - without a copy
    if isinstance(local, AsyncCollectiveTensor):
        local = local.trigger_wait()  # type: ignore[no-untyped-call]
    return local
