"""A captured step of the global view as one function on this process's parts.

The operators of which a decision is kept (`_decisions.py`) become lines of one function on local tensors. What stands between them, such as
random operators and postponed sums, is called there on DTensors, as the flat loop calls it.

FUS-1: the function does what the flat loop does, in the same order, and meets the other processes as that does, so that these need not have it too. It
holds for tensors that are laid out, lie in memory and are the same ones as in the replay from which it was written, and of which none has failed or
is a copied view. From the first instruction on for which that is not so, or which raises, the flat loop goes on.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from mesh_tensor._instructions import HOLE, SPECIAL, Template
from mesh_tensor._parts._apart import Apart
from mesh_tensor._replay._writing import count_numbers, where_raised, write_function

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from mesh_tensor._parts._layouts import Layout
    from mesh_tensor._parts._sums import Summand
    from mesh_tensor._parts._worker import Worker
    from mesh_tensor._replay._compiled import Step
    from mesh_tensor._replay._decisions import Kept


_DETACH = torch.ops.aten.detach.default


@dataclass(slots=True)
class Played:
    """How the flat loop has carried an instruction out."""

    kept: Kept | None = None
    """By this decision, if by one."""
    layouts: Sequence[Layout] = ()
    """Of the tensors that it was given then."""
    later: Layout | None = None
    """Its result is a sum that was postponed, and is laid out so."""
    along: tuple[int, int | None] | None = None
    """The dimension of the mesh along which that is summed up, and that of the tensor which is split then."""
    shows: bool = False
    """Its result shows such a sum."""


@dataclass(slots=True)
class _Held:
    """A tensor of the step: the variables that have this process's part of it, the DTensor, and the sum that it will be; and its layout, if that is known."""

    part: int | None = None
    whole: int | None = None
    layout: Layout | None = None
    later: int | None = None

    def variables(self) -> list[int]:
        """Return those that have it, the one that says most first."""
        return [each for each in (self.whole, self.part, self.later) if each is not None]


@dataclass(frozen=True, slots=True)
class _Origin:
    """Where a line comes from: the instruction and, of a decision, which step of its program."""

    at: int
    kept: Kept | None = None
    place: int = 0
    names: Mapping[int, int] = field(default_factory=dict)
    """The variables that stand for the tensors of that program."""


class _Moved(Exception):
    """A tensor is not as it was when the function was written."""


