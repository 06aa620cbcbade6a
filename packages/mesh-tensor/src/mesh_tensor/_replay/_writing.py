"""Instructions written as one function of Python.

Tensors are local variables in it, which are deleted after their last use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch._ops import OpOverload

from mesh_tensor._instructions import HOLE, IN_PLACE_SHAPE, LIST, NUMBER, Template

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import TracebackType

    from mesh_tensor._replay._compiled import Step


_NAME = "mesh_tensor_written"


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
    lines = [f"def {_NAME}(given, numbers):", f" {_names(given)} given" if given else " pass"]
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
    function: Callable[[Sequence[Any], Sequence[Any]], Any] = writer.names[_NAME]
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
    inner = trace
    while inner is not None and inner.tb_frame.f_code.co_name != _NAME:
        inner = inner.tb_next
    assert inner is not None, "raised within the function"
    names = {int(name[1:]): value for name, value in inner.tb_frame.f_locals.items() if name[0] == "t"}
    return inner.tb_lineno - 3, names
