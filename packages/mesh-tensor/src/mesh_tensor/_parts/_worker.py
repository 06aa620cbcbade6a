"""A process's part of a mesh in the global view: DTensors, and PyTorch's operators on them.

STM-3 applies here: whether an operator runs as DTensor shards it, or on whole tensors, is decided by what all processes know, never by
what happened in this one. A result that could not be computed here is replaced by zeros of the same form, marked as failed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import contextmanager, suppress
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from torch._C._distributed_c10d import (
    ProcessGroup,
    _register_process_group,
    _resolve_process_group,
    _unregister_process_group,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import GroupName
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from mesh_core import MeshError
from mesh_tensor._descriptors import form_of
from mesh_tensor._instructions import (
    GONE,
    IN_PLACE_SHAPE,
    LIST,
    LOST,
    SPECIAL,
    Failed,
    Instead,
    Template,
    sent,
    unknown,
)
from mesh_tensor._operators import find
from mesh_tensor._parts._attention import BACKWARD, FORWARD, attend, missing, splits
from mesh_tensor._parts._copies import Copies
from mesh_tensor._parts._limits import (
    FILLING,
    INDEXED,
    MEAN,
    MEANS,
    NONEMPTY,
    SUM,
    WHOLE,
    has_empty_parts,
    is_kept,
    is_unaligned,
    parts_of,
)
from mesh_tensor._parts._numbered import Numbered
from mesh_tensor._parts._sums import Sums
from mesh_tensor._summaries import looked

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch.distributed.tensor.placement_types import Placement

    from mesh_tensor._bench import Bench

_lives = count(1)
_CANNOT = object()
_TALKATIVE = ("torch.distributed.tensor._collective_utils", "torch.distributed.tensor._redistribute")
"""They warn about slowness on every process, where nobody can do anything about it."""


class _Devices(DeviceMesh):
    """A mesh that needs no default group, which other users of this process may have made."""

    def get_rank(self) -> int:
        """Return this process's rank in the whole mesh."""
        return self._rank

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        """Return its coordinate in one dimension."""
        names = self.mesh_dim_names or ()
        at = self.get_coordinate()
        assert at is not None, "this process is in the mesh"
        return at[names.index(mesh_dim) if isinstance(mesh_dim, str) else mesh_dim or 0]


