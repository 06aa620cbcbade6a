"""A process's part of a recorded step: its instructions, as one function.

PRG-1: a replay does the same as the instructions one by one, even if one of them fails: the function is only a faster way to the
same tensors. In it, tensors are local variables that are deleted after their last use.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mesh_tensor._instructions import LOST, Failed, Template
from mesh_tensor._parts._apart import joined
from mesh_tensor._replay._fused import Fused, first_of_each
from mesh_tensor._replay._writing import count_numbers, where_raised, write_function

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from mesh_tensor._bench import Bench
    from mesh_tensor._parts._worker import Worker
    from mesh_tensor._replay._compiled import Compilation, Plan, Step
    from mesh_tensor._replay._sharded import ShardedPlan

_BAD = {Failed, type(LOST)}
_TIMES = 2
"""How often the flat loop carries a step out before it is looked at: by then it has kept its decisions."""
_LAYOUTS = 8
"""The most functions of one step, each for tensors laid out in another way."""


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
        self._scalars = what.scalars
        self._holes = what.holes
        self._inputs = what.inputs
        self._captured = what.captured
        self._constants = {name: bench.env.pop(ref) for name, ref in what.constants.items()}
        self._results = what.results
        self._kept = what.kept
        self._spent = what.spent
        self._remade = [ref for ref in what.kept if ref not in {*what.inputs, *what.captured}]
        """What stays from the replay before, and has to make room: it is made anew, and not used until then."""
        self._steps = list(_steps(bench.templates, what.code))
        self._code, self._begins = _with_endings(
            what.code, self._steps, {*what.inputs, *what.captured, *what.results, *what.kept}
        )
        self._function: Callable[[Sequence[Any], Sequence[Any]], Any] | None = None
        self._lines: list[int | Any] = []
        """What each line of the function carries out: a step, or a region of them."""
        self._plan: Plan | ShardedPlan | None = None
        self._known: dict[Any, Any] | None = None
        """In the global view: functions on this process's parts, by how the tensors are laid out; or how often the flat loop has met that."""
        if what.compile is not None:
            self._plan = _plans(self._steps)(what.compile, self._steps, what.scalars, set(what.holes))
        elif self._steps and all(template.decisions is not None for template, _, _ in self._steps):
            self._known = {}

    def compilation(self) -> Compilation | None:
        """Return what has been compiled of it; ``None`` if nothing was to be."""
        return None if self._plan is None else self._plan.told()

    def replay(self, count: int, inputs: list[int], made: list[int], numbers: list[Any]) -> None:
        """Do all of it, with these tensors, and give these numbers to the results."""
        for ref in self._remade:
            self._bench.env.pop(ref, None)
        if self._known is not None:
            self._replay_parts(self._known, count, inputs, made, numbers)
            return
        tensors = [self._bench.find(ref) for ref in (*inputs, *self._captured)]
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
            line, names = where_raised(error.__traceback__)
            found = self._lines[line]
            at, raised = (found, error) if isinstance(found, int) else self._left(found, count, error)
            self._one_by_one(count, inputs, made, numbers, (at, raised, names))
            return
        self._keep(made, results)

    def _replay_parts(
        self, known: dict[Any, Any], count: int, inputs: list[int], made: list[int], numbers: list[Any]
    ) -> None:
        """Do it in the global view: by the function for tensors laid out as these, once the flat loop knows them."""
        env = self._bench.env
        worker: Worker = self._steps[0][0].func.worker  # type: ignore[attr-defined]
        values = [env.get(ref) for ref in (*inputs, *self._captured)]
        values += [joined(each).clone() for each in self._constants.values()]
        seen = [worker.seen(each) for each in values]
        if worker.copies.any or worker.compares or None in seen:
            self._one_by_one(count, inputs, made, numbers)
            return
        locals_ = [each[0] for each in seen if each is not None]
        key = (
            tuple([each[1] for each in seen if each is not None]),
            tuple([(each.stride(), each.is_neg()) for each in locals_]),
            first_of_each(locals_),
        )
        program = known.get(key)
        if type(program) is not Fused:
            times = program or 0
            played = worker.played = [] if times >= _TIMES else None
            if len(known) >= _LAYOUTS:
                known.clear()
            known[key] = times + 1
            try:
                self._one_by_one(count, inputs, made, numbers)
            finally:
                worker.played = None
            if played is not None and len(played) == len(self._steps):
                known[key] = Fused(
                    worker,
                    self._steps,
                    played,
                    inputs=[*self._inputs, *self._captured, *self._constants],
                    layouts=key[0],
                    results=[*self._results, *self._kept],
                    scalars=self._scalars,
                    holes=self._holes,
                )
            return
        self._bench.replaying = count, self._number
        try:
            results = program(values, locals_, numbers)
        except Exception as error:  # noqa: BLE001 - kept, for whoever asks
            self._one_by_one(count, inputs, made, numbers, program.left(error, values, numbers))
            return
        finally:
            self._bench.replaying = None
        self._keep(made, results)

    def _keep(self, made: list[int], results: Sequence[Any]) -> None:
        """Store the results, and drop what is no longer needed."""
        env = self._bench.env
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
        left: tuple[int, Exception | None, dict[int, Any]] | None = None,
    ) -> None:
        """Continue as if all were issued one by one: from the beginning, or from where a function was `left`, perhaps by an error."""
        bench, env = self._bench, self._bench.env
        for name, ref in zip(self._inputs, inputs, strict=True):
            if ref in env:
                env[name] = env[ref]
        at, error, names = left or (0, None, {})
        if left is None:
            env.update((name, joined(each).clone()) for name, each in self._constants.items())
        env.update(names)
        scalars = list(self._scalars)
        for place, number in zip(self._holes, numbers, strict=True):
            scalars[place] = number
        bench.replaying = (count, self._number)
        try:
            if error is not None:
                template, out, refs = self._steps[at]
                bench.fail(template, out, refs, at, error)
                at += 1
            bench.run(at, self._code[self._begins[at] :], scalars[self._used(at) :], [])
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
        from mesh_tensor._replay._compiled import Refused

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

    def _used(self, at: int) -> int:
        return sum(count_numbers(template) for template, _, _ in self._steps[:at])


def _with_endings(code: array[int], steps: Sequence[Step], others: set[int]) -> tuple[array[int], list[int]]:
    """Return instructions that free each tensor after its last use, except `others`, and where each of them begins."""
    last = {
        ref: at
        for at, (template, out, refs) in enumerate(steps)
        for ref in (*range(out, out + template.out), *refs)
    }
    over: dict[int, list[int]] = {}
    for ref, at in last.items():
        if ref not in others:
            over.setdefault(at, []).append(ref)
    found, begins, begin = array("q"), [], 0
    for at, (template, _, _) in enumerate(steps):
        end = begin + 2 + template.refs
        begins.append(len(found))
        found.extend(code[begin:end])
        if at in over:
            found.append(-len(over[at]))
            found.extend(over[at])
        begin = end
    return found, [*begins, len(found)]


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
        from mesh_tensor._replay._sharded import ShardedPlan

        return ShardedPlan
    from mesh_tensor._replay._compiled import Plan

    return Plan
