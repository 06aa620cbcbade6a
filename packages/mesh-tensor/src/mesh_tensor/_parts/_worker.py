"""A process's part of a mesh in the global view: DTensors, and PyTorch's operators on them.

STM-3 applies here: whether an operator runs as DTensor shards it, or on whole tensors, is decided by what all processes know, never by
what happened in this one. A result that could not be computed here is replaced by zeros of the same form, marked as failed.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.utils._pytree import tree_leaves, tree_map

from mesh_core import MeshError
from mesh_tensor import _devices as devices
from mesh_tensor._backends import named
from mesh_tensor._descriptors import form_of
from mesh_tensor._instructions import (
    GONE,
    IN_PLACE_SHAPE,
    LIST,
    QUESTION,
    SPECIAL,
    Failed,
    Template,
    sent,
    unknown,
)
from mesh_tensor._operators import find
from mesh_tensor._parts._apart import Apart, joined
from mesh_tensor._parts._call import Again, Call, failure_of, first_failure, mark
from mesh_tensor._parts._copies import Copies
from mesh_tensor._parts._copying import COPYING, Copying
from mesh_tensor._parts._layouts import Layout, Layouts
from mesh_tensor._parts._numbered import Numbered
from mesh_tensor._parts._sums import Sums, filled_up, gathered_along
from mesh_tensor._summaries import looked
from mesh_tensor._torch._dtensor import DTensorSpec, TensorMeta, compute_local_shape_and_global_offset
from mesh_tensor._torch._mesh import Devices
from mesh_tensor._torch._trees import taken_apart

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.tensor.placement_types import Placement

    from mesh_tensor._bench import Bench
    from mesh_tensor._replay._decisions import Decisions
    from mesh_tensor._replay._fused import Played

_lives = count(1)
_BOTH_ROADS = "MESH_TENSOR_BOTH_ROADS"
"""The environment variable that makes a process carry each operator out in both ways, and compare: for tests."""
_SHAPES = 1 << 14
"""The most layouts whose parts are known."""
_TALKATIVE = ("torch.distributed.tensor._collective_utils", "torch.distributed.tensor._redistribute")
"""They warn about slowness on every process, where nobody can do anything about it."""


class Worker:
    """This process's place in a mesh. Its public methods are what a controller may call."""

    def __init__(  # noqa: PLR0917 - as it is sent
        self,
        bench: Bench,
        decide: Callable[[Template, Worker], Decisions],
        names: tuple[str, ...],
        shape: tuple[int, ...],
        kind: str,
        groups: list[int],
        on_cpu: list[int],
        ranks: dict[Any, int],
    ) -> None:
        self.bench = bench
        self.decide = decide
        """Gives a template what it keeps of DTensor's decisions."""
        self.device = torch.device(kind)
        """Where parts are."""
        self.rank = ranks[bench.address]
        self.names = names
        life = next(_lives)
        made = {}
        for name, group, other in zip(names, groups, on_cpu, strict=True):
            own, gloo = bench.groups[group], bench.groups[other]
            label = f"mesh_tensor/{life}/{name}"
            made[label] = named(label, kind, own.made, own.backend, gloo.made)
        self.mesh = Devices(kind, shape, names, rank=self.rank, life=life, groups=made)
        for each in _TALKATIVE:
            logging.getLogger(each).setLevel(logging.ERROR)
        self.everywhere = (Replicate(),) * len(shape)
        self.copies = Copies(self.full, self.part)
        self.sums = Sums(self)
        self.layouts = Layouts()
        self.played: list[Played] | None = None
        """How the instructions of a replay were carried out, while that is looked at."""
        self.compares = os.environ.get(_BOTH_ROADS) == "1"
        self.seed = 0
        self._results: dict[int, list[Any]] = {}
        self._shapes: dict[DTensorSpec, tuple[int, ...]] = {}
        """What parts of such tensors must have here: not worked out for each result."""
        self.arriving: list[devices.Mark] = []
        """Copies under way from a device to tensors of this mesh."""
        self.leaving: list[devices.Mark] = []
        """The same, to a device."""
        self.failures = False
        """Whether any tensor was marked as failed."""

    def meet(self) -> None:
        """Have PyTorch find the mesh's groups, whatever others have done to those of the process."""
        self.mesh.meet()

    def close(self) -> None:
        """Free the mesh's tensors, and leave its groups."""
        env = self.bench.env
        gone = [
            ref
            for ref, each in env.items()
            if (isinstance(each, DTensor) and each.device_mesh is self.mesh)
            or (isinstance(each, Apart) and each.layout.spec.mesh is self.mesh)
        ]
        for ref in gone:
            del env[ref]
        self.mesh.close()

    def refresh(self, values: Any) -> None:
        """Refresh all tensors among these that are copied views."""
        for each in tree_leaves(values):
            if isinstance(each, DTensor):
                self.copies.refresh(each)

    def know(self, number: int, what: tuple[Any, ...]) -> None:
        """Learn a template."""
        self.bench.templates[number] = _Template(what, self)

    def put(self, number: int, value: torch.Tensor, placements: tuple[Placement, ...]) -> None:
        """Store this process's part of a tensor."""
        env = self.bench.env
        try:
            part = devices.placed(self.part(value, placements), self.device.type)
        except (RuntimeError, TypeError) as error:
            # The device is full, perhaps in this process alone: the others wait for it in what comes next. Or it has no such numbers.
            why = MeshError(
                f"{tuple(value.shape)} of {value.dtype}, {value.nbytes:,} bytes in all, could not be laid out on {self.device.type!r}: {error}"
            )
            failed = Failed(QUESTION, "distribute", why)
            self.failures = True
            try:
                meta = TensorMeta(value.shape, value.stride(), value.dtype)
                env[number] = self.zeros(DTensorSpec(self.mesh, tuple(placements), meta))
                mark(env[number], failed)
            except (RuntimeError, TypeError):
                env[number] = failed
        else:
            env[number] = self.wrap(part, value, placements)

    def execute(self, number: int, instruction: int, function: Any, args: Any, kwargs: Any) -> Any:
        """Call a user's function on tensors of the mesh, and return its result without the tensors."""

        def give(value: Any) -> Any:
            if not isinstance(value, Numbered):
                return value
            tensor = self.bench.find(value.number)
            if not isinstance(tensor, DTensor):
                raise MeshError(GONE)
            failed = failure_of(tensor)
            if failed is not None:
                raise Again(failed)
            self.copies.refresh(tensor)
            return tensor.detach()

        try:
            with torch.enable_grad():
                leaves, form = taken_apart(function(*tree_map(give, args), **tree_map(give, kwargs)))
            said = [self._said(each) for each in leaves]
        except Exception as error:  # noqa: BLE001 - told to who asks
            failed = getattr(error, "failed", None) or Failed(instruction, "execute", error)
            return sent(failed)
        self._results[number] = [each.detach() for each in leaves if isinstance(each, torch.Tensor)]
        return "value", (form, said)

    def _said(self, value: Any) -> Any:
        if isinstance(value, DTensor):
            if value.device_mesh is not self.mesh:
                raise TypeError(
                    f"a result is a DTensor on {value.device_mesh}: it must be on the mesh of the arguments"
                )
            return "form", form_of(value)
        if isinstance(value, torch.Tensor):
            raise TypeError(
                f"a result is a tensor of one process, {tuple(value.shape)}: make a DTensor of it, with DTensor.from_local(), "
                "or return its value"
            )
        return "value", value

    def adopt(self, number: int, refs: list[int]) -> None:
        """Store the tensors that a function has returned."""
        self.bench.env.update(zip(refs, self._results.pop(number, ()), strict=False))

    def placements(self, number: int) -> Any:
        """Return the layout of a tensor."""
        tensor = self.bench.find(number)
        return ("value", tensor.placements) if isinstance(tensor, DTensor) else sent(tensor)

    def part_of(self, number: int) -> Any:
        """Return this process's part of a tensor."""
        tensor = self.bench.find(number)
        failed = self._loose() or failure_of(tensor)
        if failed is not None or not isinstance(tensor, DTensor):
            return sent(failed or tensor)
        return self._sent(tensor.to_local())

    def look(self, number: int) -> Any:
        """Return a summary of this process's part of a tensor."""
        tensor = self.bench.find(number)
        failed = failure_of(tensor)
        if failed is not None or not isinstance(tensor, DTensor):
            return sent(failed or tensor)
        _, start = compute_local_shape_and_global_offset(tensor.shape, self.mesh, tensor.placements)
        return looked(tensor.to_local(), start)

    def _loose(self) -> Failed | None:
        """Return a failure that has no tensor, once."""
        loose, self.bench.loose = self.bench.loose, None
        return loose

    def whole(self, number: int) -> Any:
        """Return all of a tensor, from the first process."""
        tensor = self.bench.find(number)
        if not isinstance(tensor, DTensor):
            return sent(tensor)
        try:
            self.copies.refresh(tensor)
            value = self.full(tensor)
        except Exception as error:  # noqa: BLE001 - said
            return sent(Failed(QUESTION, "fetch", error))
        failed = self._loose() or failure_of(tensor)
        if failed is not None:
            return sent(failed)
        return self._sent(value) if self.rank == 0 else ("value", None)

    def _sent(self, value: torch.Tensor) -> Any:
        """Return values as they are sent: a device says only now what has failed there."""
        try:
            return sent(value)
        except RuntimeError as error:
            return sent(Failed(QUESTION, "fetch", error))

    def seen(self, value: Any) -> tuple[torch.Tensor, Layout] | None:
        """Return this process's part of a tensor, and its layout, if nothing about it is special."""
        if type(value) is Apart:
            if value.made is None:
                return value.local, value.layout
            value = value.made
        if type(value) is not DTensor:
            return None
        if self.failures and failure_of(value) is not None:
            return None
        if self.copies.any and getattr(value, "_mesh_copied", None) is not None:
            return None
        local: Any = value._local_tensor  # noqa: SLF001 - without a copy
        if type(local) is not torch.Tensor:
            if not isinstance(local, AsyncCollectiveTensor):
                return None
            try:
                local = value._local_tensor = local.trigger_wait()  # type: ignore[no-untyped-call]  # noqa: SLF001 - it has arrived
            except Exception:  # noqa: BLE001 - raised once more where it is used
                return None
        layout = self.layouts.of(value._spec)  # noqa: SLF001 - its layout
        # A user's function may have made it.
        return (local, layout) if local.shape == layout.shape else None

    def layout_of(self, value: Any) -> Layout:
        """Return the layout of a tensor."""
        if type(value) is Apart and value.made is None:
            return value.layout
        return self.layouts.of(joined(value)._spec)  # noqa: SLF001 - its layout

    def wrap(self, local: torch.Tensor, whole: Any, placements: Sequence[Placement]) -> DTensor:
        """Make a tensor of the mesh from this process's part; `whole` has the form of all of it."""
        meta = TensorMeta(whole.shape, whole.stride(), local.dtype)
        made: DTensor = DTensor(local, DTensorSpec(self.mesh, tuple(placements), meta), requires_grad=False)
        return made

    def summed_up(self, tensor: DTensor) -> DTensor:
        """Return the same tensor, of which no process has a summand only."""
        if not any(isinstance(each, Partial) for each in tensor.placements):
            return tensor
        placements = [Replicate() if isinstance(each, Partial) else each for each in tensor.placements]
        return tensor.redistribute(self.mesh, placements)

    def full(self, tensor: DTensor) -> torch.Tensor:
        """Return all of a tensor; its own memory, if all of it is here."""
        if all(type(each) is Replicate for each in tensor.placements):
            return tensor._local_tensor  # noqa: SLF001 - without a copy
        if tensor.dtype is torch.int16:
            # gloo does not support such numbers.
            wide: Any = tensor.to(torch.int32)
            return self.full(wide).to(torch.int16)
        whole = tensor.redistribute(self.mesh, self.everywhere).to_local()
        # What is gathered lies in memory as each release likes it.
        return whole.contiguous() if tensor.is_contiguous() else whole

    def part(self, whole: torch.Tensor, placements: Sequence[Placement]) -> torch.Tensor:
        """Return this process's part of a tensor that all of them have."""
        shards = [each if isinstance(each, Shard) else Replicate() for each in placements]
        shape, offset = compute_local_shape_and_global_offset(whole.shape, self.mesh, shards)
        local = whole
        for dim, (size, start) in enumerate(zip(shape, offset, strict=True)):
            if size != whole.shape[dim]:
                local = local.narrow(dim, min(start, whole.shape[dim]), size)
        at = self.mesh.get_coordinate()
        assert at is not None, "this process is in the mesh"
        for placement, coordinate in zip(placements, at, strict=True):
            # Of summands all but one are zeros; of averages and maxima all are the same.
            if isinstance(placement, Partial) and placement.reduce_op == "sum" and coordinate:
                local = torch.zeros_like(local)
        return local

    def fits(self, values: Any) -> bool:
        """Return whether this process's parts of tensors have the shapes that their layouts say."""
        if not isinstance(values, DTensor):
            return not isinstance(values, (list, tuple)) or all(map(self.fits, values))
        spec = values._spec  # noqa: SLF001 - hashes once
        shape = self._shapes.get(spec)
        if shape is None:
            if len(self._shapes) >= _SHAPES:
                self._shapes.clear()
            shape, _ = compute_local_shape_and_global_offset(spec.shape, self.mesh, spec.placements)
            self._shapes[spec] = shape = tuple(shape)
        return values._local_tensor.shape == shape  # noqa: SLF001 - without a copy

    def zeros(self, spec: Any) -> Any:
        """Return something of that form."""
        if not isinstance(spec, DTensorSpec):
            return None
        meta = spec.tensor_meta
        assert meta is not None
        shape, _ = compute_local_shape_and_global_offset(meta.shape, self.mesh, spec.placements)
        try:
            local = torch.zeros(shape, dtype=meta.dtype, device=self.device)
        except RuntimeError:
            # There is no memory, perhaps in this process alone: it goes on with zeros that need none, as the others wait for it.
            local = torch.zeros((), dtype=meta.dtype, device=self.device).expand(shape)
        return DTensor(local, spec, requires_grad=False)


