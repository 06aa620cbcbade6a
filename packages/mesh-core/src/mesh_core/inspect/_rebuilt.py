"""Rebuild dataclasses from JSON of an untrusted sender, which may also have another version of Mesh."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, TypeVar, cast

T = TypeVar("T")


class Strange(ValueError):
    """The data is not what was expected."""


def rebuilt(cls: type[T], value: object) -> T:
    """Make an instance of a dataclass, or raise :class:`Strange`. Unknown fields are ignored.

    >>> from dataclasses import dataclass
    >>> @dataclass
    ... class Place:
    ...     host: str
    ...     ranks: tuple[int, ...] = ()
    >>> rebuilt(Place, {"host": "b7", "ranks": [1, 2], "floor": 3})
    Place(host='b7', ranks=(1, 2))
    """
    return cast("T", _as(cls, value, cls.__name__))


def _as(kind: Any, value: Any, where: str) -> Any:
    origin = typing.get_origin(kind)
    if kind is Any:
        return value
    if origin in (types.UnionType, typing.Union):
        return _one_of(typing.get_args(kind), value, where)
    if origin is tuple:
        if not isinstance(value, list):
            raise Strange(f"{where} must be a list, got {value!r:.80}")
        (each, _) = typing.get_args(kind)
        return tuple(_as(each, one, f"{where}[{index}]") for index, one in enumerate(value))
    if origin is Mapping or kind is Mapping:
        if not isinstance(value, dict):
            raise Strange(f"{where} must be an object, got {value!r:.80}")
        (_, each) = typing.get_args(kind)
        return {str(name): _as(each, one, f"{where}[{name!r}]") for name, one in value.items()}
    if is_dataclass(kind):
        return _object(kind, value, where)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind in (int, float, str, bool, type(None)):
        if type(value) is not kind:
            raise Strange(f"{where} must be {kind.__name__}, got {value!r:.80}")
        return value
    raise Strange(f"{where} has a type that cannot be sent")


def _one_of(kinds: tuple[Any, ...], value: Any, where: str) -> Any:
    for kind in kinds[:-1]:
        try:
            return _as(kind, value, where)
        except Strange:
            continue
    return _as(kinds[-1], value, where)


def _object(cls: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise Strange(f"{where} must be an object, got {value!r:.80}")
    hints = _hints(cls)
    given = {}
    for one in fields(cls):
        if one.name in value:
            given[one.name] = _as(hints.get(one.name, Any), value[one.name], f"{where}.{one.name}")
        elif one.default is MISSING and one.default_factory is MISSING:
            raise Strange(f"{where}.{one.name} is missing")
    return cls(**given)


def _hints(cls: Any) -> dict[str, Any]:
    import sys

    names = dict(vars(sys.modules[cls.__module__]))
    # Imported for type checkers only; failures are sent as their reports.
    names.setdefault("MeshFailure", type(None))
    return typing.get_type_hints(cls, names)
