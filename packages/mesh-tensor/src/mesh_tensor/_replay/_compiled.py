"""Regions of a recorded step that a process compiles.

A region is a run of PyTorch's operators, turned into an FX graph and given to a backend of `torch.compile`. Collectives, the user's functions
and random operators stay between regions.

RGN-1: a compiled region does the same as its operators one by one, up to rounding if the backend reorders arithmetic. If a region fails that
writes to nothing outside, its operators are carried out one by one; if it does write, everything that it makes or writes has failed.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule

from mesh_tensor._instructions import HOLE, IN_PLACE_SHAPE, LIST, Template, fill
from mesh_tensor._operators import COLLECTIVE_SPACES
from mesh_tensor._replay._writing import count_numbers

if TYPE_CHECKING:
    from torch.fx import Node

Step = tuple[Template, int, list[int]]
"""The function, the number of its first result, and the numbers of its tensors."""
LEAST = 2
"""The fewest operators that are worth a region."""
_ROUNDS = 8
"""The most operators that are found, one after the other, to be those that a backend cannot compile."""
_COLLECTIVE = "a collective is never compiled"


@dataclass
class Compilation:
    """What one process has compiled of a captured step."""

    backend: str
    """The name by which `torch.compile` knows it."""
    regions: int = 0
    """The number of compiled pieces; collectives separate them."""
    operators: int = 0
    """The number of operators in them."""
    reasons: list[str] = field(default_factory=list)
    """Why the other operators are not compiled, by operator."""


def together(backend: str, parts: list[Compilation]) -> Compilation:
    """Return the compilations of all parts of a step."""
    reasons = dict.fromkeys(why for each in parts for why in each.reasons)
    return Compilation(
        backend, sum(each.regions for each in parts), sum(each.operators for each in parts), list(reasons)
    )


class Plan:
    """Which steps of a program are compiled together."""

    def __init__(self, backend: str, steps: list[Step], scalars: list[Any], holes: set[int]) -> None:
        self.backend = backend
        self._steps = steps
        self._numbers = numbers_of(steps, scalars)
        self._drawn = numbers_of(steps, [place in holes for place in range(len(scalars))])
        self.excluded: dict[int, str] = {}
        """Steps that the backend has refused, and why."""
        self._rounds = 0
        self.replaying = (0, 0)
        """The replay in progress, and the program's number."""
        self.regions: list[Region] = []

    def divide(self, results: set[int]) -> dict[int, Region]:
        """Return regions by their first steps. `results` are needed after the last one."""
        known = {each.key: each for each in self.regions}
        last = {ref: at for at, (_, _, refs) in enumerate(self._steps) for ref in refs}
        last |= dict.fromkeys(results, len(self._steps))
        self.regions = []
        for begin, end, writes in self._runs():
            region = known.get((begin, end)) or self._region(begin, end, writes, last)
            self.regions.append(region)
        return {each.begin: each for each in self.regions}

    def _runs(self) -> list[tuple[int, int, bool]]:
        """Return the beginnings and ends of runs of operators, and whether they write to earlier tensors."""
        runs: list[tuple[int, int, bool]] = []
        begin, writes = 0, False
        roots: dict[int, int] = {}

        def close(at: int, then: int) -> None:
            nonlocal begin, writes
            if at - begin >= LEAST:
                runs.append((begin, at, writes))
            begin, writes = then, False
            roots.clear()

        for at, (template, out, refs) in enumerate(self._steps):
            if self._why_not(at) is not None:
                close(at, at + 1)
                continue
            new = range(out, out + template.out)
            is_outer = any(roots.get(ref, -1) == -1 for ref in written_by(template, refs))
            if is_outer and not writes:
                # Steps that only compute are separate, so that they can be repeated if they fail.
                close(at, at)
                writes = True
            source = -1
            if _views(template) and refs:
                source = roots.get(refs[0], -1)
                roots.update(dict.fromkeys(new, source))
            else:
                roots.update((ref, ref) for ref in new)
        close(len(self._steps), len(self._steps))
        return runs

    def _why_not(self, at: int) -> str | None:
        """Return why an operator cannot be part of a region."""
        template, _, _ = self._steps[at]
        func = template.func
        if at in self.excluded:
            return self.excluded[at]
        if not isinstance(func, OpOverload):
            if template.group is not None:
                return _COLLECTIVE
            return "it is no operator of PyTorch's own on tensors of one process"
        if func.namespace in COLLECTIVE_SPACES:
            return _COLLECTIVE
        if torch.Tag.nondeterministic_seeded in func.tags or any(self._drawn[at]):
            return "it draws random numbers, which would be others"
        if template.mode == IN_PLACE_SHAPE:
            return "it changes a shape in place"
        if not template.out and not any(template.written) and not written_by(template, [0] * template.refs):
            return "it has no results"
        return None

    def _region(self, begin: int, end: int, writes: bool, last: dict[int, int]) -> Region:
        steps = self._steps[begin:end]
        made = [ref for template, out, _ in steps for ref in range(out, out + template.out)]
        inputs = dict.fromkeys(ref for _, _, refs in steps for ref in refs)
        return Region(
            self,
            begin,
            end,
            writes=writes,
            inputs=[ref for ref in inputs if ref not in set(made)],
            results=[ref for ref in made if last.get(ref, -1) >= end],
            steps=steps,
            numbers=self._numbers[begin:end],
        )

    def refuse(self, region: Region, inputs: list[torch.Tensor], error: Exception) -> None:
        """Leave out what the backend cannot compile: the first operator that it refuses, if it can be found."""
        self._rounds += 1
        if self._rounds > _ROUNDS:
            why = f"{self.backend} has refused {_ROUNDS} other operators of the step"
            self.excluded.update(dict.fromkeys(range(region.begin, region.end), why))
            return
        low, high = 0, region.end - region.begin
        while high - low > 1:
            middle = (low + high) // 2
            try:
                region.first(middle).compile(inputs)
            except Exception as found:  # noqa: BLE001 - said
                high, error = middle, found
            else:
                low = middle
        first, *_ = str(error).strip().splitlines() or [""]
        self.excluded[region.begin + high - 1] = (
            f"{self.backend} cannot compile it: {type(error).__name__}: {first}"
        )

    def told(self) -> Compilation:
        """Return the state of the step's compilation."""
        done = [each for each in self.regions if each.is_compiled]
        inside = {at for each in done for at in range(each.begin, each.end)}
        reasons: dict[str, None] = {}
        for at, (template, _, _) in enumerate(self._steps):
            if at not in inside:
                why = self._why_not(at) or "it stands alone, or was not yet replayed"
                reasons[f"{template.name}: {why}"] = None
        return Compilation(self.backend, len(done), len(inside), list(reasons))