class Worker:
    """This process's place in a mesh. Its public methods are what a controller may call."""

    def __init__(
        self,
        bench: Bench,
        names: tuple[str, ...],
        shape: tuple[int, ...],
        groups: list[int],
        ranks: dict[Any, int],
    ) -> None:
        self.bench = bench
        self.rank = ranks[bench.address]
        self.names = names
        life = next(_lives)
        mesh: Any = _Devices(
            "cpu",
            torch.arange(len(ranks)).view(shape),
            mesh_dim_names=names,
            _init_backend=False,
            _rank=self.rank,
        )
        # PyTorch caches shardings by their meshes, which must differ if their groups do.
        mesh._thread_id = life  # noqa: SLF001 - the one part of a mesh's identity that says nothing
        # No groups over several dimensions: PyTorch would use one to gather what two have split unevenly, in the wrong order.
        mesh._dim_group_names = [f"mesh_tensor/{life}/{name}" for name in names]  # noqa: SLF001 - as from_group()
        for name, group in zip(mesh._dim_group_names, groups, strict=True):  # noqa: SLF001 - likewise
            mesh._pg_registry[name] = _registered(name, bench.groups[group].made)  # noqa: SLF001 - likewise
        self.mesh: DeviceMesh = mesh
        for each in _TALKATIVE:
            logging.getLogger(each).setLevel(logging.ERROR)
        self.everywhere = (Replicate(),) * len(shape)
        self.copies = Copies(self.full, self.part)
        self.sums = Sums(self)
        self.seed = 0
        self._results: dict[int, list[Any]] = {}
        self.failures = False
        """Whether any tensor was marked as failed."""

    def meet(self) -> None:
        """Have PyTorch find the mesh's groups by their names. Destroying the default group, as programs for torchrun do, makes it forget them."""
        groups: dict[str, ProcessGroup] = self.mesh._pg_registry  # noqa: SLF001 - as above
        try:
            for name in groups:
                _resolve_process_group(GroupName(name))
                return  # All are forgotten together.
        except (RuntimeError, LookupError, ValueError):
            for name, group in groups.items():
                _register_process_group(GroupName(name), group)

    def close(self) -> None:
        """Free the mesh's tensors, and leave its groups."""
        env = self.bench.env
        gone = [
            ref for ref, each in env.items() if isinstance(each, DTensor) and each.device_mesh is self.mesh
        ]
        for ref in gone:
            del env[ref]
        mesh: Any = self.mesh
        for name in mesh._dim_group_names:  # noqa: SLF001 - as above
            _unregister_process_group(GroupName(name))
        mesh._pg_registry.clear()  # noqa: SLF001 - as above

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
        self.bench.env[number] = self.wrap(self.part(value, placements).clone(), value, placements)

    def execute(self, number: int, function: Any, args: Any, kwargs: Any) -> Any:
        """Call a user's function on tensors of the mesh, and return its result without the tensors."""
        env = self.bench.env

        def give(value: Any) -> Any:
            if not isinstance(value, Numbered):
                return value
            tensor = env.get(value.number, LOST)
            if not isinstance(tensor, DTensor):
                raise MeshError(GONE)
            failed = failure_of(tensor)
            if failed is not None:
                raise Again(failed)
            self.copies.refresh(tensor)
            return tensor.detach()

        try:
            with torch.enable_grad():
                leaves, form = tree_flatten(function(*tree_map(give, args), **tree_map(give, kwargs)))
            said = [self._said(each) for each in leaves]
        except Exception as error:  # noqa: BLE001 - told to who asks
            failed = getattr(error, "failed", None) or Failed(-1, "execute", error)
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
        tensor = self.bench.env.get(number, LOST)
        return ("value", tensor.placements) if isinstance(tensor, DTensor) else sent(tensor)

    def part_of(self, number: int) -> Any:
        """Return this process's part of a tensor."""
        tensor = self.bench.env.get(number, LOST)
        failed = self._loose() or failure_of(tensor)
        if failed is not None or not isinstance(tensor, DTensor):
            return sent(failed or tensor)
        return sent(tensor.to_local())

    def look(self, number: int) -> Any:
        """Return a summary of this process's part of a tensor."""
        tensor = self.bench.env.get(number, LOST)
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
        tensor = self.bench.env.get(number, LOST)
        if not isinstance(tensor, DTensor):
            return sent(tensor)
        try:
            self.copies.refresh(tensor)
            value = self.full(tensor)
        except Exception as error:  # noqa: BLE001 - said
            return sent(Failed(-1, "fetch", error))
        failed = self._loose() or failure_of(tensor)
        if failed is not None:
            return sent(failed)
        return sent(value) if self.rank == 0 else ("value", None)

    def wrap(self, local: torch.Tensor, whole: Any, placements: Sequence[Placement]) -> DTensor:
        """Make a tensor of the mesh from this process's part; `whole` has the form of all of it."""
        meta = TensorMeta(whole.shape, whole.stride(), local.dtype)
        made: DTensor = DTensor(local, DTensorSpec(self.mesh, tuple(placements), meta), requires_grad=False)
        return made

    def full(self, tensor: DTensor) -> torch.Tensor:
        """Return all of a tensor; its own memory, if all of it is here."""
        if all(type(each) is Replicate for each in tensor.placements):
            return tensor._local_tensor  # noqa: SLF001 - without a copy
        if tensor.dtype is torch.int16:
            # gloo does not support such numbers.
            wide: Any = tensor.to(torch.int32)
            return self.full(wide).to(torch.int16)
        return tensor.redistribute(self.mesh, self.everywhere).to_local()

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

    def zeros(self, spec: Any) -> Any:
        """Return something of that form."""
        if not isinstance(spec, DTensorSpec):
            return None
        meta = spec.tensor_meta
        assert meta is not None
        shape, _ = compute_local_shape_and_global_offset(meta.shape, self.mesh, spec.placements)
        return DTensor(torch.zeros(shape, dtype=meta.dtype), spec, requires_grad=False)