class Fused:
    """A program of the global view, for tensors of certain layouts."""

    def __init__(
        self,
        worker: Worker,
        steps: Sequence[Step],
        played: Sequence[Played],
        *,
        inputs: Sequence[int],
        layouts: Sequence[Layout],
        results: Sequence[int],
        scalars: Sequence[Any],
        holes: Sequence[int],
    ) -> None:
        self._worker = worker
        self._instructions = steps
        self._scalars = scalars
        self._new = {place: hole for hole, place in enumerate(holes)}
        self._steps: list[Step] = []
        self._origins: list[_Origin] = []
        self._since: list[tuple[int, int, _Held, _Held]] = []
        """From which line on an instruction's tensor is held by which variables."""
        self._next: int = 1 + max([0, *inputs, *(out + template.out for template, out, _ in steps)])
        self._held: dict[int, _Held] = {}
        self._given = [_Held(ref, layout=layout) for ref, layout in zip(inputs, layouts, strict=True)]
        for ref, held in zip(inputs, self._given, strict=True):
            self._hold(ref, held)
        self._can_wait = False
        """Whether sums may have been postponed by now."""
        places: list[int] = []
        """Of the numbers, in the order in which the lines take them."""
        begin = 0
        for at, ((template, out, refs), how) in enumerate(zip(steps, played, strict=True)):
            if how.kept is not None:
                self._inline(at, out, refs, how)
                places.extend(begin + each for each in how.kept.order)
            elif how.later is not None:
                self._postpone(at, out, refs, how)
            elif how.shows:
                self._hold(out, self._held[refs[0]])
            else:
                self._call(at, template, out, refs)
                places.extend(range(begin, begin + count_numbers(template)))
            begin += count_numbers(template)
        self._results = [self._held[ref] for ref in results]
        self._function, self._lines = write_function(
            self._steps,
            list(inputs),
            [each.variables()[0] for each in self._results],
            {},
            name="<captured step on local tensors>",
            scalars=[scalars[place] for place in places],
            holes=[at for at, place in enumerate(places) if place in self._new],
        )
        self._order = [self._new[place] for place in places if place in self._new]

    def __call__(self, values: Sequence[Any], locals_: Sequence[Any], numbers: Sequence[Any]) -> list[Any]:
        """Return the results: tensors that were given, or new ones."""
        found = self._function(locals_, [numbers[each] for each in self._order])
        made = {id(held): value for held, value in zip(self._given, values, strict=True)}
        for held, each in zip(self._results, found, strict=True):
            if id(held) not in made:
                made[id(held)] = self._shown(held, held.variables()[0], each)
        return [made[id(held)] for held in self._results]

    def _shown(self, held: _Held, variable: int, value: Any) -> Any:
        """Return what processes keep under a number, of what a variable has."""
        if variable == held.whole:
            return value
        if variable == held.later:
            return self._worker.sums.shown(value)
        assert held.layout is not None, "it is known of parts"
        return Apart(value, held.layout)

    def left(
        self, error: Exception, values: Sequence[Any], numbers: Sequence[Any]
    ) -> tuple[int, Exception | None, dict[int, Any]]:
        """Return from which instruction on the flat loop continues after an error, which error that has raised, and the tensors by then."""
        line, variables = where_raised(error.__traceback__)
        step = self._lines[line]
        origin = self._origins[step]
        made = {id(held): value for held, value in zip(self._given, values, strict=True)}
        env: dict[int, Any] = {}
        latest = {ref: (held, then) for since, ref, held, then in self._since if since <= step}
        for ref, (held, then) in latest.items():
            if id(held) in made:
                env[ref] = made[id(held)]
            elif (found := next((each for each in then.variables() if each in variables), None)) is not None:
                env[ref] = made[id(held)] = self._shown(then, found, variables[found])
        self._worker.bench.now = origin.at
        if isinstance(error, _Moved):
            return origin.at, None, env
        if origin.kept is None:
            return origin.at, error, env
        if not origin.kept.meets:
            # It has written nothing yet: the same once more, with everything that is done about failures.
            return origin.at, None, env
        self._finish(origin, error, env, variables, numbers)
        return origin.at + 1, None, env

    def _finish(
        self,
        origin: _Origin,
        error: Exception,
        env: dict[int, Any],
        variables: dict[int, Any],
        numbers: Sequence[Any],
    ) -> None:
        """Do the rest of an instruction that meets others (RGN-2), and mark what depends on what has raised."""
        template, out, refs = self._instructions[origin.at]
        kept = origin.kept
        assert kept is not None, "it is a decision's line"
        begin = sum(count_numbers(each) for each, _, _ in self._instructions[: origin.at])
        given = [
            numbers[self._new[place]] if place in self._new else self._scalars[place]
            for place in range(begin, begin + count_numbers(template))
        ]
        known = {ref: variables[name] for ref, name in origin.names.items() if name in variables}
        kept.finish(
            self._worker,
            template,
            (env, out, [env[ref] for ref in refs]),
            (origin.place, known, error),
            given,
        )

    def _fresh(self, count: int) -> int:
        """Return the first of so many new variables."""
        self._next += count
        return self._next - count

    def _hold(self, ref: int, held: _Held) -> None:
        self._held[ref] = held
        self._since.append((len(self._steps), ref, held, copy.copy(held)))

    def _changed(self, held: _Held) -> None:
        """Note that a tensor is held by other variables now."""
        for ref in [ref for ref, each in self._held.items() if each is held]:
            self._hold(ref, held)

    def _emit(self, template: Template, out: int, variables: list[int], origin: _Origin) -> None:
        self._steps.append((template, out, variables))
        self._origins.append(origin)

    def _part(self, at: int, ref: int, layout: Layout) -> int:
        """Return the variable with this process's part of a tensor."""
        held = self._held[ref]
        if held.part is None:
            taken = (
                _ours("arrived", self._arrived)
                if held.whole is None
                else _ours("part", _Part(self._worker, layout))
            )
            variable, held.part, held.layout = held.variables()[0], self._fresh(1), layout
            self._emit(taken, held.part, [variable], _Origin(at))
            self._changed(held)
        return held.part

    def _arrived(self, summand: Summand) -> torch.Tensor:
        found = self._worker.sums.arrived(summand)
        if found is None:
            raise _Moved
        return found

    def _whole(self, at: int, ref: int) -> int:
        """Return the variable with the DTensor."""
        held = self._held[ref]
        if held.whole is None:
            assert held.layout is not None, "it is known of parts and sums"
            made = _ours("whole", self._worker.sums.shown if held.part is None else held.layout.join)
            variable, held.whole = held.variables()[0], self._fresh(1)
            self._emit(made, held.whole, [variable], _Origin(at))
            self._changed(held)
        return held.whole

    def _postpone(self, at: int, out: int, refs: list[int], how: Played) -> None:
        """Write that a sum is to be made, later."""
        for ref in refs[1:]:
            if self._held[ref].later is not None:
                # It is only looked at, but that counts.
                self._part(at, ref, how.layouts[0])
        assert how.later is not None and how.along is not None, "it is one of these"
        given = self._part(at, refs[0], how.layouts[0])
        made = _ours(
            "postpone",
            _There(self._worker, at, _Postponed(self._worker, how.later, *how.along)),
        )
        held = _Held(layout=how.later, later=self._fresh(1))
        assert held.later is not None
        self._emit(made, held.later, [given], _Origin(at))
        self._hold(out, held)
        self._can_wait = True

    def _inline(self, at: int, out: int, refs: list[int], how: Played) -> None:
        """Write the lines of an operator whose decision is kept."""
        kept = how.kept
        assert kept is not None, "it is one of these"
        given = [self._part(at, ref, layout) for ref, layout in zip(refs, how.layouts, strict=True)]
        if self._can_wait and kept.writes:
            self._emit(
                _ours("make way", partial(self._worker.sums.make_way, (), writes=True), refs=0, out=0),
                0,
                [],
                _Origin(at),
            )
        names = dict(enumerate(given))
        for place, (template, made, used) in enumerate(kept.program.steps):
            if template.func is _DETACH:
                # Nothing here has gradients.
                names[made] = names[used[0]]
                continue
            first = self._fresh(template.out)
            self._emit(template, first, [names[ref] for ref in used], _Origin(at, kept, place, names))
            names.update(
                zip(range(made, made + template.out), range(first, first + template.out), strict=True)
            )
        before = [self._held[ref] for ref in refs]
        for place, (what, layout) in enumerate(kept.results):
            if layout is not None:
                held = _Held(names[kept.program.ends[what]], layout=layout)
            else:
                held = before[what] if what >= 0 else self._held[out - 1 - what]
            self._hold(out + place, held)

    def _call(self, at: int, template: Template, out: int, refs: list[int]) -> None:
        """Write the call of what no decision is kept of."""
        wholes = [self._whole(at, ref) for ref in refs]
        here = copy.copy(template)
        here.func = _There(self._worker, at, template.func)
        first = self._fresh(template.out)
        self._emit(here, first, wholes, _Origin(at))
        for place in range(template.out):
            self._hold(out + place, _Held(whole=first + place))
        self._can_wait = True
        for held in {id(self._held[ref]): self._held[ref] for ref in refs}.values():
            # It may have been written to, or be summed up by now.
            held.part = None
            self._changed(held)


