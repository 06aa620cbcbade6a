"""What DTensor decided about an operator, kept and carried out directly when the operator meets tensors that are laid out alike.

DTensor's dispatch costs many times what a small operator does. The first time that a template meets tensors of some layouts, it is carried out by
`Call`, with all its checks; the second time it is too, and noted: as a program of operators on local tensors, and collectives (`_noted.py`). From
then on the program is carried out, and the results stay apart from their layouts (`_apart.py`).

DCN-1: a kept decision gives what `Call` gives, meets the other processes as that does, and is used only where nothing that it depended on is
different: the template, with its constants; the layouts of the tensors (placements, shape, strides, type and mesh) and which of them are the same; the types
of numbers, and their values where the program does not hand them to the operator as they are, or a tensor consists of summands, or they decide how parts are
put together; strides in this process's memory, if the program is more than the operator itself, or its values depend on them. What depends on values, random operators, copied views (VWS-1), pending sums (SUM-1), and tensors
that have failed are left to `Call`. So processes need not agree on which of them uses a kept decision.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor, Partial
from torch.utils._pytree import tree_leaves

from mesh_core import MeshError
from mesh_tensor._instructions import IN_PLACE_SHAPE, NUMBER, Failed, Template
from mesh_tensor._operators import COLLECTIVE_SPACES
from mesh_tensor._parts._apart import Apart, joined
from mesh_tensor._parts._call import Call, failure_of, mark
from mesh_tensor._parts._sums import summed_along
from mesh_tensor._replay._compiled import written_by
from mesh_tensor._replay._fused import Played, first_of_each
from mesh_tensor._replay._noted import Program, Tracer, Untraceable, local_of
from mesh_tensor._replay._writing import count_numbers, where_raised, write_function

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mesh_tensor._parts._worker import Worker
    from mesh_tensor._replay._compiled import Step

_VARIANTS = 32
"""The most decisions that a template keeps, and the most for one set of layouts."""
_PLACED_IN_MEMORY = frozenset({"aten::as_strided", "aten::as_strided_", "aten::resize_", "aten::set_"})
"""They refer to memory rather than to a tensor."""
_DECIDED_BY_NUMBERS = frozenset(
    {"aten::_foreach_norm", "aten::histc", "aten::linalg__powsum", "aten::linalg_vector_norm", "aten::norm"}
)
"""Their numbers say how results of parts are put together: the largest, the smallest, a sum of powers."""
_UNINITIALIZED = frozenset({"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty"})
_DETACH = torch.ops.aten.detach.default


class _Notes(Tracer):  # type: ignore[no-untyped-call]
    """Notes what an operator does while it is carried out; that must not disturb it."""

    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        super().__init__(inputs)
        self.unfit = False
        """Whether something happened that cannot be repeated from notes."""

    def _note(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        if self.unfit or any(_is_without_values(each) for each in tree_leaves((args, kwargs, result))):
            # DTensor asks what form a result has.
            return
        tags = getattr(func, "tags", ())
        if (
            torch.Tag.data_dependent_output in tags
            or torch.Tag.dynamic_output_shape in tags
            or (torch.Tag.nondeterministic_seeded in tags and "scaled_dot_product" not in func.name())
            or (isinstance(func, torch._ops.OpOverload) and func._schema.name in _PLACED_IN_MEMORY)  # noqa: SLF001 - as the whole of PyTorch reads it
        ):
            self.unfit = True
            return
        try:
            super()._note(func, args, kwargs, result)
        except Untraceable:
            self.unfit = True

    def prune(self, needed: set[int]) -> None:
        """Leave out what nothing depends on."""
        kept: list[Step] = []
        for step in reversed(self.steps):
            template, out, refs = step
            if (
                not needed.isdisjoint(range(out, out + template.out))
                or template.func._schema.is_mutable  # type: ignore[attr-defined]  # noqa: SLF001 - likewise
                or _meets(step)
            ):
                kept.append(step)
                needed.update(refs)
        self.steps = kept[::-1]
        self.origins = [0] * len(kept)


class Kept:
    """A program that stands for an operator on tensors of some layouts."""

    __slots__ = ("_lines", "function", "layout", "meets", "order", "program", "results", "writes")

    def __init__(self, worker: Worker, program: Program, order: list[int], *, writes: bool) -> None:
        self.program = program
        self.writes = writes
        """Whether the operator is one that writes to tensors."""
        self.meets = any(map(_meets, program.steps))
        """Whether it takes part in collectives: once begun, it must be finished."""
        self.order = order
        """Which of the operator's numbers the program takes, in its order."""
        self.results = [
            (what, None if spec is None else worker.layouts.of(spec)) for what, spec in program.results
        ]
        self.layout = self.results[0][1] if len(self.results) == 1 else None
        """Of its one result, if that is a new tensor."""
        self.function, self._lines = write_function(
            program.steps,
            list(range(program.count)),
            program.ends,
            {},
            name="<operator on local tensors>",
            scalars=order,
            holes=[order.index(each) for each in range(len(order))],
        )

    def keep(self, env: dict[int, Any], out: int, values: list[Any], made: Sequence[Any]) -> None:
        """Store the results."""
        if self.layout is not None:
            env[out] = Apart(made[0], self.layout)
            return
        for at, (what, layout) in enumerate(self.results):
            if layout is not None:
                env[out + at] = Apart(made[what], layout)
            else:
                env[out + at] = values[what] if what >= 0 else env[out - 1 - what]

    def where(self, error: Exception) -> tuple[int, dict[int, Any], Exception]:
        """Return which step has raised, with the tensors by then."""
        line, env = where_raised(error.__traceback__)
        return self._lines[line], env, error

    def finish(
        self,
        worker: Worker,
        template: Template,
        instruction: tuple[dict[int, Any], int, list[Any]],
        where: tuple[int, dict[int, Any], Exception],
        given: Sequence[Any],
    ) -> None:
        """Do the rest of a program that has raised, so that the others do not wait (RGN-2), and mark what depends on that."""
        (env, out, values), (at, known, error) = instruction, where
        count = worker.bench.instruction()
        made, failed = self.program.rest(
            at,
            known,
            {},
            error,
            lambda _, raised: Failed(count, template.name, raised),
            [given[each] for each in self.order],
        )
        worker.failures = True
        self.keep(env, out, values, made)
        for place, why in enumerate(self.program.failures(failed)):
            mark(joined(env[out + place]), why)
        for place in self.program.written:
            mark(joined(values[place]), failed.get(place))