def _registered(name: str, gloo: Any) -> ProcessGroup:
    """Let PyTorch find a group by its name."""
    group: Any = ProcessGroup(gloo.rank(), gloo.size())
    group._set_default_backend(ProcessGroup.BackendType.GLOO)  # noqa: SLF001 - as PyTorch does where it makes groups
    group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, gloo)  # noqa: SLF001 - likewise
    group._set_group_name(name)  # noqa: SLF001 - likewise
    _register_process_group(GroupName(name), group)
    made: ProcessGroup = group
    return made


def failure_of(tensor: Any) -> Failed | None:
    """Return why a tensor does not have its values."""
    return getattr(tensor, "_mesh_failed", None)


class _Template(Template):
    """An instruction on tensors of the whole mesh."""

    __slots__ = ()

    is_global = True

    def __init__(self, what: tuple[Any, ...], worker: Worker) -> None:
        (name, module), *_ = what
        if name[0] == SPECIAL:
            function = SPECIALS[name[1]]
            super().__init__(what, Special(function, worker))
            # The number of the instruction is needed if its failure is found later.
            self.plain = self.plain and function is not like
        else:
            try:
                operator = find(name, module)
            except (AttributeError, ImportError) as error:
                super().__init__(what, unknown(name, error))
                return
            call = Call(operator, worker, in_place_shape=what[5] == IN_PLACE_SHAPE)
            super().__init__(what, call)
            if call.viewing:
                # A view of another form, and nothing changes in place.
                self.mode = LIST if what[5] == LIST else 0


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
            mark(result, _first_failure(args))
        return result


