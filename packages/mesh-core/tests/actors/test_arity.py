"""Which calls fit an endpoint's signature, and what is said of those that do not."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from mesh_core import Actor, endpoint
from mesh_core._actors.endpoint import Arity, Interface


def arity(function: Callable[..., Any]) -> Arity:
    return Arity(inspect.signature(function), skip=0)


def two(a: int, b: int = 2) -> None: ...


def one(a: int) -> None: ...


def bare(a: int, b: int = 2, /, c: int = 3, *, d: int, e: int = 5) -> None: ...


def rest(a: int, *others: int, **named: int) -> None: ...


@pytest.mark.parametrize(
    ("function", "args", "kwargs", "complaint"),
    [
        (two, (), {}, "missing required argument 'a'"),
        (two, (1,), {}, ""),
        (two, (1, 2), {}, ""),
        (two, (1, 2, 3), {}, "takes at most 2 positional arguments, got 3"),
        (one, (1, 2), {}, "takes at most 1 positional argument, got 2"),
        (two, (), {"a": 1}, ""),
        (two, (), {"b": 1}, "missing required argument 'a'"),
        (two, (1,), {"a": 1}, "got multiple values for argument 'a'"),
        (two, (1, 2), {"a": 1, "b": 2}, "got multiple values for arguments 'a', 'b'"),
        (two, (1,), {"c": 1}, "got unexpected argument 'c'"),
        (two, (1,), {"c": 1, "d": 2}, "got unexpected arguments 'c', 'd'"),
        (bare, (1,), {}, "missing required argument 'd'"),
        (bare, (), {"d": 4}, "missing required argument 'a'"),
        (bare, (), {"a": 1, "d": 4}, "got unexpected argument 'a'"),
        (bare, (1, 2, 3), {"d": 4}, ""),
        (bare, (1,), {"c": 3, "d": 4, "e": 5}, ""),
        (bare, (1, 2, 3), {"c": 3, "d": 4}, "got multiple values for argument 'c'"),
        (bare, (1, 2, 3, 4), {"d": 4}, "takes at most 3 positional arguments, got 4"),
        (rest, (), {}, "missing required argument 'a'"),
        (rest, tuple(range(9)), {"more": 1}, ""),
        (rest, (1,), {"a": 1}, "got multiple values for argument 'a'"),
    ],
)
def test_a_call_fits_if_there_is_nothing_to_complain_about(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], complaint: str
) -> None:
    for known in (arity(function), pickle.loads(pickle.dumps(arity(function)))):
        assert known.complaint(args, kwargs) == complaint
        assert known.fits(args, kwargs) == (not complaint)


class Several(Actor):
    @endpoint
    def step(self, a: int, b: int = 2) -> int:
        return a

    @endpoint
    async def items(self) -> Any:
        yield 1

    def plain(self, c: int) -> None: ...

    def numbers(self) -> Any:
        yield 1

    async def later(self) -> Any:
        yield 1

    not_a_method = 3


SEVERAL = Interface("Several", {"step": Several.step.arity}, Several)  # type: ignore[attr-defined]


def test_an_interface_with_its_class_knows_the_plain_methods() -> None:
    assert str(SEVERAL.signature("plain")) == "(self, c: 'int') -> 'None'"
    assert SEVERAL.method("step") is Several.step.function  # type: ignore[attr-defined]
    assert SEVERAL.method("plain") is Several.plain
    assert SEVERAL.method("not_a_method") is None and SEVERAL.method("nothing") is None
    assert [SEVERAL.is_generator(name) for name in ("numbers", "later", "plain")] == [True, True, False]


def test_an_interface_without_its_class_knows_only_names() -> None:
    """As it arrives elsewhere."""
    told = Interface("Several", {"step": Several.step.arity})  # type: ignore[attr-defined]
    assert (told.signature("plain"), told.method("plain"), told.plain) == (None, None, ())
    assert not told.is_generator("numbers")


def test_interfaces_are_alike_if_names_and_arguments_are() -> None:
    arities = {"step": arity(two)}
    assert Interface("A", arities).is_like(Interface("A", {"step": arity(two)}))
    assert not Interface("A", arities).is_like(Interface("B", arities))
    assert not Interface("A", arities).is_like(Interface("A", {"step": arity(one)}))
    assert not Interface("A", arities).is_like(Interface("A", {}))