class Region:
    """Operators that are compiled together."""

    def __init__(
        self,
        plan: Plan,
        begin: int,
        end: int,
        *,
        writes: bool,
        inputs: list[int],
        results: list[int],
        steps: list[Step],
        numbers: list[list[Any]],
    ) -> None:
        self._plan = plan
        self.begin = begin
        self.end = end
        self.key = begin, end
        self.writes = writes
        """To tensors that existed before it."""
        self.inputs = inputs
        self.results = results
        self._steps = steps
        self._scalars = numbers
        self._places: list[list[int] | None] = []
        """Of each step's result: which parts are kept, if it has several."""
        self._compiled: dict[Any, Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]] = {}

    @property
    def is_compiled(self) -> bool:
        """Whether it was compiled yet."""
        return bool(self._compiled)

    def first(self, count: int) -> Region:
        """Return a region of its first operators only, all results of which are needed."""
        steps = self._steps[:count]
        made = [ref for template, out, _ in steps for ref in range(out, out + template.out)]
        return Region(
            self._plan,
            self.begin,
            self.begin + count,
            writes=self.writes,
            inputs=self.inputs,
            results=made,
            steps=steps,
            numbers=self._scalars,
        )

    def written(self) -> list[int]:
        """Return the inputs that it may write to."""
        if not self.writes:
            return []
        roots = roots_of(self._steps)
        inputs = set(self.inputs)
        written = (
            roots.get(ref, ref) for template, _, refs in self._steps for ref in written_by(template, refs)
        )
        return [ref for ref in dict.fromkeys(written) if ref in inputs]

    def __call__(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        """Carry it out; compile it first if that was not done for tensors that share memory as these do."""
        sharing = _sharing(inputs) if self.writes else None
        run = self._compiled.get(sharing)
        if run is None:
            try:
                run = self.compile(list(inputs))
            except Exception as error:
                self._plan.refuse(self, list(inputs), error)
                raise Refused from error
            self._compiled[sharing] = run
        return run(inputs)

    def compile(self, inputs: list[torch.Tensor]) -> Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]:
        """Return a function that carries it out for such tensors; nothing is carried out yet."""
        from torch._dynamo import lookup_backend

        computed, views, forms = self._outline(inputs)
        module = self._graph(computed)
        backend: Any = lookup_backend(self._plan.backend)
        with _in_this_process(self._plan.backend):
            function = backend(module, inputs)
        order = [computed.index(ref) if ref in computed else -1 for ref in self.results]

        def run(given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            found = function(*given)
            made: list[torch.Tensor] = []
            for ref, at in zip(self.results, order, strict=True):
                if at < 0:
                    place, shape, strides, offset = views[ref]
                    owner = given[place] if place >= 0 else made[-1 - place]
                    if place < 0:
                        offset += int(owner.storage_offset())
                    made.append(owner.as_strided(shape, strides, offset))
                elif found[at].stride() == forms[ref]:
                    made.append(found[at])
                else:
                    # As the script assumes that it lies in memory.
                    made.append(
                        torch.empty_strided(
                            found[at].shape, forms[ref], dtype=found[at].dtype, device=found[at].device
                        ).copy_(found[at])
                    )
            return made

        return run

    def _outline(
        self, inputs: list[torch.Tensor]
    ) -> tuple[list[int], dict[int, tuple[int, Any, Any, int]], dict[int, tuple[int, ...]]]:
        """Find out which results are computed and how they lie in memory, and which are views, of what and how.

        Views are of inputs, by their places; or of earlier results, counted from -1 downwards.
        """
        with FakeTensorMode() as mode:
            # Steps that only compute are compiled once, whichever inputs share memory: each view is a view of the input that it was taken from.
            like = mode.from_tensor if self.writes else fake_like
            env: dict[int, Any] = {ref: like(each) for ref, each in zip(self.inputs, inputs, strict=True)}
            self._interpret(env)
            owners = {_memory(env[ref]): at for at, ref in reversed(list(enumerate(self.inputs)))}
            computed: list[int] = []
            views: dict[int, tuple[int, Any, Any, int]] = {}
            forms: dict[int, tuple[int, ...]] = {}
            makers: dict[int, int] = {}
            for at, ref in enumerate(self.results):
                value = env[ref]
                place = owners.get(_memory(value), makers.get(_memory(value)))
                if place is None:
                    computed.append(ref)
                    forms[ref] = value.stride()
                    makers[_memory(value)] = -1 - at
                    continue
                owner = env[self.inputs[place] if place >= 0 else self.results[-1 - place]]
                if value.dtype != owner.dtype:
                    raise Shared("one of its results shows the memory of a tensor as numbers of another type")
                if place < 0 and not _is_all_of_its_memory(owner):
                    other = self.results[-1 - place]
                    raise Shared(f"two of its results share memory, those numbered {other} and {ref}")
                views[ref] = place, tuple(value.shape), value.stride(), int(value.storage_offset())
        return computed, views, forms

    def _interpret(self, env: dict[int, Any]) -> None:
        """Carry its operators out one by one."""
        self._places = []
        for (template, out, refs), numbers in zip(self._steps, self._scalars, strict=False):
            args, kwargs = arguments(template, [env[ref] for ref in refs], numbers)
            result: Any = template.func(*args, **kwargs)
            places = places_of(template, result)
            self._places.append(places)
            env.update(
                {out: result}
                if places is None
                else {out + at: result[each] for at, each in enumerate(places)}
            )

    def _graph(self, results: list[int]) -> GraphModule:
        """Write it as a graph."""
        graph = Graph()
        env: dict[int, Any] = {ref: graph.placeholder(f"t{ref}") for ref in self.inputs}
        for (template, out, refs), numbers, places in zip(
            self._steps, self._scalars, self._places, strict=False
        ):
            args, kwargs = arguments(template, [env[ref] for ref in refs], numbers)
            node: Node = graph.call_function(template.func, tuple(args), kwargs)
            if places is None:
                env[out] = node
            else:
                for at, place in enumerate(places):
                    env[out + at] = graph.call_function(operator.getitem, (node, place))
        graph.output(tuple(env[ref] for ref in results))
        return GraphModule(torch.nn.Module(), graph)


class Refused(Exception):
    """A region cannot be carried out: its operators are, one by one."""

    def __init__(self, *, divide: bool = True) -> None:
        super().__init__("its operators are carried out one by one")
        self.divide = divide
        """The program must be divided again, without something that was found to fail."""


class Shared(Exception):
    """Results of a region share memory in a way that compiled results would not."""


def arguments(template: Template, tensors: list[Any], numbers: list[Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of an operator."""
    supply, scalars = iter(tensors), iter(numbers)
    args = [fill(each, supply, scalars) for each in template.args]
    return args, {name: fill(each, supply, scalars) for name, each in template.kwargs.items()}


def places_of(template: Template, result: Any) -> list[int] | None:
    """Return which parts of a result are kept, or ``None`` if it is one tensor."""
    if not template.out:
        return []
    if template.mode != LIST and type(result) is not tuple:
        return None
    written = template.written
    return [
        place
        for place, each in enumerate(result)
        if each is not None and not (place < len(written) and written[place])
    ]


def written_by(template: Template, refs: list[int]) -> list[int]:
    """Return which tensors an operator writes to."""
    schema = template.func._schema  # type: ignore[attr-defined]  # noqa: SLF001 - as the whole of PyTorch reads it
    writing = {
        argument.name
        for argument in schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    }
    if not writing:
        return []
    supply = iter(refs)
    named = [
        *zip([each.name for each in schema.arguments], template.args, strict=False),
        *template.kwargs.items(),
    ]
    return [ref for name, each in named for ref in _taken(each, supply) if name in writing]


def _taken(what: Any, supply: Iterator[int]) -> list[int]:
    """Return the tensors of one argument."""
    if isinstance(what, (list, tuple)):
        return [ref for each in what for ref in _taken(each, supply)]
    return [next(supply)] if what is HOLE else []


def _views(template: Template) -> bool:
    """Return whether an operator's results share the memory of its first argument."""
    schema = template.func._schema  # type: ignore[attr-defined]  # noqa: SLF001 - likewise
    return any(each.alias_info is not None and not each.alias_info.is_write for each in schema.returns)


def roots_of(steps: Sequence[Step]) -> dict[int, int]:
    """Return whose memory the results of steps are in: their own, or that of the tensor they are views of."""
    roots: dict[int, int] = {}
    for template, out, refs in steps:
        made = range(out, out + template.out)
        if _views(template) and refs:
            roots.update(dict.fromkeys(made, roots.get(refs[0], refs[0])))
        else:
            roots.update(zip(made, made, strict=True))
    return roots


def numbers_of(steps: Sequence[Step], scalars: list[Any]) -> list[list[Any]]:
    """Return the numbers of each step."""
    at = 0
    found = []
    for template, _, _ in steps:
        end = at + count_numbers(template)
        found.append(scalars[at:end])
        at = end
    return found


def fake_like(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of that form, with a memory of its own. Within a fake mode."""
    shape, strides, offset = tensor.shape, tensor.stride(), int(tensor.storage_offset())
    size = 0 if 0 in shape else 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    return torch.empty(offset + size, dtype=tensor.dtype, device=tensor.device).as_strided(
        shape, strides, offset
    )


def _memory(tensor: torch.Tensor) -> int:
    which: int = tensor.untyped_storage()._cdata  # noqa: SLF001 - which memory, if it has no bytes too
    return which


def _is_all_of_its_memory(tensor: torch.Tensor) -> bool:
    """Return whether a view of the same memory is also a view of this tensor."""
    whole = bool(tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size())
    return whole and int(tensor.storage_offset()) == 0 and torch._debug_has_internal_overlap(tensor) == 0  # noqa: SLF001 - its public name


def _sharing(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Return which of these share memory: the same for others that do so likewise."""
    first: dict[int, int] = {}
    return tuple([first.setdefault(_memory(each), at) for at, each in enumerate(tensors)])


def _in_this_process(backend: str) -> AbstractContextManager[Any]:
    """Start no compiler processes: nobody would end them."""
    if backend != "inductor":
        return nullcontext()
    from torch._inductor import config

    found: AbstractContextManager[Any] = config.patch(compile_threads=1)
    return found
