"""A process's part of a recorded step: its instructions, as one function.

PRG-1: a replay does the same as the instructions one by one, even if one of them fails: the function is only a faster way to the
same tensors. In it, tensors are local variables that are deleted after their last use.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch._ops import OpOverload

from mesh_tensor._instructions import HOLE, IN_PLACE_SHAPE, LIST, LOST, NUMBER, Failed, Template

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import TracebackType

    from mesh_tensor._bench import Bench
    from mesh_tensor._capture._compiled import Compilation, Plan, Step
    from mesh_tensor._capture._sharded import ShardedPlan

_BAD = {Failed, type(LOST)}


@dataclass(frozen=True)
class Definition:
    """A recorded step, or a part of one, as a process receives it. Tensors have the numbers that they had when it was recorded."""

    code: array[int]
    scalars: list[Any]
    holes: list[int]
    """Places of scalars that are new in each replay."""
    inputs: list[int]
    captured: list[int]
    """Tensors that existed before, and are looked up in each replay."""
    constants: dict[int, int]
    """Tensors of the step's own, of which each replay has a copy, and the numbers under which they are sent."""
    results: list[int]
    """Tensors for which each replay receives new numbers."""
    kept: list[int]
    """Tensors that stay, under these numbers."""
    spent: list[int]
    """Tensors of earlier parts of the step that are no longer needed."""
    compile: str | None = None
    """The backend that compiles it, if any."""


class Replayed:
    """A recorded step, or a part of one."""

    def __init__(self, bench: Bench, number: int, what: Definition) -> None:
        self._bench = bench
        self._number = number
        self._code = what.code
        self._scalars = what.scalars
        self._holes = what.holes
        self._inputs = what.inputs
        self._captured = what.captured
        self._constants = {name: bench.env.pop(ref) for name, ref in what.constants.items()}
        self._results = what.results
        self._kept = what.kept
        self._spent = what.spent
        self._steps = list(_steps(bench.templates, what.code))
        self._function: Callable[[Sequence[Any], Sequence[Any]], Any] | None = None
        self._lines: list[int | Any] = []
        """What each line of the function carries out: a step, or a region of them."""
        self._plan: Plan | ShardedPlan | None = None
        if what.compile is not None:
            self._plan = _plans(self._steps)(what.compile, self._steps, what.scalars, set(what.holes))

    def compilation(self) -> Compilation | None:
        """Return what has been compiled of it; ``None`` if nothing was to be."""
        return None if self._plan is None else self._plan.told()

    def replay(self, count: int, inputs: list[int], made: list[int], numbers: list[Any]) -> None:
        """Do all of it, with these tensors, and give these numbers to the results."""
        env = self._bench.env
        tensors = [env.get(ref, LOST) for ref in inputs]
        tensors += [env.get(ref, LOST) for ref in self._captured]
        if not _BAD.isdisjoint(map(type, tensors)):
            self._one_by_one(count, inputs, made, numbers)
            return
        tensors += [each.clone() for each in self._constants.values()]
        if self._function is None:
            self._function = self._build()
        if self._plan is not None:
            self._plan.replaying = count, self._number
        self._bench.now = -1
        try:
            results = self._function(tensors, numbers)
        except Exception as error:  # noqa: BLE001 - kept, for whoever asks
            self._one_by_one(count, inputs, made, numbers, error)
            return
        env.update(zip(made + self._kept, results, strict=True))
        for ref in self._spent:
            env.pop(ref, None)

    def _build(self) -> Callable[[Sequence[Any], Sequence[Any]], Any]:
        """Write the function."""
        results = [*self._results, *self._kept]
        function, self._lines = write_function(
            self._steps,
            [*self._inputs, *self._captured, *self._constants],
            results,
            {} if self._plan is None else self._plan.divide(set(results)),
            name=f"<recorded step {self._number}>",
            scalars=self._scalars,
            holes=self._holes,
        )
        return function

    def _one_by_one(
        self,
        count: int,
        inputs: list[int],
        made: list[int],
        numbers: list[Any],
        error: Exception | None = None,
    ) -> None:
        """Continue as if all were issued one by one: from the beginning, or from the instruction that has failed."""
        bench, env = self._bench, self._bench.env
        for name, ref in zip(self._inputs, inputs, strict=True):
            if ref in env:
                env[name] = env[ref]
        at = 0
        if error is None:
            env.update((name, each.clone()) for name, each in self._constants.items())
        else:
            line, names = where_raised(error.__traceback__)
            env.update(names)
            found = self._lines[line]
            at, error = (found, error) if isinstance(found, int) else self._left(found, count, error)
        scalars = list(self._scalars)
        for place, number in zip(self._holes, numbers, strict=True):
            scalars[place] = number
        bench.replaying = (count, self._number)
        try:
            if error is not None:
                template, out, refs = self._steps[at]
                bench.fail(template, out, refs, at, error)
                at += 1
            bench.run(at, self._code[self._offset(at) :], scalars[self._used(at) :], [])
        finally:
            bench.replaying = None
        for name, ref in zip(self._results, made, strict=True):
            if name in env:
                env[ref] = env[name]
        kept = set(self._kept)
        temporary = [ref for template, out, _ in self._steps for ref in range(out, out + template.out)]
        for ref in (*self._inputs, *self._constants, *temporary, *self._spent):
            if ref not in kept:
                env.pop(ref, None)

    def _left(self, region: Any, count: int, error: Exception) -> tuple[int, None]:
        """Return where to continue after a region that could not be carried out."""
        from mesh_tensor._capture._compiled import Refused

        if isinstance(error, Refused):
            if error.divide:
                self._function = None
            return region.begin, None
        if not region.writes:
            return region.begin, None
        template, *_ = self._steps[region.begin]
        name = f"{template.name}, or an operator that was compiled with it,"
        failed = Failed((count, self._number, region.begin), name, error)
        self._bench.env.update(dict.fromkeys([*region.results, *region.written()], failed))
        return region.end, None

    def _offset(self, at: int) -> int:
        return sum(2 + template.refs for template, _, _ in self._steps[:at])

    def _used(self, at: int) -> int:
        return sum(count_numbers(template) for template, _, _ in self._steps[:at])