class Call:
    """An operator of PyTorch's, and this process's part in it."""

    __slots__ = (
        "asks",
        "attention",
        "cannot",
        "copying",
        "cuts",
        "filling",
        "func",
        "indexed",
        "mean",
        "nonempty",
        "random",
        "replicated",
        "viewing",
        "views",
        "worker",
        "written",
    )

    def __init__(self, func: Any, worker: Worker, *, in_place_shape: bool = False) -> None:
        if in_place_shape:
            # It was given a tensor of its own, whose form need not change in place.
            func = _functional(func)
        self.func = func
        self.worker = worker
        schema = func._schema  # noqa: SLF001 - as the whole of PyTorch reads it
        self.written = tuple(
            argument.name if argument.kwarg_only else place
            for place, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        )
        self.random = (
            torch.Tag.nondeterministic_seeded in func.tags and "scaled_dot_product" not in schema.name
        )
        self.mean = MEANS.get(schema.name, 0) if func._overloadname == "default" else 0  # noqa: SLF001 - likewise
        self.attention = schema.name if schema.name in (FORWARD, BACKWARD) else None
        self.views = schema.name in ("aten::view", "aten::_unsafe_view")
        self.indexed = schema.name in INDEXED
        self.filling = schema.name in FILLING
        self.nonempty = schema.name in NONEMPTY
        self.asks = (
            torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags
        )
        self.replicated = (
            self.asks or schema.name in WHOLE or any(argument.is_out for argument in schema.arguments)
        )
        """DTensor does something else, or nothing."""
        self.cannot: set[tuple[Any, ...]] = set()
        """Layouts of the tensors that DTensor cannot handle."""
        self.cuts: dict[Any, bool] = {}
        self.viewing = not self.written and any(each.alias_info is not None for each in schema.returns)
        self.copying: dict[Any, bool] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        worker = self.worker
        result = None
        if worker.sums.any:
            result = worker.sums.before(self.func, args, kwargs, writes=bool(self.written))
        if result is not None:
            return result
        if worker.copies.any:
            worker.refresh((args, kwargs))
        result = self._done(args, kwargs)
        if self.viewing and args and isinstance(args[0], DTensor):
            self._viewed(result, args, kwargs)
        if self.written and worker.copies.any:
            for each in tree_leaves([self._argument(where, args, kwargs) for where in self.written]):
                if isinstance(each, DTensor):
                    worker.copies.written(each)
        if worker.failures and (failed := _first_failure((args, kwargs))) is not None:
            if self.asks:
                raise Again(failed)
            mark(result, failed)
            mark([self._argument(where, args, kwargs) for where in self.written], failed)
        return result

    def _done(self, args: Any, kwargs: Any) -> Any:
        """Do it, in one way or another."""
        worker = self.worker
        if self.attention is not None:
            return self._attended(self.attention, args, kwargs)
        if self.random:
            return self._with_random(args, kwargs)
        if (
            self.replicated
            or (self.cannot and _layouts(args, kwargs) in self.cannot)
            or (self.views and self._is_cut(*args))
            or (self.indexed and is_unaligned(*args))
            or (self.nonempty and any(map(self._leaves_some_without, args)))
            or (self.filling and any(isinstance(each, Partial) for each in args[0].placements))
            or complex in map(type, args)
        ):
            return self._whole(args, kwargs)
        if self.mean and (len(args) <= self.mean or args[self.mean] == MEAN):
            if len(args) <= self.mean:
                return self._whole(args, kwargs)
            summed_up = (*args[: self.mean], SUM, *args[self.mean + 1 :])
            return torch.ops.aten.div.Scalar(self._done(summed_up, kwargs), max(1, args[1].numel()))
        try:
            result = self.func(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - looked into
            return self._otherwise(error, args, kwargs)
        if isinstance(result, torch.Tensor) and not isinstance(result, DTensor):
            result = worker.wrap(result, result, worker.everywhere)
        elif _is_average(result) and any(
            each.shape[dim] % parts
            for each in tree_leaves((args, kwargs))
            if isinstance(each, DTensor)
            for dim, parts in parts_of(each).items()
        ):
            # DTensor averages the averages of the parts, even if these differ in size.
            self.cannot.add(_layouts(args, kwargs))
            return self._whole(args, kwargs)
        return result

    def _attended(self, name: str, args: Any, kwargs: Any) -> Any:
        """Split attention by batches and heads, or let all processes compute all of it."""
        worker = self.worker
        split = splits(name, args, kwargs)
        if split is None:
            # DTensor would search all layouts of all its parts for a solution, for minutes.
            return self._whole(args, kwargs)
        try:
            return attend(worker, self.func, args, kwargs, split)
        except Exception as error:
            raise self._instead(error, missing(worker, self.func, args, split), args, kwargs) from error

    def _viewed(self, result: Any, args: Any, kwargs: Any) -> None:
        """Remember the source of a view that does not share its memory."""
        base = args[0]
        layout = base._spec  # noqa: SLF001 - hashes once
        copied = self.copying.get(layout)
        if copied is None:
            copied = self.copying[layout] = self._is_copied(args, kwargs)
        if copied:
            func = torch.ops.aten.reshape.default if self.views else self.func
            self.worker.copies.add(result, base, lambda whole: func(whole, *args[1:], **kwargs))
        elif self.worker.copies.any:
            self.worker.copies.follow(result, base)

    def _is_copied(self, args: Any, kwargs: Any) -> bool:
        """Return whether DTensor, or we, gather the tensor before a view is taken: as all processes know it."""
        base = args[0]
        if all(type(each) is Replicate for each in base.placements):
            return self.views and not base.is_contiguous()
        dispatcher: Any = DTensor._op_dispatcher  # noqa: SLF001 - the same question as when it is called
        if self.views and self._is_cut(*args):
            return True
        try:
            info = dispatcher.unwrap_to_op_info(self.func, args, kwargs)
            sharding = dispatcher.sharding_propagator.propagate_op_sharding(info.schema)
        except Exception:  # noqa: BLE001 - whatever it is, it does not know how
            return True
        changed = sharding.redistribute_schema
        return changed is not None and changed.args_schema[0].placements != base.placements

    def _is_cut(self, tensor: DTensor, shape: Sequence[int]) -> bool:
        """Return whether a view joins or splits a dimension of which processes have parts of different sizes."""
        layout = tensor._spec  # noqa: SLF001 - hashes once
        found = self.cuts.get(layout)
        if found is None:
            found = self.cuts[layout] = any(
                tensor.shape[dim] % parts and not is_kept(tensor.shape, dim, shape)
                for dim, parts in parts_of(tensor).items()
            )
        return found

    def _leaves_some_without(self, tensor: Any) -> bool:
        """Return whether some process has no element of a tensor that has some."""
        if not isinstance(tensor, DTensor):
            return False
        layout = tensor._spec  # noqa: SLF001 - hashes once
        found = self.cuts.get(layout)
        if found is None:
            found = self.cuts[layout] = tensor.numel() > 0 and has_empty_parts(tensor)
        return found

    def _argument(self, where: int | str, args: Any, kwargs: Any) -> Any:
        return kwargs.get(where) if isinstance(where, str) else args[where] if where < len(args) else None

    def _otherwise(self, error: Exception, args: Any, kwargs: Any) -> Any:
        if self.views and not args[0].is_contiguous():
            # Here it lies in memory in another way than where the view was decided on.
            with suppress(Exception):
                return self.func(
                    torch.ops.aten.clone.default(args[0], memory_format=torch.contiguous_format), *args[1:]
                )
        # Assertions are DTensor's own, about layouts: all processes get them, before anything is computed.
        spec = _CANNOT if isinstance(error, AssertionError) else self._spec(args, kwargs)
        if spec is _CANNOT:
            self.cannot.add(_layouts(args, kwargs))
            return self._whole(args, kwargs)
        if spec is None and not self.written:
            # A check, for example: there is no result that could carry the failure.
            raise error
        raise self._instead(error, tree_map(self.worker.zeros, spec, is_leaf=_is_spec), args, kwargs)

    def _instead(self, error: Exception, results: Any, args: Any, kwargs: Any) -> Instead:
        """Continue with these in place of the results."""
        self.worker.failures = True
        written = [self._argument(where, args, kwargs) for where in self.written]
        return Instead(error, results, lambda failed: mark([results, written], failed))

    def _spec(self, args: Any, kwargs: Any) -> Any:
        """Return the form of DTensor's result, if it supports the operator at all."""
        if not any(isinstance(each, DTensor) for each in tree_leaves((args, kwargs))):
            return _CANNOT
        dispatcher: Any = DTensor._op_dispatcher  # noqa: SLF001 - the same question as when it is called
        try:
            info = dispatcher.unwrap_to_op_info(self.func, args, kwargs)
            return dispatcher.sharding_propagator.propagate_op_sharding(info.schema).output_spec
        except Exception:  # noqa: BLE001 - whatever it is, it does not know how
            return _CANNOT

    def _whole(self, args: Any, kwargs: Any) -> Any:
        """Let each process compute all of it."""
        worker = self.worker
        fulls: dict[int, torch.Tensor] = {}

        def give(value: Any) -> Any:
            if not isinstance(value, DTensor):
                return value
            found = fulls.get(id(value))
            if found is None:
                found = fulls[id(value)] = worker.full(value)
            return found

        whole_args, whole_kwargs = tree_map(give, (args, kwargs))
        try:
            func = torch.ops.aten.reshape.default if self.views else self.func
            result = func(*whole_args, **whole_kwargs)
        except Exception as error:
            worker.failures = True
            form = _CANNOT
            with suppress(Exception):
                form = self._form(args, kwargs)
            if form is _CANNOT or form is None or self.asks:
                raise
            raise self._instead(error, form, args, kwargs) from error
        back = self._written_back(args, kwargs, fulls)

        def take(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            found = back.get(id(value))
            if found is None or found.shape != value.shape:
                found = worker.wrap(value, value, worker.everywhere)
            return found

        return tree_map(take, result)

    def _written_back(self, args: Any, kwargs: Any, fulls: dict[int, torch.Tensor]) -> dict[int, DTensor]:
        """Keep this process's parts of what has been written to; whose whole tensors those are."""
        back: dict[int, DTensor] = {}
        for where in self.written:
            for each in tree_leaves(self._argument(where, args, kwargs)):
                if isinstance(each, DTensor):
                    full, local = fulls[id(each)], each._local_tensor  # noqa: SLF001 - to write to
                    if full is not local:
                        local.copy_(self.worker.part(full, each.placements))
                    back[id(full)] = each
        return back

    def _form(self, args: Any, kwargs: Any) -> Any:
        """Return something that has the form of the result, on whole tensors."""
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode():

            def fake(value: Any) -> Any:
                if not isinstance(value, DTensor):
                    return value
                return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)

            fake_args, fake_kwargs = tree_map(fake, (args, kwargs))
            result = self.func(*fake_args, **fake_kwargs)

        def real(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            zeros = torch.zeros(value.shape, dtype=value.dtype)
            return self.worker.wrap(zeros, zeros, self.worker.everywhere)

        return tree_map(real, result)

    def _with_random(self, args: Any, kwargs: Any) -> Any:
        """Let all processes draw the same numbers, and each keep its part."""
        worker = self.worker
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, DTensor)]
        with _drawing(worker.seed):
            if self.func is torch.ops.aten.native_dropout.default and args[2] is not False:
                return self._dropout(*args)
            result = self._whole(args, kwargs)
        if not tensors or self.written:
            return result
        placements = [each if isinstance(each, Shard) else Replicate() for each in tensors[0].placements]

        def spread(value: Any) -> Any:
            if isinstance(value, DTensor) and value.shape == tensors[0].shape:
                return value.redistribute(worker.mesh, placements)
            return value

        return tree_map(spread, result)

    def _dropout(self, tensor: Any, p: float, *_: Any) -> Any:
        """Apply dropout to the whole tensor as one process would, without gathering it."""
        worker = self.worker
        placements = [each if isinstance(each, Shard) else Replicate() for each in tensor.placements]
        local = tensor.redistribute(worker.mesh, placements).to_local()
        drawn, mask = self.func(torch.ones(tensor.shape, dtype=tensor.dtype), p, True)
        kept = worker.part(drawn, placements)
        return (
            worker.wrap(local * kept, tensor, placements),
            worker.wrap(worker.part(mask, placements).clone(), tensor, placements),
        )


