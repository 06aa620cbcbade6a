"""Durations as people write them."""

from __future__ import annotations

import re

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_TEXT = re.compile(r"(\d+(?:\.\d+)?)\s*([smhd]?)")


def seconds(value: str | float, what: str) -> float:
    """Return a duration in seconds.

    >>> seconds("8h", "keep"), seconds(1.5, "keep"), seconds("90", "keep")
    (28800.0, 1.5, 90.0)
    """
    if isinstance(value, str):
        found = _TEXT.fullmatch(value.strip())
        if found is not None and float(found[1]) > 0:
            return float(found[1]) * _UNITS[found[2] or "s"]
    elif isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf"):
        return float(value)
    raise ValueError(
        f"{what} must be a number of seconds, or such as '90s', '30m', '8h' or '2d', got {value!r}"
    )