class _There:
    """Calls what an instruction calls, and says which one it is."""

    __slots__ = ("_at", "_bench", "_func")

    def __init__(self, worker: Worker, at: int, func: Callable[..., Any]) -> None:
        self._bench = worker.bench
        self._at = at
        self._func = func

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._bench.now = self._at
        return self._func(*args, **kwargs)


class _Postponed:
    """Has a summand summed up, later."""

    __slots__ = ("_dim", "_layout", "_split", "_worker")

    def __init__(self, worker: Worker, layout: Layout, dim: int, split: int | None) -> None:
        self._worker = worker
        self._layout = layout
        self._dim = dim
        self._split = split

    def __call__(self, local: torch.Tensor) -> Summand:
        return self._worker.sums.postpone(local, self._layout, self._dim, self._split)


class _Part:
    """Takes this process's part of a DTensor, once it is there."""

    __slots__ = ("_layout", "_worker")

    def __init__(self, worker: Worker, layout: Layout) -> None:
        self._worker = worker
        self._layout = layout

    def __call__(self, tensor: Any) -> torch.Tensor:
        worker = self._worker
        if worker.sums.any:
            worker.sums.make_way((tensor,), writes=False)
        seen = worker.seen(tensor)
        if seen is None or seen[1] is not self._layout:
            raise _Moved
        return seen[0]


def _ours(name: str, func: Callable[..., Any], *, refs: int = 1, out: int = 1) -> Template:
    return Template((((SPECIAL, name, ""), None), [HOLE] * refs, {}, refs, out, 0, ()), func)


def first_of_each(locals_: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Return which of these are the same: the first places where they stand."""
    first: dict[int, int] = {}
    return tuple([first.setdefault(id(each), at) for at, each in enumerate(locals_)])
