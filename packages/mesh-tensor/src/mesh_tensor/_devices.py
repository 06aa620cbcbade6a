"""Kinds of devices on which processes have tensors: the only place that knows the particulars of each.

`DEVICES` has an entry for each kind besides the CPU; a kind without one is used as PyTorch does by itself, and its tensors go through the CPU for collectives.
Everything here but the table is called in the processes of a mesh, on the thread of a stream.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

import torch

from mesh_core.extensions import current_proc
from mesh_tensor._descriptors import HERE
from mesh_tensor._portable import offer

if TYPE_CHECKING:
    from collections.abc import Sequence

_PINNED_LEAST = 1 << 16
"""Fewer bytes are copied as they are: pinning costs more than it saves."""
Mark = tuple[str, Any]
"""A place in a device's queue: its kind, and the device's own event."""


class Device:
    """The operations on a kind of device. The base class is for devices that carry out work immediately."""

    backend: str | None = None
    """PyTorch's name of the collectives among such devices; without it, or if processes share one, tensors go through the CPU."""

    def count(self) -> int:
        """Return how many of them this process can see."""
        return 1

    def choose(self, index: int, *, own_queue: bool) -> str:
        """Let this thread use one of them, in a queue of its own or the default one; return a key that is unique on the host."""
        return str(index)

    def mark(self) -> Any:
        """Return an event that happens when the device has done what this thread has issued; ``None`` if it has."""
        return None

    def wait(self, event: Any) -> None:
        """Let the device do what this thread issues from now on after an event."""

    def used_here(self, tensor: torch.Tensor) -> None:
        """Keep memory that another thread has made until what this one does with it is done."""

    def generators(self) -> Sequence[torch.Generator]:
        """Return what operators on this thread's device draw random numbers from, unless they are told otherwise; CPUs aside."""
        return ()

    def placed(self, tensor: torch.Tensor, kind: str) -> torch.Tensor:
        """Return a copy of a tensor of the CPU in this thread's device."""
        return tensor.clone() if kind == "cpu" else tensor.to(kind)

    def fetched(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of a tensor of such a device on the CPU, with its values."""
        return tensor.to("cpu")

    def pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of a tensor of the CPU, in memory that the device reads and writes by itself."""
        return tensor.clone()

    def brought(self, tensors: Sequence[torch.Tensor], kind: str) -> tuple[list[torch.Tensor], Any]:
        """Return copies of tensors of the CPU on this thread's device, and an event: until it has happened, nobody may write to the originals.

        This thread does not wait; what it issues from now on does.
        """
        return [each.to(kind) for each in tensors], None

    def taken(self, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Any]:
        """Return copies of tensors of such a device on the CPU, and an event: until it has happened, they do not have their values."""
        return [each.to("cpu") for each in tensors], None

    def finish(self, event: Any) -> None:
        """Wait in this thread for an event."""

    def has_backend(self) -> bool:
        """Return whether its backend is there."""
        return self.backend is not None


class Cuda(Device):
    """CUDA devices; each stream of a mesh is one of CUDA's, and the default stream CUDA's default one."""

    backend = "nccl"

    def count(self) -> int:
        """Return how many are visible (`CUDA_VISIBLE_DEVICES`)."""
        return torch.cuda.device_count()

    def choose(self, index: int, *, own_queue: bool) -> str:
        """Make it this thread's device."""
        torch.cuda.set_device(index)
        if own_queue:
            torch.cuda.set_stream(torch.cuda.Stream())  # type: ignore[no-untyped-call]
        return str(torch.cuda.get_device_properties(index).uuid)

    def mark(self) -> Any:
        """Record an event."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event

    def wait(self, event: Any) -> None:
        """Let this thread's stream wait."""
        torch.cuda.current_stream().wait_event(event)

    def used_here(self, tensor: torch.Tensor) -> None:
        """Tell the allocator."""
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream())

    def generators(self) -> Sequence[torch.Generator]:
        """Return the generator of this thread's device."""
        return (torch.cuda.default_generators[torch.cuda.current_device()],)

    def placed(self, tensor: torch.Tensor, kind: str) -> torch.Tensor:
        """Copy it by way of pinned memory, which PyTorch keeps until the device has read it: this thread does not wait for that.

        What is in other memory CUDA reads at once, into a buffer of its own.
        """
        tensor = tensor.contiguous()
        return (tensor if tensor.nbytes < _PINNED_LEAST else tensor.pin_memory()).to(kind, non_blocking=True)

    def fetched(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy it into pinned memory, which the device writes to by itself, and wait for that."""
        tensor = tensor.contiguous()
        if tensor.nbytes < _PINNED_LEAST:
            return tensor.to("cpu")
        return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor)

    def pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy it into pinned memory."""
        return torch.empty_like(tensor, pin_memory=True).copy_(tensor)

    def brought(self, tensors: Sequence[torch.Tensor], kind: str) -> tuple[list[torch.Tensor], Any]:
        """Copy them beside what the device computes; this thread's stream waits for that."""
        own, copies = torch.cuda.current_stream(), _stream_for_copies()
        with torch.cuda.stream(copies):
            made = [each.to(kind, non_blocking=True) for each in tensors]
            event = self.mark()
        own.wait_event(event)
        for each in made:
            each.record_stream(own)
        return made, event

    def taken(self, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Any]:
        """Copy them into pinned memory beside what the device computes next."""
        copies = _stream_for_copies()
        copies.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(copies):
            made = [
                torch.empty_like(each, device="cpu", pin_memory=True).copy_(each, non_blocking=True)
                for each in tensors
            ]
            event = self.mark()
        for each in tensors:
            each.record_stream(copies)
        return made, event

    def finish(self, event: Any) -> None:
        """Wait for CUDA's event."""
        event.synchronize()

    def has_backend(self) -> bool:
        """Return whether this build of PyTorch has NCCL."""
        import torch.distributed as dist

        return dist.is_nccl_available()


DEVICES: dict[str, Device] = {"cuda": Cuda()}
"""By PyTorch's name of the kind."""
_here = threading.local()
_portable: dict[str, Any] = {}
"""What this process has offered of the CPU's operators, by the kind of device: for good, as PyTorch's own operators are."""


def _stream_for_copies() -> Any:
    """Return the stream of CUDA's in which this thread's copies run beside what it computes."""
    found = getattr(_here, "copies", None)
    if found is None:
        found = _here.copies = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    return found


def device_of(kind: str) -> Device:
    """Return the operations for that kind."""
    return DEVICES.get(kind) or Device()


def generators(kind: str) -> list[torch.Generator]:
    """Return what operators on this thread's device of that kind, and on the CPU, draw random numbers from."""
    return [torch.default_generator, *device_of(kind).generators()]


def placed(tensor: torch.Tensor, kind: str) -> torch.Tensor:
    """Return a copy of a tensor of the CPU in this thread's device of that kind."""
    return device_of(kind).placed(tensor, kind)


def fetched(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor on the CPU."""
    return device_of(tensor.device.type).fetched(tensor)


def pinned(tensor: torch.Tensor, kind: str) -> torch.Tensor:
    """Return a copy of a tensor of the CPU, in memory that devices of that kind read and write by themselves."""
    return device_of(kind).pinned(tensor)


def brought(tensors: Sequence[torch.Tensor], kind: str) -> tuple[list[torch.Tensor], list[Mark]]:
    """Return copies of tensors of the CPU on this thread's device, and what must have happened before the originals may change."""
    made, event = device_of(kind).brought(tensors, kind)
    return made, [] if event is None else [(kind, event)]


def taken(tensors: Sequence[torch.Tensor], kind: str) -> tuple[list[torch.Tensor], list[Mark]]:
    """Return copies of tensors of a device on the CPU, and what must have happened before they have their values."""
    made, event = device_of(kind).taken(tensors)
    return made, [] if event is None else [(kind, event)]


def finish(marked: Sequence[Mark]) -> None:
    """Wait in this thread until that has happened."""
    for kind, event in marked:
        device_of(kind).finish(event)


def enter(kind: str, *, own_queue: bool) -> tuple[str, str, bool]:
    """Let this thread use this process's device of that kind; return its host, its name there, and whether the kind's backend is there."""
    device = device_of(kind)
    used: dict[str, str] = _used()
    if kind not in used:
        count = device.count()
        if not count:
            raise RuntimeError(
                f"{current_proc()} has no device of kind {kind!r}: PyTorch {torch.__version__} finds none"
            )
        used[kind] = device.choose(_local_rank() % count, own_queue=own_queue)
        if kind not in HERE and kind not in _portable:
            _portable[kind] = offer(kind)
    return current_proc().host, used[kind], device.has_backend()


def _local_rank() -> int:
    """Return which of its host's processes this is."""
    told = os.environ.get("LOCAL_RANK")
    # Ranks of a mesh are beside each other on a host, so that as many of them as there are devices have one each.
    return int(told) if told else current_proc().point.rank


def _used() -> dict[str, str]:
    found: dict[str, str] | None = getattr(_here, "used", None)
    if found is None:
        found = _here.used = {}
    return found


def marks() -> Sequence[Mark]:
    """Return how far this thread's devices have got."""
    found = [(kind, device_of(kind).mark()) for kind in _used()]
    return [(kind, event) for kind, event in found if event is not None]


def wait(marked: Sequence[Mark]) -> None:
    """Let this thread's devices wait for that."""
    for kind, event in marked:
        device_of(kind).wait(event)


def used_here(tensor: torch.Tensor) -> None:
    """Keep memory of another stream for this thread's devices."""
    if tensor.device.type in _used():
        device_of(tensor.device.type).used_here(tensor)