class _Varied:
    """Decisions that depend on more than layouts."""

    __slots__ = ("by_memory", "by_value", "known")

    def __init__(self, *, by_memory: bool, by_value: bool) -> None:
        self.by_memory = by_memory
        self.by_value = by_value
        self.known: dict[Any, Kept] = {}

    def key(self, locals_: Sequence[torch.Tensor], given: Sequence[Any]) -> Any:
        """Return what else a decision depends on."""
        where = [(each.stride(), each.is_neg()) for each in locals_] if self.by_memory else []
        # As they are written, because 0.0 equals -0.0.
        return (*where, *map(repr, given)) if self.by_value else tuple(where)


_NEVER = object()


@dataclass(slots=True)
class _Asked:
    """An instruction, and what is known of its tensors."""

    env: dict[int, Any]
    do: Callable[..., None]
    """Carries it out as DTensor does."""
    out: int
    refs: list[int]
    values: list[Any]
    locals_: list[Any]
    given: Sequence[Any]
    """Its numbers."""

    def join(self) -> list[Any]:
        """Return its tensors as DTensors."""
        for at, each in enumerate(self.values):
            if type(each) is Apart:
                self.values[at] = self.env[self.refs[at]] = each.joined()
        return self.values


class Decisions:
    """The decisions about one template."""

    __slots__ = ("_before", "_is_fit", "_known", "_numbers", "_operator", "_template", "_worker", "_writes")

    def __init__(self, template: Template, worker: Worker) -> None:
        self._template = template
        self._worker = worker
        self._numbers = count_numbers(template)
        self._known: dict[Any, Any] = {}
        """By layouts: how often they were met, then a decision, or several, or that there can be none."""
        self._before = 0 if worker.compares else 1
        """How often an operator is carried out by DTensor before it is noted."""
        func: Any = template.func
        self._operator = func.func if isinstance(func, Call) else None
        self._writes = isinstance(func, Call) and bool(func.written)
        self._is_fit = _can_be_noted(template)

    def carry_out(
        self, env: dict[int, Any], out: int, refs: list[int], numbers: Any, do: Callable[..., None]
    ) -> None:
        """Carry an instruction out: as it was decided before, or by `do`."""
        if self._worker.played is not None:
            self._worker.played.append(Played())
        given = [next(numbers) for _ in range(self._numbers)] if self._numbers else ()
        values = [env.get(ref) for ref in refs]
        if self._is_fit and self._is_done(env, out, refs, values, given, do):
            return
        for ref in refs:
            found = env.get(ref)
            if type(found) is Apart:
                env[ref] = found.joined()
        do(self._template, out, refs, iter(given))
        if self._worker.played is not None:
            self._worker.played[-1] = self._how(env, out, values)

    def _how(self, env: dict[int, Any], out: int, values: list[Any]) -> Played:
        """Return how an instruction was carried out of which no decision is kept."""
        sums, made = self._worker.sums, env.get(out)
        if self._template.out != 1 or not sums.is_pending(made):
            return Played()
        if self._operator is _DETACH:
            return Played(shows=True)
        before = self._worker.layout_of(values[0])
        after = self._worker.layout_of(made)
        return Played(
            layouts=[before], later=after, along=summed_along(before.spec.placements, after.spec.placements)
        )

    def _is_done(  # noqa: PLR0917 - an instruction, taken apart
        self,
        env: dict[int, Any],
        out: int,
        refs: list[int],
        values: list[Any],
        given: Sequence[Any],
        do: Callable[..., None],
    ) -> bool:
        """Carry it out as it was decided before, or note what is decided now; return whether it is done."""
        worker = self._worker
        if worker.sums.any and not self._makes_way(values):
            return False
        locals_: list[Any] = []
        key = self._key(values, locals_)
        if key is None or (self._writes and worker.copies.any):
            return False
        if given:
            key = key, *map(type, given)
        found = self._known.get(key)
        if type(found) is _Varied:
            found = found.known.get(found.key(locals_, given), found)
        if type(found) is not Kept or worker.compares:
            return self._is_noted(found, key, _Asked(env, do, out, refs, values, locals_, given))
        try:
            made = found.function(locals_, given)
        except Exception as error:  # noqa: BLE001 - looked into
            if not found.meets:
                # Nothing has been written yet: the same once more, with everything that is done about failures.
                return False
            raised = error
        else:
            found.keep(env, out, values, made)
            if worker.played is not None:
                worker.played[-1] = Played(found, [worker.layout_of(each) for each in values])
            return True
        found.finish(worker, self._template, (env, out, values), found.where(raised), given)
        return True

    def _key(self, values: list[Any], locals_: list[Any]) -> Any:
        """Return what tells the layouts of tensors apart, and which of them are the same; ``None`` if one is special. Collects the parts."""
        key: list[Any] = []
        for each in values:
            if type(each) is Apart and each.made is None:
                locals_.append(each.local)
                key.append(each.layout)
                continue
            seen = self._worker.seen(each)
            if seen is None:
                return None
            locals_.append(seen[0])
            key.append(seen[1])
        if len(key) == 1:
            return key[0]
        if len(set(map(id, locals_))) != len(locals_):
            return tuple(key), first_of_each(locals_)
        return tuple(key)

    def _is_noted(self, found: Any, key: Any, asked: _Asked) -> bool:
        """Note what is decided if it is time to; return whether the instruction was carried out by that."""
        if type(found) is Kept:
            return self._compare(found, asked)
        if type(found) is _Varied:
            if len(found.known) >= _VARIANTS:
                return False
        elif found is _NEVER or (found is None and len(self._known) >= _VARIANTS):
            return False
        elif (found or 0) < self._before:
            self._known[key] = (found or 0) + 1
            return False
        self._note(key, asked)
        return True

    def _makes_way(self, values: list[Any]) -> bool:
        """Let pending sums do what the operator makes them do; return whether it is not one that can wait itself."""
        sums = self._worker.sums
        tensors = [each.made if type(each) is Apart else each for each in values]
        if self._operator is _DETACH and sums.is_pending(tensors[0]):
            return False
        sums.make_way(tensors, writes=self._writes)
        return True

    def _note(self, key: Any, asked: _Asked) -> None:
        """Carry the operator out as DTensor does, and keep how."""
        worker = self._worker
        tensors = asked.join()
        specs = [each._spec for each in tensors]  # noqa: SLF001 - its layout
        copies = [_copy(each) for each in asked.locals_] if worker.compares else []
        varied = self._known.get(key)
        # Unless all goes well.
        self._known[key] = _NEVER
        notes = _Notes(asked.locals_)
        with notes:
            asked.do(self._template, asked.out, asked.refs, iter(asked.given))
            wholes = [asked.env.get(asked.out + at) for at in range(self._template.out)]
            if not all(type(each) is DTensor for each in wholes):
                return
            ends = [local_of(each) for each in wholes]
        if (
            notes.unfit
            or any(each._local_tensor is not mine for each, mine in zip(tensors, asked.locals_, strict=True))  # noqa: SLF001 - likewise
            or any(each._spec != spec for each, spec in zip(tensors, specs, strict=True))  # noqa: SLF001 - likewise
            or any(getattr(each, "_mesh_copied", None) is not None for each in wholes)
            or any(failure_of(each) is not None for each in (*tensors, *wholes))
            or any(map(worker.sums.is_pending, wholes))
            or any(type(each) is not torch.Tensor or id(each) not in notes.refs for each in ends)
        ):
            return
        made_at = [notes.refs[id(each)] for each in ends]
        notes.prune(set(made_at))
        own = [at for at, (template, _, _) in enumerate(notes.steps) if template.func is self._operator]
        by_memory = len(notes.steps) != 1 or not own or getattr(self._template.func, "ordered", False)
        if by_memory and any(each.is_complex() for each in asked.locals_):
            # Whether they are conjugated is not in their strides.
            return
        order: list[int] | None = []
        if asked.given:
            can_hand_over = (
                len(own) == 1
                and not any(map(_has_summands, tensors))
                and self._operator._schema.name not in _DECIDED_BY_NUMBERS  # type: ignore[union-attr]  # noqa: SLF001 - as the whole of PyTorch reads it
            )
            order = _handed_over(self._template, asked.given, notes.steps, own[0]) if can_hand_over else None
        program = Program(notes, len(asked.locals_))
        program.gives(tensors, wholes, made_at)
        kept = Kept(worker, program, order or [], writes=self._writes)
        if program.written and not kept.meets and not _writes_at_the_end(program):
            return
        if type(varied) is not _Varied:
            varied = _Varied(by_memory=by_memory, by_value=order is None)
        elif (by_memory and not varied.by_memory) or (order is None and not varied.by_value):
            return
        if varied.by_memory or varied.by_value:
            varied.known[varied.key(asked.locals_, asked.given)] = kept
            self._known[key] = varied
        else:
            self._known[key] = kept
        if worker.compares and not kept.meets:
            self._check(kept, copies, asked, ends)

    def _compare(self, kept: Kept, asked: _Asked) -> bool:
        """Carry the operator out in both ways; with collectives, as kept."""
        if kept.meets:
            made = kept.function(asked.locals_, asked.given)
            kept.keep(asked.env, asked.out, asked.values, made)
            return True
        copies = [_copy(each) for each in asked.locals_]
        asked.join()
        asked.do(self._template, asked.out, asked.refs, iter(asked.given))
        wholes = [asked.env[asked.out + at] for at in range(self._template.out)]
        for whole, (_, layout) in zip(wholes, kept.results, strict=True):
            if layout is not None and whole._spec != layout.spec:  # noqa: SLF001 - its layout
                raise MeshError(
                    f"{self._template.name} gives {whole._spec}, and what was kept {layout.spec}"  # noqa: SLF001 - likewise
                )
        self._check(kept, copies, asked, [local_of(each) for each in wholes])
        return True

    def _check(self, kept: Kept, copies: list[Any], asked: _Asked, ends: list[Any]) -> None:
        """Raise if a decision gives something else than what was computed."""
        if any(template.func._schema.name in _UNINITIALIZED for template, _, _ in kept.program.steps):  # type: ignore[attr-defined]  # noqa: SLF001 - as the whole of PyTorch reads it
            return
        memories = {each.untyped_storage()._cdata for each in asked.locals_}  # noqa: SLF001 - which memory
        if kept.program.written and len(memories) != len(asked.locals_):
            # It writes to what another one reads, and the copies do not share memory.
            return
        made = kept.function(copies, asked.given)
        pairs = [(copies[at], asked.locals_[at]) for at in kept.program.written]
        for end, (what, layout) in zip(ends, kept.results, strict=True):
            if layout is not None:
                pairs.append((made[what], end))
        for mine, other in pairs:
            if mine.dtype != other.dtype or mine.shape != other.shape:
                raise MeshError(f"{self._template.name}: what was kept gives another form")
            torch.testing.assert_close(mine, other, equal_nan=True)