def _steps(templates: dict[int, Template], code: array[int]) -> Iterator[tuple[Template, int, list[int]]]:
    """Split instructions into the function, the number of its first result, and the numbers of its tensors."""
    at, numbers = 0, code.tolist()
    while at < len(numbers):
        template = templates[numbers[at]]
        end = at + 2 + template.refs
        yield template, numbers[at + 1], numbers[at + 2 : end]
        at = end


def _plans(steps: Sequence[Step]) -> type[Plan | ShardedPlan]:
    """Return what divides such a program."""
    if any(template.is_global for template, _, _ in steps):
        from mesh_tensor._capture._sharded import ShardedPlan

        return ShardedPlan
    from mesh_tensor._capture._compiled import Plan

    return Plan


def write_function(
    steps: Sequence[Step],
    given: list[int],
    results: list[int],
    regions: Mapping[int, Any],
    *,
    name: str,
    scalars: Sequence[Any] = (),
    holes: Sequence[int] = (),
) -> tuple[Callable[[Sequence[Any], Sequence[Any]], Any], list[int | Any]]:
    """Write steps as one function of tensors and of the numbers that are new in each call.

    Returns it and what each of its lines carries out, from the third on: a step, or a region that begins with it.
    """
    writer = _Writer(scalars, holes)
    last = {ref: at for at, (_, _, refs) in enumerate(steps) for ref in refs}
    of_others = set(given) | set(results)
    lines = ["def replay(given, numbers):", f" {_names(given)} given" if given else " pass"]
    carried: list[int | Any] = []
    at = 0
    while at < len(steps):
        region = regions.get(at)
        if region is None:
            template, out, refs = steps[at]
            carried.append(at)
            names = [*refs, *range(out, out + template.out)]
            text = writer.call(template, out, refs)
            at += 1
        else:
            carried.append(region)
            names = region.inputs
            text = writer.region(region, steps[at : region.end])
            at = region.end
        over = [ref for ref in dict.fromkeys(names) if last.get(ref, -1) < at and ref not in of_others]
        ending = f"; del {', '.join(f't{ref}' for ref in over)}" if over else ""
        lines.append(f" {text}{ending}")
    lines.append(f" return {_listed(results)}")
    exec(compile("\n".join(lines) + "\n", name, "exec"), writer.names)
    function: Callable[[Sequence[Any], Sequence[Any]], Any] = writer.names["replay"]
    return function, carried


