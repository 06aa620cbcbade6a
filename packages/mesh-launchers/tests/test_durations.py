"""Durations as people write them, and the numbers that options accept."""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest

from mesh_launchers._dialing import check_dial
from mesh_launchers._durations import seconds
from mesh_launchers._ray import RayOptions
from mesh_launchers._slurm import SlurmOptions

LEAST = math.nextafter(0.0, 1.0)
"""The least number above 0."""


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (LEAST, LEAST),
        (sys.float_info.max, sys.float_info.max),
        (1, 1.0),
        ("1", 1.0),
        ("0.5s", 0.5),
        (" 1 m ", 60.0),
        ("1h", 3600.0),
        ("1.5d", 129_600.0),
    ],
)
def test_a_duration_in_seconds(written: str | float, expected: float) -> None:
    assert seconds(written, "keep") == expected


@pytest.mark.parametrize(
    "written", [0, -LEAST, math.inf, math.nan, True, None, "0", "0.0h", "-1", "1w", "1.", "", "1 s 1"]
)
def test_what_is_no_duration(written: Any) -> None:
    with pytest.raises(ValueError, match=r"^keep must be a number of seconds"):
        seconds(written, "keep")


def test_ports_to_dial_are_from_1_to_65535() -> None:
    for port in (1, 65535):
        check_dial(f"login1:{port}")
    for wrong in (0, 65536, -1, "", "x", "１", "1\n", "9" * 5000):
        with pytest.raises(ValueError, match="dial must be HOST:PORT"):
            check_dial(f"login1:{wrong}")


def test_hosts_to_dial_are_words() -> None:
    """They are told them in a line of orders, one of which is to end."""
    for right in ("login1", "10.0.0.1", "::1", "[::1]"):
        check_dial(f"{right}:1")
    for wrong in ("", "login1\nover\n", "login1\0", "two words", "login1\x1b[2J", "a\u2028b"):
        with pytest.raises(ValueError, match="dial must be HOST:PORT"):
            check_dial(f"{wrong}:1")


def test_graces_and_amounts_are_not_negative() -> None:
    assert SlurmOptions(preemption_grace=0).preemption_grace == 0
    with pytest.raises(ValueError, match="preemption_grace must not be negative"):
        SlurmOptions(preemption_grace=-LEAST)
    assert RayOptions(cpus=0, gpus=LEAST).bundle()["GPU"] == LEAST
    with pytest.raises(ValueError, match="GPU must not be negative"):
        RayOptions(gpus=-LEAST)