class Again(MeshError):
    """A question about a tensor that has failed."""

    def __init__(self, failed: Failed) -> None:
        super().__init__(failed.error)
        self.failed = failed


def _layouts(args: Any, kwargs: Any) -> tuple[Any, ...]:
    return tuple(each._spec for each in tree_leaves((args, kwargs)) if isinstance(each, DTensor))  # noqa: SLF001 - its layout


def _is_average(result: Any) -> bool:
    return isinstance(result, DTensor) and any(
        isinstance(each, Partial) and each.reduce_op == "avg" for each in result.placements
    )


def _is_spec(value: Any) -> bool:
    return isinstance(value, DTensorSpec)


def _first_failure(values: Any) -> Failed | None:
    return next((failed for each in tree_leaves(values) if (failed := failure_of(each)) is not None), None)


def mark(values: Any, failed: Failed | None) -> None:
    if failed is not None:
        for each in tree_leaves(values):
            if isinstance(each, DTensor):
                each._mesh_failed = failed  # type: ignore[attr-defined]  # noqa: SLF001 - beside PyTorch's own


def _functional(func: Any) -> Any:
    """Return the operator that makes a new tensor, for one that changes a tensor in place."""
    schema = func._schema  # noqa: SLF001 - as the whole of PyTorch reads it
    name = schema.name.removeprefix("aten::").removesuffix("_")
    packet = getattr(torch.ops.aten, name, None)
    return getattr(packet, func._overloadname, func) if packet is not None else func  # noqa: SLF001 - likewise