class _Writer:
    """Writes calls."""

    def __init__(self, scalars: Sequence[Any], holes: Sequence[int]) -> None:
        self.names: dict[str, Any] = {"kept": _kept}
        self._scalars = enumerate(scalars)
        self._holes = {place: at for at, place in enumerate(holes)}
        self._known: dict[int, str] = {}

    def call(self, template: Template, out: int, refs: list[int]) -> str:
        """Write one instruction."""
        supply = iter(refs)
        args = [self._argument(each, supply) for each in template.args]
        if template.mode == IN_PLACE_SHAPE:
            args[0] += ".detach()"
        args += [f"{name}={self._argument(each, supply)}" for name, each in template.kwargs.items()]
        func = template.func
        done = f"{self._name(getattr(func, '_op', func))}({', '.join(args)})"
        if not template.out:
            return done
        if (
            template.mode == IN_PLACE_SHAPE
            or (template.plain and template.out == 1)
            or _returns_one(template)
        ):
            return f"t{out} = {done}"
        targets = _names(list(range(out, out + template.out)))
        if template.mode == LIST and not any(template.written):
            return f"{targets} {done}"
        return f"{targets} kept({self._name(template)}, {done})"

    def region(self, region: Any, steps: Sequence[Step]) -> str:
        """Write the call of what is compiled."""
        for _ in range(sum(count_numbers(template) for template, _, _ in steps)):
            next(self._scalars)
        targets = f"{_names(region.results)} " if region.results else ""
        return f"{targets}{self._name(region)}({', '.join(f't{ref}' for ref in region.inputs)})"

    def _argument(self, what: Any, supply: Iterator[int]) -> str:
        if what is HOLE:
            return f"t{next(supply)}"
        if what is NUMBER:
            place, value = next(self._scalars)
            return f"numbers[{self._holes[place]}]" if place in self._holes else self._name(value)
        if isinstance(what, (list, tuple)) and _has_holes(what):
            return f"[{', '.join(self._argument(each, supply) for each in what)}]"
        return self._name(list(what) if type(what) is tuple else what)

    def _name(self, value: Any) -> str:
        if value is None or type(value) in (int, bool):
            return repr(value)
        name = self._known.get(id(value))
        if name is None:
            # Its values are kept alive by their names, and so are no two at one place.
            name = self._known[id(value)] = f"v{len(self.names)}"
            self.names[name] = value
        return name


def _kept(template: Template, result: Any) -> list[Any]:
    """Return the new tensors of a result: neither those that existed before, nor those that do not exist."""
    written = template.written
    values = result if template.mode == LIST or type(result) is tuple else [result]
    return [
        each
        for place, each in enumerate(values)
        if not (each is None or (place < len(written) and written[place]))
    ]


def _returns_one(template: Template) -> bool:
    func = template.func
    return (
        isinstance(func, OpOverload)
        and template.mode == 0
        and template.out == 1
        and len(func._schema.returns) == 1  # noqa: SLF001 - as the whole of PyTorch reads it
    )


def _has_holes(what: Any) -> bool:
    if isinstance(what, (list, tuple)):
        return any(map(_has_holes, what))
    return what is HOLE or what is NUMBER


def count_numbers(template: Template) -> int:
    """Return how many numbers are sent with each call of a template."""

    def count(what: Any) -> int:
        if isinstance(what, (list, tuple)):
            return sum(map(count, what))
        return int(what is NUMBER)

    return count(template.args) + count(list(template.kwargs.values()))


def _names(refs: list[int]) -> str:
    """What is assigned to."""
    return "".join(f"t{ref}, " for ref in refs) + "="


def _listed(refs: list[int]) -> str:
    return f"[{', '.join(f't{ref}' for ref in refs)}]"


def where_raised(trace: TracebackType | None) -> tuple[int, dict[int, Any]]:
    """Return which line of such a function has failed, counted from its first step, and the tensors that existed by then."""
    assert trace is not None and trace.tb_next is not None, "raised within the function"
    inner = trace.tb_next
    names = {int(name[1:]): value for name, value in inner.tb_frame.f_locals.items() if name[0] == "t"}
    return inner.tb_lineno - 3, names