class _Template(Template):
    """An instruction on tensors of the whole mesh."""

    __slots__ = ()

    is_global = True

    def __init__(self, what: tuple[Any, ...], worker: Worker) -> None:
        (name, module), *_ = what
        if name[0] == SPECIAL and name[1] in COPYING:
            super().__init__(what, Copying(COPYING[name[1]], worker))
        elif name[0] == SPECIAL:
            function = SPECIALS[name[1]]
            super().__init__(what, Special(function, worker))
        else:
            try:
                operator = find(name, module)
            except (AttributeError, ImportError) as error:
                super().__init__(what, unknown(name, error))
                self.decisions = worker.decide(self, worker)
                return
            call = Call(operator, worker, in_place_shape=what[5] == IN_PLACE_SHAPE)
            super().__init__(what, call)
            if call.viewing:
                # A view of another form, and nothing changes in place.
                self.mode = LIST if what[5] == LIST else 0
        self.decisions = worker.decide(self, worker)


class Special:
    """One of our functions on tensors of the mesh."""

    __slots__ = ("function", "worker")

    def __init__(self, function: Callable[..., Any], worker: Worker) -> None:
        self.function = function
        self.worker = worker

    def __call__(self, *args: Any) -> Any:
        if self.worker.sums.any:
            self.worker.sums.before(self.function, args, {}, writes=False)
        if self.worker.copies.any:
            self.worker.refresh(args)
        result = self.function(self.worker, *args)
        if self.worker.failures:
            mark(result, first_failure(args))
        return result