@contextmanager
def _drawing(seed: int) -> Iterator[None]:
    """Draw random numbers from a seed, and leave this process's own as they were."""
    generator = torch.default_generator
    before = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(before)


def redistribute(worker: Worker, tensor: DTensor, placements: tuple[Placement, ...]) -> DTensor:
    """Return the same tensor, with another layout."""
    if any(
        isinstance(each, Partial) and each != had
        for each, had in zip(placements, tensor.placements, strict=True)
    ):
        return worker.wrap(worker.part(worker.full(tensor), placements).clone(), tensor, placements)
    return tensor.redistribute(worker.mesh, placements)


def like(worker: Worker, tensor: DTensor, other: DTensor) -> DTensor:
    """Return a tensor, with the layout of another one."""
    placements = tuple(Replicate() if isinstance(each, Partial) else each for each in other.placements)
    if tensor.placements == placements:
        return tensor
    put_off = worker.sums.put_off(tensor, placements)
    return tensor.redistribute(worker.mesh, placements) if put_off is None else put_off


def summed(worker: Worker, tensor: DTensor, dim: str) -> DTensor:
    """Return a tensor with its sum along one dimension of the mesh, if there are summands."""
    placements = list(tensor.placements)
    at = worker.names.index(dim)
    if not isinstance(placements[at], Partial):
        return tensor
    placements[at] = Replicate()
    return tensor.redistribute(worker.mesh, placements)


def seed(worker: Worker, value: int) -> None:
    """Draw from this next."""
    worker.seed = value


SPECIALS: dict[str, Callable[..., Any]] = {each.__name__: each for each in (redistribute, like, summed, seed)}
