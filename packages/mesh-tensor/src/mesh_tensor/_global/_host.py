"""Tensors of a mesh that are in the memory of its hosts, beside a mesh whose tensors are on devices: parameters that are offloaded.

OFF-1: copies between the two memories are asynchronous. In the processes, nothing is done with tensors in the host's memory, views aside, before all copies
that were asked for have happened: those that come have no values yet, those that go must not change. This process says so, ahead of the first
operator that follows copies, so that all processes wait at the same place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import _disable_current_modes

from mesh_tensor._descriptors import strides_of
from mesh_tensor._global._tensor import GlobalIssuer, GlobalStream, GlobalTensor, gathered, gathered_values
from mesh_tensor._instructions import HOLE, LIST, SPECIAL
from mesh_tensor._propagate import Hit
from mesh_tensor._stream import caller
from mesh_tensor._streams._guard import storage_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch._ops import OpOverload
    from torch.distributed.tensor.placement_types import Placement

    from mesh_core import Future, ProcMesh, ValueMesh
    from mesh_tensor._global._mesh import HostMesh, Mesh

Placements = tuple["Placement", ...]
_DETACH = torch.ops.aten.detach.default
_COPY = "copy between memories"
LAID_OUT = "_mesh_laid_out"
"""The attribute of a gradient that has the layout of its parameter already."""
_HERE = "_mesh_on_device"
"""The attribute of a parameter with its copy on the device, and which version of the parameter that is a copy of."""


class HostIssuer(GlobalIssuer):
    """Issues operators on tensors in the memory of the hosts, once these have their values (OFF-1)."""

    stream: HostStream

    def issue(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        """Let the workers do it."""
        _refuse_capture(self.stream)
        if self.stream.is_copying and func is not _DETACH:
            self.stream.settle()
        result = super().issue(func, args, kwargs)
        for where in self._operators[id(func)][0].changed:
            if isinstance(where, str):
                _count_writes((kwargs or {}).get(where))
            elif where < len(args):
                _count_writes(args[where])
        return result

    def special(self, name: str, *rest: Any) -> Any:
        """Let the workers call one of our functions."""
        _refuse_capture(self.stream)
        if self.stream.is_copying:
            self.stream.settle()
        return super().special(name, *rest)

    def function(
        self, key: tuple[Any, ...], learn: Callable[[], Hit], tensors: list[Any], *scalars: Any
    ) -> tuple[Hit, list[Any]]:
        """Let the workers do something."""
        if self.stream.is_copying and key[0] != _COPY:
            self.stream.settle()
        return super().function(key, learn, tensors, *scalars)


class HostStream(GlobalStream):
    """Messages about tensors in the memory of the hosts."""

    issuer_class = HostIssuer
    is_copying = False
    """Copies from and to devices were issued, and nothing after them that waits."""

    def join(self) -> None:
        """Have the processes meet."""
        self._settling: int | None = None
        self.is_copying = False
        super().join()

    def settle(self) -> None:
        """Let the processes wait for all copies."""
        with self.lock, _disable_current_modes():
            self.check()
            if not self.is_copying:
                return
            if self._settling is None:
                self._settling = self.teach(((SPECIAL, "settle", ""), None), [], {}, 0, 0, 0, ())
            self.append(self._settling, 0, [], [], caller())
            self.is_copying = False

    def ask(self, *question: Any, of: ProcMesh | None = None) -> Future[ValueMesh[Any]]:
        """Ask the processes something, once tensors have their values."""
        if self.is_copying:
            self.settle()
        return super().ask(*question, of=of)


def pinned(tensor: GlobalTensor, mesh: Mesh) -> GlobalTensor:
    """Return a tensor in the memory of the hosts once more, where devices of a mesh read and write by themselves."""
    issuer = tensor.mesh.issuer
    kind = mesh.device.type
    made: GlobalTensor = issuer.special("pin", (tuple(tensor.shape), tensor.dtype), (tensor,), (kind,), kind)
    return made


def copied(tensors: Sequence[Any], to: Mesh, placements: tuple[Placements, ...]) -> list[Any]:
    """Return copies in the other memory, with these layouts; without gradients. Nobody waits for that (OFF-1)."""
    source, target = tensors[0].descriptor.stream, to.issuer.stream
    host = target if isinstance(target, HostStream) else source
    assert isinstance(host, HostStream), "one of them is"
    with source.lock, _disable_current_modes():
        source.check()
        target.check()
        target.link(source)

        def learn() -> Hit:
            made: list[Any] = [
                target.descriptor(
                    (tuple(each.shape), strides_of(tuple(each.shape)), 0, each.dtype, to.device)
                )
                for each in tensors
            ]
            what = "take" if target is host else "bring"
            arguments = [*[HOLE] * len(tensors), source.number, placements]
            template = target.teach(
                ((SPECIAL, what, ""), None), arguments, {}, len(tensors), len(made), LIST, ()
            )
            return Hit(template, made, 0, True)

        key = (_COPY, source.number, placements, *[each.descriptor for each in tensors])
        _, made = to.issuer.function(key, learn, list(tensors))
        target.flush()  # before a tensor can be freed
        host.is_copying = True
    return made


class _OnDevice(torch.autograd.Function):
    """Parameters are copied to devices, and their gradients back."""

    @staticmethod
    def forward(ctx: Any, mesh: Mesh, placements: tuple[Placements, ...], *parameters: Any) -> Any:
        ctx.host, ctx.placements = parameters[0].mesh, placements
        ctx.set_materialize_grads(False)
        return tuple(_on_device(parameters, mesh, placements))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        # All of a unit at once: their sums travel together, and so do their copies.
        given = [(place, each) for place, each in enumerate(grads) if each is not None]
        found: list[Any] = [None] * len(grads)
        if given:
            wanted = tuple([ctx.placements[place] for place, _ in given])
            made = copied([each for _, each in given], ctx.host, wanted)
            for (place, _), each in zip(given, made, strict=True):
                setattr(each, LAID_OUT, True)
                found[place] = each
        return None, None, *found


def _on_device(parameters: Sequence[Any], mesh: Mesh, placements: tuple[Placements, ...]) -> list[Any]:
    """Return parameters on devices: copies that are there already, if they are still equal."""
    host: HostMesh = parameters[0].mesh
    _refuse_capture(host.issuer.stream)
    if not host.keeps_copies:
        return copied(parameters, mesh, placements)
    found: dict[int, Any] = {}
    old: list[tuple[int, Any]] = []
    for place, each in enumerate(parameters):
        kept = each.__dict__.get(_HERE)
        if kept is not None and kept[0] == _state(each):
            found[place] = kept[1]
        else:
            old.append((place, each))
    if old:
        wanted = tuple([placements[place] for place, _ in old])
        made = copied([each for _, each in old], mesh, wanted)
        for (place, each), copy in zip(old, made, strict=True):
            each.__dict__[_HERE] = _state(each), copy
            found[place] = copy
    # Other objects each time, as autograd notes on them what they come from.
    return [found[place].detach() for place in range(len(parameters))]


def _count_writes(written: Any) -> None:
    if isinstance(written, (list, tuple)):
        for each in written:
            _count_writes(each)
    elif type(written) is GlobalTensor:
        storage_of(written.ref).writes += 1


def _state(parameter: Any) -> tuple[int, int]:
    """Return what changes with a parameter's values."""
    return parameter.ref.number, storage_of(parameter.ref).writes


