"""Checks of options, with consistent error messages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeGuard


def is_whole(value: object, least: int | None = None) -> TypeGuard[int]:
    """Return whether this is an integer of at least ``least``. ``True`` and ``False`` are not."""
    return isinstance(value, int) and not isinstance(value, bool) and (least is None or value >= least)


def is_number(value: object) -> TypeGuard[float]:
    """Return whether this is an integer or a float. ``True`` and ``False`` are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def whole(value: object, what: str, least: int) -> int:
    """Return an integer of at least ``least``; raise for anything else.

    >>> whole(0, "Pool(per_rank=)", 1)
    Traceback (most recent call last):
    ValueError: Pool(per_rank=) must be at least 1, got 0
    """
    if not is_whole(value):
        raise TypeError(f"{what} must be a whole number, got {value!r}")
    if value < least:
        raise ValueError(f"{what} must be at least {least}, got {value}")
    return value


def seconds(value: object, what: str) -> float | None:
    """Return a positive number of seconds, or ``None`` if that is given; raise for anything else.

    >>> seconds("5", "Pool(timeout=)")
    Traceback (most recent call last):
    TypeError: Pool(timeout=) must be a number of seconds or None, got '5'
    """
    if value is None:
        return None
    # A NumPy scalar is accepted too.
    if isinstance(value, bool) or not hasattr(value, "__float__"):
        raise TypeError(f"{what} must be a number of seconds or None, got {value!r}")
    if not (number := float(value)) > 0:
        raise ValueError(f"{what} must be a positive number of seconds, got {value!r}")
    return number


def check_positive(**given: float | None) -> None:
    """Raise unless each of these is positive or ``None``."""
    for name, value in given.items():
        if value is not None and not value > 0:
            raise ValueError(f"{name} must be positive, got {value!r}")


def one_of(value: object, what: str, known: Iterable[str]) -> None:
    """Raise unless ``value`` is one of ``known``."""
    known = list(known)
    if value not in known:
        raise ValueError(f"{what} must be one of {', '.join(map(repr, known))}, got {value!r}")
