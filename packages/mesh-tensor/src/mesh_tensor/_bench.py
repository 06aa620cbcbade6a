"""A process's part of the work of one controller: its tensors, and the instructions that it knows.

FRE-1: a tensor is freed where the script has freed it: before the next instruction that it issues, and in a step that is carried out again after its last
use. So a process needs memory for what the script has at a time, however many instructions travel together.

Imported in every process of a job, and therefore without PyTorch until tensors are used.
"""

from __future__ import annotations

import os
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from mesh_core import MeshError
from mesh_tensor._instructions import (
    GONE,
    IN_PLACE_SHAPE,
    LIST,
    LOST,
    QUESTION,
    SPECIAL,
    Failed,
    Instead,
    Template,
    fill,
    sent,
    unknown,
)
from mesh_tensor._parts._apart import joined

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from mesh_tensor._groups import Group
    from mesh_tensor._parts._sums import Sums
    from mesh_tensor._streams._handover import Handover
    from mesh_tensor._timing import Timing


def function_of(what: tuple[Any, ...], bench: Bench) -> Callable[..., Any]:
    """Return the function that an instruction calls here."""
    (name, module), *_ = what
    if name[0] == SPECIAL:
        from mesh_tensor._special import SPECIAL as FUNCTIONS

        return partial(FUNCTIONS[name[1]], bench)
    from mesh_tensor._operators import NEEDS_GRADIENTS, find

    try:
        func = find(name, module)
    except (AttributeError, ImportError) as error:
        return unknown(name, error)
    if func._schema.name in NEEDS_GRADIENTS:  # noqa: SLF001 - as the whole of PyTorch reads it
        import torch

        func = torch.enable_grad()(func)
    called: Callable[..., Any] = func
    return called