def _can_be_noted(template: Template) -> bool:
    func: Any = template.func
    if template.mode == IN_PLACE_SHAPE or not hasattr(func, "worker"):
        return False
    if not isinstance(func, Call):
        return bool(template.out)
    return not (
        func.random
        or func.asks
        or func.needs_gradients
        or func.func._schema.name in _PLACED_IN_MEMORY  # noqa: SLF001 - as the whole of PyTorch reads it
        or not (template.out or func.written)
    )


def _handed_over(template: Template, given: Sequence[Any], steps: list[Step], at: int) -> list[int] | None:
    """Have a step take the operator's numbers as they come; return them in its order, or ``None`` if it does not take them as they are."""
    step, out, refs = steps[at]
    names = [each.name for each in step.func._schema.arguments]  # type: ignore[attr-defined]  # noqa: SLF001 - likewise
    asked = dict(zip(names, template.args, strict=False)) | template.kwargs
    wanted = [name for name, each in asked.items() if each is NUMBER]
    args, kwargs = list(step.args), dict(step.kwargs)
    for name, value in zip(wanted, given, strict=True):
        place = names.index(name)
        if place < len(args):
            found, args[place] = args[place], NUMBER
        else:
            # What is the default is left out.
            found, kwargs[name] = kwargs.get(name, value), NUMBER
        taken_as = float(value) if type(found) is float else value
        if type(found) is not type(taken_as) or repr(found) != repr(taken_as):
            return None
    steps[at] = _with_arguments(step, args, kwargs), out, refs
    taken = dict(zip(names, args, strict=False)) | kwargs
    return [wanted.index(name) for name, each in taken.items() if each is NUMBER]


