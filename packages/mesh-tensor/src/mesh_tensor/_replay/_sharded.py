"""Runs of operators on DTensors that a process compiles: what they do with its own parts of the tensors.

A run is traced once for the layouts of its inputs. That gives a program of PyTorch's operators on local tensors and of collectives between
them; the operators become regions as in the per-rank view.

RGN-2: a compiled run meets the other processes in the same collectives, in the same order, as its operators would one by one, even if
one of them fails in this process. So some processes may compile a run while others do not. What depends on the failed operator is marked as
failed, and nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor

from mesh_tensor._instructions import IN_PLACE_SHAPE, Failed
from mesh_tensor._parts._call import Call, failure_of, mark
from mesh_tensor._parts._copies import Copies
from mesh_tensor._parts._sums import Sums
from mesh_tensor._parts._worker import Special, seed
from mesh_tensor._replay._compiled import (
    LEAST,
    Compilation,
    Plan,
    Refused,
    Region,
    arguments,
    fake_like,
    numbers_of,
    places_of,
    together,
)
from mesh_tensor._replay._noted import Program, Tracer, Untraceable, local_of
from mesh_tensor._replay._writing import where_raised, write_function

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed.tensor.placement_types import Placement

    from mesh_tensor._parts._worker import Worker
    from mesh_tensor._replay._compiled import Step

_WAIT = torch.ops._c10d_functional.wait_tensor.default  # noqa: SLF001 - its public name
_ROUNDS = 16
"""The most operators that cannot be traced and are left out of the runs, one after the other."""


class ShardedPlan:
    """Which operators of a program of the global view are compiled together. The counterpart of `Plan`."""

    def __init__(self, backend: str, steps: list[Step], scalars: list[Any], holes: set[int]) -> None:
        self.backend = backend
        self.steps = steps
        self._numbers = numbers_of(steps, scalars)
        self._changing = numbers_of(steps, [place in holes for place in range(len(scalars))])
        self.excluded: dict[int, str] = {}
        """Operators that could not be traced, and why."""
        self.replaying = (0, 0)
        """The replay in progress, and the program's number."""
        self.runs: list[Run] = []

    def divide(self, results: set[int]) -> dict[int, Run]:
        """Return runs by their first operators. `results` are needed after the last one."""
        known = {(each.begin, each.end): each for each in self.runs}
        last = {ref: at for at, (_, _, refs) in enumerate(self.steps) for ref in refs}
        last |= dict.fromkeys(results, len(self.steps))
        self.runs = []
        begin = 0
        for at in range(len(self.steps) + 1):
            if at == len(self.steps) or self._why_not(at) is not None:
                if at - begin >= LEAST:
                    self.runs.append(known.get((begin, at)) or self._run(begin, at, last))
                begin = at + 1
        return {each.begin: each for each in self.runs}

    def _run(self, begin: int, end: int, last: dict[int, int]) -> Run:
        steps = self.steps[begin:end]
        made = [ref for template, out, _ in steps for ref in range(out, out + template.out)]
        inputs = dict.fromkeys(ref for _, _, refs in steps for ref in refs)
        return Run(
            self,
            begin,
            end,
            inputs=[ref for ref in inputs if ref not in set(made)],
            results=[ref for ref in made if last.get(ref, -1) >= end],
            numbers=self._numbers[begin:end],
        )

    def _why_not(self, at: int) -> str | None:
        """Return why an operator cannot be part of a run."""
        template, _, _ = self.steps[at]
        func = template.func
        if at in self.excluded:
            return self.excluded[at]
        if isinstance(func, Special):
            return "it sets the seed of random numbers" if func.function is seed else None
        if not isinstance(func, Call):
            return "it is no operator of PyTorch's on tensors of the whole mesh"
        if func.random or any(self._changing[at]):
            return "it draws random numbers, which would be others"
        if func.asks:
            return "its result depends on values"
        if not template.out and not func.written:
            return "it has no results"
        return None

    def leave_out(self, at: int, why: str) -> None:
        """Stop tracing this operator."""
        template, _, _ = self.steps[at]
        same = (each for each, (other, _, _) in enumerate(self.steps) if other is template)
        self.excluded.update(dict.fromkeys(same, why))
        if len({id(self.steps[each][0]) for each in self.excluded}) > _ROUNDS:
            why = f"{_ROUNDS} other operators of the step could not be traced"
            self.excluded |= {
                each: why
                for run in self.runs
                if not run.is_traced
                for each in range(run.begin, run.end)
                if each not in self.excluded
            }

    def told(self) -> Compilation:
        """Return the state of the step's compilation."""
        traced = [each for each in self.runs if each.is_traced]
        inside = {at for each in traced for at in range(each.begin, each.end)}
        reasons: dict[str, None] = {}
        for at, (template, _, _) in enumerate(self.steps):
            if at not in inside:
                why = self._why_not(at) or "it stands alone, or was not yet replayed"
                reasons[f"{template.name}: {why}"] = None
        parts = [each.told() for each in traced]
        found = together(self.backend, [*parts, Compilation(self.backend, reasons=list(reasons))])
        # With each collective there is one of these.
        found.reasons = [
            each for each in found.reasons if not each.startswith("_c10d_functional.wait_tensor")
        ]
        return found


