"""One of PyTorch's operators, on tensors of a mesh in the global view, in one process.

STM-3 applies here, as in `_worker`.
"""

from __future__ import annotations

import math
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.utils._pytree import tree_leaves, tree_map

from mesh_core import MeshError
from mesh_tensor import _devices as devices
from mesh_tensor._instructions import Failed, Instead
from mesh_tensor._operators import NEEDS_GRADIENTS
from mesh_tensor._parts._attention import BACKWARD, FORWARD, attend, missing, splits
from mesh_tensor._parts._limits import (
    DIVIDING,
    ENTROPIES,
    FILLING,
    GATHERED,
    INDEXED,
    MASKED,
    MEAN,
    MEANS,
    NONEMPTY,
    NORMS,
    ORDERED,
    SEEKING,
    SUM,
    WHOLE,
    dims_given,
    has_empty_parts,
    has_lone_rows,
    in_order,
    is_kept,
    is_unaligned,
    parts_of,
)
from mesh_tensor._torch._dtensor import DTensorSpec, decided, is_refusal, is_trusted, squeezes_parts

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mesh_tensor._parts._worker import Worker

_CANNOT = object()


def failure_of(tensor: Any) -> Failed | None:
    """Return why a tensor does not have its values."""
    return getattr(tensor, "_mesh_failed", None)