def _with_arguments(step: Template, args: list[Any], kwargs: dict[str, Any]) -> Template:
    func: Any = step.func
    namespace, _, name = func._schema.name.partition("::")  # noqa: SLF001 - likewise
    what = ((namespace, name, func._overloadname), None)  # noqa: SLF001 - likewise
    return Template((what, args, kwargs, step.refs, step.out, step.mode, step.written), func)


def _writes_at_the_end(program: Program) -> bool:
    """Return whether only the last step writes to inputs: if one raises, nothing was written."""
    return not any(
        program.root(ref) < program.count
        for template, _, refs in program.steps[:-1]
        for ref in written_by(template, refs)
    )


def _meets(step: Step) -> bool:
    return step[0].func.namespace in COLLECTIVE_SPACES  # type: ignore[attr-defined]


def _is_without_values(value: Any) -> bool:
    return isinstance(value, FakeTensor) or (isinstance(value, torch.Tensor) and value.is_meta)


def _has_summands(tensor: DTensor) -> bool:
    return any(isinstance(each, Partial) for each in tensor.placements)


def _copy(local: torch.Tensor) -> torch.Tensor:
    """Return the same values, in memory of their own but laid out alike, if no two are at one place."""
    if torch._debug_has_internal_overlap(local) != 0:  # noqa: SLF001 - its public name
        return local.clone()
    copy = torch.empty_strided(local.shape, local.stride(), dtype=local.dtype, device=local.device)
    return copy.copy_(local)