class Run:
    """Operators on DTensors that are carried out as one program on this process's parts."""

    def __init__(
        self,
        plan: ShardedPlan,
        begin: int,
        end: int,
        *,
        inputs: list[int],
        results: list[int],
        numbers: list[list[Any]],
    ) -> None:
        self._plan = plan
        self.begin = begin
        self.end = end
        self.inputs = inputs
        self.results = results
        self._numbers = numbers
        self._programs: dict[Any, _Local] = {}
        self._newest: _Local | None = None

    writes = True
    """It meets other processes: even if it raises, it is never repeated."""

    @property
    def is_traced(self) -> bool:
        """Whether it was traced yet."""
        return self._newest is not None

    def told(self) -> Compilation:
        """Return what was compiled for the layouts that it was last traced for."""
        assert self._newest is not None
        return self._newest.plan.told()

    def written(self) -> list[int]:
        """Return the inputs that it may write to."""
        return [self.inputs[at] for at in self._newest.written] if self._newest is not None else []

    def __call__(self, *tensors: Any) -> list[Any]:
        """Carry it out; trace it first if that was not done for tensors that lie on the mesh, and in memory, as these do."""
        worker = self._worker()
        if worker.sums.any:
            worker.sums.finish()
        self._check(worker, tensors)
        given = [local_of(each) for each in tensors]
        key = tuple(
            [
                (each._spec, local.shape, local.stride(), local.storage_offset())  # noqa: SLF001 - its layout
                for each, local in zip(tensors, given, strict=True)
            ]
        )
        program = self._programs.get(key)
        if program is None:
            program = self._programs[key] = self._traced(worker, tensors, given)
        self._newest = program
        found, failed = program(given, self._plan.replaying)
        results: list[Any] = []
        for what, spec in program.results:
            if spec is not None:
                results.append(DTensor(found[what], spec, requires_grad=False))
            else:
                results.append(tensors[what] if what >= 0 else results[-1 - what])
        if failed:
            worker.failures = True
            for each, why in zip(results, program.failures(failed), strict=True):
                mark(each, why)
            for at in program.written:
                mark(tensors[at], failed.get(at))
        if worker.copies.any:
            for at in program.written:
                worker.copies.written(tensors[at])
        return results

    def _check(self, worker: Worker, tensors: Sequence[Any]) -> None:
        """Raise if these tensors must be worked on operator by operator."""
        if worker.failures and any(failure_of(each) is not None for each in tensors):
            # Operators mark what depends on that.
            raise Refused(divide=False)
        if worker.copies.any:
            for ref, each in zip(self.inputs, tensors, strict=True):
                if getattr(each, "_mesh_copied", None) is not None:
                    self._leave_out_users(ref)

    def _worker(self) -> Worker:
        found: Worker = self._plan.steps[self.begin][0].func.worker  # type: ignore[attr-defined]
        return found

    def _leave_out_users(self, ref: int) -> None:
        """Leave out uses of a view whose values are copies: they are refreshed, and written through, operator by operator (VWS-1)."""
        for at in range(self.begin, self.end):
            if ref in self._plan.steps[at][2]:
                self._plan.leave_out(at, "it uses a view whose values DTensor has copied")
        raise Refused(divide=True)

    def _traced(self, worker: Worker, tensors: Sequence[Any], given: Sequence[torch.Tensor]) -> _Local:
        try:
            return self._trace(worker, tensors, given)
        except Refused:
            raise
        except Exception as error:
            for at in range(self.begin, self.end):
                self._plan.leave_out(
                    at, f"what stands around it cannot be traced: {type(error).__name__}: {error}"
                )
            raise Refused from error

    def _trace(self, worker: Worker, tensors: Sequence[Any], given: Sequence[torch.Tensor]) -> _Local:
        """Find out what the operators do with this process's parts, without carrying anything out."""
        copies, failures, sums = worker.copies, worker.failures, worker.sums
        worker.copies = _NoCopies(worker.full, worker.part)
        worker.sums = _AtOnce(worker)
        try:
            with FakeTensorMode() as fakes:
                locals_ = [fake_like(each) for each in given]
                env: dict[int, Any] = {
                    ref: DTensor(local, each._spec, requires_grad=False)  # noqa: SLF001 - likewise
                    for ref, local, each in zip(self.inputs, locals_, tensors, strict=True)
                }
                before = [env[ref] for ref in self.inputs]
                tracer = Tracer(locals_)
                del fakes
                with tracer:
                    self._interpret(tracer, env)
                    wholes = [env[ref] for ref in self.results]
                    ends = [local_of(each) for each in wholes]
                changed = [
                    at
                    for at, (fake, each) in enumerate(zip(before, tensors, strict=True))
                    if fake._spec != each._spec  # noqa: SLF001 - likewise
                ]
        finally:
            worker.copies, worker.failures, worker.sums = copies, failures, sums
        if changed:
            self._plan.leave_out(self.end - 1, "a tensor lies on the mesh in another way after it")
            raise Refused(divide=True)
        names = [self._plan.steps[self.begin + at][0].name for at in range(self.end - self.begin)]
        made = _Local(self._plan.backend, tracer, len(given), self.begin, names)
        made.gives(before, wholes, [tracer.refs.get(id(each)) for each in ends])
        return made

    def _interpret(self, tracer: Tracer, env: dict[int, Any]) -> None:
        """Carry the operators out one by one on tensors without values."""
        for at, numbers in enumerate(self._numbers):
            tracer.now = at
            template, out, refs = self._plan.steps[self.begin + at]
            call: Any = template.func
            known = set(call.cannot) if isinstance(call, Call) else set()
            why: str | None = None
            result: Any = None
            try:
                args, kwargs = arguments(template, [env[ref] for ref in refs], numbers)
                if template.mode == IN_PLACE_SHAPE:
                    args[0] = args[0].detach()
                result = call(*args, **kwargs)
            except Exception as error:  # noqa: BLE001 - said
                first, *_ = str(error).strip().splitlines() or [""]
                why = str(error) if isinstance(error, Untraceable) else f"{type(error).__name__}: {first}"
            if isinstance(call, Call) and call.cannot != known:
                # Only what happens to real tensors, in all processes, decides how an operator is carried out from then on (STM-3).
                call.cannot = known
                why = why or "it is not yet known whether DTensor can do it"
            if why is not None:
                self._plan.leave_out(self.begin + at, f"it cannot be traced: {why}")
                raise Refused(divide=True)
            places = places_of(template, result)
            env.update(
                {out: result}
                if places is None
                else {out + each: result[place] for each, place in enumerate(places)}
            )


