"""What instructions and answers consist of, at the controller and at its workers.

Imported in every process of a job, and therefore without PyTorch until a tensor is sent.
"""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING, Any

from mesh_core import MeshError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mesh_tensor._replay._decisions import Decisions

IN_PLACE_SHAPE = 1
LIST = 2
SPECIAL = "mesh_tensor"
"""In place of a namespace of PyTorch: one of our own functions."""
SENT, RECEIVED = "to_mesh: send", "to_mesh: receive"
"""Names of the two instructions that move tensors."""
COLLECTIVES = {"reduce": 2, "reduce_all": 1, "reduce_scatter": 2, "all_gather": 1, "all_to_all": 1}
"""Our own functions that processes do together, and which of their arguments is the group's number."""


class Failed:
    """Takes the place of a tensor whose operator has failed; whatever depends on it fails likewise."""

    __slots__ = ("error", "instruction", "operator", "trace")

    def __init__(self, instruction: int | tuple[Any, ...], operator: str, error: BaseException) -> None:
        self.instruction: int | tuple[Any, ...] = instruction
        """Its number; of a replay, which one, of which program, and where in it; of another stream, which one, and any of these."""
        self.operator = operator
        self.error = f"{type(error).__name__}: {error}"
        self.trace = "".join(traceback.format_exception(error))


class Instead(Exception):
    """An operator has failed here; its results have the form that they should have, for those who continue with them."""

    def __init__(self, error: BaseException, results: Any, mark: Callable[[Failed], None]) -> None:
        super().__init__(str(error))
        self.error = error
        self.results = results
        self.mark = mark


QUESTION = -1
"""In place of an instruction's number: what has failed is the answer to a question."""
LOST = "lost"
"""Takes the place of a tensor of a process that was restarted since."""


GONE = "the tensor is not there: it was on a process of the mesh that has ended since, or was being computed when one did"


class _Hole:
    """Where in a template a tensor comes in."""

    __slots__ = ()

    def __reduce__(self) -> str:
        return "HOLE"


class _Number:
    """Where in a template a number comes in."""

    __slots__ = ()

    def __reduce__(self) -> str:
        return "NUMBER"


HOLE = _Hole()
NUMBER = _Number()


class Template:
    """An operator with its constant arguments."""

    __slots__ = (
        "args",
        "decisions",
        "func",
        "group",
        "kwargs",
        "lenient",
        "mode",
        "name",
        "out",
        "plain",
        "refs",
        "written",
    )

    is_global = False
    """Its tensors are those of a mesh in the global view."""

    def __init__(self, what: tuple[Any, ...], func: Callable[..., Any]) -> None:
        (name, _), self.args, self.kwargs, self.refs, self.out, self.mode, self.written = what
        # A user's function has a name of its own.
        self.name = (name[0] == SPECIAL and name[2]) or ".".join(filter(None, name))
        self.func = func
        self.decisions: Decisions | None = None
        """In the global view: how it is carried out on tensors of each layout."""
        place = COLLECTIVES.get(name[1]) if name[0] == SPECIAL else None
        self.group: int | None = None if place is None else self.args[place]
        self.lenient = name[0] == SPECIAL and name[1] == "send"
        """Called even if a tensor has failed, or is missing: others wait for an answer about it."""
        # Only tensors, in most cases: avoid building a list of arguments.
        self.plain = not self.kwargs and all(each is HOLE for each in self.args) and not self.mode


def unknown(name: Sequence[str], error: Exception) -> Callable[..., Any]:
    """Return what takes the place of a missing operator: it says so when it is called."""

    def refuse(*_: Any, **__: Any) -> None:
        raise MeshError(
            f"the operator is not known in this process ({'.'.join(name)}: {error}): import the module that defines it there too, with "
            "bootstrap= of spawn_procs for example"
        )

    return refuse


def fill(what: Any, tensors: Any, numbers: Any) -> Any:
    """Return an argument of a template, with these tensors and numbers in their places."""
    if what is HOLE:
        return next(tensors)
    if what is NUMBER:
        return next(numbers)
    kind = type(what)
    if kind is list or kind is tuple:
        return [fill(each, tensors, numbers) for each in what]
    return what


def sent(value: Any) -> Any:
    """Return a tensor as it is sent, without a copy: a reply's bytes are copied before the next instruction can change the tensor."""
    if value is LOST:
        return ("failed", QUESTION, "keeping it", GONE, "")
    if type(value) is Failed:
        return ("failed", value.instruction, value.operator, value.error, value.trace)
    if not hasattr(value, "detach"):
        return ("value", value)
    import torch

    from mesh_tensor._descriptors import HERE

    value = value.detach()
    if value.device.type not in HERE:
        from mesh_tensor._devices import fetched

        value = fetched(value)
    # Other layouts, and subclasses, pickle in PyTorch's way: with all the memory that they are views of.
    is_plain = type(value) is torch.Tensor and value.layout is torch.strided and not value.is_quantized
    # Zeros that PyTorch keeps without memory have nothing to copy from.
    is_plain = is_plain and not value._is_zerotensor()  # noqa: SLF001 - nothing else tells
    return ("value", value if is_plain else value.clone())