def redistribute(worker: Worker, tensor: DTensor, placements: tuple[Placement, ...]) -> DTensor:
    """Return the same tensor, with another layout."""
    if any(
        isinstance(each, Partial) and each != had
        for each, had in zip(placements, tensor.placements, strict=True)
    ):
        whole = worker.full(tensor).contiguous()
        return worker.wrap(worker.part(whole, placements).clone(), whole, placements)
    return _moved(worker, tensor, placements)


def gather(worker: Worker, *given: Any) -> list[DTensor]:
    """Return tensors with other layouts, those that are split over one dimension of the mesh in one message for all of them."""
    *tensors, wanted = given
    results: list[Any] = [None] * len(tensors)
    together: dict[tuple[int, torch.dtype], list[tuple[int, int]]] = {}
    for place, (tensor, placements) in enumerate(zip(tensors, wanted, strict=True)):
        along = gathered_along(tensor.placements, placements)
        if along is None:
            results[place] = _moved(worker, tensor, placements)
        else:
            dim, split = along
            together.setdefault((dim, tensor.dtype), []).append((place, split))
    for (dim, _), places in together.items():
        count = worker.mesh.shape[dim]
        parts = [
            filled_up(tensors[place]._local_tensor, split, tensors[place].shape[split], count)  # noqa: SLF001 - without a copy
            for place, split in places
        ]
        name = worker.mesh._dim_group_names[dim]  # noqa: SLF001 - as it was made
        flat = torch.cat([each.reshape(-1) for each in parts])
        space = torch.ops._c10d_functional  # noqa: SLF001 - its public name
        found = space.wait_tensor.default(space.all_gather_into_tensor.default(flat, count, name)).view(
            count, -1
        )
        at = 0
        for (place, split), part in zip(places, parts, strict=True):
            size = part.numel()
            pieces = found[:, at : at + size].reshape(count, *part.shape)
            at += size
            tensor = tensors[place]
            whole = pieces.flatten(0, 1) if split == 0 else pieces.movedim(0, split).flatten(split, split + 1)
            if whole.shape[split] != tensor.shape[split]:
                whole = whole.narrow(split, 0, tensor.shape[split])
            layout = worker.layouts.placed(tensor._spec, tuple(wanted[place]))  # noqa: SLF001 - its layout
            results[place] = layout.join(whole.contiguous())
    return results