class Bench:
    """The tensors of one controller, and the templates that it has taught. Its public methods are what a controller may call."""

    def __init__(self, address: Any, controller: Any, handover: Handover, *, is_side: bool = False) -> None:
        self.address = address
        """This process's own."""
        self.is_side = is_side
        """It belongs to a stream besides the default one."""
        self.controller = controller
        self.handover = handover
        """Where streams of this process pass tensors to each other."""
        self._birth = (os.getpid(), time.monotonic_ns())
        self.groups: dict[int, Group] = {}
        self._meshes: dict[int, Any] = {}
        self.env: dict[int, Any] = {}
        self.templates: dict[int, Template] = {}
        self.timing: Timing | None = None
        """Records when each instruction runs here, while a timeline is taken."""
        self.programs: dict[int, Any] = {}
        self.now = 0
        """The instruction in progress, if it is not one of the simplest."""
        self.replaying: tuple[int, int] | None = None
        """The replay that the instructions in progress belong to, and its program."""
        self.loose: Failed | None = None
        """The first failure that has no tensor: of an operator without results."""
        self.unfinished: list[Sums] = []
        """Postponed sums, to be waited for at the end of the message."""

    def run(self, first: int, code: Any, scalars: Iterable[Any], freed: list[int]) -> None:
        """Carry out a batch."""
        self.meet()
        env, templates = self.env, self.templates
        numbers = iter(scalars)
        at, end, count = 0, len(code), first
        code = code.tolist()
        while at < end:
            number = code[at]
            if number < 0:
                # So many tensors are no longer needed.
                begin, at = at + 1, at + 1 - number
                self.free(code[begin:at])
                continue
            template = templates[number]
            refs = template.refs
            out = code[at + 1]
            first_ref = at + 2
            at = first_ref + refs
            try:
                if template.decisions is not None:
                    self.now = count
                    template.decisions.carry_out(env, out, code[first_ref:at], numbers, self._general)
                elif template.plain and template.out == 1:
                    if refs == 2:
                        env[out] = template.func(env[code[first_ref]], env[code[first_ref + 1]])
                    else:
                        env[out] = template.func(*[env[ref] for ref in code[first_ref:at]])
                else:
                    self.now = count
                    self._general(template, out, code[first_ref:at], numbers)
            except Exception as error:  # noqa: BLE001 - kept, for whoever asks
                self.fail(template, out, code[first_ref:at], count, error)
            count += 1
        self.finish()
        self.free(freed)

    def meet(self) -> None:
        """Let the groups of all meshes be found."""
        for mesh in self._meshes.values():
            mesh.meet()

    def finish(self) -> None:
        """Wait for postponed sums."""
        for each in self.unfinished[:]:
            each.finish()

    def instruction(self) -> int | tuple[Any, ...]:
        """Return which instruction is in progress, if it is not one of the simplest; -1 if only the whole replay is known."""
        return self.now if self.replaying is None else (*self.replaying, self.now)

    def free(self, numbers: list[int]) -> None:
        """Drop tensors, and programs, whose numbers are negative."""
        env = self.env
        for number in numbers:
            if number < 0:
                self.programs.pop(-number, None)
            else:
                env.pop(number, None)

    def define(self, number: int, what: Any) -> None:
        """Learn a program."""
        from mesh_tensor._replay._program import Replayed

        self.programs[number] = Replayed(self, number, what)

    def compilations(self, numbers: list[int]) -> Any:
        """Return what has been compiled of programs."""
        told = [self.programs[number].compilation() for number in numbers if number in self.programs]
        return "value", [each for each in told if each is not None]

    def replay(self, number: int, freed: list[int], *what: Any) -> None:
        """Carry a program out, once what is no longer needed is gone."""
        if freed:
            self.free(freed)
        self.meet()
        self.programs[number].replay(*what)
        self.finish()

    def know(self, number: int, what: tuple[Any, ...]) -> None:
        """Learn a template."""
        self.templates[number] = Template(what, function_of(what, self))

    def unlearn(self, numbers: list[int]) -> None:
        """Forget templates."""
        for number in numbers:
            self.templates.pop(number, None)

    def leave(self, groups: list[int]) -> None:
        """Leave groups, because some of their processes were restarted."""
        for number in groups:
            self.groups.pop(number, None)

    def enter(self, number: int, *what: Any) -> None:
        """Take a place in a mesh of the global view."""
        from mesh_tensor._parts._worker import Worker
        from mesh_tensor._replay._decisions import Decisions

        self._meshes[number] = Worker(self, Decisions, *what)

    def exit(self, number: int) -> None:
        """Leave it, with all tensors of the mesh."""
        mesh = self._meshes.pop(number, None)
        if mesh is not None:
            mesh.close()

    def within(self, number: int, what: str, *rest: Any) -> Any:
        """Do something in a mesh of the global view."""
        self.meet()
        return getattr(self._meshes[number], what)(*rest)

    def mesh(self, number: int) -> Any:
        """Return this process's place in a mesh of the global view."""
        return self._meshes[number]

    def find(self, number: int) -> Any:
        """Return a tensor, or what is in its place."""
        return joined(self.env.get(number, LOST))

    def put(self, number: int, value: Any) -> None:
        """Store this tensor; its memory is this process's own."""
        self.env[number] = value.clone()

    def get(self, number: int) -> Any:
        """Return a tensor as it travels."""
        return self._loose() or sent(self.find(number))

    def forms(self, numbers: list[int]) -> Any:
        """Return the forms of tensors, and other values as they are."""
        return self._loose() or _told([self.find(number) for number in numbers])

    def results(self, number: int) -> Any:
        """Return the structure of a function's results, and their forms, or values of those that are not tensors."""
        found = self.env.get(number, LOST)
        if found is LOST or type(found) is Failed:
            return sent(found)
        kind, told = _told(found.leaves)
        return kind, (found.shape, told)

    def look(self, number: int) -> Any:
        """Return a summary of a tensor."""
        from mesh_tensor._summaries import looked

        found = self.find(number)
        return sent(found) if found is LOST or type(found) is Failed else looked(found)

    def time(self) -> None:
        """Start recording when each instruction runs."""
        from mesh_tensor._timing import Timing

        self.timing = Timing(self)

    def timed(self) -> Any:
        """Return the recording, and end it."""
        timing, self.timing = self.timing, None
        return "value", ([], 0) if timing is None else (timing.spans, timing.left_out)

    def usage(self, by_storage: bool = False) -> Any:
        """Return how many tensors there are, and how much memory they use; views share it."""
        import torch

        found = [joined(each) for each in self.env.values()]
        tensors = [getattr(each, "_local_tensor", each) for each in found if isinstance(each, torch.Tensor)]
        storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
        return "value", (len(tensors), storages if by_storage else sum(storages.values()))

    def device(self, kind: str) -> Any:
        """Use this process's own device of that kind; return a key that distinguishes it from those of others."""
        from mesh_tensor import _devices

        try:
            return "value", _devices.enter(kind, own_queue=self.is_side)
        except Exception as error:  # noqa: BLE001 - told to who asks
            return "value", f"{type(error).__name__}: {error}"

    def who(self) -> Any:
        """Return which process this is."""
        return "value", self.address

    def birth(self) -> Any:
        """Return a number that changes when the process is restarted."""
        return self._birth

    def where(self) -> Any:
        """Return on which host this process is, and how others reach it."""
        from mesh_tensor._network import here

        return "value", tuple(here())

    def group(self, number: int, *what: Any) -> Any:
        """Join others."""
        from mesh_tensor._groups import join

        self.groups[number] = join(self.address, number, *what)
        return "value", None

    def checkpoint(self, what: str, *rest: Any) -> Any:
        """Do something for a checkpoint."""
        from mesh_tensor._checkpoint import _worker

        try:
            return getattr(_worker, what)(self, *rest)
        except Exception as error:  # noqa: BLE001 - said
            return sent(Failed(QUESTION, "checkpoint", error))

    def exchange(self, what: str, count: int, *rest: Any) -> None:
        """Give tensors to others, or receive theirs: an instruction that is sent by itself."""
        from mesh_tensor import _exchange
        from mesh_tensor._streams import _worker

        getattr(_worker if what in _worker.BETWEEN_STREAMS else _exchange, what)(self, count, *rest)

    def refresh(self, tensor: Any) -> None:
        """Refresh a tensor of the global view that shows another one."""
        for mesh in self._meshes.values():
            if mesh.mesh is tensor.device_mesh:
                mesh.refresh([tensor])

    def _loose(self) -> Any:
        loose, self.loose = self.loose, None
        return None if loose is None else sent(loose)

    def _general(self, template: Template, out: int, refs: list[int], numbers: Any) -> None:
        env = self.env
        # Numbers are taken even if a tensor has failed.
        tensors = [env.get(ref) for ref in refs]
        supply = iter(tensors)
        args = [fill(each, supply, numbers) for each in template.args]
        kwargs = {name: fill(each, supply, numbers) for name, each in template.kwargs.items()}
        if not template.lenient and any(each is None or type(each) is Failed for each in tensors):
            raise MeshError("a tensor is not there")
        if template.mode == IN_PLACE_SHAPE:
            args[0] = args[0].detach()
            env[out] = template.func(*args, **kwargs)
            return
        result: Any = template.func(*args, **kwargs)
        if not template.out:
            return
        self._keep(template, out, result)

    def _keep(self, template: Template, out: int, result: Any) -> None:
        if template.mode == LIST or type(result) is tuple:
            at = out
            for place, each in enumerate(result):
                # As the controller counts: neither tensors that existed before, nor missing ones.
                if each is None or (place < len(template.written) and template.written[place]):
                    continue
                self.env[at] = each
                at += 1
        else:
            self.env[out] = result

    def fail(self, template: Template, out: int, refs: list[int], count: int, error: Exception) -> None:
        """Keep a failure in place of the results."""
        env = self.env
        where = count if self.replaying is None else (*self.replaying, count)
        if isinstance(error, Instead):
            error.mark(Failed(where, template.name, error.error))
            if template.out:
                self._keep(template, out, error.results)
            return
        failed = getattr(error, "failed", None) or next(
            (env[ref] for ref in refs if type(env.get(ref)) is Failed), None
        )
        missing = failed is not None
        if failed is None:
            if any(ref not in env for ref in refs):
                error, missing = MeshError(GONE), True
            failed = Failed(where, template.name, error)
        if missing and template.group is not None:
            # The others wait for this process, which has not begun with it.
            self.groups[template.group].leave(f"{failed.operator} failed there: {failed.error}")
        for each in range(out, out + template.out):
            env[each] = failed
        if any(template.written):
            # The tensor that it was to write has neither its old nor its new values.
            env[refs[0]] = failed
        elif not template.out and self.loose is None:
            self.loose = failed


def _told(values: list[Any]) -> Any:
    """Forms of tensors, and other values as they are."""
    import torch

    from mesh_tensor._descriptors import form_of

    for each in values:
        if type(each) is Failed:
            return sent(each)
    return "value", [
        ("form", form_of(each)) if isinstance(each, torch.Tensor) else ("value", each) for each in values
    ]