def _refuse_capture(stream: GlobalStream) -> None:
    """A replay changes parameters without this process, which then would not know that their copies are old."""
    if stream.tensors.recorders:
        stream.tensors.recorded(
            lambda recorder: recorder.exchanges(
                "use parameters in the memory of the hosts, where module_to_mesh(offload=) has put them"
            )
        )


def whole_parameters(
    parameters: Sequence[Any], kept: Sequence[Placements], used: Sequence[Placements]
) -> tuple[torch.Tensor, ...]:
    """Return parameters as a unit computes with them: on the devices of the mesh, gathered. Gradients flow through."""
    host = parameters[0].mesh.on_devices
    if host is None:
        return gathered(parameters, used)
    here: tuple[torch.Tensor, ...] = _OnDevice.apply(host, tuple(kept), *parameters)
    return here if list(kept) == list(used) else gathered(here, used)


def whole_values(
    parameters: Sequence[Any], kept: Sequence[Placements], used: Sequence[Placements]
) -> list[Any]:
    """Return the same without gradients."""
    host = parameters[0].mesh.on_devices
    if host is None:
        return gathered_values(parameters, tuple(used))
    here = _on_device(parameters, host, tuple(kept))
    return here if list(kept) == list(used) else gathered_values(here, tuple(used))