class _Local(Program):
    """A program on this process's parts, whose operators are compiled."""

    def __init__(self, backend: str, tracer: Tracer, count: int, begin: int, names: list[str]) -> None:
        super().__init__(tracer, count)
        self._begin = begin
        """The first operator of the run, in its program."""
        self._names = names
        """Of the run's operators."""
        self.plan = Plan(backend, self.steps, [], set())
        self._function: Callable[[Sequence[Any], Sequence[Any]], Any] | None = None
        self._lines: list[int | Region] = []

    def __call__(
        self, given: Sequence[torch.Tensor], replaying: tuple[int, int]
    ) -> tuple[Sequence[Any], dict[int, Failed]]:
        """Return what it makes, and by number which tensors of the program have failed."""
        if self._function is None:
            regions = self.plan.divide(set(self.ends))
            self._function, self._lines = write_function(
                self.steps,
                list(range(self.count)),
                self.ends,
                regions,
                name="<operators on local tensors>",
            )
        try:
            return self._function(given, ()), {}
        except Exception as error:  # noqa: BLE001 - kept, for whoever asks
            raised = error
        return self._go_on(raised, replaying)

    def _go_on(self, error: Exception, replaying: tuple[int, int]) -> tuple[Sequence[Any], dict[int, Failed]]:
        """Carry out the rest one by one (RGN-2)."""
        line, env = where_raised(error.__traceback__)
        found = self._lines[line]
        failed: dict[int, Failed] = {}
        raised: Exception | None = None
        if isinstance(found, int):
            at, raised = found, error
        elif isinstance(error, Refused):
            self._function = None
            at = found.begin
        elif not found.writes:
            at = found.begin
        else:
            # It is unknown how far it got.
            name = f"{self._names[self._origins[found.begin]]}, or an operator that was compiled with it,"
            why = Failed((*replaying, self._begin + self._origins[found.begin]), name, error)
            env.update((ref, self.zeros(ref)) for ref in found.results)
            failed.update(dict.fromkeys((*found.results, *map(self.root, found.written())), why))
            at = found.end

        def say(at: int, error: Exception) -> Failed:
            origin = self._origins[at]
            return Failed((*replaying, self._begin + origin), self._names[origin], error)

        return self.rest(at, env, failed, raised, say)


class _NoCopies(Copies):
    """Replaces a mesh's copied views while it is traced."""

    def add(self, results: Any, base: DTensor, take: Callable[[torch.Tensor], Any]) -> None:
        """Refuse: writes to such a view are written through, operator by operator."""
        raise Untraceable("it makes a view whose values DTensor copies")


class _AtOnce(Sums):
    """Replaces a mesh's postponed sums while it is traced."""

    def put_off(self, tensor: DTensor, placements: tuple[Placement, ...]) -> DTensor | None:
        """Refuse: what the program postpones is decided once it is known as a whole."""
        return None