class Call:
    """An operator of PyTorch's, and this process's part in it."""

    __slots__ = (
        "asks",
        "attention",
        "cannot",
        "copying",
        "cuts",
        "dims",
        "divides",
        "entropy",
        "filling",
        "func",
        "gathered",
        "indexed",
        "masked",
        "mean",
        "needs_gradients",
        "nonempty",
        "norm",
        "ordered",
        "random",
        "replicated",
        "seeking",
        "squeezes",
        "stacks",
        "stays",
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
        self.divides = schema.name in DIVIDING
        self.entropy = schema.name in ENTROPIES and func._overloadname == "default"  # noqa: SLF001 - likewise
        self.gathered = GATHERED.get(schema.name, ())
        self.needs_gradients = schema.name in NEEDS_GRADIENTS
        self.nonempty = schema.name in NONEMPTY
        self.norm = schema.name in NORMS
        self.ordered = schema.name in ORDERED
        self.seeking = schema.name in SEEKING
        self.squeezes = squeezes_parts(func)
        self.stacks = schema.name == "aten::stack"
        self.dims = dims_given(func)
        self.masked = MASKED.get(schema.name)
        self.asks = (
            torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags
        )
        self.replicated = (
            self.asks
            or schema.name in WHOLE
            or not is_trusted(func)
            or any(argument.is_out for argument in schema.arguments)
        )
        """DTensor does something else, or nothing."""
        self.cannot: set[tuple[Any, ...]] = set()
        """Layouts of the tensors that DTensor cannot handle."""
        self.cuts: dict[Any, bool] = {}
        self.stays: dict[tuple[Any, ...], bool] = {}
        """By the layouts of the tensors: whether DTensor leaves what is written to in its layout."""
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
        if not worker.fits(result) or not all(
            worker.fits(self._argument(where, args, kwargs)) for where in self.written
        ):
            raise self._misfit(result, args, kwargs)
        if self.viewing and args and isinstance(args[0], DTensor):
            self._viewed(result, args, kwargs)
        if self.written and worker.copies.any:
            for each in tree_leaves([self._argument(where, args, kwargs) for where in self.written]):
                if isinstance(each, DTensor):
                    worker.copies.written(each)
        if worker.failures and (failed := first_failure((args, kwargs))) is not None:
            if self.asks:
                raise Again(failed)
            mark(result, failed)
            mark([self._argument(where, args, kwargs) for where in self.written], failed)
        return result

    def _done(self, args: Any, kwargs: Any) -> Any:  # noqa: C901, PLR0911 - one for each way
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
            or (self.squeezes and has_lone_rows(*args))
            or (self.indexed and is_unaligned(*args))
            or (self.nonempty and any(map(self._leaves_some_without, args)))
            or (self.filling and any(isinstance(each, Partial) for each in args[0].placements))
            or self.needs_gradients
            or complex in map(type, args)
            or ((self.written or self.seeking or self.ordered) and not self._stays(args, kwargs))
        ):
            return self._whole(args, kwargs)
        if self.mean and (len(args) <= self.mean or args[self.mean] == MEAN):
            if len(args) <= self.mean:
                return self._whole(args, kwargs)
            summed_up = (*args[: self.mean], SUM, *args[self.mean + 1 :])
            return torch.ops.aten.div.Scalar(self._done(summed_up, kwargs), max(1, args[1].numel()))
        if self.entropy and args[3] == MEAN and any(map(parts_of, args[:2])):
            return self._entropy(*self._done((*args[:3], SUM, args[4]), kwargs))
        args = self._adjusted(args)
        try:
            result = self.func(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - looked into
            return self._otherwise(error, args, kwargs)
        if self.masked is not None:
            result = self._unmasked(self.masked, result, args, kwargs)
        if isinstance(result, torch.Tensor) and not isinstance(result, DTensor):
            result = worker.wrap(result, result, worker.everywhere)
        elif _is_extreme(result):
            result = self._found(result)
        elif self.norm:
            # At once: a sum of norms of parts is none.
            result = worker.summed_up(result) if isinstance(result, DTensor) else result
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

    def _adjusted(self, args: Any) -> Any:
        """Return arguments that mean the same, and that DTensor takes for what they are."""
        if self.dims is not None and len(args) > self.dims and args[self.dims] == []:
            return (*args[: self.dims], list(range(args[0].dim())), *args[self.dims + 1 :])
        if self.divides and isinstance(args[1], DTensor):
            return (args[0], self.worker.summed_up(args[1]), *args[2:])
        if self.gathered:
            return tuple(
                self.worker.wrap(self.worker.full(each), each, self.worker.everywhere)
                if place in self.gathered and isinstance(each, DTensor)
                else each
                for place, each in enumerate(args)
            )
        if self.ordered:
            return tree_map(self._in_order, args)
        if self.stacks and len(args) > 1:
            # DTensor of PyTorch 2.11 counts a negative place among the dimensions of what is stacked.
            return (args[0], args[1] % (args[0][0].dim() + 1))
        return args

    def _entropy(self, total: DTensor, weight: DTensor) -> tuple[DTensor, DTensor]:
        """Return the mean, which all processes have, and the weight of all targets: in one message."""
        worker = self.worker
        parts = torch.stack([each._local_tensor for each in (total, weight)])  # noqa: SLF001 - without a copy
        both = worker.summed_up(worker.wrap(parts, parts, total.placements)).to_local()
        everywhere = worker.everywhere
        return worker.wrap(both[0] / both[1], total, everywhere), worker.wrap(both[1], weight, everywhere)

    def _in_order(self, value: Any) -> Any:
        if not isinstance(value, DTensor):
            return value
        local = in_order(value._local_tensor, value.is_contiguous())  # noqa: SLF001 - without a copy
        return self.worker.wrap(local, value, value.placements)

    def _found(self, result: DTensor) -> DTensor:
        """Return the largest or smallest of what each process has found. gloo may forget one that is not a number."""
        mesh = self.worker.mesh
        layout = tuple(zip(mesh.shape, result.placements, strict=True))
        count = math.prod(size for size, each in layout if _is_of_extremes(each))
        # Theirs one below the other, before the other dimensions.
        theirs = [Shard(0) if _is_of_extremes(each) else _behind_one(each) for _, each in layout]
        together = [Replicate() if _is_of_extremes(each) else _behind_one(each) for _, each in layout]
        form = torch.empty(count, *result.shape, device="meta")
        given = self.worker.wrap(result.to_local().unsqueeze(0), form, theirs)
        local = given.redistribute(mesh, together).to_local()
        is_largest = any(isinstance(each, Partial) and each.reduce_op == "max" for _, each in layout)
        placements = [Replicate() if _is_of_extremes(each) else each for _, each in layout]
        return self.worker.wrap(local.amax(0) if is_largest else local.amin(0), result, placements)

    def _stays(self, args: Any, kwargs: Any) -> bool:
        """Return whether DTensor leaves in their layouts the tensors that must not be redistributed: those written to, sought in, or of which their order in memory matters."""
        layouts = _layouts(args, kwargs)
        found = self.stays.get(layouts)
        if found is None:
            found = self.stays[layouts] = self._is_staying(args, kwargs)
        return found

    def _is_staying(self, args: Any, kwargs: Any) -> bool:
        try:
            sharding = decided(self.func, args, kwargs)
        except Exception:  # noqa: BLE001 - as it will say when it is called
            return True
        places = self.written or (range(len(args)) if self.ordered else (0,))
        bound = [self._argument(where, args, kwargs) for where in places]
        moved = sharding.redistribute_schema
        if moved is not None:
            then = [self._argument(where, moved.args_schema, moved.kwargs_schema) for where in places]
            if _placed(then) != _placed(bound):
                return False
        if self.seeking:
            dim = args[1] if len(args) > 1 else None
            return not any(dim is None or each == dim % max(1, args[0].dim()) for each in parts_of(args[0]))
        out = sharding.output_spec
        return not isinstance(out, DTensorSpec) or len(bound) != 1 or _placed([out]) == _placed(bound)

    def _unmasked(self, masked: tuple[int, int, int | None], result: Any, args: Any, kwargs: Any) -> Any:
        """Return what was looked up, once the processes have put it together."""
        beyond = self._beyond(masked, result, args)
        # At once: some releases take a sum of what is masked for masked, too, and fail in one process alone.
        result = self.worker.summed_up(result)
        if beyond is not None:
            raise self._instead(beyond, result, args, kwargs)
        return result

    def _beyond(self, masked: tuple[int, int, int | None], result: Any, args: Any) -> Exception | None:
        """Return an error if an index refers to what no process has; DTensor has not looked."""
        if not any(isinstance(each, Partial) for each in result.placements):
            return None
        of, by, along = masked
        dim = 0 if along is None else args[along]
        size, index = args[of].shape[dim], args[by].to_local()
        if not index.numel():
            return None
        low, high = (int(each) for each in torch.aminmax(index))
        if low >= 0 and high < size:
            return None
        return IndexError(
            f"index {low if low < 0 else high} is out of bounds for dimension {dim} with size {size}"
        )

    def _misfit(self, result: Any, args: Any, kwargs: Any) -> Instead:
        """DTensor has made something that is not the part that its layout says: continue with zeros of that form."""
        written = [self._argument(where, args, kwargs) for where in self.written]
        wrong = next(each for each in tree_leaves([result, written]) if not self.worker.fits(each))
        error = MeshError(
            f"PyTorch's DTensor has no right result for {self.func} on tensors laid out as "
            f"{', '.join(str(each.placements) for each in tree_leaves((args, kwargs)) if isinstance(each, DTensor))}: this process has a part "
            f"of {tuple(wrong.to_local().shape)}, which is none of {tuple(wrong.shape)} laid out as {wrong.placements}. Give all processes "
            "copies first, with redistribute()"
        )

        def empty(value: Any) -> Any:
            return self.worker.zeros(value._spec) if isinstance(value, DTensor) else value  # noqa: SLF001 - its layout

        return self._instead(error, tree_map(empty, result), args, kwargs)

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
        if (self.views and self._is_cut(*args)) or (self.squeezes and has_lone_rows(*args)):
            return True
        try:
            sharding = decided(self.func, args, kwargs)
        except Exception:  # noqa: BLE001 - whatever it is, it does not know how
            return True
        changed = sharding.redistribute_schema
        return changed is not None and changed.args_schema[0].placements != base.placements

    def _is_cut(self, tensor: DTensor, shape: Sequence[int]) -> bool:
        """Return whether DTensor cannot view the parts: processes have parts of different sizes of a dimension that is joined or split, or the tensor has
        no elements, where it may look for the dimensions that belong together for ever.
        """
        layout = tensor._spec  # noqa: SLF001 - hashes once
        found = self.cuts.get(layout)
        if found is None:
            found = self.cuts[layout] = not tensor.numel() or any(
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
        spec = _CANNOT if is_refusal(error) else self._spec(args, kwargs)
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
        try:
            return decided(self.func, args, kwargs).output_spec
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
                found = worker.full(value)
                if self.ordered:
                    found = in_order(found, value.is_contiguous())
                fulls[id(value)] = found
            return found

        whole_args, whole_kwargs = tree_map(give, (args, kwargs))
        try:
            func = torch.ops.aten.reshape.default if self.views else self.func
            with torch.set_grad_enabled(self.needs_gradients):
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
                return torch.empty_strided(
                    value.shape, value.stride(), dtype=value.dtype, device=self.worker.device
                )

            fake_args, fake_kwargs = tree_map(fake, (args, kwargs))
            result = self.func(*fake_args, **fake_kwargs)

        def real(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            zeros = torch.zeros(value.shape, dtype=value.dtype, device=self.worker.device)
            return self.worker.wrap(zeros, zeros, self.worker.everywhere)

        return tree_map(real, result)

    def _with_random(self, args: Any, kwargs: Any) -> Any:
        """Let all processes draw the same numbers, and each keep its part."""
        worker = self.worker
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, DTensor)]
        with _drawing(worker.seed, worker.device.type):
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
        drawn, mask = self.func(torch.ones(tensor.shape, dtype=tensor.dtype, device=local.device), p, True)
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


def _placed(tensors: Any) -> list[Any]:
    return [each.placements for each in tree_leaves(tensors) if isinstance(each, (DTensor, DTensorSpec))]


def _is_average(result: Any) -> bool:
    return isinstance(result, DTensor) and any(
        isinstance(each, Partial) and each.reduce_op == "avg" for each in result.placements
    )


def _is_extreme(result: Any) -> bool:
    """Return whether each process has found the largest, or smallest, of floating-point numbers of its own."""
    return (
        isinstance(result, DTensor)
        and result.dtype.is_floating_point
        and any(map(_is_of_extremes, result.placements))
    )


def _is_of_extremes(placement: Any) -> bool:
    return isinstance(placement, Partial) and placement.reduce_op in ("max", "min")


def _behind_one(placement: Any) -> Any:
    """Return the placement of a tensor that gets another dimension in front."""
    return Shard(placement.dim + 1) if isinstance(placement, Shard) else placement


def _is_spec(value: Any) -> bool:
    return isinstance(value, DTensorSpec)


def first_failure(values: Any) -> Failed | None:
    return next((failed for each in tree_leaves(values) if (failed := failure_of(each)) is not None), None)


def mark(values: Any, failed: Failed | None) -> None:
    if failed is not None:
        for each in tree_leaves(values):
            if isinstance(each, DTensor):
                each._mesh_failed = failed  # type: ignore[attr-defined]  # noqa: SLF001 - beside PyTorch's own


def _functional(func: Any) -> Any:
    """Return the operator that makes a new tensor, for one that changes a tensor in place."""
    schema = func._schema  # noqa: SLF001 - as the whole of PyTorch reads it
    packet = getattr(torch.ops.aten, schema.name.removeprefix("aten::").removesuffix("_"), None)
    # By what it takes: the overloads of the two may have different names, as those of `transpose_` have.
    takes = [str(each.type) for each in schema.arguments]
    for name in [] if packet is None else packet.overloads():
        found = getattr(packet, name)
        if [str(each.type) for each in found._schema.arguments] == takes:  # noqa: SLF001 - likewise
            return found
    return func


@contextmanager
def _drawing(seed: int, kind: str) -> Iterator[None]:
    """Draw random numbers from a seed, and leave this process's own as they were."""
    before = [(each, each.get_state()) for each in devices.generators(kind)]
    for generator, _ in before:
        generator.manual_seed(seed)
    try:
        yield
    finally:
        for generator, state in before:
            generator.set_state(state)