def like(worker: Worker, tensor: DTensor, other: DTensor) -> DTensor:
    """Return a tensor, with the layout of another one."""
    placements = tuple(Replicate() if isinstance(each, Partial) else each for each in other.placements)
    if tensor.placements == placements:
        return _in_order(tensor)
    put_off = worker.sums.put_off(tensor, placements)
    return _moved(worker, tensor, placements) if put_off is None else put_off


def summed(worker: Worker, tensor: DTensor, dim: str) -> DTensor:
    """Return a tensor with its sum along one dimension of the mesh, if there are summands."""
    placements = list(tensor.placements)
    at = worker.names.index(dim)
    if not isinstance(placements[at], Partial):
        return _in_order(tensor)
    placements[at] = Replicate()
    return _moved(worker, tensor, placements)


def _moved(worker: Worker, tensor: DTensor, placements: Sequence[Placement]) -> DTensor:
    """Return the same tensor in another layout, with its elements in order."""
    moved = _in_order(tensor).redistribute(worker.mesh, placements)
    local = moved._local_tensor  # noqa: SLF001 - without waiting for it
    if type(local) is torch.Tensor and not local.is_contiguous():
        return worker.wrap(local.contiguous(), moved, placements)
    return moved


def _in_order(tensor: DTensor) -> DTensor:
    """Return the same tensor with its elements in order: so the script knows the results of our functions, and takes views of them."""
    made: Any = tensor.contiguous()
    assert isinstance(made, DTensor)
    return made


def seed(worker: Worker, value: int) -> None:
    """Draw from this next."""
    worker.seed = value


SPECIALS: dict[str, Callable[..., Any]] = {
    each.__name__: each for each in (redistribute, gather, like, summed, seed)
}
